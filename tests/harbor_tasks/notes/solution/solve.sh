#!/bin/sh
id -u > uid.txt
echo "$WORD" > word.txt
