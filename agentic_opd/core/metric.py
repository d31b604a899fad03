"""What a metric is called, what it is measured in, and what it means: the one place where each is described.

Every module that computes metrics lists them as a table of these; docs/metrics.md is made of the tables.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Metric(NamedTuple):
    """One metric. A name in angle brackets, as in `eval/pass@<k>`, stands for a number."""

    name: str
    unit: str
    meaning: str

    def stands_for(self, name: str) -> bool:
        """Whether `name` is a name of this metric."""
        parts = re.split(r"<\w+>", self.name)
        return re.fullmatch(r"\d+".join(map(re.escape, parts)), name) is not None


def percentiles(name: str, values: Sequence[float], of: Sequence[int] = (50, 95)) -> dict[str, float]:
    """`name_p50` and so on; empty if there are no values."""
    if not values:
        return {}
    return {f"{name}_p{q}": float(value) for q, value in zip(of, np.percentile(values, of), strict=True)}
