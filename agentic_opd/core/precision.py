"""Differences between readings of the same tokens by the same weights, and how large they may be in each precision."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Noise:
    """Differences of log-probabilities, in nats."""

    rms: float
    """Root mean square: what a hint's gaps are compared with."""
    largest: float
    """Grows with the number of tokens, and is that of the least likely ones."""

    @classmethod
    def of(cls, differences: ArrayLike) -> "Noise":
        """Measure it over differences of any shape, at least one."""
        sizes = np.abs(np.asarray(differences, np.float64))
        return cls(root_mean_square(sizes), float(sizes.max()))

    def exceeds(self, tolerance: "Noise") -> bool:
        """Whether either number is above its tolerance; what is not a number is."""
        return not (self.rms <= tolerance.rms and self.largest <= tolerance.largest)

    def __str__(self) -> str:
        """Both numbers as a person reads them."""
        return f"{self.rms:.2g} nats (root mean square), {self.largest:.2g} at most"


def root_mean_square(values: ArrayLike) -> float:
    """Of at least one value."""
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64)))))


TOLERANCES = {
    "float32": Noise(rms=5e-4, largest=1e-3),
    "float16": Noise(rms=0.04, largest=0.25),
    "bfloat16": Noise(rms=0.3, largest=2.0),
}
"""By torch's names. SmolLM2-135M in bfloat16 is up to 0.12 (root mean square) and 0.55 nats away from float32, and both
sides may compute in it. For float16 an eighth: it keeps three bits more."""


def tolerance_for(*precisions: str | None, largest: float | None = None) -> Noise:
    """The noise that is expected where these precisions are involved: that of the coarsest.

    Args:
        precisions: What servers name. A server that names none may compute in any.
        largest: Bound of the largest difference that a person has set, in place of the table.
    """
    if largest is not None:
        return Noise(rms=math.inf, largest=largest)
    return max((TOLERANCES.get(name or "", TOLERANCES["bfloat16"]) for name in precisions), key=lambda one: one.rms)


def coarsest(precisions: Iterable[str | None]) -> str | None:
    """The one with the most noise of those that are named; None if none is."""
    named = {name for name in precisions if name is not None}
    return max(named, key=lambda name: (tolerance_for(name).rms, name), default=None)
