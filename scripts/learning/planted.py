"""Mistakes planted in a turn, whose consequence shows one to three turns later: does the judge name that turn?

scripted episodes (`demo_policy.trajectories`) -> the judge, as `process` asks it -> hints by turn
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from demo_policy import POLICY_DIR, SQL_POLICY_DIR
from demo_policy.projects import ProjectWorld
from demo_policy.sql.author import sql_chat
from demo_policy.sql.trajectories import SqlTrajectories
from demo_policy.trajectories import CodingTrajectories, JudgedEpisode, TrajectoryAuthor

from agentic_opd.core.types import TurnOutcome
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.connect import questions_of
from agentic_opd.distill.evidence import turn_contexts
from agentic_opd.distill.hints import Hint, JudgedBy, NoHint, SingleTurnJudge, find_hint
from agentic_opd.distill.judge import OpenAIJudge
from agentic_opd.distill.pool import HintPool
from agentic_opd.distill.trajectory import TrajectoryJudge
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer, load_tokenizer
from agentic_opd.worlds.coding.tools import TOOL_SPECS

SEED = 1_000_000
"""Of the episodes; none that was trained on."""
_AT_ONCE = 8


class Landed(NamedTuple):
    """Where hints landed."""

    right: int
    """Hints on a turn with a planted mistake."""
    named: int
    """Turns that got a hint."""
    planted: int
    """Turns with a planted mistake."""

    def __str__(self) -> str:
        share = f"{self.right / self.named:.0%}" if self.named else "-"
        return f"{share} of {self.named} hints on the planted turn; {self.right} of {self.planted} mistakes named"


@dataclass(frozen=True, slots=True)
class JudgedPlant:
    """An episode with planted mistakes, and the judge's result for each turn."""

    planted: JudgedEpisode
    results: Sequence[Hint | NoHint]
    answers: Sequence[str]
    """The judge's answers."""

    @property
    def hints(self) -> dict[int, str]:
        """Turn -> its hint."""
        return {turn: result.text for turn, result in enumerate(self.results) if isinstance(result, Hint)}

    def text(self) -> str:
        """Return the episode and the answers for a reader."""
        messages = self.planted.episode.messages
        lines = [f"task {self.planted.episode.task.task_id}, planted in turns (from 1)"]
        lines += [f"  {turn + 1}: {hints[0]}" for turn, hints in self.planted.at_fault.items()]
        number = 0
        for message in messages[2:]:
            number += message["role"] == "assistant"
            calls = "\n".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
            head = f"turn {number}" if message["role"] == "assistant" else f"  {message['role']}"
            lines.append(f"--- {head}\n{message['content']}\n{calls}".rstrip())
        verification = self.planted.episode.verification
        lines.append(f"--- verdict\n{verification.judge_report if verification else None}")
        lines += [f"--- answer {number}\n{answer}" for number, answer in enumerate(self.answers, start=1)]
        lines.append(f"--- hints\n{ {turn + 1: hint for turn, hint in self.hints.items()} }")
        return "\n".join(lines)


def author_of(world: str) -> TrajectoryAuthor:
    """Return what draws the episodes of `coding` or `sql`."""
    tokenizer = load_tokenizer(str({"coding": POLICY_DIR, "sql": SQL_POLICY_DIR}[world]))
    if world == "sql":
        return SqlTrajectories(sql_chat(tokenizer))
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)
    return CodingTrajectories(chat, ProjectWorld())


def plant(author: TrajectoryAuthor, count: int, seed: int = SEED) -> list[JudgedEpisode]:
    """Draw episodes until they hold `count` planted mistakes or one more."""
    rng, episodes = Random(seed), list[JudgedEpisode]()
    while sum(len(episode.at_fault) for episode in episodes) < count:
        episodes.append(author.planted(rng))
    return episodes


async def judge_all(episodes: Sequence[JudgedEpisode], config: DistillConfig, tokenizer: object) -> list[JudgedPlant]:
    """Ask the judge that `config` names about each episode, as its scope says.

    Raises:
        ServerError: the judge does not answer.
    """
    settings = config.judge
    assert settings.base_url is not None
    assert settings.model_name is not None
    client = OpenAIJudge(settings.base_url, settings.model_name, settings.api_key, settings)
    judge, slots = JudgedBy(client, questions_of(config, tokenizer), is_policy=False), asyncio.Semaphore(_AT_ONCE)

    async def judged(planted: JudgedEpisode) -> JudgedPlant:
        recording = planted.episode.recording
        rollout_judge = TrajectoryJudge(recording, judge, config) if settings.scope == "trajectory" else None
        turn_judge = rollout_judge or SingleTurnJudge(judge, config)
        async with slots:
            results = [
                await find_hint(context, turn_judge, config, HintPool(0))
                for context in turn_contexts(recording, config)
            ]
        windows = rollout_judge.judged.windows if rollout_judge is not None and rollout_judge.judged is not None else ()
        answers = [vote.text for window in windows for vote in window.votes] or [
            f"turn {turn + 1}: {vote.text}" for turn, result in enumerate(results) for vote in result.judgement.votes
        ]
        return JudgedPlant(planted, results, answers)

    try:
        await client.check()
        return await asyncio.gather(*map(judged, episodes))
    finally:
        await client.close()


def landed(plants: Sequence[JudgedPlant]) -> Landed:
    """Count where the hints landed."""
    return Landed(
        right=sum(turn in plant.planted.at_fault for plant in plants for turn in plant.hints),
        named=sum(len(plant.hints) for plant in plants),
        planted=sum(len(plant.planted.at_fault) for plant in plants),
    )


def by_distance(plants: Sequence[JudgedPlant]) -> dict[int, tuple[int, int]]:
    """Return the mistakes that were named, and all of them, by the turns until their consequence shows."""
    counts = dict[int, tuple[int, int]]()
    for plant in plants:
        for turn, distance in sorted(plant.planted.distances.items()):
            named, total = counts.get(distance, (0, 0))
            counts[distance] = named + (turn in plant.hints), total + 1
    return dict(sorted(counts.items()))


def unreadable(plants: Sequence[JudgedPlant]) -> int:
    """Return the number of turns that no answer of the judge could be read about."""
    return sum(
        isinstance(result, NoHint) and result.outcome is TurnOutcome.JUDGE_ERROR
        for plant in plants
        for result in plant.results
    )
