"""JSON of any origin -> a scored group or a list of problems, and counts of a file's contents. Pure.

The checks have two steps. `form_problems` checks the JSON: fields, types, lengths, and entries that are no ids or
numbers. `GroupChecker` checks the contents of the parsed group. Both depend only on the wire format
(docs/wire_format.md). Turn records are checked against the arrays; without records, the arrays are checked alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast, get_args

from agentic_opd.core.errors import WireError
from agentic_opd.core.names import HintSource
from agentic_opd.core.types import IGNORED, MOST_NATS, MOST_SCORE, PROMPT_LOGPROB, EvidenceKind, StepScore, TurnOutcome
from agentic_opd.wire.group import (
    SAME_LOGPROB,
    ControlKind,
    ControlReading,
    GapBaseline,
    ScoredGroup,
    ScoredRollout,
    TurnRecord,
    context_turn_from_wire,
    hint_sources_of,
    is_int,
    is_number,
    is_text,
)

SUM_SLACK = 1e-3
"""Tolerance above 1 for the sum of a row's probabilities, because logprobs are written rounded."""

_MOST_ID = 2**63 - 1
_LOGPROB = f"a finite number from {-MOST_NATS:g}"

_REQUIRED = ("tokens", "masks", "scores", "inference_logprobs")
_OPTIONAL = ("messages", "overrides", "advantages", "ref_logprobs")
_DISTILL = ("distill_token_ids", "distill_logprobs")
_RECORD = ("span", "outcome", "next_state_role", "votes", "hint", "hint_token_ids", "insert_at")
_READINGS = ("baseline_logprobs", "unhinted_logprobs")
_OUTCOMES = frozenset(outcome.value for outcome in TurnOutcome)
_ROLES = ("tool", "user", "verdict", None)
_HINTED = frozenset({TurnOutcome.SCORED, TurnOutcome.TOO_LONG, TurnOutcome.SCORING_ERROR})
"""Outcomes of turns with an accepted hint."""


class Problem(NamedTuple):
    """A problem and its location: "" for the whole group, otherwise for example `sequence 0, position 812`."""

    where: str
    message: str

    def at(self, place: str) -> str:
        """Return the full message for a group located at `place`."""
        return f"{place}{', ' if self.where else ''}{self.where}: {self.message}"


class Checked(NamedTuple):
    """A group (None if the JSON can't be parsed as one) and all its problems, in order."""

    group: ScoredGroup | None
    problems: list[Problem]


def read_group(value: object, place: str = "a group") -> ScoredGroup:
    """Read a group of any origin; the contents are not checked beyond `form_problems`.

    Args:
        value: The JSON.
        place: Where the JSON came from, for the error message.

    Raises:
        WireError: a field is missing or has the wrong type or length; the message names the first such place.
    """
    for problem in form_problems(value):
        raise WireError(problem.at(place))
    return ScoredGroup.from_wire(value)


# ----------------------------------------------------------------------------------------------- the form of the JSON


def form_problems(value: object) -> Iterator[Problem]:
    """Yield the problems that prevent `value` from being read as a scored group."""
    if not isinstance(value, dict):
        yield Problem("", f"expected a JSON object, got {type(value).__name__}")
        return
    fields = cast(dict[str, Any], value)
    problems = list(_field_problems(fields))
    yield from problems
    if problems:
        return  # later checks would only repeat these problems
    columns = {name: fields[name] for name in (*_REQUIRED, *_OPTIONAL, *_DISTILL) if fields.get(name) is not None}
    for index in range(len(fields["tokens"])):
        for where, message in _sequence_form({name: column[index] for name, column in columns.items()}):
            yield Problem(f"sequence {index}{where}", message)


def _field_problems(fields: dict[str, Any]) -> Iterator[Problem]:
    """Yield missing fields, and fields without one entry per sequence."""
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        yield Problem("", "tokens: expected a list of at least one sequence")
        return
    size = len(cast(list[Any], tokens))
    distill = [name for name in _DISTILL if fields.get(name) is not None]
    if len(distill) == 1:
        yield Problem("", f"{distill[0]} is there without the other distillation field")
    for name in (*_REQUIRED, *(name for name in _OPTIONAL if fields.get(name) is not None), *distill):
        column = fields.get(name)
        if not isinstance(column, list):
            yield Problem("", f"{name}: expected a list, got {_kind(fields, name)}")
        elif len(column) != size:
            yield Problem("", f"{name}: expected {size} entries, one a sequence, got {len(column)}")
    about = _object(fields.get("group_overrides"))
    scores = about.get("rollout_scores", [])
    if not (isinstance(scores, list) and all(map(is_number, cast(list[Any], scores)))):
        yield Problem("", f"group_overrides: rollout_scores {scores!r}, expected a list of finite numbers")
    yield from _opd_problems(_object(about.get("opd")))


def _opd_problems(opd: dict[str, Any]) -> Iterator[Problem]:
    """Yield problems of `group_overrides["opd"]`."""
    said = opd.get("outcomes")
    if said is not None and not (isinstance(said, dict) and all(map(is_int, said.values()))):
        yield Problem("", f"group_overrides: outcomes {said!r}, expected an object of counts")
    if "gap_baseline" in opd and opd["gap_baseline"] not in get_args(GapBaseline):
        known = ", ".join(get_args(GapBaseline))
        yield Problem("", f"group_overrides: gap_baseline {opd['gap_baseline']!r} is none of {known}")
    if not isinstance(opd.get("teacher", ""), str):
        yield Problem("", f"group_overrides: teacher {opd['teacher']!r}, expected a kind of task")
    if "hint_source" in opd and hint_sources_of(opd["hint_source"]) is None:
        known = ", ".join(get_args(HintSource))
        yield Problem("", f"group_overrides: hint_source {opd['hint_source']!r} is none of {known}, nor a list of them")


def _sequence_form(sequence: dict[str, Any]) -> Iterator[Problem]:
    opd = _object(_object(sequence.get("overrides")).get("opd"))
    tokens, records = sequence["tokens"], opd.get("turns")
    if not is_number(sequence["scores"]):
        yield Problem("", f"scores: expected a finite number from {-MOST_SCORE:g} to {MOST_SCORE:g}")
    if not _is_chat(sequence.get("messages", [])):
        yield Problem("", "messages: expected a list of objects that have a role and a content")
    if not tokens or not _are_ids(tokens):
        yield Problem("", "tokens: expected token ids, at least one")
        return
    for name, kind, most, entry in (
        ("masks", int, _MOST_ID, "mask: expected a whole number"),
        ("inference_logprobs", float, MOST_NATS, f"inference_logprobs: expected {_LOGPROB} to {MOST_NATS:g}"),
    ):
        values = sequence[name]
        if not isinstance(values, list) or len(values) != len(tokens):
            yield Problem("", f"{name}: expected {len(tokens)} entries, one a token, got {_size(values)}")
        elif (at := _odd_one(values, kind, -most, most)) is not None:
            yield Problem(f", position {at}", f"{entry}, got {values[at]!r}")
    yield from _records_form(records, len(tokens))
    yield from _context_form(opd.get("context_turns", []))
    if "distill_token_ids" in sequence:
        yield from _rows_form(len(tokens), sequence["distill_token_ids"], sequence["distill_logprobs"])


def _records_form(records: Any, length: int) -> Iterator[Problem]:
    if isinstance(records, list):
        for index, record in enumerate(cast(list[Any], records)):
            yield from (Problem(f", turn {index}", message) for message in _record_form(record, length))
    elif records is not None:
        yield Problem("", f"opd turns: expected a list, got {type(records).__name__}")


def _context_form(entries: Any) -> Iterator[Problem]:
    if not isinstance(entries, list):
        yield Problem("", f"opd context_turns: expected a list, got {type(entries).__name__}")
        return
    for index, entry in enumerate(cast(list[Any], entries)):
        try:
            context_turn_from_wire(entry)
        except WireError as error:
            yield Problem(f", context turn {index}", str(error))


def _record_form(record: Any, length: int) -> Iterator[str]:
    if not isinstance(record, dict) or any(name not in record for name in _RECORD):
        yield f"record: expected an object with {', '.join(_RECORD)}"
        return
    span, outcome, role, votes, hint, hint_ids, place = (record[name] for name in _RECORD)
    if not (_are_ids(span) and len(span) == 2 and 0 < span[0] < span[1] <= length):
        yield f"span: expected [start, end) inside of {length} tokens, got {span!r}"
    if not isinstance(outcome, str) or outcome not in _OUTCOMES:
        yield f"outcome: {outcome!r} is none of {', '.join(sorted(_OUTCOMES))}"
    if role not in _ROLES:
        yield f"next_state_role: {role!r} is none of tool, user, verdict and null"
    yield from _votes_form(votes)
    if not isinstance(hint, str | None):
        yield f"hint: {hint!r}, expected a text or null"
    if not _are_ids(hint_ids):
        yield "hint_token_ids: expected token ids"
    if not (place is None or is_int(place)):
        yield f"insert_at: {place!r}, expected a position of the turn's prompt, or null"
    fields = cast(dict[str, Any], record)
    if _are_ids(span) and len(span) == 2:
        yield from _reasoning_form(fields, *span)
        first = fields.get("scored_from")
        yield from _further_form(fields, span[1] - (first if is_int(first) else span[0]))
    else:
        yield from _further_form(fields, 0)


def _reasoning_form(record: dict[str, Any], start: int, end: int) -> Iterator[str]:
    reasoning, first = record.get("reasoning_tokens", 0), record.get("scored_from", start)
    if not (is_int(reasoning) and 0 <= reasoning <= max(end - start, 0)):
        yield f"reasoning_tokens: {reasoning!r}, expected 0 to {end - start}"
    if not (is_int(first) and start <= first <= end):
        yield f"scored_from: {first!r}, expected a position of the span"


def _further_form(record: dict[str, Any], tokens: int) -> Iterator[str]:
    """Yield problems of a record's optional fields; `tokens` is the length of its scored span."""
    yield from (
        f"{name}: {record[name]!r}, expected {expected}"
        for name, (is_right, expected) in _OPTIONAL_OF_RECORD.items()
        if name in record and not is_right(record[name])
    )
    for name in _READINGS:
        if name in record and not (_are_logprobs(record[name]) and len(record[name]) == tokens):
            yield f"{name}: expected {tokens} finite numbers of at most 0, one a token of the span"
    if "control" in record:
        yield from _control_form(record["control"], tokens)


def _control_form(control: Any, tokens: int) -> Iterator[str]:
    fields = _object(control)
    kind, hint, rows = fields.get("kind"), fields.get("hint"), fields.get("logprobs")
    if kind not in get_args(ControlKind):
        yield f"control: kind {kind!r} is none of {', '.join(get_args(ControlKind))}"
    if not is_text(hint) or not hint:
        yield f"control: hint {hint!r}, expected a text"
    if not _are_ids(fields.get("hint_token_ids")) or not fields["hint_token_ids"]:
        yield "control: hint_token_ids: expected token ids, at least one"
    if not isinstance(rows, list) or len(rows) != tokens:
        yield f"control: logprobs: expected {tokens} rows, one a token of the span, got {_size(rows)}"
    elif not all(_is_control_row(row) for row in cast(list[Any], rows)):
        yield "control: logprobs: expected finite numbers of at most 0 or null, and never null first"


def _is_control_row(row: Any) -> bool:
    if not isinstance(row, list) or not row:
        return False
    entries = cast(list[Any], row)
    return entries[0] is not None and _are_logprobs([entry for entry in entries if entry is not None])


def _votes_form(votes: Any) -> Iterator[str]:
    if not isinstance(votes, list) or not all(isinstance(vote, dict) for vote in votes):
        yield "votes: expected a list of objects"
        return
    for vote in cast(list[dict[str, Any]], votes):
        decision, hint = vote.get("decision"), vote.get("hint")
        if decision not in (1, -1, None) or not isinstance(hint, str if decision == 1 else type(None)):
            yield f"votes: decision {decision!r} with hint {hint!r}"


def _rows_form(length: int, ids: Any, logprobs: Any) -> Iterator[Problem]:
    for name, rows in (("distill_token_ids", ids), ("distill_logprobs", logprobs)):
        if not isinstance(rows, list) or len(rows) != length:
            yield Problem("", f"{name}: expected {length} rows, one a token, got {_size(rows)}")
            return
    for position, (row_ids, row) in enumerate(zip(ids, logprobs, strict=True)):
        if row_ids == row == []:
            continue
        if not isinstance(row_ids, list) or not isinstance(row, list) or len(row_ids) != len(row):
            yield Problem(f", position {position}", "row: expected two lists of one length")
        elif not _are_ids(row_ids):
            yield Problem(f", position {position}", "row: an id is not a token id")
        elif (at := _odd_one(row, float, -MOST_NATS, SUM_SLACK)) is not None:
            yield Problem(f", position {position}", f"row: logprob {row[at]!r}, expected {_LOGPROB} to 0")


def _are_ids(values: Any) -> bool:
    """Whether `values` is a list of possible token ids."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) <= _MOST_ID)


def _are_logprobs(values: Any) -> bool:
    """Whether `values` is a list of logprobs, at most `SUM_SLACK` above 0 (rounding)."""
    return isinstance(values, list) and all(is_number(value) and -MOST_NATS <= value <= SUM_SLACK for value in values)


def _is_step_score(value: Any) -> bool:
    return is_int(value) and value in get_args(StepScore)


def _is_version(value: Any) -> bool:
    return is_int(value) and value >= 0


def _are_kinds_of_evidence(values: Any) -> bool:
    if not isinstance(values, list) or not all(map(is_text, values)):
        return False
    return len(set(values)) == len(values) and set(values) <= set(get_args(EvidenceKind))


def _are_step_votes(values: Any) -> bool:
    return isinstance(values, list) and all(value is None or _is_step_score(value) for value in values)


_OPTIONAL_OF_RECORD: dict[str, tuple[Callable[[Any], bool], str]] = {
    "evidence": (_are_kinds_of_evidence, f"some of {', '.join(get_args(EvidenceKind))}, each once"),
    "question": (is_text, "a text"),
    "step_votes": (_are_step_votes, "a list of 1, 0, -1 and null"),
    "step_score": (_is_step_score, "1, 0 or -1"),
    "truncated": (lambda value: isinstance(value, bool), "true or false"),
    "weight_version": (_is_version, "a whole number, at least 0"),
    "scored_version": (_is_version, "a whole number, at least 0"),
    "hint_source": (lambda value: value in get_args(HintSource), f"one of {', '.join(get_args(HintSource))}"),
}
"""Optional fields of a record, with a check and the expected value in words."""


def _odd_one(values: list[Any], kind: type[int | float], least: float, most: float) -> int | None:
    """Return the index of the first value that is not a number (an integer if `kind` is int) from `least` to `most`."""
    is_of_kind = set(map(type, values)) <= {kind} and (kind is int or not any(map(math.isnan, values)))
    if is_of_kind and (not values or (least <= min(values) and max(values) <= most)):
        return None
    is_good = is_int if kind is int else is_number
    return next((i for i, value in enumerate(values) if not (is_good(value) and least <= value <= most)), None)


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _kind(fields: dict[str, Any], name: str) -> str:
    return type(fields[name]).__name__ if name in fields else "nothing"


def _size(values: Any) -> str:
    return str(len(values)) if isinstance(values, list) else type(values).__name__


# ------------------------------------------------------------------------------------------ the contents of the group


class GroupChecker:
    """Checks the groups of one file in order; `counts` sums up their contents."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.top_k: int | None = None
        """Entries of a scored row, from the first `distill_topk` or non-empty row in the file."""

    def read(self, value: object) -> Checked:
        """Read a group and collect all its problems."""
        problems = list(form_problems(value))
        if isinstance(value, dict):
            fields = cast(dict[str, Any], value)
            self.counts["groups"] += 1
            self.counts["sequences"] += len(fields["tokens"]) if isinstance(fields.get("tokens"), list) else 0
            if not isinstance(fields.get("group_overrides"), dict):
                kind = _kind(fields, "group_overrides")
                problems.append(Problem("", f"group_overrides: expected an object, got {kind}"))
        if problems:
            return Checked(None, problems)
        group = ScoredGroup.from_wire(value)
        return Checked(group, list(self._group(group)))

    def _group(self, group: ScoredGroup) -> Iterator[Problem]:
        distillation, has_rows = group.distillation, group.rollouts[0].rows is not None
        if self.top_k is None and distillation is not None:
            self.top_k = distillation.distill_topk
        self.counts["groups with distillation" if has_rows else "groups without distillation"] += 1
        reads_hints = distillation is None or "none" not in distillation.hint_sources
        for index, rollout in enumerate(group.rollouts):
            for where, message in self._rollout(rollout, reads_hints=reads_hints):
                yield Problem(f"sequence {index}{where}", message)
        alike = group.compared_scores
        if any(rollout.is_rewarded and rollout.score not in alike for rollout in group.rollouts):
            yield Problem("", f"group_overrides: rollout_scores {list(alike)!r} lack the score of a sequence")
        records = [turn for rollout in group.rollouts for turn in rollout.turns or ()]
        named = () if distillation is None else distillation.hint_sources
        if odd := {turn.hint_source for turn in records if turn.hint_source} - {*named} if named else set[str]():
            yield Problem("", f"opd turns: hint_source {', '.join(sorted(odd))}, but the group has {', '.join(named)}")
        if distillation is None or not distillation.outcomes or not records:
            return
        found = Counter(turn.outcome.value for turn in records)
        if {name: count for name, count in distillation.outcomes.items() if count} != found:
            said = dict(distillation.outcomes)
            yield Problem("", f"group_overrides: outcomes {said!r}, but the turns' records say {dict(found)!r}")

    def _rollout(self, rollout: ScoredRollout, *, reads_hints: bool) -> Iterator[Problem]:
        """Yield problems of the arrays; if there are none, of the records; if there are none, of the rows."""
        if problems := list(_array_problems(rollout)):
            yield from problems
            return
        self.counts["tokens"] += len(rollout.tokens_T)
        self.counts["sampled tokens"] += sum(mask != IGNORED for mask in rollout.masks_T)
        if problems := list(_turn_problems(rollout, reads_hints=reads_hints)):
            yield from problems
            return
        if rollout.turns is not None:
            self.counts["turns"] += len(rollout.turns)
            self.counts.update(f"  {turn.outcome.value}" for turn in rollout.turns)
        if rollout.rows is not None:
            yield from self._rows(rollout)
        elif rollout.scored_positions:
            first = min(rollout.scored_positions)
            yield Problem(f", position {first}", "the turn is scored, but there are no distillation arrays")

    def _rows(self, rollout: ScoredRollout) -> Iterator[Problem]:
        assert rollout.rows is not None
        ids, logprobs = rollout.rows.token_ids_TK, rollout.rows.logprobs_TK
        if self.top_k is None:
            self.top_k = next((len(row) for row in ids if row), None)
        scored = rollout.scored_positions
        for position, (mask, row_ids, row_logprobs) in enumerate(zip(rollout.masks_T, ids, logprobs, strict=True)):
            is_scored = None if scored is None else position in scored
            if not row_ids and not is_scored and self.top_k != 1:
                continue
            message = self._row_problem(rollout, position, row_ids, row_logprobs, is_scored)
            if message is not None:
                yield Problem(f", position {position}", f"row: {message}")
            elif row_ids and mask != IGNORED and (is_scored or (is_scored is None and self.top_k != 1)):
                self.counts["scored rows"] += 1
        for turn in rollout.turns or ():
            if turn.control is not None:
                yield from _control_problems(turn, turn.control, ids)

    def _row_problem(
        self, rollout: ScoredRollout, at: int, ids: Sequence[int], logprobs: Sequence[float], is_scored: bool | None
    ) -> str | None:
        """Return the problem of one row, or None; `is_scored` is None if the rollout has no records."""
        is_sampled, is_rectangle = rollout.masks_T[at] != IGNORED, self.top_k == 1
        if not ids and is_rectangle:
            return "empty, but rows of one entry are written at every position"
        if not ids:
            return "missing in the span of a scored turn"
        if not is_rectangle and not is_sampled:
            return "written at a position that was not sampled"
        if not is_rectangle and is_scored is False:
            return "written outside of the scored turns' spans"
        if len(ids) != self.top_k:
            return f"expected {self.top_k} entries, got {len(ids)}"
        if (message := _entries_problem(rollout.tokens_T[at], ids, logprobs)) is not None:
            return message
        if is_rectangle and not is_sampled and logprobs[0] != 0:
            return f"expected logprob 0.0 at a prompt position, got {logprobs[0]}"
        student = rollout.logprobs_T[at]
        if is_rectangle and is_sampled and is_scored is False and abs(logprobs[0] - student) > SAME_LOGPROB:
            return f"expected the student's logprob {student} at an unscored position, got {logprobs[0]}"
        return None


def _array_problems(rollout: ScoredRollout) -> Iterator[Problem]:
    arrays = zip(rollout.tokens_T, rollout.masks_T, rollout.logprobs_T, strict=True)
    for position, (token, mask, logprob) in enumerate(arrays):
        if mask not in (IGNORED, token):
            message = f"mask: expected {IGNORED} or the token {token}, got {mask!r}"
        elif mask == IGNORED and logprob != PROMPT_LOGPROB:
            message = f"inference_logprobs: expected {PROMPT_LOGPROB} at a prompt position, got {logprob}"
        elif mask != IGNORED and logprob > 0:
            message = f"inference_logprobs: expected at most 0, got {logprob}"
        else:
            continue
        yield Problem(f", position {position}", message)


def _control_problems(turn: TurnRecord, control: ControlReading, ids_TK: Sequence[Sequence[int]]) -> Iterator[Problem]:
    """Yield problems of a control's rows, whose entries refer to the ids of the teacher's rows."""
    for position, row in enumerate(control.logprobs_RK, start=turn.scored_span[0]):
        total = sum(math.exp(logprob) for logprob in row if logprob is not None)
        if len(row) != len(ids_TK[position]):
            message = f"expected {len(ids_TK[position])} entries, those of the row, got {len(row)}"
        elif total > 1 + SUM_SLACK:
            message = f"probabilities sum to {total:.6f}, expected at most 1"
        else:
            continue
        yield Problem(f", position {position}", f"control: {message}")


def _turn_problems(rollout: ScoredRollout, *, reads_hints: bool) -> Iterator[Problem]:
    """Yield problems of the records: each alone, their order, and against masks and messages.

    Spans must be in order, must not overlap, and must cover exactly the sampled positions. `reads_hints`: the teacher
    read the hints.
    """
    if rollout.turns is None:
        return
    before, in_turn = 0, [False] * len(rollout.masks_T)
    for index, turn in enumerate(rollout.turns):
        start, end = turn.span
        yield from (Problem(f", turn {index}", message) for message in _record_problems(turn, reads_hints=reads_hints))
        if start < before:
            yield Problem(f", turn {index}", f"span: starts at {start}, before the end {before} of the turn before")
        before = end
        in_turn[start:end] = [True] * (end - start)
    for position, (is_in, mask) in enumerate(zip(in_turn, rollout.masks_T, strict=True)):
        if is_in != (mask != IGNORED):
            what = "in a turn's span, but not sampled" if is_in else "sampled, but in no turn's span"
            yield Problem(f", position {position}", what)
    if rollout.messages is not None:
        said = [index for index, message in enumerate(rollout.messages) if message["role"] == "assistant"]
        context = [turn.message_index for turn in rollout.context_turns]
        if wrong := [index for index in context if index not in said] or len(context) != len(set(context)):
            yield Problem("", f"opd context_turns: messages {wrong or context} are not the assistant's, or stand twice")
        elif len(said) != len(rollout.turns) + len(context):
            also = f" and {len(context)} context turns" if context else ""
            yield Problem("", f"opd turns: {len(rollout.turns)} records{also} for {len(said)} assistant messages")


def _record_problems(turn: TurnRecord, *, reads_hints: bool) -> Iterator[str]:
    outcome, ids, place, start = turn.outcome, turn.hint_token_ids, turn.insert_at, turn.span[0]
    if (turn.next_state_role is None) != (outcome is TurnOutcome.NO_NEXT_STATE):
        yield f"next_state_role: {turn.next_state_role!r} does not go with outcome {outcome.value!r}"
    if (outcome in _HINTED) != bool(turn.hint):
        yield f"hint: {turn.hint!r} does not go with outcome {outcome.value!r}"
    if bool(ids) != (place is not None):
        yield f"insert_at: {place!r} with {len(ids)} hint_token_ids"
    elif place is not None and not 0 < place <= start:
        yield f"insert_at: {place!r}, expected a position of the turn's prompt, 1 to {start}"
    if turn.is_scored and bool(ids) != reads_hints:
        yield f"hint_token_ids: {'empty' if reads_hints else 'there, with hint_source none'}, but the turn is scored"
    if outcome not in _HINTED and ids:
        yield f"hint_token_ids: {len(ids)} of them do not go with outcome {outcome.value!r}"
    yield from (
        f"{name}: does not go with outcome {outcome.value!r}"
        for name in (*_READINGS, "scored_version", "control")
        if not turn.is_scored and getattr(turn, name) is not None
    )
    if turn.hint_source is not None and not turn.hint:
        yield f"hint_source: {turn.hint_source!r}, but there is no hint"
    if turn.control is not None and turn.control.hint == turn.hint:
        yield "control: its hint is the turn's own"
    if turn.step_score not in (None, 0, *turn.step_votes):
        yield f"step_score: {turn.step_score}, but no vote says so"


def _entries_problem(token: int, ids: Sequence[int], logprobs: Sequence[float]) -> str | None:
    if ids[0] != token:
        return f"first id {ids[0]}, expected the token {token}"
    if len(set(ids)) != len(ids):
        return "an id occurs twice"
    if (likely := max(logprobs)) > 0:
        return f"logprob {likely!r}, expected {_LOGPROB} to 0"
    if (rise := next((k for k in range(2, len(logprobs)) if logprobs[k] > logprobs[k - 1]), None)) is not None:
        return f"entry {rise} is likelier than entry {rise - 1}; the others stand most likely first"
    total = sum(map(math.exp, logprobs))
    return f"probabilities sum to {total:.6f}, expected at most 1" if total > 1 + SUM_SLACK else None
