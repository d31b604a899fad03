"""Transcripts -> padded batches with a loss weight for every token, for scripts/demo_policy/train."""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from demo_policy.transcripts import Transcript

DECISION_WEIGHT = 8.0
"""Where a solution parts from others, or a hinted turn works on or ends: rare, and lost among the rest."""
JUDGE_WEIGHT = 3.0
"""The judge's answers are short beside its prompts; their tokens count more."""


class Batch(NamedTuple):
    """Right-padded rows that share `prefix`: ids [B, S], and the loss weight of each as a target [B, S]."""

    kind: str
    number: int
    prefix: list[int]
    ids: Tensor
    weights: Tensor


class Feed:
    """Endless batches of rows of one skill, of like length; every row once an epoch."""

    def __init__(self, kind: str, rows: list[Transcript], size: int, rng: Random) -> None:
        self.kind = kind
        self.prefix = common_prefix(rows)
        self.batches = self._batches(rows, size, rng)

    def next_parts(self, parts: int, other_weight: float, *, short: bool) -> list[Batch]:
        """The next batch in up to `parts` parts; `short` leaves out what all rows start with.

        Not of the judge's rows: its two questions differ in nothing but what they start with.
        """
        rows = next(self.batches)
        split = [rows[i::parts] for i in range(parts)]
        batches = [make_batch(self.kind, i, part, self.prefix, other_weight) for i, part in enumerate(split) if part]
        is_short = short and not self.kind.startswith("judge")
        return [batch._replace(prefix=[]) for batch in batches] if is_short else batches

    @staticmethod
    def _batches(rows: list[Transcript], size: int, rng: Random) -> Iterator[list[Transcript]]:
        while True:
            order = rng.sample(rows, len(rows))
            for start in range(0, len(order), size * 32):
                near = sorted(order[start : start + size * 32], key=lambda row: len(row.token_ids))
                chunks = [near[i : i + size] for i in range(0, len(near), size)]
                rng.shuffle(chunks)
                yield from chunks


def common_prefix(rows: list[Transcript]) -> list[int]:
    """What all rows start with."""
    first, last = min(row.token_ids for row in rows), max(row.token_ids for row in rows)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return list(first[:length])


def make_batch(kind: str, number: int, rows: list[Transcript], prefix: list[int], other_weight: float) -> Batch:
    """Pad the rows behind their prefix. What a hinted row holds besides its target is taught by the others."""
    cut = len(prefix)
    width = max(len(row.token_ids) for row in rows) - cut
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    weights = torch.zeros(len(rows), width)
    hinted = kind in ("heed_first", "heed_later", "ignore")
    weight, other_loss_weight = (JUDGE_WEIGHT if kind.startswith("judge") else 1.0), (0.0 if hinted else other_weight)
    for i, row in enumerate(rows):
        length = len(row.token_ids) - cut
        ids[i, :length] = torch.tensor(row.token_ids[cut:])
        weights[i, :length] = torch.where(torch.tensor(row.is_target[cut:]), weight, other_loss_weight)
        weights[i, [position - cut for position in row.decisions]] = DECISION_WEIGHT
    return Batch(kind, number, prefix, ids, weights)


def jobs_of(parts: list[Batch]) -> list[list[Batch]]:
    """Parts with the same prefix and number in their batches go together: the prefix is computed once for them."""
    jobs: dict[tuple[int, tuple[int, ...]], list[Batch]] = {}
    for part in parts:
        jobs.setdefault((part.number, tuple(part.prefix)), []).append(part)
    return sorted(jobs.values(), key=lambda job: -sum(part.ids.numel() for part in job))
