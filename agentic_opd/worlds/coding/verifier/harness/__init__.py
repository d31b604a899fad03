"""What runs inside the verifying sandbox, in two processes: the hidden tests, and the solution.

    runner.py           the tests' process: runs the tests and reports, signed, what came of them
    counter.py          counts the checks; clock.py says how long one may take
    test_cases.py       the tests of a pytest or unittest file
    test_side.py        what the tests hold in place of the solution; its calls go over a pipe
    solution_side.py    the solution's process: imports solution.py and answers the calls
    peer.py, pipe.py    calls in both directions, and what crosses: plain data
    programs.py         child processes, and solution.py as a program in one for each input

These modules travel into the sandbox as source text. So they import nothing but each other and small parts of the
standard library (starting Python is most of what a verification costs).
"""
