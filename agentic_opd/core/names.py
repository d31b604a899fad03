"""Names that both settings and written records hold. Imports nothing, because help texts need them."""

HINT_SOURCES = ("judge", "feedback", "sibling", "reference")
"""The package's own sources of the teacher's hint: the judge, the feedback after the turn, a sibling rollout of the
group that passed, and the task's reference solution. With all of them the teacher reads a hint."""
