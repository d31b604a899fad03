"""Names that both settings and written records hold. Imports nothing, because help texts need them."""

from typing import Literal

HintSource = Literal["judge", "feedback", "sibling", "reference", "other_task", "none"]
"""Source of the teacher's hint: the judge, the feedback after the turn, a sibling rollout of the group that passed, or
the task's reference solution. For ablations of the judge's hint: a hint of another task in its place, or none."""
