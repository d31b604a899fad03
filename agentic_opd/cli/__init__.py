"""Commands: `agentic-opd COMMAND`, one file or folder per command.

In: a command line. Out: an exit code, and the printed or written results.
"""
