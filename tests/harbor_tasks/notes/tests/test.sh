#!/bin/sh
# No reward file: the exit code decides. It runs as root, although the agent does not.
test "$(id -u)" = 0 && test "$(cat word.txt)" = "$ANSWER"
