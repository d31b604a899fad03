"""Differences between log-probabilities of the same tokens under the same weights, and tolerances by precision."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Noise:
    """Differences of log-probabilities, in nats."""

    rms: float
    """Root mean square; the gaps of a hint are compared with it."""
    largest: float
    """Largest absolute difference. It grows with the number of tokens and comes from the least likely ones."""

    @classmethod
    def of(cls, differences: ArrayLike) -> "Noise":
        """Measure differences of any shape, at least one."""
        sizes = np.abs(np.asarray(differences, np.float64))
        return cls(root_mean_square(sizes), float(sizes.max()))

    def exceeds(self, tolerance: "Noise") -> bool:
        """Return whether either number is above its tolerance or NaN."""
        return not (self.rms <= tolerance.rms and self.largest <= tolerance.largest)

    def __str__(self) -> str:
        return f"{self.rms:.2g} nats (root mean square), {self.largest:.2g} at most"


def root_mean_square(values: ArrayLike) -> float:
    """Return the root mean square of at least one value."""
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64)))))


TOLERANCES = {
    "float32": Noise(rms=5e-4, largest=1e-3),
    "float16": Noise(rms=0.04, largest=0.25),
    "bfloat16": Noise(rms=0.3, largest=2.0),
}
"""Tolerances by torch's name of the precision. SmolLM2-135M in bfloat16 differs from float32 by up to 0.12 (root mean
square) and 0.55 nats, and both sides may compute in bfloat16. float16 gets an eighth, for three more mantissa bits."""


def tolerance_for(*precisions: str | None, largest: float | None = None) -> Noise:
    """Return the expected noise of a comparison that involves these precisions: that of the coarsest.

    None counts as bfloat16, the coarsest. `largest` is the user's bound of the largest difference; it replaces the
    table.
    """
    if largest is not None:
        return Noise(rms=math.inf, largest=largest)
    return max((TOLERANCES.get(name or "", TOLERANCES["bfloat16"]) for name in precisions), key=lambda noise: noise.rms)


def coarsest(precisions: Iterable[str | None]) -> str | None:
    """Return the named precision with the most noise; None if no precision is named."""
    named = {name for name in precisions if name is not None}
    return max(named, key=lambda name: (tolerance_for(name).rms, name), default=None)
