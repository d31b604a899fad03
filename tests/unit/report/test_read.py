import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import PlaceError
from agentic_opd.report.read import read_groups, read_run, report_path, settings_path

from .sample import HINT, TOKENS, group, rollouts


def test_a_rollout_holds_what_the_line_says() -> None:
    one, other = rollouts(group("fizzbuzz", passed=(4, 1)))
    assert (one.task_id, one.line, one.index, other.index) == ("fizzbuzz", 1, 0, 1)
    assert one.tokens_T.tolist() == TOKENS
    assert one.sampled_S.tolist() == [3, 4, 6, 7]
    assert one.student_S.tolist() == [-0.5, -1.5, -0.25, -2.0]
    assert one.is_scored_S.tolist() == [True, True, False, False]
    assert one.gaps.tolist() == pytest.approx([0.4, -1.0])
    assert one.teacher.ids.tolist() == [10, 7, 8, 11, 8, 9]
    assert one.spans == ((3, 5), (6, 8))
    assert [turn.outcome for turn in one.records] == ["scored", "vote_failed"]
    assert (one.records[0].hint, one.records[0].votes[1].text, one.records[0].insert_at) == (HINT, "hm", 2)
    assert one.checks is not None
    assert other.checks is not None
    assert (one.checks.all_passed, other.checks.all_passed, other.checks.passed, other.checks.total) == (
        True,
        False,
        1,
        4,
    )
    assert (one.reward, one.stop_reason, one.tool_errors) == ({"correctness": 1, "efficiency": 0.5}, "finished", 1)
    assert one.distillation.noise_floor == 2e-6


def test_of_a_row_the_likely_entries_are_kept_and_three_at_least() -> None:
    wide = group()
    wide["group_overrides"]["opd"]["distill_topk"] = 10
    for ids, logprobs in zip(wide["distill_token_ids"], wide["distill_logprobs"], strict=True):
        ids[3], ids[4] = [10, *range(20, 29)], [11, *range(20, 29)]
        logprobs[3] = [-9.0, *[-2.4] * 9]
        logprobs[4] = [-0.01, -5.0, -6.0, *[-9.0] * 7]
    one = rollouts(wide)[0]
    assert one.teacher.counts_S.tolist() == [8, 3, 0, 0]
    assert one.teacher.ids.tolist() == [10, *range(20, 27), 11, 20, 21]


def test_with_k_1_only_scored_turns_have_rows() -> None:
    """Every position has one entry then; unscored ones hold the student's own logprob."""
    one = group()
    one["group_overrides"]["opd"]["distill_topk"] = 1
    one["distill_token_ids"] = [[[token] for token in TOKENS]] * 2
    one["distill_logprobs"] = [[[0.0], [0.0], [0.0], [-0.1], [-1.5], [0.0], [-0.25], [-2.0]]] * 2
    assert rollouts(one)[0].is_scored_S.tolist() == [True, True, False, False]
    for overrides in one["overrides"]:
        del overrides["opd"]
    unrecorded = rollouts(one)[0]
    assert unrecorded.is_scored_S.tolist() == [True, False, False, False]
    assert (unrecorded.spans, unrecorded.records) == (((3, 5), (6, 8)), ())


def test_a_file_of_another_program_has_only_its_arrays() -> None:
    bare = {name: group()[name] for name in ("tokens", "masks", "scores", "inference_logprobs")}
    one = rollouts({**bare, "group_overrides": {}})[0]
    assert (one.task_id, one.checks, one.reward, one.messages) == ("line 1", None, None, ())
    assert not one.is_scored_S.any()
    assert one.spans == ((3, 5), (6, 8))


def broken(**changes: Any) -> dict[str, Any]:
    return {**group(), **changes}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"hello\n", "line 2 is not JSON"),
        (b'{"tokens": [[1,', "cut off"),
        (b"[" * 100_000 + b"\n", "line 2 is not JSON"),
        (b'{"tokens": ' + b"1" * 5000 + b"}\n", "line 2 is not JSON"),
        (b"[]\n", "line 2: [], expected an object"),
        (b"{}\n", "tokens: missing"),
        (broken(scores=[float("nan"), 0.0]), "sequence 0: scores: nan, expected a finite number"),
        (broken(scores=[10**400, 0.0]), "sequence 0: scores: 1000"),
        (broken(scores=[0.0, -1.7e308]), "sequence 1: scores: -1.7e+308, expected at least -1000000"),
        (broken(inference_logprobs=[[float("nan")] * 8] * 2), "expected a finite number"),
        (broken(masks=[[]] * 2), "lengths differ (tokens=8, masks=0,"),
        (broken(distill_logprobs=None), "of distill_token_ids and distill_logprobs one is missing"),
        (broken(overrides=[{"opd": {"turns": 7}}] * 2), "opd.turns: 7, expected a list"),
        (broken(overrides=[{"opd": {"turns": [{"span": [3, 5]}]}}] * 2), "expected an object with span, outcome"),
        (b"\xff\xfe\n", "line 2 is not JSON"),
    ],
)
def test_a_line_that_breaks_the_format_is_left_out_and_named(line: Any, reason: str) -> None:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
    left_out: list[str] = []
    good = json.dumps(group()).encode() + b"\n"
    read = list(read_groups([good, raw, b"\n", *([good] if raw.endswith(b"\n") else [])], left_out))
    assert [rollout.line for rollout in read][:2] == [1, 1]
    assert len(left_out) == 1
    assert reason in left_out[0]
    assert left_out[0].startswith("line 2")


@pytest.mark.parametrize(
    "odd",
    [
        {"overrides": [None, 7]},
        {"overrides": [{"verification": {"passed": "x", "total": None}, "reward": {"a": float("inf")}}] * 2},
        {"overrides": [{"reward": {"a": 1.7e308}, "turns": 10**400}] * 2},
        {"group_overrides": {"task_id": 7, "opd": {"noise_floor": "x"}}},
        {"messages": [[{"role": 5, "content": ["a", {"b": float("nan")}]}] for _ in range(2)], "overrides": [{}] * 2},
    ],
)
def test_what_the_format_leaves_open_may_be_anything(odd: dict[str, Any]) -> None:
    one = rollouts({**group(), **odd})[0]
    assert one.tokens_T.tolist() == TOKENS


def test_a_file_without_a_group_is_an_error(tmp_path: Path) -> None:
    for content, reason in (("", "it is empty"), ("hello\n", "line 1 is not JSON"), ("\n\n", "it is empty")):
        path = tmp_path / "groups.jsonl"
        path.write_text(content)
        with pytest.raises(PlaceError, match=reason):
            read_run(path)
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(PlaceError, match="cannot read"):
            read_run(path)
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(json.dumps(group()).encode())[:-20])
    with pytest.raises(PlaceError, match="cannot read"):
        read_run(torn)


def test_settings_lie_beside_the_file_also_when_it_is_packed(tmp_path: Path) -> None:
    packed = tmp_path / "groups.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(group()).encode() + b"\n"))
    (tmp_path / "groups.run.json").write_text('{"policy_model": "p", "odd": NaN}')
    run = read_run(packed)
    assert run.settings == {"policy_model": "p", "odd": "NaN"}
    assert len(run.rollouts) == 2
    assert report_path(packed) == tmp_path / "groups.html"
    settings_path(packed).write_text("[]")
    assert read_run(packed).settings == {}
