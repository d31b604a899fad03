"""Logs of agents -> an adapter with a held-out figure, or a refusal: `agentic-opd learn`.

In: the sessions on a disk and a model. Out: a folder with the verdict, its figures, a report and the adapter. Hints,
training and grading are those of `runs`, `training` and the world `replay`; this room splits, compares and decides.
"""
