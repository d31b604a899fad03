"""JSON -> `ScoredGroup` -> JSON: nothing is lost, and what the format leaves open may be anything."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.core.errors import WireError
from agentic_opd.core.types import SamplingDistribution, TurnOutcome
from agentic_opd.wire.checks import GroupChecker, read_group
from agentic_opd.wire.counts import RolloutCounts, RunCounts, TurnCounts
from agentic_opd.wire.group import ScoredGroup, TurnRecord, VerdictCounts, gap_baseline_T

from .sample import group

HINT = "Check divisibility by 15 first."


def written_before() -> str:
    """A line as `process` wrote it before there were typed groups: six tokens, a scored turn [3, 5), another [5, 6)."""
    votes = f'[{{"decision": 1, "hint": "{HINT}", "text": "yes"}}]'
    scored = (
        f'{{"span": [3, 5], "outcome": "scored", "next_state_role": "tool", "votes": {votes}, "hint": "{HINT}", '
        '"hint_token_ids": [70], "insert_at": 2, "error": null}'
    )
    silent = (
        '{"span": [5, 6], "outcome": "no_next_state", "next_state_role": null, "votes": [], "hint": null, '
        '"hint_token_ids": [], "insert_at": null, "error": null}'
    )
    return (
        '{"tokens": [[1, 2, 3, 10, 11, 12]], "masks": [[-100, -100, -100, 10, 11, 12]], "scores": [0.5], '
        '"inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -1.5, -0.25]], "overrides": [{"stop_reason": "finished", '
        '"turns": 2, "tool_calls": 1, "tool_errors": 0, "reward": {"correctness": 0.5, "efficiency": 1.0, '
        '"tool_usage": 1.0}, "verification": {"outcome": "ran", "passed": 1, "total": 2}, "opd": {"turns": '
        f"[{scored}, {silent}]"
        '}}], "group_overrides": {"item_id": "t#0", "task_id": "t", "opd": {"distill_topk": 2, "hint_placement": '
        '"end", "outcomes": {"scored": 1, "no_next_state": 1}, "noise_floor": 2e-06}, "weight_version": 3}, '
        '"distill_logprobs": [[[], [], [], [-0.1, -3.0], [-0.2, -2.5], []]], '
        '"distill_token_ids": [[[], [], [], [10, 7], [11, 8], []]]}'
    )


def test_a_line_written_before_reads_and_writes_the_same() -> None:
    group, problems = GroupChecker().read(json.loads(written_before()))
    assert problems == []
    assert group is not None
    assert json.dumps(group.to_wire()) == written_before()
    (one,) = group.rollouts
    assert one.turns is not None
    assert [turn.outcome for turn in one.turns] == [TurnOutcome.SCORED, TurnOutcome.NO_NEXT_STATE]
    assert (one.turns[0].span, one.turns[0].hint, one.turns[0].votes[0].decision) == ((3, 5), HINT, 1)
    assert (one.checks, one.num_turns, one.stop_reason) == (VerdictCounts("ran", 1, 2), 2, "finished")
    assert (group.item_id, group.task_id, group.weight_version) == ("t#0", "t", 3)
    assert one.row_positions == [3, 4]


def test_gaps_are_measured_from_the_baselines_of_the_turns_that_have_one() -> None:
    line = json.loads(written_before())
    assert list(ScoredGroup.from_wire(line).rollouts[0].baseline_T) == line["inference_logprobs"][0]
    line["overrides"][0]["opd"]["turns"][0]["baseline_logprobs"] = [-0.75, -1.25]
    one = ScoredGroup.from_wire(line).rollouts[0]
    assert list(one.baseline_T) == [1.0, 1.0, 1.0, -0.75, -1.25, -0.25]
    assert list(one.logprobs_T) == [1.0, 1.0, 1.0, -0.5, -1.5, -0.25]


TURNS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans()), max_size=5)
"""Turns one behind the other: positions before it, its length, and whether it has a baseline."""


@pytest.mark.slow
@given(TURNS)
def test_a_baseline_is_as_long_as_the_tokens_and_differs_in_its_spans_only(turns: list[tuple[int, int, bool]]) -> None:
    records: list[TurnRecord] = []
    expected: list[float] = []
    for before, length, has_baseline in turns:
        start, end = len(expected) + before, len(expected) + before + length
        baseline = (-2.0,) * length if has_baseline else None
        records.append(TurnRecord((start, end), TurnOutcome.SCORED, "tool", baseline_logprobs=baseline))
        expected += [-1.0] * before + [-2.0 if has_baseline else -1.0] * length
    assert gap_baseline_T([-1.0] * len(expected), records) == expected


@pytest.mark.parametrize("name", ["baseline_logprobs", "unhinted_logprobs"])
def test_a_reading_has_one_number_a_token_of_its_turn(name: str) -> None:
    line = json.loads(written_before())
    line["overrides"][0]["opd"]["turns"][0][name] = [-0.75]
    with pytest.raises(WireError, match=f"span=2, {name}=1"):
        ScoredGroup.from_wire(line)


def bare(**changes: Any) -> dict[str, Any]:
    """A group of another origin: two sequences of three tokens, the last one sampled."""
    arrays = {"tokens": [[1, 2, 3]] * 2, "masks": [[-100, -100, 3]] * 2, "inference_logprobs": [[1.0, 1.0, -0.5]] * 2}
    return {**arrays, "scores": [0, 1], **changes}


def test_a_group_of_another_origin_needs_only_its_arrays() -> None:
    group = ScoredGroup.from_wire(bare(group_overrides=None, images=None, env_id=4))
    assert (group.scores, group.item_id, group.distillation) == ([0.0, 1.0], None, None)
    assert group.rollouts[0].row_positions == []
    assert group.to_wire() == {**bare(), "overrides": [{}, {}], "group_overrides": {}, "images": None, "env_id": 4}


def test_with_one_entry_a_row_that_repeats_the_student_is_not_the_teachers() -> None:
    rows = {"distill_token_ids": [[[1], [2], [3]]] * 2, "distill_logprobs": [[[0.0], [0.0], [-0.5]], [[0.0]] * 3]}
    group = ScoredGroup.from_wire(bare(**rows))
    assert [one.row_positions for one in group.rollouts] == [[], [2]]


@pytest.mark.parametrize(
    "about",
    [
        {"overrides": [None, 7]},
        {"overrides": [{"verification": {"passed": "x", "total": None}}, {"verification": {"passed": 3, "total": 2}}]},
        {"overrides": [{"reward": {"a": "high"}, "turns": "two", "stop_reason": 1}, {"tool_errors": True}]},
        {"group_overrides": {"task_id": 7, "weight_version": "x", "opd": {"noise_floor": "x"}}},
    ],
)
def test_what_is_of_another_form_is_kept_and_not_read(about: dict[str, Any]) -> None:
    group = ScoredGroup.from_wire(bare(**about))
    one = group.rollouts[0]
    assert (one.checks, one.reward, one.num_turns, one.stop_reason, one.tool_errors) == (None,) * 5
    assert (group.task_id, group.weight_version, group.distillation) == (None, None, None)
    again = group.to_wire()
    assert again["overrides"] == [one if isinstance(one, dict) else {} for one in about.get("overrides", [{}, {}])]
    assert again["group_overrides"] == about.get("group_overrides", {})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], r"a group: \[\], expected an object"),
        ({}, "a group: tokens: missing"),
        (bare(scores=[1]), "lengths differ .*scores=1"),
        (bare(overrides=[{}]), "lengths differ .*overrides=1"),
        (bare(masks=[[3], [3]]), "tokens=3, masks=1"),
        (
            bare(overrides=[{"opd": {"turns": [{"span": [2, 3]}]}}, {}]),
            "sequence 0, turn 0: record: outcome, next_state_role",
        ),
    ],
)
def test_what_is_not_a_group_is_a_typed_error(value: Any, said: str) -> None:
    with pytest.raises(WireError, match=said):
        ScoredGroup.from_wire(value)


def test_counts_are_those_of_the_file_and_add_up() -> None:
    group, other = ScoredGroup.from_wire(json.loads(written_before())), ScoredGroup.from_wire(bare())
    run = RunCounts()
    for one in (group, group, other):
        run.add(one)
    assert list(run.by_task) == ["t", ""]
    expected = RolloutCounts(2, 2, 0, 1.0, 4, 12, 6, 4, TurnCounts(4, 2))
    expected.records.outcomes.update({TurnOutcome.SCORED: 2, TurnOutcome.NO_NEXT_STATE: 2})
    assert run.by_task["t"] == expected
    merged = RolloutCounts()
    for part in run.by_task.values():
        merged.merge(part)
    assert merged == run.total
    assert (merged.rollouts, merged.verified, merged.records.scored) == (4, 2, 2)
    assert (run.distilled, run.noise_floor) == (True, 2e-6)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.3},
        {"temperature": 0.0},
        [{"temperature": 0.3}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "altered": ["min_p"]}],
    ],
)
def test_distributions_are_read_and_written_as_one_for_all_turns_or_one_for_each(sampling: Any) -> None:
    wire = group()
    wire["overrides"][1]["opd"]["sampling"] = sampling
    read = read_group(wire)
    assert read.to_wire()["overrides"] == wire["overrides"]
    listed = sampling if isinstance(sampling, list) else [sampling] * 2
    pairs = read.rollouts[1].turn_distributions
    assert [span for span, _ in pairs] == [(3, 5), (6, 8)]
    assert [distribution and distribution.temperature for _, distribution in pairs] == [
        entry["temperature"] for entry in listed
    ]
    assert [distribution for _, distribution in read.rollouts[0].turn_distributions] == [None] * 2


@pytest.mark.parametrize(
    ("parameters", "altered", "expected"),
    [
        ({}, (), SamplingDistribution(1.0)),
        ({"temperature": None, "top_p": 1.0, "top_k": -1}, (), SamplingDistribution(1.0)),
        ({"temperature": 0, "top_k": 0}, ("temperature",), SamplingDistribution(0.0)),
        ({"temperature": 0.001}, (), SamplingDistribution(0.01)),
        (
            {"temperature": 2, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
            ("top_p", "top_k", "min_p"),
            SamplingDistribution(2.0, 0.5, 3, ("min_p",)),
        ),
    ],
)
def test_a_requests_parameters_say_what_was_sampled_from(
    parameters: dict[str, Any], altered: tuple[str, ...], expected: SamplingDistribution
) -> None:
    assert SamplingDistribution.of_parameters(parameters, altered) == expected
    assert expected.is_greedy == (expected.temperature == 0)
    assert expected.is_truncated == (expected.top_p is not None)
