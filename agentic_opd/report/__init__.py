"""The HTML report: a JSONL of scored groups -> one self-contained file to look at (`agentic-opd report`).

In: a file that `process` wrote. Out: a page with its turns, hints and gaps, token by token.
"""
