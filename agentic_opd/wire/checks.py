"""A scored group as it stands in a file -> what is wrong with it, and counts. Pure.

Knows the wire format (docs/wire_format.md) and nothing of how a group was made, so that it can judge files of any
origin. What a group says of its turns (`overrides[i]["opd"]["turns"]`) is checked against its arrays; without it the
arrays are checked by themselves.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

from agentic_opd.core.types import IGNORED, PROMPT_LOGPROB, TurnOutcome

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


SUM_SLACK = 1e-3
"""How far above 1 the probabilities of a row may sum: logprobs are written rounded."""

_REQUIRED = ("tokens", "masks", "scores", "inference_logprobs")
_OPTIONAL = ("messages", "overrides", "advantages", "ref_logprobs")
_DISTILL = ("distill_token_ids", "distill_logprobs")


class GroupChecker:
    """Checks the groups of one file, one after the other; `counts` adds up what they hold."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.top_k: int | None = None
        """Entries of a scored row: what the first group says of itself, or its first row holds."""

    def check(self, group: object) -> Iterator[Problem]:
        """Yield everything that is wrong with `group`, in order."""
        if not isinstance(group, dict):
            yield Problem("", f"expected a JSON object, got {type(group).__name__}")
            return
        size = len(group["tokens"]) if isinstance(group.get("tokens"), list) else 0
        self.counts["groups"] += 1
        self.counts["sequences"] += size
        problems = list(_group_problems(group, size))
        yield from problems
        if problems:
            return  # what follows would only repeat them
        self._read_top_k(group)
        has_rows = group.get("distill_token_ids") is not None
        self.counts["groups with distillation" if has_rows else "groups without distillation"] += 1
        for index in range(size):
            sequence = {name: values[index] for name, values in group.items() if _per_sequence(name, values)}
            for place, message in self._sequence(sequence, has_rows):
                yield Problem(f"sequence {index}{place}", message)
        yield from _count_problems(group)

    def _read_top_k(self, group: dict[str, Any]) -> None:
        opd = group["group_overrides"].get("opd")
        declared = opd.get("distill_topk") if isinstance(opd, dict) else None
        if self.top_k is None and is_int(declared):
            self.top_k = declared

    def _sequence(self, sequence: dict[str, Any], has_rows: bool) -> Iterator[Problem]:
        tokens, masks = sequence["tokens"], sequence["masks"]
        problems = list(_token_problems(tokens, masks, sequence["inference_logprobs"]))
        yield from problems
        if problems:
            return
        self.counts["tokens"] += len(tokens)
        self.counts["sampled tokens"] += sum(mask != IGNORED for mask in masks)
        scored = None
        if (records := _records(sequence)) is not None:
            messages = sequence.get("messages")
            problems = list(turn_problems(records, tokens, masks, messages))
            yield from problems
            if problems:
                return
            scored = scored_positions(records)
            self.counts["turns"] += len(records)
            self.counts.update(f"  {record['outcome']}" for record in records)
        if has_rows:
            yield from self._rows(sequence, scored)
        elif scored:
            yield Problem(f", position {min(scored)}", "the turn is scored, but there are no distillation arrays")

    def _rows(self, sequence: dict[str, Any], scored: frozenset[int] | None) -> Iterator[Problem]:
        tokens, masks = sequence["tokens"], sequence["masks"]
        ids, logprobs = sequence["distill_token_ids"], sequence["distill_logprobs"]
        for name, rows in (("distill_token_ids", ids), ("distill_logprobs", logprobs)):
            if not isinstance(rows, list) or len(rows) != len(tokens):
                got = len(rows) if isinstance(rows, list) else type(rows).__name__
                yield Problem("", f"{name}: expected {len(tokens)} rows, one a token, got {got}")
                return
        if self.top_k is None:
            self.top_k = next((len(row) for row in ids if isinstance(row, list) and row), None)
        for position, (token, mask, row_ids, row_logprobs) in enumerate(zip(tokens, masks, ids, logprobs, strict=True)):
            is_scored = None if scored is None else position in scored
            student = sequence["inference_logprobs"][position]
            message = _row_problem(token, mask, row_ids, row_logprobs, is_scored, student, self.top_k)
            if message is not None:
                yield Problem(f", position {position}", message)
            elif row_ids and mask != IGNORED and (is_scored or (is_scored is None and self.top_k != 1)):
                self.counts["scored rows"] += 1


def _per_sequence(name: str, values: object) -> bool:
    return isinstance(values, list) and name in (*_REQUIRED, *_OPTIONAL, *_DISTILL)


def _group_problems(group: dict[str, Any], size: int) -> Iterator[Problem]:
    """Which fields there are, and whether each has one entry a sequence."""
    if size == 0:
        yield Problem("", "tokens: expected a list of at least one sequence")
        return
    distill = [name for name in _DISTILL if group.get(name) is not None]
    if len(distill) == 1:
        yield Problem("", f"{distill[0]} is there without the other distillation field")
    optional = [name for name in _OPTIONAL if group.get(name) is not None]
    for name in (*_REQUIRED, *optional, *distill):
        values = group.get(name)
        if not isinstance(values, list):
            yield Problem("", f"{name}: expected a list, got {_kind(group, name)}")
        elif len(values) != size:
            yield Problem("", f"{name}: expected {size} entries, one a sequence, got {len(values)}")
        elif name in _ENTRIES:
            is_good, expected = _ENTRIES[name]
            bad = (index for index, value in enumerate(values) if not is_good(value))
            yield from (Problem(f"sequence {index}", f"{name}: expected {expected}") for index in bad)
    if not isinstance(group.get("group_overrides"), dict):
        yield Problem("", f"group_overrides: expected an object, got {_kind(group, 'group_overrides')}")


def _count_problems(group: dict[str, Any]) -> Iterator[Problem]:
    """Whether the group counts its turns' outcomes as their records say them; nothing where it does not count them."""
    opd = group["group_overrides"].get("opd")
    said = opd.get("outcomes") if isinstance(opd, dict) else None
    overrides = group.get("overrides")
    if said is None or not isinstance(overrides, list):
        return
    found = Counter(
        record["outcome"]
        for one in overrides
        for record in _records({"overrides": one}) or ()
        if isinstance(record, dict) and isinstance(record.get("outcome"), str)
    )
    if not isinstance(said, dict) or {name: count for name, count in said.items() if count} != dict(found):
        yield Problem("", f"group_overrides: outcomes {said!r}, but the turns' records say {dict(found)!r}")


def _is_chat(messages: object) -> bool:
    return isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)


_ENTRIES: dict[str, tuple[Callable[[object], bool], str]] = {
    "scores": (is_number, "a finite number"),
    "messages": (_is_chat, "a list of objects that have a role and a content"),
}
"""Fields whose entries are judged by themselves."""


def _token_problems(tokens: object, masks: object, logprobs: object) -> Iterator[Problem]:
    if not isinstance(tokens, list) or not tokens or not is_ids(tokens):
        yield Problem("", "tokens: expected token ids, at least one")
        return
    for name, values in (("masks", masks), ("inference_logprobs", logprobs)):
        if not isinstance(values, list) or len(values) != len(tokens):
            got = len(values) if isinstance(values, list) else type(values).__name__
            yield Problem("", f"{name}: expected {len(tokens)} entries, one a token, got {got}")
            return
    for position, (token, mask, logprob) in enumerate(zip(tokens, masks, logprobs, strict=True)):  # type: ignore[arg-type]
        if not is_int(mask) or mask not in (IGNORED, token):
            yield Problem(f", position {position}", f"mask: expected {IGNORED} or the token {token}, got {mask!r}")
        elif not is_number(logprob):
            yield Problem(f", position {position}", f"inference_logprobs: expected a finite number, got {logprob!r}")
        elif mask == IGNORED and logprob != PROMPT_LOGPROB:
            yield Problem(
                f", position {position}",
                f"inference_logprobs: expected {PROMPT_LOGPROB} at a prompt position, got {logprob}",
            )
        elif mask != IGNORED and logprob > 0:
            yield Problem(f", position {position}", f"inference_logprobs: expected at most 0, got {logprob}")


def _records(sequence: dict[str, Any]) -> Any:
    overrides = sequence.get("overrides")
    opd = overrides.get("opd") if isinstance(overrides, dict) else None
    return opd.get("turns") if isinstance(opd, dict) else None


def _row_problem(
    token: int, mask: int, ids: object, logprobs: object, is_scored: bool | None, student: float, top_k: int | None
) -> str | None:
    """What is wrong with one row; `is_scored` is None where nothing says which turns were scored."""
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        return "row: expected two lists of one length"
    if not ids:
        if top_k == 1:
            return "row: empty, but rows of one entry are written at every position"
        return "row: missing in the span of a scored turn" if is_scored else None
    if top_k != 1 and mask == IGNORED:
        return "row: written at a position that was not sampled"
    if top_k != 1 and is_scored is False:
        return "row: written outside of the scored turns' spans"
    if len(ids) != top_k:
        return f"row: expected {top_k} entries, got {len(ids)}"
    if (message := _entries_problem(token, ids, logprobs)) is not None:
        return message
    if top_k == 1 and mask == IGNORED and logprobs[0] != 0:
        return f"row: expected logprob 0.0 at a prompt position, got {logprobs[0]}"
    if top_k == 1 and mask != IGNORED and is_scored is False and abs(logprobs[0] - student) > 1e-6:
        return f"row: expected the student's logprob {student} at an unscored position, got {logprobs[0]}"
    return None


def _entries_problem(token: int, ids: Sequence[Any], logprobs: Sequence[Any]) -> str | None:
    if not is_ids(ids):
        return "row: an id is not a token id"
    if ids[0] != token:
        return f"row: first id {ids[0]}, expected the token {token}"
    if len(set(ids)) != len(ids):
        return "row: an id occurs twice"
    for logprob in logprobs:
        if not is_number(logprob) or logprob > 0:
            return f"row: logprob {logprob!r}, expected a finite number, at most 0"
    if (rise := next((k for k in range(2, len(logprobs)) if logprobs[k] > logprobs[k - 1]), None)) is not None:
        return f"row: entry {rise} is likelier than entry {rise - 1}; the others stand most likely first"
    total = sum(map(math.exp, logprobs))
    return f"row: probabilities sum to {total:.6f}, expected at most 1" if total > 1 + SUM_SLACK else None


def _kind(group: dict[str, Any], name: str) -> str:
    return type(group[name]).__name__ if name in group else "nothing"
