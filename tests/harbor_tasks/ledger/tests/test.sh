#!/bin/bash
cd "$(dirname "$0")"
python3 test_state.py
