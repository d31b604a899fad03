"""The group that everything here starts from, two sequences like this:

position        0     1     2     3     4     5     6     7
tokens          1     2     3    10    11     4    12    13
sampled                           x     x           x     x
turns                            [scored )         [vote_failed)
rows, K=2       .     .     .     x     x     .     .     .
"""

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.validate import main, validate

TOKENS = [1, 2, 3, 10, 11, 4, 12, 13]
MASKS = [-100, -100, -100, 10, 11, -100, 12, 13]
STUDENT = [1.0, 1.0, 1.0, -0.5, -1.5, 1.0, -0.25, -2.0]
HINT = "Check divisibility by 15 first."
SCORED = {
    "span": [3, 5],
    "outcome": "scored",
    "next_state_role": "tool",
    "votes": [{"decision": 1, "hint": HINT, "text": "..."}, {"decision": None, "hint": None, "text": "hm"}],
    "hint": HINT,
    "hint_token_ids": [70, 71],
    "insert_at": 2,
    "error": None,
}
UNSCORED = {
    **SCORED,
    "span": [6, 8],
    "outcome": "vote_failed",
    "next_state_role": "verdict",
    "votes": [{"decision": -1, "hint": None, "text": "..."}],
    "hint": None,
    "hint_token_ids": [],
    "insert_at": None,
}
IDS = [[], [], [], [10, 7], [11, 8], [], [], []]
LOGPROBS = [[], [], [], [-0.1, -3.0], [-0.2, -2.5], [], [], []]
CHAT = [{"role": role, "content": ""} for role in ("system", "user", "assistant", "tool", "assistant")]


def group() -> dict[str, Any]:
    one = {
        "tokens": TOKENS,
        "masks": MASKS,
        "scores": 0.5,
        "inference_logprobs": STUDENT,
        "messages": CHAT,
        "overrides": {"opd": {"turns": [SCORED, UNSCORED]}},
        "distill_token_ids": IDS,
        "distill_logprobs": LOGPROBS,
    }
    whole: dict[str, Any] = {name: [copy.deepcopy(value), copy.deepcopy(value)] for name, value in one.items()}
    outcomes = {"scored": 2, "vote_failed": 2, "leaked": 0}
    return {**whole, "group_overrides": {"task_id": "t", "opd": {"distill_topk": 2, "outcomes": outcomes}}}


def k_1_group() -> dict[str, Any]:
    one = group()
    one["group_overrides"]["opd"]["distill_topk"] = 1
    one["distill_token_ids"] = [[[token] for token in TOKENS]] * 2
    one["distill_logprobs"] = [[[0.0], [0.0], [0.0], [-0.1], [-0.2], [0.0], [-0.25], [-2.0]] for _ in range(2)]
    return one


def write(path: Path, *groups: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in groups))
    return path


def violations(tmp_path: Path, *groups: Any) -> list[str]:
    return validate(write(tmp_path / "groups.jsonl", *groups)).shown


def test_good_groups_pass_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write(tmp_path / "groups.jsonl", group(), group()))]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "groups 2",
        "sequences 4",
        "tokens 32",
        "sampled tokens 16",
        "turns 8",
        "scored 4",
        "vote_failed 4",
        "scored rows 8",
        "entries of a row (K) 2",
        "no violation",
    ):
        assert part in printed


def test_the_others_of_a_row_stand_most_likely_first(tmp_path: Path) -> None:
    one = {name: values[:1] if isinstance(values, list) else values for name, values in group().items()}
    del one["overrides"], one["messages"]
    one["group_overrides"] = {}
    ids = [[10, 7, 8], [11, 8, 7], [12, 1, 2], [13, 1, 2]]
    logprobs = [[-0.2, -4.0, -4.0], [-6.0, -0.2, -4.0], [-0.2, -5.0, -4.0], [-0.2, -4.0, -5.0]]
    rows = zip((3, 4, 6, 7), ids, logprobs, strict=True)
    one["distill_token_ids"], one["distill_logprobs"] = ([[[] for _ in TOKENS]] for _ in range(2))
    for position, row_ids, row_logprobs in rows:
        one["distill_token_ids"][0][position], one["distill_logprobs"][0][position] = row_ids, row_logprobs
    said = "line 1, sequence 0, position 6: row: entry 2 is likelier than entry 1; the others stand most likely first"
    assert violations(tmp_path, one) == [said]


def test_k_1_groups_pass(tmp_path: Path) -> None:
    report = validate(write(tmp_path / "groups.jsonl", k_1_group()))
    assert report.shown == []
    assert report.counts["scored rows"] == 4


def test_gzipped_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(group()) + "\n").encode()))
    assert validate(path).counts["groups"] == 1


def change(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(one: dict[str, Any]) -> None:
        *where, last = path
        for key in where:
            one = one[key]
        one[last] = to

    return apply


TURN_0 = ("overrides", 1, "opd", "turns", 0)
TURN_1 = ("overrides", 1, "opd", "turns", 1)


@pytest.mark.parametrize(
    ("mutate", "expected"),
    [
        (change("tokens", to=[]), "line 2: tokens: expected a list of at least one sequence"),
        (change("scores", to=[0.5]), "line 2: scores: expected 2 entries, one a sequence, got 1"),
        (change("inference_logprobs", to=None), "line 2: inference_logprobs: expected a list, got NoneType"),
        (change("messages", to=[CHAT]), "line 2: messages: expected 2 entries, one a sequence, got 1"),
        (change("group_overrides", to=None), "line 2: group_overrides: expected an object, got NoneType"),
        (change("distill_logprobs", to=None), "line 2: distill_token_ids is there without the other"),
        (change("scores", 1, to="high"), "line 2, sequence 1: scores: expected a finite number"),
        (change("messages", 1, 0, to={"role": "user"}), "line 2, sequence 1: messages: expected a list of objects"),
        (change("tokens", 1, 0, to=-1), "line 2, sequence 1: tokens: expected token ids"),
        (change("tokens", 1, 0, to="a"), "line 2, sequence 1: tokens: expected token ids"),
        (change("masks", 1, to=[-100]), "line 2, sequence 1: masks: expected 8 entries, one a token, got 1"),
        (change("masks", 1, 3, to=99), "line 2, sequence 1, position 3: mask: expected -100 or the token 10, got 99"),
        (
            change("inference_logprobs", 1, 0, to=0.0),
            "position 0: inference_logprobs: expected 1.0 at a prompt position",
        ),
        (change("inference_logprobs", 1, 3, to=1.0), "position 3: inference_logprobs: expected at most 0, got 1.0"),
        (change(*TURN_0, to={}), "line 2, sequence 1, turn 0: record: expected an object with span"),
        (change(*TURN_0, "span", to=[3, 9]), "turn 0: span: expected [start, end) inside of 8 tokens, got [3, 9]"),
        (change(*TURN_0, "span", to=[0, 5]), "turn 0: span: expected [start, end)"),
        (change(*TURN_0, "span", to=[3, 4]), "position 4: sampled, but in no turn's span"),
        (change(*TURN_0, "span", to=[2, 5]), "position 2: in a turn's span, but not sampled"),
        (change(*TURN_1, "span", to=[4, 8]), "turn 1: span: starts at 4, before the end 5 of the turn before"),
        (change(*TURN_0, "outcome", to="great"), "turn 0: outcome: 'great' is none of"),
        (change(*TURN_0, "outcome", to=[]), "turn 0: outcome: [] is none of"),
        (
            change(*TURN_0, "next_state_role", to=None),
            "turn 0: next_state_role: None does not go with outcome 'scored'",
        ),
        (change(*TURN_0, "votes", 0, "hint", to=None), "turn 0: votes: decision 1 with hint None"),
        (change(*TURN_0, "votes", 0, "decision", to=2), "turn 0: votes: decision 2"),
        (change(*TURN_0, "hint", to=None), "turn 0: hint: None does not go with outcome 'scored'"),
        (change(*TURN_1, "hint", to=HINT), "does not go with outcome 'vote_failed'"),
        (change(*TURN_0, "hint_token_ids", to=[]), "turn 0: insert_at: 2 with 0 hint_token_ids"),
        (
            change(*TURN_0, to={**SCORED, "hint_token_ids": [], "insert_at": None}),
            "turn 0: hint_token_ids: empty, but the turn is scored",
        ),
        (change(*TURN_0, "insert_at", to=4), "turn 0: insert_at: 4, expected a position of the turn's prompt, 1 to 3"),
        (change(*TURN_0, "insert_at", to=0), "turn 0: insert_at: 0, expected"),
        (change("overrides", 1, "opd", "turns", to=[SCORED]), "sequence 1, position 6: sampled, but in no turn's span"),
        (change("messages", 1, to=CHAT[:3]), "sequence 1: opd turns: 2 records for 1 assistant messages"),
        (
            change("distill_token_ids", 1, to=IDS[:7]),
            "sequence 1: distill_token_ids: expected 8 rows, one a token, got 7",
        ),
        (change("distill_token_ids", 1, 0, to=[1, 2]), "position 0: row: expected two lists of one length"),
        (change("distill_token_ids", 1, 3, to=[9, 7]), "position 3: row: first id 9, expected the token 10"),
        (change("distill_token_ids", 1, 3, to=[10, 10]), "position 3: row: an id occurs twice"),
        (change("distill_token_ids", 1, 3, to=[10, "7"]), "position 3: row: an id is not a token id"),
        (change("distill_logprobs", 1, 3, to=[-0.1, 0.2]), "position 3: row: logprob 0.2, expected"),
        (change("distill_logprobs", 1, 3, to=[-0.1, None]), "position 3: row: logprob None, expected"),
        (change("distill_logprobs", 1, 3, to=[-0.1, -0.1]), "position 3: row: probabilities sum to 1.80"),
        (
            change("group_overrides", "opd", "outcomes", to={"scored": 3, "vote_failed": 1}),
            "line 2: group_overrides: outcomes {'scored': 3, 'vote_failed': 1}, but the turns' records say",
        ),
        (change("group_overrides", "opd", "outcomes", to=[]), "line 2: group_overrides: outcomes []"),
    ],
)
def test_each_violation_is_named_with_its_place(tmp_path: Path, mutate: Any, expected: str) -> None:
    bad = group()
    mutate(bad)
    found = violations(tmp_path, group(), bad)
    assert found
    assert expected in found[0]
    assert found[0].startswith("line 2")


def with_row(position: int, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    bad = group()
    bad["distill_token_ids"][0][position], bad["distill_logprobs"][0][position] = ids, logprobs
    return bad


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (with_row(0, [1, 7], [-0.1, -3.0]), "position 0: row: written at a position that was not sampled"),
        (with_row(6, [12, 7], [-0.1, -3.0]), "position 6: row: written outside of the scored turns' spans"),
        (with_row(3, [], []), "position 3: row: missing in the span of a scored turn"),
        (with_row(3, [10], [-0.1]), "position 3: row: expected 2 entries, got 1"),
    ],
)
def test_rows_stand_where_turns_are_scored_and_nowhere_else(tmp_path: Path, bad: Any, expected: str) -> None:
    assert violations(tmp_path, bad) == [f"line 1, sequence 0, {expected}"]


@pytest.mark.parametrize(
    ("position", "row", "expected"),
    [
        (0, ([], []), "row: empty, but rows of one entry are written at every position"),
        (0, ([1], [-0.5]), "row: expected logprob 0.0 at a prompt position, got -0.5"),
        (6, ([12], [-0.5]), "row: expected the student's logprob -0.25 at an unscored position, got -0.5"),
        (6, ([12, 7], [-0.25, -4.0]), "row: expected 1 entries, got 2"),
    ],
)
def test_k_1_is_rectangular(tmp_path: Path, position: int, row: Any, expected: str) -> None:
    bad = k_1_group()
    bad["distill_token_ids"][1] = [*bad["distill_token_ids"][1]]
    bad["distill_token_ids"][1][position], bad["distill_logprobs"][1][position] = row
    assert violations(tmp_path, bad) == [f"line 1, sequence 1, position {position}: {expected}"]


def test_k_is_the_same_in_the_whole_file(tmp_path: Path) -> None:
    other = group()
    for sequence in range(2):
        other["distill_token_ids"][sequence][3:5] = [[10, 7, 8], [11, 7, 8]]
        other["distill_logprobs"][sequence][3:5] = [[-0.1, -3.0, -4.0]] * 2
    assert violations(tmp_path, group(), other)[0] == "line 2, sequence 0, position 3: row: expected 2 entries, got 3"


def test_files_of_others_are_judged_by_their_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = group()
    del foreign["overrides"], foreign["messages"]
    foreign["group_overrides"] = {}
    assert violations(tmp_path, foreign) == []
    padded = copy.deepcopy(foreign)
    padded["distill_token_ids"][0][0], padded["distill_logprobs"][0][0] = [0, 0], [0.0, 0.0]
    assert "position 0: row: written at a position that was not sampled" in violations(tmp_path, padded)[0]
    del foreign["distill_token_ids"], foreign["distill_logprobs"]
    assert main([str(write(tmp_path / "groups.jsonl", foreign))]) == 0
    assert "Distillation is absent" in capsys.readouterr().out


def test_a_scored_turn_without_arrays_is_a_violation(tmp_path: Path) -> None:
    bad = group()
    del bad["distill_token_ids"], bad["distill_logprobs"]
    assert "position 3: the turn is scored, but there are no distillation arrays" in violations(tmp_path, bad)[0]


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_are_not_json_are_refused(tmp_path: Path, constant: str) -> None:
    line = json.dumps(group()).replace("-0.25", constant, 1)
    assert violations(tmp_path, line) == [f"line 1: not JSON: {constant} is no JSON number"]


@pytest.mark.parametrize("line", ['{"tokens": [[1', "[1]", "3", '{"tokens": 3}', "{}"])
def test_lines_that_are_no_groups(tmp_path: Path, line: str) -> None:
    found = violations(tmp_path, group(), line)
    assert found
    assert found[0].startswith("line 2")


def test_an_empty_file_is_no_success(tmp_path: Path) -> None:
    assert main([str(write(tmp_path / "groups.jsonl"))]) == 1


def test_at_most_20_violations_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = group()
    bad["scores"] = ["x", "x"]
    assert main([str(write(tmp_path / "groups.jsonl", *[bad] * 15))]) == 1
    printed = capsys.readouterr().out
    assert printed.count("expected a finite number") == 20
    assert "... and 10 more" in printed
    assert "30 violations" in printed


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff\xfe")]
)
def test_a_file_that_can_not_be_read_is_exit_code_2(
    tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "x.jsonl")
    assert main([str(tmp_path / "x.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_broken_archive_can_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(group()).encode())[:50])
    assert main([str(path)]) == 2
    path.write_bytes(b"plain")
    assert main([str(path)]) == 2


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "Exit code 0: no violation" in " ".join(capsys.readouterr().out.split())
