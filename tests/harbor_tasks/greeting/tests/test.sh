#!/bin/bash
# Writes 1 or 0, as most of Harbor's tasks do.
if [ "$(cat greeting.txt)" = "hello earth" ]; then
  echo "the greeting is right"
  echo 1 > /logs/verifier/reward.txt
else
  echo "expected 'hello earth', got '$(head -c 100 greeting.txt)'"
  echo 0 > /logs/verifier/reward.txt
fi
