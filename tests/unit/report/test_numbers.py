from itertools import pairwise

import numpy as np
import pytest

from agentic_opd.report.numbers import Distribution, Overview, distributions_of, overview
from agentic_opd.report.read import ShownRollout

from .sample import HINT, SCORED, UNSCORED, group, in_two_sequences, judged_as_a_whole, rollouts, with_records


def numbers(*read: ShownRollout) -> Overview:
    return overview(read)


def test_everything_is_counted() -> None:
    """Two groups of two rollouts, each with a scored turn of two tokens and another turn of two."""
    shown = numbers(*rollouts(group("a"), group("b", passed=(4, 4))))
    assert (shown.groups, shown.rollouts, shown.turns, shown.hints) == (2, 4, 8, 4)
    assert (shown.tokens, shown.sampled_tokens, shown.scored_tokens) == (32, 16, 8)
    assert shown.passed == 3
    assert shown.mean_score == pytest.approx((1 + 0.25 + 1 + 1) / 4)
    assert shown.mean_gap == pytest.approx((0.4 - 1.0) / 2)
    assert shown.positive_gaps == 0.5
    assert shown.noise_floor == 2e-6
    assert shown.colour_limit == 1.0
    assert [(row.task, row.passed, row.hints, row.turns, row.scored_tokens) for row in shown.by_task] == [
        ("a", 1, 2, 4, 4),
        ("b", 2, 2, 4, 4),
    ]
    (hint,) = shown.hint_rows
    assert (hint.text, hint.turns, hint.tasks, hint.rollout, hint.position) == (HINT, 4, 2, 0, 3)
    assert [(row.rollout, row.sampled, round(row.gap, 6)) for row in shown.gap_rows[:2]] == [(0, 0, 0.4), (1, 0, 0.4)]
    assert [row.gap for row in shown.gap_rows[4:]] == pytest.approx([-1.0] * 4)


def test_the_funnel_loses_every_turn_at_one_stage() -> None:
    names = ("no_next_state", "judge_error", "leaked", "vote_failed")
    lost = [{**UNSCORED, "span": [3, 5], "outcome": name} for name in names]
    lost[0]["next_state_role"] = None
    for record in lost[1:]:
        record["next_state_role"] = "tool"
    late = {**SCORED, "span": [6, 8], "outcome": "too_long"}
    read = [one for record in lost for one in rollouts(with_records(record, late))] + rollouts(group())
    stages = {stage.name: stage.turns for stage in numbers(*read).funnel}
    # 10 rollouts of 2 turns: 8 too long, 2 scored, 2 of each that is lost, and the 2 failed votes of the last group.
    assert stages == {"all turns": 20, "with a next state": 18, "voted on": 16, "with a hint": 10, "scored": 2}
    assert numbers(*read).funnel[3].lost == {"vote_failed": 4, "leaked": 2}


def counts(one: Distribution) -> dict[str, int]:
    """Bins by the values they hold, or hold between two ticks."""
    is_edges = len(one.ticks) > len(one.counts)
    labels = [f"{low} to {high}" for low, high in pairwise(one.ticks)] if is_edges else one.ticks
    return dict(zip(labels, one.counts, strict=True))


def test_gaps_that_moved_fall_into_one_bin_each() -> None:
    """Also those at an edge, and those of exactly the size from which a token has moved."""
    gaps = np.asarray([-12.0, -10.0, -0.3, -0.05, 0.05, 0.1, 10.0, 12.0])
    (one,) = (one for one in distributions_of(rollouts(), gaps) if one.unit == "nats")
    assert sum(one.counts) == one.n == 8
    assert counts(one) == {
        " to -10": 1,
        "-10 to -3": 1,
        "-3 to -1": 0,
        "-1 to -0.3": 0,
        "-0.3 to -0.1": 1,
        "-0.1 to ±0.05": 1,
        "±0.05 to 0.1": 1,
        "0.1 to 0.3": 1,
        "0.3 to 1": 0,
        "1 to 3": 0,
        "3 to 10": 0,
        "10 to ": 2,
    }


def test_distributions_count_everything_once() -> None:
    shown = numbers(*rollouts(group(), group()))
    counted = {one.name: counts(one) for one in shown.distributions}
    assert counted["score"]["0.9 to 1"] == 2
    assert counted["score"]["0.2 to 0.3"] == 2
    assert counted["reward: efficiency"]["0.5 to 0.6"] == 4
    assert counted["votes for a hint"] == {"0": 4, "1": 4, "2": 0}
    assert counted["hint length"]["30 to 40"] == 4
    gaps = counted["gap of the tokens that moved"]
    assert (gaps["0.3 to 1"], gaps["-3 to -1"] + gaps["-1 to -0.3"], sum(gaps.values())) == (4, 4, 8)


def test_a_file_without_distillation_has_no_numbers_of_it() -> None:
    bare = {name: group()[name] for name in ("tokens", "masks", "scores", "inference_logprobs")}
    shown = numbers(*rollouts({**bare, "group_overrides": {}}))
    assert (shown.funnel, shown.hint_rows, shown.gap_rows) == ((), (), ())
    assert (shown.evidence_rows, shown.moved_tokens, shown.mean_moved) == ((), 0, None)
    assert (shown.passed, shown.mean_gap, shown.positive_gaps, shown.noise_floor) == (None, None, None, None)
    assert [one.name for one in shown.distributions] == ["score"]


def test_the_gaps_of_a_turn_are_its_own() -> None:
    one = rollouts()[0]
    assert one.gaps_in(one.spans[0]).tolist() == pytest.approx([0.4, -1.0])
    assert one.gaps_in(one.spans[1]).tolist() == []


def test_the_judges_tokens_are_counted_for_both_scopes() -> None:
    whole = numbers(*rollouts(judged_as_a_whole())).judge
    assert whole is not None
    assert whole._asdict() == {
        "questions": 2,
        "uncounted": 0,
        "rollouts": 2,
        "hints": 2,
        "read_tokens": 600,
        "sampled_tokens": 120,
    }
    asked = {"question": "## Turn", "judge_tokens": {"read": 100, "sampled": 20}}
    by_turn = numbers(*rollouts(with_records({**SCORED, **asked}, {**UNSCORED, **asked}))).judge
    assert by_turn is not None
    assert (by_turn.questions, by_turn.rollouts, by_turn.read_tokens, by_turn.sampled_tokens) == (4, 2, 400, 80)
    unknown = numbers(*rollouts(with_records({**SCORED, **asked}, {**UNSCORED, "question": "## Turn"}))).judge
    assert unknown is not None
    assert (unknown.uncounted, unknown.rollouts, unknown.read_tokens) == (2, 0, 0)
    assert numbers(*rollouts(group())).judge is None
    shared = numbers(*rollouts(in_two_sequences())).judge
    assert shared is not None
    assert (shared.questions, shared.rollouts, shared.hints) == (1, 1, 1)


def test_votes_are_counted_by_turn_for_both_scopes() -> None:
    """Of a rollout that was judged as a whole, all answers about the turn's window count, also those in no record."""
    judged = rollouts(judged_as_a_whole())[0]
    assert [judged.votes_on(turn) for turn in (0, 1)] == [(2, 3), (1, 3)]
    first, second = rollouts(in_two_sequences())
    assert (first.votes_on(0), second.votes_on(0)) == ((2, 3), (1, 3))
    assert (first.turns_before, second.turns_before) == (0, 1)
    votes = next(one for one in numbers(judged).distributions if one.name == "votes for a hint")
    assert counts(votes) == {"0": 0, "1": 1, "2": 1, "3": 0}
