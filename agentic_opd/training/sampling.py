"""Sampled tokens whose distribution is not the policy's at the turn's temperature: counts, and warnings once."""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Literal

from agentic_opd.wire.group import ScoredGroup

logger = logging.getLogger(__name__)

_WARNINGS = {
    "unknown_temperature_tokens": "%d sampled tokens are of groups that do not record at which temperature "
    "(docs/wire_format.md): it counts as 1. If it was another one, set loss.temperature to it",
    "greedy_tokens": "%d sampled tokens were sampled at temperature 0: the divergences count them as sampled at 1",
    "truncated_tokens": "%d sampled tokens were sampled under top_p, top_k or another parameter that changes the "
    "distribution (docs/wire_format.md): ratios and start_kl are those of the whole distribution at their temperature",
}
"""Counts, in the order of the metrics, and what the log says of the first ones."""


def sampling_counts(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Count the sampled tokens of unknown temperature, at temperature 0, and under parameters such as `top_p`.

    Counts of 0 are left out.
    """
    counts = Counter[str]()
    for rollout in chain.from_iterable(group.rollouts for group in groups):
        for (start, end), distribution in rollout.turn_distributions:
            if distribution is None:
                counts["unknown_temperature_tokens"] += end - start
            elif distribution.is_greedy:
                counts["greedy_tokens"] += end - start
            elif distribution.is_truncated:
                counts["truncated_tokens"] += end - start
    return {name: float(counts[name]) for name in _WARNINGS if counts[name]}


class SamplingNotes:
    """Warns of each count of `sampling_counts` once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def check(self, groups: Sequence[ScoredGroup], temperature: float | Literal["group"]) -> dict[str, float]:
        """Return the counts of a batch; those that `loss.temperature` as a number decides are left out."""
        decided = {"unknown_temperature_tokens", "greedy_tokens"} if temperature != "group" else set[str]()
        counts = {name: count for name, count in sampling_counts(groups).items() if name not in decided}
        for name in counts.keys() - self._logged:
            logger.warning(_WARNINGS[name], counts[name])
        self._logged |= counts.keys()
        return counts
