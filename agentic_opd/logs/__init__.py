"""Logs of agents, clients and datasets -> conversations in this package's log form.

In: files and folders, whose format is recognised by content. Out: messages and tools, with the counts of what was left
out and why. `detect` lists the formats.
"""

FORMAT_NAMES = (
    *("Claude Code", "Codex", "OpenClaw", "OpenCode", "inspect", "SWE-agent", "mini-swe-agent", "OpenHands"),
    *("ATIF", "verifiers", "requests", "list of messages"),
)
"""Names of `detect.FORMATS`, which a help text reads without the readers."""
