"""Finished episodes -> a scored group, as it is written and sent; and what a group says of itself. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import Episode, Task


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One task to roll out, in one pass over the tasks; `item_id` is the same in a continued run."""

    task: Task
    epoch: int

    @property
    def item_id(self) -> str:
        """`task#epoch`."""
        return f"{self.task.task_id}#{self.epoch}"


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """A verified episode, and what was added to it: fields of its sequence, and entries of its overrides."""

    episode: Episode
    fields: Mapping[str, Any]
    overrides: Mapping[str, Any]


def scored_group(
    item: TaskItem, finished: Sequence[FinishedEpisode], *, include_messages: bool, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The group of one item, one entry an episode in every list; docs/wire_format.md describes the format.

    Args:
        item: What was rolled out.
        finished: Its episodes, each with tokens, a verification and a reward.
        include_messages: Whether the messages go along with the tokens.
        overrides: Further entries of `group_overrides`.

    Raises:
        AlignmentError: an episode lacks tokens or a reward, or the episodes hold different fields.
    """
    names = {frozenset(one.fields) for one in finished}
    if len(names) != 1:
        raise AlignmentError(
            f"group {item.item_id!r}: its episodes hold different fields: {sorted(map(sorted, names))}"
        )
    episodes = [one.episode for one in finished]
    group: dict[str, Any] = {
        "tokens": [list(episode.tokens_T) for episode in episodes],
        "masks": [list(episode.masks_T) for episode in episodes],
        "scores": [_reward(episode).total for episode in episodes],
        "inference_logprobs": [list(episode.logprobs_T) for episode in episodes],
        "overrides": [{**_overrides(one.episode), **one.overrides} for one in finished],
        "group_overrides": {"item_id": item.item_id, "task_id": item.task.task_id, **overrides},
    }
    versions = [episode.weight_version for episode in episodes if episode.weight_version is not None]
    if versions:  # The oldest one: a trainer measures from it how stale the group is.
        group["group_overrides"]["weight_version"] = min(versions)
    if include_messages:
        group["messages"] = [list(episode.messages) for episode in episodes]
    for name in sorted(names.pop()):
        group[name] = [one.fields[name] for one in finished]
    return group


def _reward(episode: Episode) -> Any:
    if episode.reward is None or not episode.tokens_T:
        raise AlignmentError(f"an episode of {episode.task.task_id!r} has no tokens or no reward")
    return episode.reward


def _overrides(episode: Episode) -> dict[str, Any]:
    """What the numbers of a rollout came from."""
    reward, verification = _reward(episode), episode.verification
    if verification is None:
        raise AlignmentError(f"an episode of {episode.task.task_id!r} was never verified")
    return {
        "stop_reason": episode.stop_reason.value,
        "turns": len(episode.turns),
        "tool_calls": episode.tool_calls,
        "tool_errors": episode.tool_errors,
        "reward": {
            "correctness": reward.correctness,
            "efficiency": reward.efficiency,
            "tool_usage": reward.tool_usage,
        },
        "verification": {
            "outcome": verification.outcome.value,
            "passed": verification.passed,
            "total": verification.total,
        },
    }


COUNTED = ("rollouts", "passed", "score", "turns", "hints", "scored", "tokens", "scored_tokens")
"""What `RunCounts` adds up; `score` is a sum, to be divided by `rollouts`."""


class RunCounts:
    """Adds up groups as they stand in the file, by task; `distilled` where any of them was."""

    def __init__(self) -> None:
        self.by_task: dict[str, dict[str, float]] = {}
        self.outcomes: Counter[str] = Counter()
        self.noise_floor: float | None = None
        self.distilled = False

    def add(self, group: Mapping[str, Any]) -> None:
        """Count one group."""
        counts = self.by_task.setdefault(group["group_overrides"]["task_id"], dict.fromkeys(COUNTED, 0.0))
        rows = group.get("distill_token_ids") or [[]] * len(group["tokens"])
        for score, overrides, tokens, rows_T in zip(
            group["scores"], group["overrides"], group["tokens"], rows, strict=True
        ):
            turns = overrides.get("opd", {}).get("turns", [])
            spans = [range(*turn["span"]) for turn in turns if turn["outcome"] == "scored"]
            self.outcomes.update(turn["outcome"] for turn in turns)
            added = {
                "rollouts": 1,
                "passed": overrides["verification"]["passed"] == overrides["verification"]["total"],
                "score": score,
                "turns": overrides["turns"],
                "hints": sum(turn["hint"] is not None for turn in turns),
                "scored": len(spans),
                "tokens": len(tokens),
                "scored_tokens": sum(len(rows_T[p]) > 0 for span in spans for p in span),
            }
            for name, value in added.items():
                counts[name] += value
        opd = group["group_overrides"].get("opd")
        self.distilled |= opd is not None
        floors = [floor for floor in (self.noise_floor, (opd or {}).get("noise_floor")) if floor is not None]
        self.noise_floor = max(floors, default=None)

    def total(self) -> dict[str, float]:
        """All tasks together."""
        return {name: sum(counts[name] for counts in self.by_task.values()) for name in COUNTED}


def rollout_rows(
    group: Mapping[str, Any], decode: Callable[[Sequence[int]], str], most: int
) -> list[tuple[str, float, str, str]]:
    """(task, score, hints, text) of at most `most` rollouts of a group, those with the most hints first.

    Hints are a line a turn, `turn 2 (scored): ...`; turns without one are left out.
    """
    task_id: str = group["group_overrides"]["task_id"]
    rows: list[tuple[int, tuple[str, float, str, str]]] = []
    for score, overrides, tokens in zip(group["scores"], group["overrides"], group["tokens"], strict=True):
        turns = enumerate(overrides.get("opd", {}).get("turns", []), start=1)
        hints = [f"turn {i} ({turn['outcome']}): {turn['hint']}" for i, turn in turns if turn["hint"] is not None]
        rows.append((len(hints), (task_id, score, "\n".join(hints), decode(tokens))))
    rows.sort(key=lambda row: -row[0])
    return [row for _, row in rows[:most]]
