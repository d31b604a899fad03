"""What a person types: `agentic-opd COMMAND`, one file or folder a command.

In: a command line. Out: an exit code, and what the command prints or writes.
"""
