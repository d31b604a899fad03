"""Hidden tests as source text, before they run: which tests there are, what they take from the solution, their checks.

All of it is pure. The host decides everything here from the tests alone, before a solution runs, so no solution can
change it. verifier/ runs what comes out.
"""
