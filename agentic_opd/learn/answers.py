"""Held-out turns -> the policy's answers to them, and the log-probabilities of the log's own answers (I/O)."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import AlignmentError, ServerMismatchError
from agentic_opd.core.text import read_json
from agentic_opd.core.types import TurnOutcome
from agentic_opd.distill.evidence import turn_text
from agentic_opd.learn.config import LearnConfig
from agentic_opd.learn.figures import AnswerFigures, repeated_share
from agentic_opd.learn.held_out import HeldOutTurn
from agentic_opd.learn.plan import say
from agentic_opd.learn.stages import RowFile
from agentic_opd.runs.distill import PolicyDistiller
from agentic_opd.wire.files import whole_lines
from agentic_opd.wire.group import ScoredGroup, ScoredRollout

_AT_ONCE = 32
"""Answers that are sampled at the same time."""
ACCEPTED = (TurnOutcome.VOTE_FAILED, TurnOutcome.NO_NEXT_STATE)
"""Outcomes of turns without a correction."""


async def sample_answers(
    turns: Mapping[str, HeldOutTurn], by: PolicyDistiller, config: LearnConfig, file: RowFile, version: int
) -> None:
    """Sample one answer to each turn's prompt by the weights of `version`; a row is its message, calls and tokens.

    Raises:
        ServerMismatchError: other weights answered.
        ServerError: the policy's server failed.
    """

    async def answer(name: str) -> dict[str, Any]:
        task, prompt = turns[name].task, turns[name].prompt
        chat = by.chat.with_tools(task.tools or ())
        room = by.policy.info.max_model_len - len(prompt.token_ids)
        parameters = {
            "max_tokens": min(config.max_tokens, room),
            "temperature": config.temperature,
            "seed": config.seed,
            "stop_token_ids": chat.stop_token_ids,
        }
        (completion,) = await by.policy.complete(prompt.token_ids, parameters, version)
        if completion.weight_version not in (None, version):
            raise ServerMismatchError(
                f"{by.policy_url} answered with the weights of version {completion.weight_version}, and version "
                f"{version} is evaluated: does another program load weights there?"
            )
        parsed = chat.parse([*prompt.token_ids], completion.token_ids, len(task.messages))
        calls = [{"name": call.name, "error": call.error} for call in parsed.tool_calls]
        return {"message": parsed.message, "calls": calls, "tokens": len(completion.token_ids)}

    await file.fill("answers", {name: partial(answer, name) for name in turns}, _AT_ONCE)


def figures_of(row: Mapping[str, Any], tool_names: Collection[str]) -> AnswerFigures:
    """Return the counts of an answer's row; `tool_names` are those of the tools that it may call."""
    calls = row["calls"]
    return AnswerFigures(
        is_calling=bool(calls),
        calls_parse=bool(calls) and all(call["error"] is None and call["name"] in tool_names for call in calls),
        repetition=repeated_share(turn_text(row["message"])),
        tokens=row["tokens"],
    )


def read_groups(path: Path) -> list[ScoredGroup]:
    """Return the groups of a file that `distill` wrote."""
    return [ScoredGroup.from_wire(read_json(line)) for line, _ in whole_lines(path)]


async def accepted_logprob(
    groups: Sequence[ScoredGroup], by: PolicyDistiller, file: RowFile
) -> tuple[float, float] | None:
    """Return the mean log-probability (nats a token) of the answers without a correction, before and after.

    Those before were read when the hints were made; those after are read now by the newest weights. None: there is no
    such answer.

    Raises:
        ServerError: the policy's server failed.
    """
    rollouts = {
        f"{group.item_id}/{index}": rollout
        for group in groups
        for index, rollout in enumerate(group.rollouts)
        if _accepted_positions(rollout)
    }

    async def read(rollout: ScoredRollout) -> dict[str, Any]:
        try:
            logprobs_T = await by.logprobs_of(rollout)
        except AlignmentError as error:
            return {"error": str(error)}
        positions = _accepted_positions(rollout)
        sums = [sum(column[position] for position in positions) for column in (rollout.logprobs_T, logprobs_T)]
        return {"before": sums[0], "after": sums[1], "tokens": len(positions)}

    await file.fill("conversations", {name: partial(read, rollout) for name, rollout in rollouts.items()}, _AT_ONCE)
    rows = [row for name in rollouts if "error" not in (row := file.rows[name])]
    if errors := [file.rows[name]["error"] for name in rollouts if "error" in file.rows[name]]:
        say(f"log-probability: {len(errors)} of {len(rollouts)} held-out conversations are left out: {errors[0]}")
    tokens = sum(row["tokens"] for row in rows)
    if not tokens:
        return None
    before, after = (sum(row[arm] for row in rows) / tokens for arm in ("before", "after"))
    return before, after


def _accepted_positions(rollout: ScoredRollout) -> list[int]:
    turns = (turn for turn in rollout.turns or () if turn.outcome in ACCEPTED)
    return [position for turn in turns for position in range(*turn.span)]
