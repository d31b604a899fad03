"""The coding world: Python tasks, four tools in a sandbox, hidden tests.

In: a dataset's rows and an agent's tool calls. Out: tasks, tool results, and the result of the hidden tests.
"""
