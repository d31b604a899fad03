"""JSON of any origin -> a scored group or a list of problems, and counts of a file's contents. Pure.

`group.read_form` checks the form of the JSON by the types. Here `read_group` checks that the arrays hold ids and
numbers, and `GroupChecker` also checks the meaning: masks, records against arrays, rows, counts. `agentic-opd validate`
and `training.collate` both use it, so they refuse the same groups. All of it depends only on the wire format
(docs/wire_format.md). Without turn records, the arrays are checked alone.

A check of an array runs vectorised first; only an array that fails it is looked at entry by entry, for the message.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, starmap
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import FailFast, Field, TypeAdapter

from agentic_opd.core.attachments.messages import KIND, problems_of
from agentic_opd.core.errors import AlignmentError, WireError
from agentic_opd.core.names import HINT_SOURCES
from agentic_opd.core.types import (
    IGNORED,
    MOST_ID,
    MOST_NATS,
    PROMPT_LOGPROB,
    ProofVerdict,
    TurnOutcome,
    sampled_spans,
)
from agentic_opd.wire.counts import JudgeCounts
from agentic_opd.wire.group import (
    SAME_LOGPROB,
    SUM_SLACK,
    ControlReading,
    HintReading,
    Logprob,
    Problem,
    ScoredGroup,
    ScoredRollout,
    TurnRecord,
    read_form,
    short_repr,
    validated,
)

GAP_SLACK = 1e-3
"""Tolerance between a hint's mean gap and that of its rows (nats); both are computed from written numbers."""

_PROOF_SLACK = 1e-6
"""Tolerance between an effect and its counts; effects are written rounded."""

_HINTED = frozenset(
    {
        TurnOutcome.SCORED,
        TurnOutcome.TOO_LONG,
        TurnOutcome.SCORING_ERROR,
        TurnOutcome.REFUTED,
        TurnOutcome.UNPROVEN,
    }
)
"""Outcomes of turns with an accepted hint."""

_MASKS = TypeAdapter[Any](Annotated[list[Annotated[int, Field(strict=True, ge=-MOST_ID, le=MOST_ID)]], FailFast()])
_LOGPROBS = TypeAdapter[Any](
    Annotated[list[Annotated[float, Field(strict=True, ge=-MOST_NATS, le=MOST_NATS, allow_inf_nan=False)]], FailFast()]
)
_ROW = TypeAdapter[Any](Annotated[list[Logprob], FailFast()])


class Checked(NamedTuple):
    """A group (None if the JSON can't be parsed as one) and all its problems, in order."""

    group: ScoredGroup | None
    problems: list[Problem]


def read_group(value: object, origin: str = "a group") -> ScoredGroup:
    """Read a group of any origin and check that its arrays hold ids and numbers, but not their meaning.

    `origin` names it in the error.

    Raises:
        WireError: a field is missing or has the wrong type or length; the message names the first such field.
    """
    group, problems = _read(value)
    if group is None:
        raise WireError(problems[0].message_for(origin))
    return group


def checked_group(group: object, origin: str) -> ScoredGroup:
    """Return a group, or read it from JSON, if `GroupChecker` finds no problem; `origin` names it in errors.

    Raises:
        WireError: the JSON can't be read as a group.
        AlignmentError: the group violates the wire format. Both messages hold the first problem.
    """
    if isinstance(group, ScoredGroup):
        checked = Checked(group, GroupChecker().check(group))
    else:
        checked = GroupChecker().read(group)
    if checked.problems:
        raise (WireError if checked.group is None else AlignmentError)(checked.problems[0].message_for(origin))
    assert checked.group is not None
    return checked.group


def _read(value: object) -> tuple[ScoredGroup | None, list[Problem]]:
    group, problems = read_form(value)
    for index, rollout in enumerate(() if group is None else group.rollouts):
        _check_entries(rollout, f"sequence {index}", problems)
    return None if problems else group, problems


def _check_entries(rollout: ScoredRollout, where: str, problems: list[Problem]) -> None:
    """Add a problem for each array or row with an entry that is not an id or number."""
    if not _are_ids(rollout.tokens_T):
        problems.append(Problem(where, "tokens: expected token ids"))
    validated(_MASKS, rollout.masks_T, problems, where, "masks")
    if not _are_numbers(rollout.logprobs_T, -MOST_NATS, MOST_NATS):
        validated(_LOGPROBS, rollout.logprobs_T, problems, where, "inference_logprobs")
    rows = rollout.rows
    if rows is None or (
        _are_ids(list(chain.from_iterable(rows.token_ids_TK)))
        and _are_numbers(list(chain.from_iterable(rows.logprobs_TK)), -MOST_NATS, SUM_SLACK)
    ):
        return
    for position, (ids, logprobs) in enumerate(zip(rows.token_ids_TK, rows.logprobs_TK, strict=True)):
        if not _are_ids(ids):
            problems.append(
                Problem(f"{where}, position {position}", f"distill_token_ids: {short_repr(ids)}, expected token ids")
            )
        if ids:
            validated(_ROW, logprobs, problems, f"{where}, position {position}", "distill_logprobs")


def _are_ids(values: Sequence[Any]) -> bool:
    """Return whether all `values` are possible token ids. Rows are most of a file, so no Python loop reads them."""
    return set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) <= MOST_ID))


def _are_numbers(values: Sequence[Any], low: float, high: float) -> bool:
    """Return whether all `values` are numbers from `low` to `high`; NaN is not."""
    if not set(map(type, values)) <= {int, float}:
        return False
    try:
        values_N = np.fromiter(values, np.float64, len(values))
    except OverflowError:
        return False
    return bool(((values_N >= low) & (values_N <= high)).all())


class GroupChecker:
    """Checks groups in order; `counts` sums up the contents of those that it read."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.top_k: int | None = None
        """Entries of a scored row: the first group's."""

    def read(self, value: object) -> Checked:
        """Read a group of any origin, and return all its problems."""
        group, problems = _read(value)
        if isinstance(value, dict):
            fields = cast(dict[str, Any], value)
            self.counts["groups"] += 1
            self.counts["sequences"] += len(fields["tokens"]) if isinstance(fields.get("tokens"), list) else 0
            if not isinstance(fields.get("group_overrides"), dict):
                entry = short_repr(fields["group_overrides"]) if "group_overrides" in fields else "nothing"
                problems.append(Problem("", f"group_overrides: {entry}, expected an object"))
        if problems or group is None:
            return Checked(None, problems)
        return Checked(group, list(self._group(group)))

    def check(self, group: ScoredGroup) -> list[Problem]:
        """Return all problems of a group that this process built or read."""
        problems: list[Problem] = []
        for index, rollout in enumerate(group.rollouts):
            _check_entries(rollout, f"sequence {index}", problems)
        return problems or list(self._group(group))

    def _group(self, group: ScoredGroup) -> Iterator[Problem]:
        distillation, has_rows = group.distillation, group.rollouts[0].rows is not None
        top_k = _entries_of_a_row(group)
        self.top_k = top_k if self.top_k is None else self.top_k
        self.counts["groups with distillation" if has_rows else "groups without distillation"] += 1
        for index, rollout in enumerate(group.rollouts):
            for where, message in self._rollout(rollout, top_k):
                yield Problem(f"sequence {index}{where}", message)
        yield from _reward_problems(group)
        yield from _trajectory_problems(group)
        records = [turn for rollout in group.rollouts for turn in rollout.turns or ()]
        sources = () if distillation is None else distillation.hint_sources
        if sources and (odd := {turn.hint_source for turn in records if turn.hint_source} - {*sources}):
            names, expected = ", ".join(sorted(odd)), ", ".join(sources)
            yield Problem("", f"opd turns: hint_source {names}, but the group has {expected}")
        if distillation is None or not distillation.outcomes or not records:
            return
        counted = Counter(turn.outcome.value for turn in records)
        if {name: count for name, count in distillation.outcomes.items() if count} != counted:
            outcomes = dict(distillation.outcomes)
            yield Problem("", f"group_overrides: outcomes {outcomes!r}, but the turns' records say {dict(counted)!r}")

    def _rollout(self, rollout: ScoredRollout, top_k: int | None) -> Iterator[Problem]:
        """Yield problems of the arrays; if there are none, of the records; if there are none, of the rows."""
        if problems := _array_problems(rollout):
            yield from problems
            return
        self.counts["tokens"] += len(rollout.tokens_T)
        self.counts["sampled tokens"] += len(rollout.masks_T) - list(rollout.masks_T).count(IGNORED)
        insertions = [turn.insert_at for turn in rollout.turns or () if turn.insert_at is not None]
        of_attachments = problems_of(rollout.attachments, rollout.masks_T, insertions, rollout.messages)
        problems = [*starmap(Problem, of_attachments), *_turn_problems(rollout), *_sampling_problems(rollout)]
        if problems:
            yield from problems
            return
        if rollout.attachments:
            self.counts[KIND] += len(rollout.attachments)
        if rollout.turns is not None:
            self.counts["turns"] += len(rollout.turns)
            self.counts.update(f"  {turn.outcome.value}" for turn in rollout.turns)
        self._count_judge(JudgeCounts.of(rollout.turns or (), rollout.trajectory))
        if rollout.trajectory is not None:
            self.counts["judged trajectories"] += 1
            self.counts["  windows"] += len(rollout.trajectory.windows)
        if rollout.rows is not None:
            yield from self._rows(rollout, top_k)
        elif rollout.scored_positions:
            first = min(rollout.scored_positions)
            yield Problem(f", position {first}", "the turn is scored, but there are no distillation arrays")

    def _count_judge(self, judge: JudgeCounts) -> None:
        counts = {
            "questions to the judge": judge.questions,
            "questions of unknown tokens": judge.uncounted,
            "judge tokens read": judge.read_tokens,
            "judge tokens sampled": judge.sampled_tokens,
        }
        self.counts.update({name: count for name, count in counts.items() if count})

    def _rows(self, rollout: ScoredRollout, top_k: int | None) -> Iterator[Problem]:
        """Yield problems of the rows, [T, `top_k`] or empty, and of the readings that refer to them."""
        assert rollout.rows is not None
        ids, logprobs = rollout.rows.token_ids_TK, rollout.rows.logprobs_TK
        scored = rollout.scored_positions
        if _are_rows(rollout, top_k):
            rows = [position for position, row in enumerate(ids) if row and rollout.masks_T[position] != IGNORED]
            if scored is None:
                self.counts["scored rows"] += len(rows) if top_k != 1 else 0
            else:
                self.counts["scored rows"] += len(scored.intersection(rows))
        else:
            for position, (mask, row_ids, row_logprobs) in enumerate(zip(rollout.masks_T, ids, logprobs, strict=True)):
                is_scored = None if scored is None else position in scored
                if not row_ids and not is_scored and top_k != 1:
                    continue
                message = _row_problem(rollout, position, row_ids, row_logprobs, is_scored, top_k)
                if message is not None:
                    yield Problem(f", position {position}", f"row: {message}")
                elif row_ids and mask != IGNORED and (is_scored or (is_scored is None and top_k != 1)):
                    self.counts["scored rows"] += 1
        for index, turn in enumerate(rollout.turns or ()):
            if turn.control is not None:
                yield from _control_problems(turn, turn.control, ids)
            if turn.hints and (message := _gap_problem(turn, rollout)) is not None:
                yield Problem(f", turn {index}", message)


def _entries_of_a_row(group: ScoredGroup) -> int | None:
    """Return the number of entries that the rows of a group have, as it says or as its first row has; None without."""
    if group.distillation is not None:
        return group.distillation.distill_topk
    rows = chain.from_iterable(rollout.rows.token_ids_TK for rollout in group.rollouts if rollout.rows is not None)
    return next((len(row) for row in rows if row), None)


def _trajectory_problems(group: ScoredGroup) -> Iterator[Problem]:
    """Yield problems of the questions about whole rollouts, if the group has all sequences of the rollout."""
    numbers = group.rollout_numbers
    for index, (rollout, number) in enumerate(zip(group.rollouts, numbers, strict=True)):
        pairs = zip(group.rollouts, numbers, strict=True)
        sequences = [sequence for sequence, rollout_number in pairs if rollout_number == number]
        if rollout.trajectory is None or any(sequence.first_turn is not None for sequence in sequences):
            continue
        last = max((window.last for window in rollout.trajectory.windows), default=0)
        records = sum(len(sequence.turns or ()) for sequence in sequences)
        if last > records:
            yield Problem(f"sequence {index}", f"opd trajectory: turns up to {last}, but the rollout has {records}")


def _reward_problems(group: ScoredGroup) -> Iterator[Problem]:
    """Yield problems of the lists in which an item of the trajectory API has the rewards of its whole group."""
    if group.rollout_scores is not None:
        scores = group.rollout_scores
        if any(rollout.is_rewarded and rollout.score not in scores for rollout in group.rollouts):
            yield Problem("", f"group_overrides: rollout_scores {list(scores)!r} lack the score of a sequence")
    if group.turn_scores is not None:
        for index, (rollout, first_turn) in enumerate(zip(group.rollouts, group.first_turns, strict=True)):
            for number, total in enumerate(rollout.turn_totals, start=first_turn):
                totals = group.turn_scores[number] if number < len(group.turn_scores) else ()
                if rollout.is_rewarded and total not in totals:
                    message = f"group_overrides: turn_scores of turn {number}, {list(totals)!r}, lack its {total!r}"
                    yield Problem(f"sequence {index}", message)


def _are_rows(rollout: ScoredRollout, top_k: int | None) -> bool:
    """Return whether `_row_problem` would accept each row; numbers close to a bound may be refused."""
    assert rollout.rows is not None
    lengths_T = np.fromiter(map(len, rollout.rows.token_ids_TK), np.int64, len(rollout.tokens_T))
    has_row_T, tokens_T = lengths_T > 0, np.asarray(rollout.tokens_T)
    sampled_T = np.asarray(rollout.masks_T) != IGNORED
    scored_T = (
        None
        if rollout.turns is None
        else _covered(len(tokens_T), (turn.scored_span for turn in rollout.turns if turn.is_scored))
    )
    if not ((lengths_T == 0) | (lengths_T == top_k)).all():
        return False
    if top_k == 1:
        logprobs_T = _flat(rollout.rows.logprobs_TK, np.float64)
        if not has_row_T.all() or not (logprobs_T <= 0).all():
            return False
        if not (_flat(rollout.rows.token_ids_TK, np.int64) == tokens_T).all() or (logprobs_T[~sampled_T] != 0).any():
            return False
        fillers_T = np.zeros_like(sampled_T) if scored_T is None else sampled_T & ~scored_T
        students_T = np.asarray(rollout.logprobs_T, np.float64)
        return bool((abs(logprobs_T - students_T)[fillers_T] <= SAME_LOGPROB).all())
    expected_T = (sampled_T | ~has_row_T) if scored_T is None else has_row_T == scored_T
    if not expected_T.all():
        return False
    if not has_row_T.any():
        return True
    ids_RK = _flat(rollout.rows.token_ids_TK, np.int64).reshape(-1, top_k or 1)
    logprobs_RK = _flat(rollout.rows.logprobs_TK, np.float64).reshape(ids_RK.shape)
    return bool(
        (ids_RK[:, 0] == tokens_T[has_row_T]).all()
        and (np.diff(np.sort(ids_RK, axis=1), axis=1) > 0).all()
        and (logprobs_RK <= 0).all()
        and (np.diff(logprobs_RK[:, 1:], axis=1) <= 0).all()
        and (np.exp(logprobs_RK).sum(axis=1) <= _SURE_SUM).all()
    )


def _covered(length: int, spans: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which positions [T] the spans cover."""
    covered_T = np.zeros(length, np.bool_)
    for start, end in spans:
        covered_T[start:end] = True
    return covered_T


def _flat(rows: Sequence[Sequence[float]], kind: type[Any]) -> NDArray[Any]:
    """Return the entries of all rows in one array."""
    return np.fromiter(chain.from_iterable(rows), kind)


_SURE_SUM = 1 + SUM_SLACK - 1e-9
"""A sum of probabilities up to here is at most 1 + SUM_SLACK in any order of the addition."""


def _row_problem(
    rollout: ScoredRollout,
    position: int,
    ids: Sequence[int],
    logprobs: Sequence[float],
    is_scored: bool | None,
    top_k: int | None,
) -> str | None:
    """Return the problem of one row, or None; `is_scored` is None if the rollout has no records."""
    is_sampled, is_rectangle = rollout.masks_T[position] != IGNORED, top_k == 1
    if not ids and is_rectangle:
        return "empty, but rows of one entry are written at every position"
    if not ids:
        return "missing in the span of a scored turn"
    if not is_rectangle and not is_sampled:
        return "written at a position that was not sampled"
    if not is_rectangle and is_scored is False:
        return "written outside of the scored turns' spans"
    if len(ids) != top_k:
        return f"expected {top_k} entries, got {len(ids)}"
    if (message := _entries_problem(rollout.tokens_T[position], ids, logprobs)) is not None:
        return message
    if is_rectangle and not is_sampled and logprobs[0] != 0:
        return f"expected logprob 0.0 at a prompt position, got {logprobs[0]}"
    student = rollout.logprobs_T[position]
    if is_rectangle and is_sampled and is_scored is False and abs(logprobs[0] - student) > SAME_LOGPROB:
        return f"expected the student's logprob {student} at an unscored position, got {logprobs[0]}"
    return None


def _array_problems(rollout: ScoredRollout) -> list[Problem]:
    """Return problems of the masks and of the sampling weights' logprobs."""
    tokens_T, masks_T, logprobs_T = map(np.asarray, (rollout.tokens_T, rollout.masks_T, rollout.logprobs_T))
    sampled_T = masks_T != IGNORED
    fits_T = np.where(sampled_T, (masks_T == tokens_T) & (logprobs_T <= 0), logprobs_T == PROMPT_LOGPROB)
    fits_T[:1] &= ~sampled_T[:1]
    positions: list[int] = np.flatnonzero(~fits_T).tolist()
    return [Problem(f", position {position}", _array_problem(rollout, position)) for position in positions]


def _array_problem(rollout: ScoredRollout, position: int) -> str:
    token, mask, logprob = rollout.tokens_T[position], rollout.masks_T[position], rollout.logprobs_T[position]
    if mask not in (IGNORED, token):
        return f"mask: expected {IGNORED} or the token {token}, got {mask!r}"
    if mask == IGNORED:
        return f"inference_logprobs: expected {PROMPT_LOGPROB} at a prompt position, got {logprob}"
    if logprob > 0:
        return f"inference_logprobs: expected at most 0, got {logprob}"
    return "mask: the first token is marked as sampled, but nothing before it predicts it"


def _control_problems(turn: TurnRecord, control: ControlReading, ids_TK: Sequence[Sequence[int]]) -> Iterator[Problem]:
    """Yield problems of a control's rows, whose entries refer to the ids of the teacher's rows."""
    rows = control.logprobs_RK
    if list(map(len, rows)) == list(map(len, ids_TK[slice(*turn.scored_span)])) and all(rows):
        starts_R = np.cumsum([0, *map(len, rows)])[:-1]
        logprobs_N = np.array(list(chain.from_iterable(rows)), np.float64)  # None becomes NaN.
        sums_R = np.add.reduceat(np.nan_to_num(np.exp(logprobs_N)), starts_R)
        if not np.isnan(logprobs_N[starts_R]).any() and (sums_R <= _SURE_SUM).all():
            return
    for position, row in enumerate(control.logprobs_RK, start=turn.scored_span[0]):
        total = sum(math.exp(logprob) for logprob in row if logprob is not None)
        if len(row) != len(ids_TK[position]):
            message = f"expected {len(ids_TK[position])} entries, those of the row, got {len(row)}"
        elif row[0] is None:
            message = "the sampled token has no logprob"
        elif total > 1 + SUM_SLACK:
            message = f"probabilities sum to {total:.6f}, expected at most 1"
        else:
            continue
        yield Problem(f", position {position}", f"control: {message}")


def _gap_problem(turn: TurnRecord, rollout: ScoredRollout) -> str | None:
    """Return the problem of a chosen hint whose mean gap is not that of the rows; None if a row is empty."""
    assert rollout.rows is not None
    span = slice(*turn.scored_span)
    rows = rollout.rows.logprobs_TK[span]
    if not all(rows):
        return None
    baseline = turn.baseline_logprobs or rollout.logprobs_T[span]
    gap = sum(row[0] - student for row, student in zip(rows, baseline, strict=True)) / len(rows)
    written = next((reading.gap for reading in turn.hints if reading.hint_token_ids == turn.hint_token_ids), None)
    if written is None or abs(written - gap) <= GAP_SLACK:
        return None
    return f"hints: gap {written} of the turn's hint, but the mean of its rows is {gap:.6f}"


def _turn_problems(rollout: ScoredRollout) -> Iterator[Problem]:
    """Yield problems of the records: each alone, their order, and against masks and messages.

    Spans must be in order, must not overlap, and must cover exactly the sampled positions. `reads_hints`: the teacher
    read the hints.
    """
    if rollout.turns is None:
        return
    last_end = 0
    for index, turn in enumerate(rollout.turns):
        start, end = turn.span
        yield from (Problem(f", turn {index}", message) for message in _record_problems(turn))
        if start < last_end:
            yield Problem(f", turn {index}", f"span: starts at {start}, before the end {last_end} of the turn before")
        last_end = end
    in_turn_T = _covered(len(rollout.tokens_T), (turn.span for turn in rollout.turns))
    for position in np.flatnonzero(in_turn_T != (np.asarray(rollout.masks_T) != IGNORED)).tolist():
        message = "in a turn's span, but not sampled" if in_turn_T[position] else "sampled, but in no turn's span"
        yield Problem(f", position {position}", message)
    if rollout.messages is not None:
        assistant = [index for index, message in enumerate(rollout.messages) if message["role"] == "assistant"]
        context = [turn.message_index for turn in rollout.context_turns]
        if wrong := [index for index in context if index not in assistant] or len(context) != len(set(context)):
            yield Problem(
                "", f"opd context_turns: messages {wrong or context} are not the assistant's, or are listed twice"
            )
        elif len(assistant) != len(rollout.turns) + len(context):
            context_part = f" and {len(context)} context turns" if context else ""
            records = f"{len(rollout.turns)} records{context_part}"
            yield Problem("", f"opd turns: {records} for {len(assistant)} assistant messages")


def _sampling_problems(rollout: ScoredRollout) -> Iterator[Problem]:
    """Yield the problem of distributions that are neither one for all turns nor one for each."""
    count, turns = len(rollout.sampling), len(sampled_spans(rollout.masks_T))
    if count > 1 and count != turns:
        yield Problem("", f"opd sampling: {count} entries for {turns} sampled turns, expected one for all or for each")


def _record_problems(turn: TurnRecord) -> Iterator[str]:
    outcome, ids, insert_at, start = turn.outcome, turn.hint_token_ids, turn.insert_at, turn.span[0]
    if (turn.next_state_role is None) != (outcome is TurnOutcome.NO_NEXT_STATE):
        yield f"next_state_role: {turn.next_state_role!r} does not go with outcome {outcome.value!r}"
    if (outcome in _HINTED) != bool(turn.hint):
        yield f"hint: {short_repr(turn.hint)} does not go with outcome {outcome.value!r}"
    if bool(ids) != (insert_at is not None):
        yield f"insert_at: {insert_at!r} with {len(ids)} hint_token_ids"
    elif insert_at is not None and not 0 < insert_at <= start:
        yield f"insert_at: {insert_at!r}, expected a position of the turn's prompt, 1 to {start}"
    if turn.is_scored and not ids and turn.hint_source in (None, *HINT_SOURCES) and not _is_contrast(turn):
        yield "hint_token_ids: empty, but the turn is scored"
    if outcome not in _HINTED and ids:
        yield f"hint_token_ids: {len(ids)} of them do not go with outcome {outcome.value!r}"
    if turn.hint_source is not None and not turn.hint:
        yield f"hint_source: {turn.hint_source!r}, but there is no hint"
    if len(set(turn.evidence)) != len(turn.evidence):
        yield f"evidence: {list(turn.evidence)}, expected each kind once"
    yield from _judge_problems(turn)
    yield from _proof_problems(turn)
    yield from _reading_problems(turn)
    yield from _hints_problems(turn)


def _is_contrast(turn: TurnRecord) -> bool:
    """Return whether the turn's refuted hint is its control, and its rows are without a hint."""
    return turn.control is not None and turn.control.kind == "refuted"


def _proof_problems(turn: TurnRecord) -> Iterator[str]:
    if (proof := turn.proof) is None:
        return
    with_hint, without, verdict = proof.with_hint, proof.without_hint, proof.verdict
    if (with_hint is None) != (verdict is None) or (verdict is not None and not turn.hint):
        yield f"proof: verdict {verdict} with_hint {with_hint}, expected both for a turn with a hint, or none"
    is_refuted = turn.outcome is TurnOutcome.REFUTED or _is_contrast(turn)
    if is_refuted and verdict is not ProofVerdict.REFUTED:
        yield f"proof: verdict {verdict} does not go with outcome {turn.outcome.value!r}"
    if proof.effect is None or proof.interval is None:
        return
    rates = [passed / played for passed, played in (with_hint or (0, 0), without) if played]
    if len(rates) < 2 or abs(proof.effect - (rates[0] - rates[1])) > _PROOF_SLACK:
        yield f"proof: effect {proof.effect}, but the counts are {with_hint} and {without}"
    if not proof.interval[0] <= proof.effect <= proof.interval[1]:
        yield f"proof: effect {proof.effect} is outside of its interval {list(proof.interval)}"


def _judge_problems(turn: TurnRecord) -> Iterator[str]:
    if turn.judge_tokens is not None and turn.question is None:
        yield "judge_tokens: there is no question to the judge"
    if turn.step_score not in (None, 0, *turn.step_votes):
        yield f"step_score: {turn.step_score}, but no vote gives it"


def _reading_problems(turn: TurnRecord) -> Iterator[str]:
    for name in ("baseline_logprobs", "unhinted_logprobs", "scored_version", "control", "support"):
        if not turn.is_scored and getattr(turn, name) is not None:
            yield f"{name}: does not go with outcome {turn.outcome.value!r}"
    if (control := turn.control) is not None:
        if (control.hint == turn.hint) != _is_contrast(turn):
            yield f"control: its hint is {'not ' if _is_contrast(turn) else ''}the turn's own"
        if control.hint in [reading.hint for reading in turn.hints]:
            yield "control: its hint is one of the turn's hints"
        if not control.hint or not control.hint_token_ids:
            yield f"control: hint {short_repr(control.hint)} of {len(control.hint_token_ids)} tokens, expected a text"


def _hints_problems(turn: TurnRecord) -> Iterator[str]:
    """Yield problems of the hints that were compared, and of their choice."""
    hints = turn.hints
    if hints and not turn.is_scored:
        yield f"hints: do not go with outcome {turn.outcome.value!r}"
    for index, reading in enumerate(hints):
        yield from (f"hints[{index}]{problem}" for problem in _hint_problems(reading, turn.span[0]))
    if len({reading.hint for reading in hints}) != len(hints):
        yield "hints: a text occurs twice"
    turn_hint = (turn.hint, turn.hint_token_ids, turn.insert_at)
    chosen = [
        reading.overlap for reading in hints if (reading.hint, reading.hint_token_ids, reading.insert_at) == turn_hint
    ]
    if hints and not chosen:
        yield "hints: the turn's hint is not among them"
    if chosen and chosen[0] < max(reading.overlap for reading in hints):
        yield f"hints: the turn's hint has the overlap {chosen[0]}, but another has more"


def _hint_problems(reading: HintReading, start: int) -> Iterator[str]:
    if not reading.hint or not reading.hint_token_ids:
        yield f": hint {short_repr(reading.hint)} of {len(reading.hint_token_ids)} tokens, expected a text"
    if not 0 < reading.insert_at <= start:
        yield f".insert_at: {reading.insert_at}, expected a position of the turn's prompt, 1 to {start}"
    if not 0 <= reading.overlap <= 1:
        yield f".overlap: {reading.overlap}, expected 0 to 1"
    if reading.entropy < 0:
        yield f".entropy: {reading.entropy}, expected at least 0"


def _entries_problem(token: int, ids: Sequence[int], logprobs: Sequence[float]) -> str | None:
    if ids[0] != token:
        return f"first id {ids[0]}, expected the token {token}"
    if len(set(ids)) != len(ids):
        return "an id occurs twice"
    if (likely := max(logprobs)) > 0:
        return f"logprob {likely!r}, expected at most 0"
    if (rise := next((k for k in range(2, len(logprobs)) if logprobs[k] > logprobs[k - 1]), None)) is not None:
        return f"entry {rise} is likelier than entry {rise - 1}; the others stand most likely first"
    total = sum(map(math.exp, logprobs))
    return f"probabilities sum to {total:.6f}, expected at most 1" if total > 1 + SUM_SLACK else None
