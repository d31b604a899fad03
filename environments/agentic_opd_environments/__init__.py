"""Worlds beside the package: SQL, function calls, Harbor tasks, and replayed turns of a gateway.

In: files of tasks, and an agent's calls. Out: tool results and verdicts. `agentic_opd` finds these worlds by their
entry points, as it finds those of any other package (docs/worlds.md).
"""
