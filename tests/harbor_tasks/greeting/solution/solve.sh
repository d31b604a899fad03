#!/bin/bash
echo "hello earth" > greeting.txt
