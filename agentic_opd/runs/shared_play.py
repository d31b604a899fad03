"""Continuations of turns, each played once for all turns of the same prompt (I/O by the environment).

The first turns of a task's rollouts have one prompt. What the policy does from there depends on the hint and the seed
alone, and the seeds of a proof are those of its pairs: so turns of one prompt share the results.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from agentic_opd.core.types import Recording
from agentic_opd.proof.prove import Play, PlayedOn
from agentic_opd.rollout.loop import HintInsertion
from agentic_opd.rollout.replay import Continuation, ReplayError
from agentic_opd.runs.recorded import RecordedEpisode
from agentic_opd.wire.group import ScoredGroup


class ReplayEnvironment(Protocol):
    """What replays the episodes of groups: `env.agent.AgentEnv`."""

    def recorded_episodes(self, group: ScoredGroup) -> list[RecordedEpisode | ReplayError]:
        """Return the rollouts of a group; an error in place of each that can't be replayed."""
        ...

    def room(self, recording: Recording, turn_index: int, hint: HintInsertion | None) -> int:
        """Return the token limit of a turn whose prompt may hold the hint, or raise ReplayError."""
        ...

    async def continued(
        self,
        recording: Recording,
        turn_index: int,
        hint: HintInsertion | None = None,
        *,
        is_hinted: bool = True,
        seed: int | None = None,
    ) -> Continuation:
        """Replay an episode to a turn; the policy plays on from there."""
        ...


@dataclass(slots=True)
class _Prompt:
    """The results from one prompt on, by hint, token limit and seed."""

    one_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    results: dict[tuple[HintInsertion | None, int | None, int], PlayedOn] = field(
        default_factory=dict[tuple[HintInsertion | None, int | None, int], PlayedOn]
    )


class SharedPlay:
    """Plays continuations; `played` is called after each one that was not taken from another turn of the prompt."""

    def __init__(self, env: ReplayEnvironment, played: Callable[[PlayedOn], None] = lambda result: None) -> None:
        self._env, self._played = env, played
        self._prompts: defaultdict[bytes, _Prompt] = defaultdict(_Prompt)

    @asynccontextmanager
    async def of(self, recording: Recording, turn_index: int, hint: HintInsertion | None) -> AsyncGenerator[Play]:
        """Yield what plays the continuations of a turn, when no other turn of the same prompt is played."""
        prompt = self._prompts[_digest(recording, turn_index)]
        try:
            room = self._env.room(recording, turn_index, hint)
        except ReplayError:
            room = None  # The continuation has the reason as its outcome.

        async def play(*, is_hinted: bool, seed: int) -> PlayedOn:
            key = (hint if is_hinted else None, room, seed)
            if key not in prompt.results:
                continuation = await self._env.continued(recording, turn_index, hint, is_hinted=is_hinted, seed=seed)
                prompt.results[key] = PlayedOn.of(continuation)
                self._played(prompt.results[key])
            return prompt.results[key]

        async with prompt.one_turn:
            yield play


def arms_of(turns: Iterable[tuple[Recording, int, HintInsertion | None]]) -> int:
    """Return the number of arms that are played for turns (recording, turn index, hint): of each prompt one without
    a hint, and one for each of its hints.
    """
    arms = {(_digest(recording, index), read) for recording, index, hint in turns for read in (None, hint)}
    return len(arms)


def _digest(recording: Recording, turn_index: int) -> bytes:
    """Return a key of the task and of all ids before a turn."""
    turn = recording.turns[turn_index]
    index = next(index for index, trace in enumerate(recording.traces) if turn in trace.turns)
    ids = [trace.tokens_T for trace in recording.traces[:index]]
    return blake2b(repr((recording.name, ids, recording.traces[index].tokens_T[: turn.start])).encode()).digest()
