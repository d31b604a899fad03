"""Hints proven by replay: continuations of a turn with and without its hint, and the test of their outcomes."""
