#!/bin/bash
set -e
cat inbox/*.txt | python3 -c "import sys; print(sum(int(line.split()[1]) for line in sys.stdin))" > out/total.txt
cut -d' ' -f1 inbox/*.txt | sort -u > out/items.txt
