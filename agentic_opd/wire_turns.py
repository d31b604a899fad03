"""The turn records of one sequence, as they stand in a file -> what is wrong with them, and where they are. Pure."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

from agentic_opd.types import IGNORED, TurnOutcome

_OUTCOMES = frozenset(outcome.value for outcome in TurnOutcome)
_HINTED = frozenset({TurnOutcome.SCORED.value, TurnOutcome.TOO_LONG.value, TurnOutcome.SCORING_ERROR.value})
"""Outcomes of a turn whose hint was accepted."""
_FIELDS = ("span", "outcome", "next_state_role", "votes", "hint", "hint_token_ids", "insert_at")
_ROLES = ("tool", "user", "verdict", None)


class Problem(NamedTuple):
    """What is wrong, and where: "" for the whole sequence, else as in `, turn 2` or `, position 812`."""

    where: str
    message: str


def scored_positions(records: Sequence[dict[str, Any]]) -> frozenset[int]:
    """The positions that lie in a scored turn, by checked records."""
    spans = (record["span"] for record in records if record["outcome"] == TurnOutcome.SCORED.value)
    return frozenset(position for start, end in spans for position in range(start, end))


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_ids(values: Sequence[object]) -> bool:
    """Whether all `values` could be token ids."""
    return all(is_int(value) and value >= 0 for value in values)


def turn_problems(records: object, tokens: Sequence[int], masks: Sequence[int], messages: object) -> Iterator[Problem]:
    """Yield what is wrong with the records of one sequence: in themselves, in their order, and against its arrays.

    Args:
        records: What stands under `overrides[i]["opd"]["turns"]`.
        tokens: Its tokens.
        masks: Its masks, already checked against the tokens.
        messages: Its messages, where the file has them.

    Yields:
        Where (`, turn 2` or `, position 812`) and what.
    """
    if not isinstance(records, list):
        yield Problem("", f"opd turns: expected a list, got {type(records).__name__}")
        return
    problems = [
        Problem(f", turn {i}", message) for i, r in enumerate(records) for message in _record_problems(r, len(tokens))
    ]
    yield from problems
    if problems:
        return
    yield from _span_problems([record["span"] for record in records], masks)
    if isinstance(messages, list):
        said = sum(message["role"] == "assistant" for message in messages)
        if said != len(records):
            yield Problem("", f"opd turns: {len(records)} records for {said} assistant messages")


def _record_problems(record: object, length: int) -> Iterator[str]:
    if not isinstance(record, dict) or any(name not in record for name in _FIELDS):
        yield f"record: expected an object with {', '.join(_FIELDS)}"
        return
    span, outcome, role = record["span"], record["outcome"], record["next_state_role"]
    if not (isinstance(span, list) and len(span) == 2 and is_ids(span) and 0 < span[0] < span[1] <= length):
        yield f"span: expected [start, end) inside of {length} tokens, got {span!r}"
        return
    if not isinstance(outcome, str) or outcome not in _OUTCOMES:
        yield f"outcome: {outcome!r} is none of {', '.join(sorted(_OUTCOMES))}"
        return
    if role not in _ROLES or (role is None) != (outcome == TurnOutcome.NO_NEXT_STATE.value):
        yield f"next_state_role: {role!r} does not go with outcome {outcome!r}"
    yield from _vote_problems(record["votes"])
    yield from _hint_problems(record)


def _vote_problems(votes: object) -> Iterator[str]:
    if not isinstance(votes, list) or not all(isinstance(vote, dict) for vote in votes):
        yield "votes: expected a list of objects"
        return
    for vote in votes:
        decision, hint = vote.get("decision"), vote.get("hint")
        if decision not in (1, -1, None) or (decision == 1) != isinstance(hint, str):
            yield f"votes: decision {decision!r} with hint {hint!r}"


def _hint_problems(record: dict[str, Any]) -> Iterator[str]:
    outcome, hint, ids, place = (record[name] for name in ("outcome", "hint", "hint_token_ids", "insert_at"))
    start = record["span"][0]
    if not isinstance(ids, list) or not is_ids(ids):
        yield "hint_token_ids: expected token ids"
        return
    if (outcome in _HINTED) != (isinstance(hint, str) and hint != ""):
        yield f"hint: {hint!r} does not go with outcome {outcome!r}"
    if bool(ids) != (place is not None):
        yield f"insert_at: {place!r} with {len(ids)} hint_token_ids"
    elif place is not None and not (is_int(place) and 0 < place <= start):
        yield f"insert_at: {place!r}, expected a position of the turn's prompt, 1 to {start}"
    if outcome == TurnOutcome.SCORED.value and not ids:
        yield "hint_token_ids: empty, but the turn is scored"
    if outcome not in _HINTED and ids:
        yield f"hint_token_ids: {len(ids)} of them do not go with outcome {outcome!r}"


def _span_problems(spans: Sequence[Sequence[int]], masks: Sequence[int]) -> Iterator[Problem]:
    """Spans are in order, do not overlap, and cover exactly the sampled positions."""
    before = 0
    owner = [False] * len(masks)
    for index, (start, end) in enumerate(spans):
        if start < before:
            yield Problem(f", turn {index}", f"span: starts at {start}, before the end {before} of the turn before")
        before = end
        owner[start:end] = [True] * (end - start)
    for position, (owned, mask) in enumerate(zip(owner, masks, strict=True)):
        if owned and mask == IGNORED:
            yield Problem(f", position {position}", "in a turn's span, but not sampled")
        elif not owned and mask != IGNORED:
            yield Problem(f", position {position}", "sampled, but in no turn's span")
