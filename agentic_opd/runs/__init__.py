"""The modes process, evaluate and serve, with their files and metric logs.

In: items and an environment that turns them into groups or samples. Out: files, groups at a trajectory API, a summary.
"""
