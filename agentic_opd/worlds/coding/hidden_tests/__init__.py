"""Analyze hidden tests as source text: the tests, the names that they need from the solution, and their checks.

All modules are pure. The host analyzes the tests before a solution runs, so a solution cannot change the result.
verifier/ runs the instrumented tests.
"""
