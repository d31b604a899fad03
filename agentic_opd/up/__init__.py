"""Run a whole loop by one command: vLLM servers, the trajectory API, environments and the trainer as child processes.

In: a file that configures the parts. Out: their logs, groups, metrics and weights in one folder.
"""
