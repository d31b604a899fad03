"""What a mode needs of an environment, and what it gets from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from agentic_opd.core.types import Episode
from agentic_opd.distill.distiller import DistilledGroup
from agentic_opd.runs.config import RunConfig
from agentic_opd.wire.group import ScoredGroup, TaskItem


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A scored group, and what the metrics of its logging step are made of."""

    group: ScoredGroup
    episodes: tuple[Episode, ...]
    distilled: DistilledGroup | None


class Environment(Protocol):
    """Makes groups of items."""

    @property
    def name(self) -> str | None:
        """What it is called at the trajectory API and at W&B."""
        ...

    @property
    def config(self) -> RunConfig:
        """How the run is run."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        ...

    def items(self) -> Iterator[TaskItem]:
        """Every task once, in an order drawn from the seed, then again in another order, without end."""
        ...

    async def collect(self, item: TaskItem) -> FinishedGroup:
        """Roll out one item, and distill it if that is on.

        Raises:
            ServerError: the policy server failed in one of its rollouts.
        """
        ...

    async def policy_versions(self) -> list[int]:
        """Which weights the policy's servers have; without those that do not say.

        Raises:
            ServerError: one does not answer.
        """
        ...

    def roles(self) -> dict[str, str]:
        """Which model does what and where, for the first lines that a person reads."""
        ...

    def line_settings(self) -> dict[str, Any]:
        """The settings that a written line depends on, and the policy's model."""
        ...

    def default_line_settings(self) -> dict[str, Any]:
        """The defaults of these settings."""
        ...
