"""What a mode does: process, evaluate and serve, with the files and metric logs that they write.

In: items, and what makes a group or a sample of one. Out: files, groups at a trajectory API, and a summary.
"""
