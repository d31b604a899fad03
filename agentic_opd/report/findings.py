"""The overview and the rollouts -> warnings about the distillation, as sentences. Pure."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from agentic_opd.core.precision import Noise, tolerance_for
from agentic_opd.core.types import TurnOutcome
from agentic_opd.report.numbers import Overview
from agentic_opd.report.read import ShownRollout
from agentic_opd.wire.counts import TurnCounts
from agentic_opd.wire.group import TurnRecord

ROUNDING = 5e-5
"""Largest rounding error (nats) of the teacher's logprobs in a file."""
LIKE_NOISE = 1.5
"""Ratio of root mean squares, gaps to noise, up to which the gaps count as noise."""
REPEATED = 0.5
"""Share of all hints from which a single hint, accepted on several tasks, is reported as unspecific."""
MANY = 0.1
"""Share of the turns, or votes, above which a failure is reported."""

_TEST_CODE = re.compile(r"\bassert\s+\S|\w\([^()]*\)\s*==\s*\S")

_LOST_FOR = {
    TurnOutcome.NO_NEXT_STATE: "nothing answered them",
    TurnOutcome.VOTE_FAILED: "too few votes were for a hint",
    TurnOutcome.JUDGE_ERROR: "the judge failed, or no vote of it could be read: look at its words beside a turn",
    TurnOutcome.LEAKED: "their hints repeated hidden test code",
    TurnOutcome.REFUTED: "the policy passes less often with their hints",
    TurnOutcome.UNPROVEN: "replays did not show that their hints help",
    TurnOutcome.NOT_JUDGED: "their rollouts did not fail, and the judge reads failed ones only",
}


def findings(numbers: Overview, rollouts: Sequence[ShownRollout]) -> list[str]:
    """Return the warnings of a run, one sentence each; empty if there is nothing to report."""
    left_out = _no_verdicts(rollouts)
    turns, counts = [turn for rollout in rollouts for turn in rollout.records], TurnCounts()
    counts.add(turns)
    if not numbers.funnel and not numbers.scored_tokens:
        nothing = "Nothing was distilled: the file holds neither records of its turns nor a teacher's rows."
        return [*left_out, nothing]
    about_turns = (
        *_without_hints(counts),
        *_failures(counts, turns),
        *_abstentions(rollouts),
        *_hints(numbers, counts, turns),
    )
    return [*left_out, *about_turns, *_gaps(numbers)]


def _no_verdicts(rollouts: Sequence[ShownRollout]) -> Iterator[str]:
    causes = Counter[str]()
    for of_group in {rollout.line: rollout.no_verdicts for rollout in rollouts}.values():
        causes.update(of_group)
    if causes:
        counted = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
        yield (
            f"{causes.total()} rollouts are left out because their tests gave no verdict ({counted}). If the share "
            "grows while the policy learns, it may have learned to break tests that it would fail."
        )


def _without_hints(counts: TurnCounts) -> Iterator[str]:
    if counts.hints or not counts.turns:
        return
    outcome, count = counts.outcomes.most_common(1)[0]
    why = f": {_LOST_FOR[outcome]}" if outcome in _LOST_FOR else ""
    yield f"No turn has a hint, so nothing was distilled. {count} of {counts.turns} turns ended in {outcome}{why}."


def _failures(counts: TurnCounts, turns: Sequence[TurnRecord]) -> Iterator[str]:
    for outcome, cause in (
        (TurnOutcome.JUDGE_ERROR, "the judge failed or could not be read"),
        (TurnOutcome.TOO_LONG, "hint and turn did not fit the teacher's context"),
        (TurnOutcome.SCORING_ERROR, "the teacher gave no usable rows"),
    ):
        if counts.outcomes[outcome] > MANY * counts.turns:
            yield f"{counts.outcomes[outcome]} of {counts.turns} turns ended in {outcome}: {cause}."
    votes = [vote for turn in turns for vote in turn.votes if turn.outcome is not TurnOutcome.JUDGE_ERROR]
    unread = sum(vote.decision is None for vote in votes)
    if unread > MANY * len(votes):
        yield f"{unread} of {len(votes)} votes could not be read and count as abstentions: look at the judge's words."


def _abstentions(rollouts: Sequence[ShownRollout]) -> Iterator[str]:
    windows = [window for rollout in rollouts if not rollout.turns_before for window in rollout.windows]
    votes = [vote for window in windows for vote in window.votes]
    kinds = Counter(vote.kind for vote in votes if not vote.kind.is_readable)
    if kinds.total() > MANY * len(votes):
        counted = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in kinds.most_common())
        yield (
            f"{kinds.total()} of {len(votes)} answers about whole rollouts can't be read and count as abstentions "
            f"({counted}): look at the judge's words."
        )


def _hints(numbers: Overview, counts: TurnCounts, turns: Sequence[TurnRecord]) -> Iterator[str]:
    if numbers.hint_rows and numbers.hints >= 4:
        row = numbers.hint_rows[0]
        if row.tasks > 1 and row.turns >= REPEATED * numbers.hints:
            yield (
                f"One hint is {row.turns} of all {numbers.hints}, over {row.tasks} tasks: {_cut(row.text)}. "
                "It can't be about what happened in each of them."
            )
    if leaked := counts.outcomes[TurnOutcome.LEAKED]:
        yield f"{leaked} hints quoted the hidden tests and were dropped."
    like_tests = [turn.hint for turn in turns if turn.hint is not None and _TEST_CODE.search(turn.hint)]
    if like_tests:
        yield f"{len(like_tests)} accepted hints look like test code, for example: {_cut(like_tests[0])}."


def _gaps(numbers: Overview) -> Iterator[str]:
    noise, rms = numbers.noise_floor, numbers.noise_rms
    if noise is None or rms is None:
        return
    measured, tolerance = Noise(rms, noise), tolerance_for(numbers.precision)
    if measured.exceeds(tolerance):
        yield (
            f"Without a hint the teacher is {measured} away from the student, more than "
            f"{numbers.precision or 'any precision'} explains ({tolerance})."
        )
    if numbers.gap_rms is not None and numbers.gap_rms <= LIKE_NOISE * max(rms, ROUNDING):
        yield (
            f"The gaps are noise: {numbers.gap_rms:.2g} nats (root mean square) with hints, {rms:.2g} without. The "
            "hints change nothing for the teacher."
        )


def _cut(text: str) -> str:
    return repr(text if len(text) <= 160 else text[:160] + "…")
