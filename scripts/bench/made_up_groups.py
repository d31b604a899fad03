"""Scored groups of random ids, for measurements of the trainer."""

from collections.abc import Iterator
from random import Random
from typing import Any

from agentic_opd.wire.group import ScoredGroup

TOP_K = 50


def made_up(
    groups: int, vocab: int, beginning: int = 480, lengths: tuple[int, int] = (120, 900)
) -> Iterator[ScoredGroup]:
    """Groups of 8 sequences that begin alike, of which a third is sampled and a half of that scored."""
    rng = Random(0)
    start = [rng.randrange(vocab) for _ in range(beginning)]
    for _ in range(groups):
        question = [rng.randrange(vocab) for _ in range(60)]
        group: dict[str, Any] = {"scores": [float(rng.random() < 0.5) for _ in range(8)]}
        rows = [[*start, *question, *(rng.randrange(vocab) for _ in range(rng.randint(*lengths)))] for _ in range(8)]
        masks = [[t if i >= beginning + 60 and i // 40 % 3 == 0 else -100 for i, t in enumerate(row)] for row in rows]
        ids = [
            [
                [] if m == -100 or i // 120 % 2 == 0 else [m, *[t for t in range(TOP_K) if t != m][: TOP_K - 1]]
                for i, m in enumerate(mask)
            ]
            for mask in masks
        ]
        group |= {"tokens": rows, "masks": masks, "distill_token_ids": ids}
        group["inference_logprobs"] = [[1.0 if m == -100 else -2.0 for m in mask] for mask in masks]
        group["distill_logprobs"] = [[[-4.0] * len(entry_ids) for entry_ids in row] for row in ids]
        yield ScoredGroup.from_wire(group)
