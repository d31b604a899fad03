"""Names, units and meanings of metrics: the only place that describes each.

Every module that computes metrics lists them in a table of `Metric`; docs/metrics.md is generated from the tables.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Metric(NamedTuple):
    """One metric. A name in angle brackets, as in `eval/pass@<k>`, is a placeholder for a number."""

    name: str
    unit: str
    meaning: str

    def stands_for(self, name: str) -> bool:
        """Return whether `name` is an instance of this metric's name."""
        parts = re.split(r"<\w+>", self.name)
        return re.fullmatch(r"\d+".join(map(re.escape, parts)), name) is not None


def percentiles(
    name: str, values: Sequence[float] | NDArray[np.float64], of: Sequence[int] = (50, 95)
) -> dict[str, float]:
    """Return `values`' percentiles as `name_p50` and so on; empty if there are no values."""
    if not len(values):
        return {}
    return {f"{name}_p{q}": float(value) for q, value in zip(of, np.percentile(values, of), strict=True)}
