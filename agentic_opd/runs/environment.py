"""The environment interface of the modes, and the groups that it returns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from agentic_opd.core.types import Episode
from agentic_opd.distill.distiller import DistilledGroup
from agentic_opd.runs.config import RunConfig
from agentic_opd.wire.group import ScoredGroup, TaskItem


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A scored group, with its episodes and distillation for the metrics."""

    group: ScoredGroup
    episodes: tuple[Episode, ...]
    """All episodes, also those that the group leaves out because their tests gave no verdict."""
    distilled: DistilledGroup | None


class Environment(Protocol):
    """Interface of an environment that makes groups of items."""

    @property
    def name(self) -> str | None:
        """Name at the trajectory API and at W&B."""
        ...

    @property
    def config(self) -> RunConfig:
        """Settings of the run."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        ...

    def items(self) -> Iterator[TaskItem]:
        """Yield items endlessly: passes over all tasks, each in a new order drawn from the seed."""
        ...

    async def collect(self, item: TaskItem) -> FinishedGroup:
        """Roll out one item, and distill it if distillation is on.

        Raises:
            ServerError: the policy server failed during a rollout.
        """
        ...

    async def policy_versions(self) -> list[int]:
        """Return the weight versions of the policy's servers that report one.

        Raises:
            ServerError: a server does not answer.
        """
        ...

    def roles(self) -> dict[str, str]:
        """Return role -> model and server, for the start screen."""
        ...

    def line_settings(self) -> dict[str, Any]:
        """Return the settings that written lines depend on, including the policy's model."""
        ...
