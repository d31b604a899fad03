"""What runs inside the verifying sandbox, in two processes: the hidden tests, and the solution.

    runner.py         the tests' process: runs the checks, counts them, signs the count
    test_side.py      its stand-in `solution` module, whose calls go over a pipe
    solution_side.py  the solution's process: imports solution.py and answers the calls
    wire.py           what crosses between them: plain data of exact built-in types

These modules travel into the sandbox as source text. So they import nothing but each other and small parts of the
standard library (starting Python is most of what a verification costs).
"""
