"""The weights of the loss's parts over the steps of a run."""

import math
from collections.abc import Mapping, Sequence

import torch

from agentic_opd.training.config import PASS_WINDOW, LossConfig
from agentic_opd.wire.group import ScoredGroup


class LossWeights:
    """The weights of the loss's parts over the steps; a part ends for good when the pass rate reaches its `until`."""

    def __init__(self, loss: LossConfig) -> None:
        self._loss = loss
        self._until = {name: schedule.until for name, schedule in loss.schedules.items() if schedule.until is not None}
        self._rates = torch.full((PASS_WINDOW,), math.nan, dtype=torch.float64)
        self._best = torch.zeros((), dtype=torch.float64)
        """Highest pass rate of `PASS_WINDOW` batches."""

    def at_step(self, step: int) -> LossConfig:
        """Return the settings of the loss with the weights of a step."""
        return self._loss.at_step(step, [name for name, until in self._until.items() if float(self._best) >= until])

    def passed(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Record a batch's pass rate, and return it as a metric; empty if no rollout was verified."""
        pairs = [pair for group in groups for pair in zip(group.rollouts, group.is_first_of_rollout, strict=True)]
        checks = [rollout.checks.all_passed for rollout, is_first in pairs if is_first and rollout.checks is not None]
        if not checks:
            return {}
        rate = sum(checks) / len(checks)
        self._rates = torch.cat((self._rates[1:], torch.tensor([rate], dtype=torch.float64)))
        self._best = torch.fmax(self._best, self._rates.mean())  # The mean of less than `PASS_WINDOW` batches is NaN.
        return {"pass_rate": rate}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a resumed run needs."""
        return {"rates": self._rates, "best": self._best}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._rates, self._best = state["rates"], state["best"]
