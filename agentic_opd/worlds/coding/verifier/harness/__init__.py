"""The code inside the verifying sandbox, in two processes: the hidden tests, and the solution.

    runner.py           the tests' process: runs the tests and writes signed reports
    counter.py          counts the checks; clock.py limits the time of each
    test_cases.py       the tests of a pytest or unittest file
    test_side.py        replaces the module `solution`: each call is a question to the other process
    solution_side.py    the solution's process: imports solution.py and answers the questions
    pipe.py             messages between the two: plain data, as copies
    programs.py         child processes, and solution.py as a program in one for each input

The modules are sent to the sandbox as source, with worlds/coding/grading.py. They import only each other and small
parts of the standard library, since starting Python is most of the cost of a verification.
"""
