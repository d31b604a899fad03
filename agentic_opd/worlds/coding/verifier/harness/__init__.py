"""The code inside the verifying sandbox, in two processes: the hidden tests (runner.py), and the solution.

The modules are sent to the sandbox as source, with worlds/coding/grading.py. They import only each other and small
parts of the standard library, since starting Python is most of the cost of a verification.
"""
