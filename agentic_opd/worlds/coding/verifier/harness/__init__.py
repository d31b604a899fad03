"""What runs inside the verifying sandbox, in two processes: the hidden tests, and the solution.

    runner.py           the tests' process: runs the tests and reports their results, signed
    counter.py          counts the checks; clock.py limits the time of each
    test_cases.py       the tests of a pytest or unittest file
    test_side.py        stands for the module `solution`: each call is a question to the other process
    solution_side.py    the solution's process: imports solution.py and answers the questions
    pipe.py             what crosses: plain data, as copies
    programs.py         child processes, and solution.py as a program in one for each input

The modules travel there as source, with worlds/coding/grading.py. So they import only each other and small parts of the
standard library: starting Python is most of the cost of a verification.
"""
