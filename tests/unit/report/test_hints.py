"""Tables of hints, over the group of sample.py: gaps +0.4 and -1.0 in the first turn of each rollout."""

from typing import Any

import pytest

from agentic_opd.core.intervals import Estimate
from agentic_opd.core.types import ProofVerdict
from agentic_opd.report.hints import Effect, HintRow, effect_of, hinted_turns, rows_by_evidence, rows_by_hint
from agentic_opd.wire.group import ProofRecord

from .sample import HINT, SCORED, UNSCORED, group, rollouts, with_records


def by_hint(*groups: Any) -> tuple[HintRow, ...]:
    return rows_by_hint(hinted_turns(rollouts(*groups)))


def told(text: str, **changes: Any) -> dict[str, Any]:
    """The scored turn, with another hint."""
    vote = {"decision": 1, "hint": text, "text": text}
    return {**SCORED, "hint": text, "votes": [vote], **changes}


def test_a_hint_is_measured_by_the_tokens_that_moved() -> None:
    """+0.02 next to -1.0: the small gap neither counts nor draws the mean towards 0."""
    one = group(passed=(4,))
    one["inference_logprobs"][0][3] = -0.12
    (row,) = by_hint(one)
    assert (row.text, row.turns, row.moved) == (HINT, 1, 1)
    assert (row.largest, row.mean_moved) == pytest.approx((1.0, 1.0))


def test_what_is_within_three_times_the_noise_has_not_moved() -> None:
    loud = group(passed=(4,))
    loud["group_overrides"]["opd"]["noise_rms"] = 0.2
    (row,) = by_hint(loud)
    assert (row.moved, row.largest) == (1, pytest.approx(1.0))
    loud["group_overrides"]["opd"]["noise_rms"] = 0.5
    (row,) = by_hint(loud)
    assert (row.turns, row.moved, row.largest, row.mean_moved) == (1, 0, None, None)


def test_gaps_are_measured_from_the_baseline() -> None:
    one = with_records({**SCORED, "baseline_logprobs": [-0.1, -0.5]}, UNSCORED)
    (row,) = by_hint(one)
    assert (row.moved, row.largest) == (2, pytest.approx(2.0))


def test_the_same_hint_in_other_spelling_is_one() -> None:
    """Spaces, letters' case and the last stop aside; the wording that is most frequent is shown."""
    spelled = [HINT, HINT, "check  Divisibility by 15 first", "Another hint, for another thing."]
    rows = by_hint(*(with_records(told(text), UNSCORED, task=text) for text in spelled))
    assert [(row.text, row.wordings, row.turns, row.tasks) for row in rows] == [
        (HINT, 2, 6, 2),
        (spelled[3], 1, 2, 1),
    ]


def test_a_hint_has_the_effect_of_its_proof_and_several_that_of_their_turns() -> None:
    proof = {"without_hint": [0, 4], "with_hint": [4, 4], "verdict": "proven", "effect": 1.0, "interval": [0.25, 1.0]}
    unproven = {**proof, "with_hint": [0, 4], "verdict": "open", "effect": 0.0, "interval": [-0.5, 0.5]}
    (row,) = by_hint(with_records({**SCORED, "proof": proof}, UNSCORED) | {"scores": [0.5, 0.5]})
    assert row.effect is not None
    assert (row.effect.turns, row.effect.with_hint, row.effect.without_hint) == (2, 1.0, 0.0)
    one, other = (with_records(told(HINT, proof=each), UNSCORED) for each in (proof, unproven))
    (row,) = by_hint(one, other)
    assert row.effect is not None
    assert (row.effect.turns, row.effect.difference.value) == (4, 0.5)
    assert row.effect.difference.low < 0.5 < row.effect.difference.high
    (row,) = by_hint(group())
    assert row.effect is None
    assert effect_of([ProofRecord((0, 4), (4, 4), ProofVerdict.PROVEN, 1.0, (0.25, 1.0))]) == Effect(
        1, 1.0, 0.0, Estimate(1.0, 0.25, 1.0)
    )


def test_rows_by_evidence_name_what_was_shown_together() -> None:
    later = {**SCORED, "evidence": ["tool", "later"]}
    rows = rows_by_evidence(hinted_turns(rollouts(with_records(later, UNSCORED), group(), group())))
    assert [(row.text, row.evidence, row.turns) for row in rows] == [
        ("tool", ("tool",), 4),
        ("tool, later", ("tool", "later"), 2),
    ]


@pytest.mark.parametrize(
    ("following", "expected"),
    [
        (UNSCORED, "no_fault"),
        ({**UNSCORED, "outcome": "judge_error", "votes": []}, "unclear"),
        (told("Again, for the second turn.", span=[6, 8], outcome="too_long"), "fault"),
        ({**UNSCORED, "step_votes": [-1], "step_score": -1}, "fault"),
        ({**UNSCORED, "step_votes": [1], "step_score": 1}, "no_fault"),
        ({**UNSCORED, "step_votes": [0], "step_score": 0}, "unclear"),
    ],
)
def test_what_the_next_turn_did(following: dict[str, Any], expected: str) -> None:
    first = hinted_turns(rollouts(with_records(SCORED, following)))[0]
    assert first.next_turn.value == expected


def test_the_last_turn_has_no_next_one_and_a_copy_is_told() -> None:
    one = with_records(SCORED, told("For the closing turn.", span=[6, 8], outcome="too_long"))
    assert hinted_turns(rollouts(one))[1].next_turn.value == "none"
    for tokens, masks in zip(one["tokens"], one["masks"], strict=True):
        tokens[6:8] = masks[6:8] = [10, 11]
    first, *_ = by_hint(one)
    assert first.next_turns == {"repeated": 2}
    assert (first.verified, first.passed) == (2, 1)
