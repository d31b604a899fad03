"""What is wrong with a group, and where: each violation of the format is named, whatever the JSON is."""

import copy
import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.core.errors import WireError
from agentic_opd.core.types import ContextTurn
from agentic_opd.wire import checks
from agentic_opd.wire.checks import GroupChecker, read_group
from agentic_opd.wire.group import ScoredGroup

from .sample import CHAT, HINT, IDS, KNOWN_MORE, SCORED, TOKENS, TRAJECTORY, UNSCORED, group, k_1_group, known_more


def violations(*groups: Any) -> list[str]:
    """What is wrong with the groups of a file, one a line."""
    checker = GroupChecker()
    lines = enumerate(groups, start=1)
    return [problem.message_for(f"line {number}") for number, one in lines for problem in checker.read(one).problems]


def test_the_others_of_a_row_stand_most_likely_first() -> None:
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
    assert violations(one) == [said]


def test_questions_to_the_judge_and_their_tokens_are_counted() -> None:
    checker, one = GroupChecker(), known_more()
    turns = one["overrides"][1]["opd"]["turns"]
    turns[1] = {**UNSCORED, "question": "And now?"}
    assert checker.read(one).problems == []
    expected = {
        **{"questions to the judge": 5, "questions of unknown tokens": 1},
        **{"judge tokens read": 2 * (812 + 1200), "judge tokens sampled": 2 * (96 + 96)},
    }
    assert {name: checker.counts[name] for name in expected} == expected
    del turns[0]["question"]
    said = ["line 1, sequence 1, turn 0: judge_tokens: there is no question to the judge"]
    assert violations(one) == said


def test_k_1_groups_pass() -> None:
    checker = GroupChecker()
    assert checker.read(k_1_group()).problems == []
    assert checker.counts["scored rows"] == 4


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
        (change("tokens", to=[]), "line 2: tokens: [], expected at least 1 item"),
        (change("scores", to=[0.5]), "line 2: sequences: lengths differ (tokens=2, masks=2, scores=1,"),
        (change("inference_logprobs", to=None), "line 2: inference_logprobs: None, expected a list"),
        (change("messages", to=[CHAT]), "distill_logprobs=2, messages=1, overrides=2)"),
        (change("group_overrides", to=None), "line 2: group_overrides: None, expected an object"),
        (change("distill_logprobs", to=None), "line 2: of distill_token_ids and distill_logprobs one is missing"),
        (change("scores", 1, to="high"), "line 2, sequence 1: scores: 'high', expected a number"),
        (
            change("messages", 1, 0, to={"role": "user"}),
            "line 2, sequence 1: messages[0]: {'role': 'user'}, expected an object",
        ),
        *(
            (change("overrides", 1, "opd", "sampling", to=sampling), f"line 2, sequence 1: opd{expected}")
            for sampling, expected in (
                ({"temperature": -0.5}, ".sampling[0].temperature: -0.5, expected at least 0"),
                ({"temperature": float("nan")}, ".sampling[0].temperature: nan, expected a finite number"),
                ({"temperature": "0.5"}, ".sampling[0].temperature: '0.5', expected a number"),
                ({"top_p": 0.5}, ".sampling[0].temperature: missing"),
                ({"temperature": 1.0, "top_p": 0}, ".sampling[0].top_p: 0, expected greater than 0"),
                ({"temperature": 1.0, "top_k": -1}, ".sampling[0].top_k: -1, expected at least 1"),
                ([], ".sampling: [], expected an object for all turns or one for each"),
                (None, ".sampling[0]: None, expected an object"),
                ([{"temperature": 1.0}] * 3, " sampling: 3 entries for 2 sampled turns, expected one for all or for"),
            )
        ),
        (change("tokens", 1, 0, to=-1), "line 2, sequence 1: tokens: expected token ids"),
        (change("tokens", 1, 0, to="a"), "line 2, sequence 1: tokens: expected token ids"),
        (change("masks", 1, to=[-100]), "line 2, sequence 1: rollout: lengths differ (tokens=8, masks=1,"),
        (change("masks", 1, 3, to=99), "line 2, sequence 1, position 3: mask: expected -100 or the token 10, got 99"),
        (
            change("inference_logprobs", 1, 0, to=0.0),
            "position 0: inference_logprobs: expected 1.0 at a prompt position",
        ),
        (change("inference_logprobs", 1, 3, to=1.0), "position 3: inference_logprobs: expected at most 0, got 1.0"),
        (change(*TURN_0, to={}), "line 2, sequence 1, turn 0: record: span, outcome, next_state_role, votes,"),
        (change(*TURN_0, "span", to=[3, 9]), "sequence 1: rollout: a turn's span ends at 9, but there are 8 tokens"),
        (change(*TURN_0, "span", to=[0, 5]), "turn 0: turn: span [0, 5), scored from 0"),
        (change(*TURN_0, "span", to=[3, 4]), "position 4: sampled, but in no turn's span"),
        (change(*TURN_0, "span", to=[2, 5]), "position 2: in a turn's span, but not sampled"),
        (change(*TURN_1, "span", to=[4, 8]), "turn 1: span: starts at 4, before the end 5 of the turn before"),
        (change(*TURN_0, "outcome", to="great"), "turn 0: outcome: 'great', expected 'scored', 'no_next_state'"),
        (change(*TURN_0, "outcome", to=[]), "turn 0: outcome: [], expected 'scored', 'no_next_state'"),
        (
            change(*TURN_0, "next_state_role", to=None),
            "turn 0: next_state_role: None does not go with outcome 'scored'",
        ),
        (change(*TURN_0, "votes", 0, "hint", to=None), "turn 0: vote: a hint belongs to decision 1 and to no other"),
        (change(*TURN_0, "votes", 0, "decision", to=2), "turn 0: votes[0].decision: 2, expected 1 or -1"),
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
            "sequence 1: distill arrays: lengths differ (token_ids=7, logprobs=8)",
        ),
        (
            change("distill_token_ids", 1, 0, to=[1, 2]),
            "sequence 1: distill row 0: lengths differ (token_ids=2, logprobs=0)",
        ),
        (change("distill_token_ids", 1, 3, to=[9, 7]), "position 3: row: first id 9, expected the token 10"),
        (change("distill_token_ids", 1, 3, to=[10, 10]), "position 3: row: an id occurs twice"),
        (
            change("distill_token_ids", 1, 3, to=[10, "7"]),
            "position 3: distill_token_ids: [10, '7'], expected token ids",
        ),
        (
            change("distill_logprobs", 1, 3, to=[-0.1, 0.2]),
            "position 3: distill_logprobs[1]: 0.2, expected at most 0.001",
        ),
        (change("distill_logprobs", 1, 3, to=[-0.1, None]), "position 3: distill_logprobs[1]: None, expected a number"),
        (change("distill_logprobs", 1, 3, to=[-0.1, -0.1]), "position 3: row: probabilities sum to 1.80"),
        (
            change("group_overrides", "opd", "outcomes", to={"scored": 3, "vote_failed": 1}),
            "line 2: group_overrides: outcomes {'scored': 3, 'vote_failed': 1}, but the turns' records say",
        ),
        (
            change("group_overrides", "opd", "outcomes", to=[]),
            "line 2: group_overrides: opd.outcomes: [], expected an object",
        ),
    ],
)
def test_each_violation_is_named_with_its_place(mutate: Any, expected: str) -> None:
    bad = group()
    mutate(bad)
    found = violations(group(), bad)
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
def test_rows_stand_where_turns_are_scored_and_nowhere_else(bad: Any, expected: str) -> None:
    assert violations(bad) == [f"line 1, sequence 0, {expected}"]


@pytest.mark.parametrize(
    ("position", "row", "expected"),
    [
        (0, ([], []), "row: empty, but rows of one entry are written at every position"),
        (0, ([1], [-0.5]), "row: expected logprob 0.0 at a prompt position, got -0.5"),
        (6, ([12], [-0.5]), "row: expected the student's logprob -0.25 at an unscored position, got -0.5"),
        (6, ([12, 7], [-0.25, -4.0]), "row: expected 1 entries, got 2"),
    ],
)
def test_k_1_is_rectangular(position: int, row: Any, expected: str) -> None:
    bad = k_1_group()
    bad["distill_token_ids"][1] = [*bad["distill_token_ids"][1]]
    bad["distill_token_ids"][1][position], bad["distill_logprobs"][1][position] = row
    assert violations(bad) == [f"line 1, sequence 1, position {position}: {expected}"]


def test_k_is_the_same_in_the_whole_file() -> None:
    other = group()
    for sequence in range(2):
        other["distill_token_ids"][sequence][3:5] = [[10, 7, 8], [11, 7, 8]]
        other["distill_logprobs"][sequence][3:5] = [[-0.1, -3.0, -4.0]] * 2
    assert violations(group(), other)[0] == "line 2, sequence 0, position 3: row: expected 2 entries, got 3"


def test_files_of_others_are_judged_by_their_arrays() -> None:
    foreign = group()
    del foreign["overrides"], foreign["messages"]
    foreign["group_overrides"] = {}
    assert violations(foreign) == []
    padded = copy.deepcopy(foreign)
    padded["distill_token_ids"][0][0], padded["distill_logprobs"][0][0] = [0, 0], [0.0, 0.0]
    assert "position 0: row: written at a position that was not sampled" in violations(padded)[0]
    del foreign["distill_token_ids"], foreign["distill_logprobs"]
    assert violations(foreign) == []


def test_a_scored_turn_without_arrays_is_a_violation() -> None:
    bad = group()
    del bad["distill_token_ids"], bad["distill_logprobs"]
    assert "position 3: the turn is scored, but there are no distillation arrays" in violations(bad)[0]


@pytest.mark.parametrize(
    ("mutate", "expected"),
    [
        (change("masks", 1, 3, to="x"), "masks[3]: 'x', expected a whole number"),
        (change("masks", 1, 3, to=True), "masks[3]: True, expected a whole number"),
        (change("inference_logprobs", 1, 3, to=10**400), "inference_logprobs[3]: 1000"),
        (change("inference_logprobs", 1, 3, to=float("nan")), "inference_logprobs[3]: nan, expected a finite number"),
        (change("inference_logprobs", 1, 3, to=-9999.0), "inference_logprobs[3]: -9999.0, expected at least -1000"),
        (change("inference_logprobs", 1, 3, to=-1e39), "inference_logprobs[3]: -1e+39, expected at least -1000"),
        (change("masks", 1, 3, to=2**63), "masks[3]: 9223372036854775808, expected at most"),
        (change("scores", 1, to=1e39), "sequence 1: scores: 1e+39, expected at most 1000000"),
        (change("scores", 1, to=-1.7e308), "sequence 1: scores: -1.7e+308, expected at least -1000000"),
        (
            change("distill_logprobs", 1, 3, to=[-9999.0, -0.1]),
            "position 3: distill_logprobs[0]: -9999.0, expected at least -1000",
        ),
        (
            change("distill_logprobs", 1, 3, to=[-0.1, -1e39]),
            "position 3: distill_logprobs[1]: -1e+39, expected at least -1000",
        ),
        (
            change("distill_logprobs", 1, 3, to=[500.0, -0.1]),
            "position 3: distill_logprobs[0]: 500.0, expected at most 0.001",
        ),
        (change("tokens", 1, 3, to=2**63), "tokens: expected token ids"),
        (change(*TURN_0, "next_state_role", to="x"), "next_state_role: 'x', expected 'tool', 'user' or 'verdict'"),
        (change(*TURN_0, "votes", to=[3]), "votes[0]: 3, expected an object"),
        (change(*TURN_1, "votes", 0, "hint", to=3), "votes[0].hint: 3, expected a text"),
        (change(*TURN_0, "votes", 0, "decision", to=True), "votes[0]: {'decision': True, "),
        (change(*TURN_1, "hint", to=3), "turn 1: hint: 3, expected a text"),
        (change(*TURN_0, "hint_token_ids", to=[-1]), "hint_token_ids[0]: -1, expected at least 0"),
        (change(*TURN_0, "insert_at", to=2.5), "insert_at: 2.5, expected a whole number"),
        (
            change("distill_logprobs", 1, 3, to=[-0.1, float("nan")]),
            "position 3: distill_logprobs[1]: nan, expected a finite number",
        ),
        (
            change("group_overrides", "opd", "outcomes", "scored", to="2"),
            "opd.outcomes.scored: '2', expected a whole number",
        ),
    ],
)
def test_what_the_json_is_comes_before_what_it_says(mutate: Any, expected: str) -> None:
    bad = group()
    bad["masks"][0][3] = 99  # What the group says is not looked at before it can be read.
    mutate(bad)
    (found,) = violations(bad)
    assert expected in found
    with pytest.raises(WireError) as caught:
        read_group(bad)
    assert expected in str(caught.value)


def test_reading_does_not_judge() -> None:
    """A trainer takes groups of programs that write logprobs otherwise; only what it can't read is an error."""
    other = {name: group()[name] for name in ("tokens", "masks", "scores", "inference_logprobs")}
    other["inference_logprobs"][0][0] = 0.0
    assert len(read_group(other).rollouts) == 2
    assert [one.split(": ", 1)[1] for one in violations(other)] == ["group_overrides: nothing, expected an object"]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of some JSON, depth first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


ODD = (None, True, 2**70, float("nan"), "x", [[1]], {"a": 1})


def test_records_may_hold_more_and_all_of_it_is_written_again() -> None:
    assert violations(known_more()) == []
    read, _ = GroupChecker().read(known_more())
    assert read is not None
    assert read.to_wire() == known_more()
    assert read.rollouts[0].baseline_T[3:5] == [-0.75, -1.25]


def k_1_known_more() -> dict[str, Any]:
    one = k_1_group()
    for overrides in one["overrides"]:
        record = copy.deepcopy(KNOWN_MORE)
        record["control"]["logprobs"] = [[-0.4], [-1.25]]
        overrides["opd"]["turns"] = [record, UNSCORED]
    return one


def test_a_control_of_rows_of_one_entry() -> None:
    assert violations(k_1_known_more()) == []


EVIDENCE = "expected 'tool', 'user', 'repeated', 'later' or 'verdict'"
NULL = "null, expected a value or no such field"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("evidence", "tool", "evidence: 'tool', expected a list"),
        ("evidence", ["tool", "tool"], "evidence: ['tool', 'tool'], expected each kind once"),
        ("evidence", ["hidden"], f"evidence[0]: 'hidden', {EVIDENCE}"),
        ("evidence", [1], f"evidence[0]: 1, {EVIDENCE}"),
        ("question", None, f"question: {NULL}"),
        ("judge_tokens", None, f"judge_tokens: {NULL}"),
        ("judge_tokens", {"read": 5}, "judge_tokens.sampled: missing"),
        ("judge_tokens", {"read": -1, "sampled": 2}, "judge_tokens.read: -1, expected at least 0"),
        ("judge_tokens", {"read": True, "sampled": 2}, "judge_tokens.read: True, expected a whole number"),
        ("step_votes", 1, "step_votes: 1, expected a list"),
        ("step_votes", [2], "step_votes[0]: 2, expected 1, 0 or -1"),
        ("step_votes", [True], "step_votes[0]: True, expected a number, not true or false"),
        ("step_votes", [-1, 0], "step_score: 1, but no vote gives it"),
        ("step_score", None, f"step_score: {NULL}"),
        ("step_score", 2, "step_score: 2, expected 1, 0 or -1"),
        ("step_score", True, "step_score: True, expected a number, not true or false"),
        ("truncated", 1, "truncated: 1, expected true or false"),
        ("hint_source", ["judge"], "hint_source: ['judge'], expected a text"),
        ("weight_version", -1, "weight_version: -1, expected at least 0"),
        ("weight_version", 1.5, "weight_version: 1.5, expected a whole number"),
        ("scored_version", None, f"scored_version: {NULL}"),
        ("baseline_logprobs", None, f"baseline_logprobs: {NULL}"),
        ("baseline_logprobs", [-0.5], "turn: lengths differ (span=2, baseline_logprobs=1,"),
        ("baseline_logprobs", [-0.5, 0.01], "baseline_logprobs[1]: 0.01, expected at most 0.001"),
        ("baseline_logprobs", [-0.5, None], "baseline_logprobs[1]: None, expected a number"),
        ("baseline_logprobs", [-0.5, -9999.0], "baseline_logprobs[1]: -9999.0, expected at least -1000"),
        ("unhinted_logprobs", [-0.5, float("nan")], "unhinted_logprobs[1]: nan, expected a finite number"),
        ("unhinted_logprobs", [-0.5, "x"], "unhinted_logprobs[1]: 'x', expected a number"),
        ("control", None, f"control: {NULL}"),
    ],
)
def test_further_fields_hold_what_they_may(field: str, value: Any, expected: str) -> None:
    bad = known_more()
    bad["overrides"][1]["opd"]["turns"][0][field] = value
    found = violations(bad)
    assert expected in found[0]
    assert found[0].startswith("line 1, sequence 1, turn 0: ")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("kind", "own", "turn 0: control.kind: 'own', expected 'neutral', 'other', 'same_task' or 'refuted'"),
        ("kind", [], "turn 0: control.kind: [], expected 'neutral'"),
        ("hint", "", "turn 0: control: hint '' of 1 tokens, expected a text"),
        ("hint", HINT, "turn 0: control: its hint is the turn's own"),
        ("hint", "Name it.", "turn 0: control: its hint is one of the turn's hints"),
        ("hint_token_ids", [], "turn 0: control: hint 'Return the list in reverse.' of 0 tokens"),
        ("hint_token_ids", [-1], "turn 0: control.hint_token_ids[0]: -1, expected at least 0"),
        ("logprobs", [[-0.4, -2.0]], "turn 0: turn: lengths differ (span=2, "),
        ("logprobs", [[-0.4, -2.0], []], "position 4: control: expected 2 entries, those of the row, got 0"),
        ("logprobs", [[-0.4, -2.0], 3], "turn 0: control.logprobs[1]: 3, expected a list"),
        ("logprobs", [[-0.4, -2.0], [None, -1.0]], "position 4: control: the sampled token has no logprob"),
        ("logprobs", [[-0.4, -2.0], [-1.0, "x"]], "control.logprobs[1][1]: 'x', expected a number"),
        ("logprobs", [[-0.4, -2.0], [-1.0, 0.5]], "control.logprobs[1][1]: 0.5, expected at most 0.001"),
        ("logprobs", [[-0.4], [-1.0, None]], "position 3: control: expected 2 entries, those of the row, got 1"),
        ("logprobs", [[-0.4, -2.0], [-0.1, -0.1]], "position 4: control: probabilities sum to 1.80"),
    ],
)
def test_a_control_stands_beside_the_rows(field: str, value: Any, expected: str) -> None:
    bad = known_more()
    bad["overrides"][1]["opd"]["turns"][0]["control"][field] = value
    assert expected in violations(bad)[0]


@pytest.mark.parametrize(
    ("index", "field", "value", "expected"),
    [
        (0, "hint", "", "turn 0: hints[0]: hint '' of 1 tokens, expected a text"),
        (0, "hint", HINT, "turn 0: hints: a text occurs twice"),
        (0, "hint", 1, "turn 0: hints[0].hint: 1, expected a text"),
        (0, "hint_token_ids", [], "turn 0: hints[0]: hint 'Name it.' of 0 tokens, expected a text"),
        (0, "hint_token_ids", [-1], "turn 0: hints[0].hint_token_ids[0]: -1, expected at least 0"),
        (0, "insert_at", 4, "turn 0: hints[0].insert_at: 4, expected a position of the turn's prompt, 1 to 3"),
        (0, "overlap", 1.5, "turn 0: hints[0].overlap: 1.5, expected 0 to 1"),
        (0, "overlap", 0.75, "turn 0: hints: the turn's hint has the overlap 0.5, but another has more"),
        (0, "entropy", -0.1, "turn 0: hints[0].entropy: -0.1, expected at least 0"),
        (0, "gap", None, "turn 0: hints[0].gap: None, expected a number"),
        (1, "hint_token_ids", [70], "turn 0: hints: the turn's hint is not among them"),
        (1, "gap", -0.85, "turn 0: hints: gap -0.85 of the turn's hint, but the mean of its rows is 0.850000"),
    ],
)
def test_compared_hints_hold_figures_and_the_choice(index: int, field: str, value: Any, expected: str) -> None:
    assert violations(known_more()) == []
    bad = known_more()
    bad["overrides"][1]["opd"]["turns"][0]["hints"][index][field] = value
    assert expected in violations(bad)[0]


PROOF = {
    "without_hint": [1, 4],
    "with_hint": [4, 4],
    "verdict": "proven",
    "effect": 0.75,
    "interval": [0.1, 1.0],
    "weight_version": 3,
}


def with_proof(proof: dict[str, Any], **record: Any) -> list[str]:
    one = group()
    one["overrides"][0]["opd"]["turns"][0] |= {"proof": proof, **record}
    return violations(one)


def test_a_proof_is_read_and_written_again() -> None:
    assert with_proof(PROOF) == []
    unhinted = group()
    unhinted["overrides"][0]["opd"]["turns"][1]["proof"] = {"without_hint": [0, 4], "weight_version": 3}
    assert violations(unhinted) == []
    assert ScoredGroup.from_wire(unhinted).to_wire()["overrides"][0] == unhinted["overrides"][0]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"without_hint": [5, 4]}, "proof: 5 of 4 continuations passed"),
        ({"without_hint": [-1, 4]}, "proof.without_hint[0]: -1, expected at least 0"),
        ({"with_hint": None}, "proof: verdict proven with_hint None"),
        ({"verdict": "maybe"}, "proof.verdict: 'maybe', expected 'proven', 'refuted' or 'open'"),
        ({"effect": 0.5}, "proof: effect 0.5, but the counts are (4, 4) and (1, 4)"),
        ({"interval": [0.8, 1.0]}, "proof: effect 0.75 is outside of its interval [0.8, 1.0]"),
        ({"interval": None}, "interval"),
        ({"effect": 1e9}, "proof.effect"),
    ],
)
def test_a_proofs_numbers_agree(changed: dict[str, Any], expected: str) -> None:
    problems = with_proof({**PROOF, **changed})
    assert problems
    assert expected in problems[0]


def test_a_verdict_belongs_to_a_hint() -> None:
    one = group()
    one["overrides"][0]["opd"]["turns"][1]["proof"] = PROOF
    assert "proof: verdict proven with_hint (4, 4)" in violations(one)[0]


def test_only_scored_turns_have_compared_hints() -> None:
    bad = known_more()
    bad["overrides"][1]["opd"]["turns"][1]["hints"] = KNOWN_MORE["hints"]
    assert "turn 1: hints: do not go with outcome 'vote_failed'" in violations(bad)[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("baseline_logprobs", [-0.5, -0.5]),
        ("unhinted_logprobs", [-0.5, -0.5]),
        ("scored_version", 3),
        ("control", KNOWN_MORE["control"]),
    ],
)
def test_only_scored_turns_have_readings(field: str, value: Any) -> None:
    bad = known_more()
    bad["overrides"][1]["opd"]["turns"][1][field] = value
    assert violations(bad) == [f"line 1, sequence 1, turn 1: {field}: does not go with outcome 'vote_failed'"]


def test_the_group_says_how_its_gaps_came_about() -> None:
    for name in ("gap_baseline", "hint_source"):
        bad = group()
        bad["group_overrides"]["opd"][name] = 1
        assert f"group_overrides: opd.{name}" in violations(bad)[0]
    one = group()
    one["group_overrides"]["opd"]["hint_source"] = ["sibling", "judge"]
    assert violations(one) == []
    one["overrides"][0]["opd"]["turns"][1]["hint_source"] = "judge"
    assert violations(one) == ["line 1, sequence 0, turn 1: hint_source: 'judge', but there is no hint"]
    one["overrides"][0]["opd"]["turns"][1].pop("hint_source")
    one["overrides"][0]["opd"]["turns"][0]["hint_source"] = "feedback"
    assert violations(one) == ["line 1: opd turns: hint_source feedback, but the group has sibling, judge"]


def test_only_with_a_users_source_a_scored_turn_has_no_hint_tokens() -> None:
    bare = {**SCORED, "hint_token_ids": [], "insert_at": None}
    for source, problems in (("judge", ["hint_token_ids: empty, but the turn is scored"]), ("no_hint", [])):
        one = group()
        one["group_overrides"]["opd"]["hint_source"] = source
        for overrides in one["overrides"]:
            overrides["opd"]["turns"] = [{**bare, "hint_source": source}, UNSCORED]
        assert all(problem in violations(one)[0] for problem in problems)
        assert bool(violations(one)) == bool(problems)


@pytest.mark.slow
@pytest.mark.parametrize("make", [group, k_1_group, known_more, k_1_known_more])
def test_whatever_stands_in_a_place_is_a_problem_or_a_group(make: Callable[[], dict[str, Any]]) -> None:
    text = json.dumps(make())
    for place in places(make())[1:]:
        for odd in ODD:
            bad = json.loads(text)
            change(*place, to=odd)(bad)
            read, problems = GroupChecker().read(bad)
            assert read is not None or problems, (place, odd)


def conversation() -> dict[str, Any]:
    """The group, as a gateway writes it: the first assistant's message of each sequence is context."""
    one = group()
    for index, overrides in enumerate(one["overrides"]):
        one["messages"][index].insert(2, {"role": "assistant", "content": "elsewhere"})
        overrides["opd"]["context_turns"] = [{"message": 2, "why": "altered_sampling", "altered": ["top_p"]}]
        overrides["reward"] = None
    one["group_overrides"]["session_id"] = "mine"
    return one


def test_a_conversations_context_turns_are_read_and_written_again() -> None:
    read, problems = GroupChecker().read(conversation())
    assert problems == []
    assert read is not None
    written, expected = read.to_wire(), conversation()
    assert (written["overrides"], written["messages"]) == (expected["overrides"], expected["messages"])
    assert read.session_id == "mine"
    (first, _) = read.rollouts
    assert (first.is_rewarded, first.reward) == (False, None)
    assert first.context_turns == (ContextTurn(2, "altered_sampling", ("top_p",)),)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], "2 records for 3 assistant messages"),
        ([{"message": 1, "why": "side"}], "messages [1] are not the assistant's"),
        ([{"message": 2, "why": "side"}] * 2, "are listed twice"),
        ([{"message": 2, "why": "side"}, {"message": 3, "why": "side"}], "2 records and 2 context turns for 3"),
        ([{"message": 2, "why": "tired"}], "context turn 0: why: 'tired', expected 'not_sampled', 'shared'"),
        ([{"message": "2", "why": "side"}], "context turn 0: message: '2', expected a whole number"),
        ([7], "context turn 0: 7, expected an object"),
        ({}, "opd.context_turns: {}, expected a list"),
    ],
)
def test_each_message_of_the_assistants_has_a_record_or_is_context(entries: Any, expected: str) -> None:
    one = conversation()
    one["overrides"][0]["opd"]["context_turns"] = entries
    assert any(expected in problem.message_for("line 1") for problem in GroupChecker().read(one).problems)


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("first",), 0, "trajectory: turns 0 to 2, but votes name [1]"),
        (("first",), 2, "trajectory: turns 2 to 2, but votes name [1]"),
        (("last",), 3, "sequence 1: opd trajectory: turns up to 3, but the rollout has 2"),
        (("question",), None, "expected a text"),
        (("votes", 0, "turns"), [3], "turns 1 to 2, but votes name [3]"),
        (("votes", 0, "turns"), ["1"], "expected a whole number"),
        (("votes", 1, "kind"), "perhaps", "'perhaps', expected 'named', 'none'"),
        (("votes",), {}, "expected a list"),
    ],
)
def test_a_judged_trajectory_names_turns_of_its_rollout(place: tuple[Any, ...], value: Any, expected: str) -> None:
    one = known_more()
    change("overrides", 1, "opd", "trajectory", "windows", 0, *place, to=value)(one)
    assert any(expected in problem for problem in violations(one)), violations(one)


def test_a_judged_trajectory_is_read_written_and_counted() -> None:
    checker = GroupChecker()
    read, problems = checker.read(known_more())
    assert (problems, checker.counts["judged trajectories"], checker.counts["  windows"]) == ([], 2, 2)
    assert read is not None
    assert read.distillation is not None
    assert (read.distillation.judge_scope, read.distillation.judge_when) == ("trajectory", "failed")
    assert [overrides["opd"]["trajectory"] for overrides in read.to_wire()["overrides"]] == [TRAJECTORY] * 2
    parts = known_more()
    parts["overrides"][0]["first_turn"] = parts["overrides"][1]["first_turn"] = 4
    parts["overrides"][0]["opd"]["trajectory"]["windows"][0]["last"] = 8
    assert violations(parts) == [], "the other turns are in other parts of the group"


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
WHOLE = known_more()
PLACES = places(WHOLE)[1:]


@given(st.lists(st.tuples(st.sampled_from(PLACES), ANY_JSON), min_size=1, max_size=3))
def test_a_group_changed_at_random_is_read_or_named_and_never_a_traceback(changes: list[tuple[Any, Any]]) -> None:
    bad = copy.deepcopy(WHOLE)
    for place, value in changes:
        with suppress(LookupError, TypeError):  # An earlier change removed the place.
            change(*place, to=value)(bad)
    read, problems = GroupChecker().read(bad)
    assert read is not None or problems
    assert all(len(problem.message_for("line 1")) < 2000 for problem in problems)
    if read is not None and not problems:
        again, none = GroupChecker().read(read.to_wire())
        assert (again, none) == (read, [])


LOGPROB = st.sampled_from((0.0, -0.0, 5e-4, -0.1, -0.25, -0.5, -1.0, -3.0, -1000.0)) | st.floats(-4.0, 0.0)
ID = st.sampled_from((1, 7, 8, 10, 11, 12))


@given(
    st.sampled_from((group, k_1_group, known_more, k_1_known_more)),
    st.integers(0, 7),
    st.lists(st.tuples(ID, LOGPROB), max_size=3),
    st.booleans(),
)
def test_the_vectorised_checks_refuse_what_the_checks_of_single_entries_refuse(
    make: Callable[[], dict[str, Any]], position: int, row: list[tuple[int, float]], is_foreign: bool
) -> None:
    one = make()
    one["distill_token_ids"], one["distill_logprobs"] = map(
        copy.deepcopy, (one["distill_token_ids"], one["distill_logprobs"])
    )
    one["distill_token_ids"][1][position] = [entry[0] for entry in row]
    one["distill_logprobs"][1][position] = [entry[1] for entry in row]
    if is_foreign:
        del one["overrides"], one["messages"]
    vectorised = GroupChecker()
    found = vectorised.read(one)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_are_rows", "_are_numbers"):
            patch.setattr(checks, name, lambda *values: False)
        single = GroupChecker()
        assert single.read(one) == found
        assert single.counts == vectorised.counts


@given(st.sampled_from(PLACES))
def test_a_group_that_lacks_something_is_read_or_named(place: tuple[Any, ...]) -> None:
    bad = copy.deepcopy(WHOLE)
    inner = bad
    for key in place[:-1]:
        inner = inner[key]
    del inner[place[-1]]
    read, problems = GroupChecker().read(bad)
    assert read is not None or problems


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("odd", [nested(5000), {"a": nested(5000)}, "\ud800", 10**4000, "0.5", True, -9999, 1e39])
def test_odd_values_are_named_in_a_few_words_wherever_they_stand(odd: Any) -> None:
    whole = pickle.dumps(WHOLE)
    for place in PLACES:
        bad = pickle.loads(whole)
        change(*place, to=odd)(bad)
        read, problems = GroupChecker().read(bad)
        assert read is not None or problems
        assert all(len(problem.message_for("line 1")) < 1000 for problem in problems)
