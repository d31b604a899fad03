"""`PlainEnv` with Hindsight and without its messages: python -m tests.support.plain_environment_opd serve ..."""

from typing import Any

from atroposlib.envs.base import ScoredDataGroup

from agentic_opd.env import Hindsight

from .plain_environment import PlainEnv


class PlainOpd(Hindsight, PlainEnv):
    """Returns no messages, as most of Atropos' environments."""

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[Any]]:
        """The same, without messages."""
        group, backlog = await super().collect_trajectories(item)
        del group["messages"]
        return group, backlog


if __name__ == "__main__":
    PlainOpd.cli()
