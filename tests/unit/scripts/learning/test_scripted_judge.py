"""The judge of `scripts/learn --world functions`: what it reads of the question, and what it says."""

import pytest
from learning.scripted_judge import REPEATED, answer, evidence, in_words, without_wrong_values

from agentic_opd.core.types import Evidence, HindsightPair
from agentic_opd.distill.hints import Questions, filled, parse_step_vote, parse_vote
from agentic_opd.distill.prompts import (
    JUDGE_STEP_PROMPT,
    JUDGE_SYSTEM_PROMPT,
    TRAJECTORY_QUESTION,
    TRAJECTORY_SYSTEM_PROMPT,
)
from agentic_opd.distill.trajectory import Window, parse_answer

CALL = 'The name must be "py.pay", the parameters "sum" (a number).'


def question(*texts: str) -> str:
    kinds = ("tool", "verdict")
    found = tuple(Evidence(kind, text) for kind, text in zip(kinds, texts, strict=False))
    task = "## Turn [00000000]\nPay 3 euros."  # No task can write the mark.
    return Questions(b"secret").question(HindsightPair(0, task, '{"name": "py"}', found))


def test_it_reads_what_came_after_the_turn() -> None:
    assert evidence(question("Error: no.", "No function was called.")) == ["Error: no.", "No function was called."]


@pytest.mark.parametrize(
    ("verdict", "decision", "hint"), [(CALL, 1, CALL), ("pay: the parameter sum has a wrong value, 4.", -1, None)]
)
def test_verbatim_it_gives_what_the_environment_says_that_the_call_must_be(
    verdict: str, decision: int, hint: str | None
) -> None:
    vote = parse_vote(answer(JUDGE_SYSTEM_PROMPT, question("Error: no such function.", verdict), "verbatim"))
    assert (vote.decision, vote.hint) == (decision, hint)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (f'Error: the name must be "py.pay".\n\n{CALL}', f"Write only the call: {CALL}"),
        (
            "pay: the parameter sum has a wrong value, 4.",
            "for the parameter sum: its value is not what the request asks for.",
        ),
        (
            "pay: the parameter tip does not belong to the call.",
            "about the parameter tip: the parameter tip does not belong",
        ),
        ("2 calls were made, expected 1.", "Make exactly one call"),
    ],
)
def test_in_words_it_says_what_to_do(found: str, said: str) -> None:
    assert said in in_words(found)
    vote = parse_vote(answer(JUDGE_SYSTEM_PROMPT, question(found), "words"))
    assert vote.decision == 1
    assert said in (vote.hint or "")


@pytest.mark.parametrize("model", ["verbatim", "words"])
def test_of_right_calls_it_has_nothing_to_say(model: str) -> None:
    assert (
        parse_vote(answer(JUDGE_SYSTEM_PROMPT, question('{"status": "ok"}', "The calls are right."), model)).decision
        == -1
    )


@pytest.mark.parametrize(
    ("said", "hint", "step"),
    [("Shorter, please.", "Shorter, please.", -1), ("Thanks, that is how I like it.", None, 1)],
)
def test_a_persons_complaint_is_the_hint_and_decides_the_step(said: str, hint: str | None, step: int) -> None:
    asked = question(said)
    assert parse_vote(answer(JUDGE_SYSTEM_PROMPT, asked, "person")).hint == hint
    assert parse_step_vote(answer(JUDGE_STEP_PROMPT, asked, "person")) == step


def about_trajectory(turns: dict[str, str], verdict: str, model: str) -> dict[int, str]:
    """Ask the scripted judge about turns, each with the result that followed it."""
    sections = [
        f"## {title} [0123abcd]\n{text}"
        for number, (turn, result) in enumerate(turns.items(), start=1)
        for title, text in ((f"Turn {number}", turn), (f"Turn {number}: tool result", result))
    ]
    fields = {"mark": "0123abcd", "task": "## Turn 9 [0]\nPay.", "turns": "\n\n".join(sections), "verdict": verdict}
    asked = filled(TRAJECTORY_QUESTION, fields)
    parsed = parse_answer(answer(TRAJECTORY_SYSTEM_PROMPT, asked, model), Window("", range(1, len(turns) + 1)), 3)
    assert parsed.vote.kind.is_readable
    return {turn.number: turn.hint for turn in parsed.named}


def test_of_a_trajectory_it_names_the_turns_that_the_environment_corrected() -> None:
    turns = {'{"name": "a"}': CALL, '{"name": "py.pay"}': "The calls are right."}
    assert about_trajectory(turns, "The calls are right.", "verbatim") == {1: CALL}
    assert about_trajectory({'{"name": "a"}': "ok"}, CALL, "words") == {1: f"Write only the call: {CALL}"}


def test_a_reader_names_the_turn_that_wrote_the_function_of_a_failed_example() -> None:
    turns = {
        "def first(n):\n    return n": "wrote 2 lines",
        "def second(n):\n    return n": "[no output]",
        "python test_solution.py": "ok   first(1)\nFAIL second(2): expected 4, got 2",
    }
    named = about_trajectory(turns, "Hidden tests: 1 of 2 passed.", "reader")
    assert list(named) == [2]
    assert "second" in named[2]
    assert about_trajectory({**turns, "python test_solution.py": "2 of 2 examples passed"}, "All.", "reader") == {}


WRONG = "1 of 3 user turns with calls are right, up to the first wrong one. User turn 2: The state of Kettle is wrong: "
WRONG += "litres is 1.75, which is not as requested. The call fill(litres=0.25) in user turn 2 was the last one that "
WRONG += "changed it."


HINT = "The state of Kettle is wrong: litres is not as requested. The call fill in user turn 2 was the last one that "
HINT += "changed it."
EXTRA = "Error: Kettle.look() got an unexpected keyword argument 'depth'. It must be look(lid: boolean)."
FILL, LOOK = "[fill]\nlitres: 0.25", "I look.\n\n[look]"


@pytest.mark.parametrize(
    ("turn", "result", "verdict", "hint"),
    [
        (FILL, '{"litres": 1.75}', WRONG, HINT),
        (LOOK, '{"litres": 1.75}', WRONG, None),
        (LOOK, "Error: it has no water.", WRONG, "Error: it has no water."),
        (LOOK, EXTRA, WRONG, "It must be look(lid: boolean)."),
        ("Done.", None, WRONG, HINT),
        ("Done.", None, "User turn 1: No function was called.", "No function was called."),
        ("Done.", None, "All 3 user turns with calls are right.", None),
        (FILL, '{"litres": 1.75}', "All 3 user turns with calls are right.", None),
    ],
)
def test_of_a_conversation_the_turns_at_fault_get_what_the_environment_says(
    turn: str, result: str | None, verdict: str, hint: str | None
) -> None:
    later = Evidence("later", "Error: of a later turn.", 3)
    parts = (*([Evidence("tool", result)] if result else []), later, Evidence("verdict", verdict))
    asked = Questions(b"secret").question(HindsightPair(0, "Fill in a litre.", turn, parts))
    vote = parse_vote(answer(JUDGE_SYSTEM_PROMPT, asked, "conversation"))
    assert (vote.decision, vote.hint) == (-1 if hint is None else 1, hint)


@pytest.mark.parametrize(
    ("result", "hint"), [(EXTRA, REPEATED), ('{"error": "It is full."}', REPEATED), ('{"litres": 1.75}', None)]
)
def test_a_repeated_call_gets_a_sentence_that_quotes_no_error(result: str, hint: str | None) -> None:
    parts = (Evidence("tool", result), Evidence("repeated", "The turn before made the same calls."))
    asked = Questions(b"secret").question(HindsightPair(1, "Fill in a litre.", LOOK, parts))
    vote = parse_vote(answer(JUDGE_SYSTEM_PROMPT, asked, "conversation"))
    assert vote.hint == hint


@pytest.mark.parametrize(
    ("verdict", "hint"),
    [
        (
            'status is "a, \\"b\\".", which is not as requested. No call changed it.',
            "status is not as requested. No call changed it.",
        ),
        (
            'home has "x.txt", which does not belong there. home lacks',
            "home has something that does not belong there. home lacks",
        ),
        (
            "orders has the entry [1, 2], which does not belong there.",
            "orders has something that does not belong there.",
        ),
        ('The call mv(a="(b)", c=1) in user turn 3 was the last one', "The call mv in user turn 3 was the last one"),
        ("1 of the 2 results were not seen. Calls of this user turn: ls(a=true).", "1 of the 2 results were not seen."),
    ],
)
def test_a_hint_of_a_conversation_does_not_quote_what_was_wrong(verdict: str, hint: str) -> None:
    assert without_wrong_values(verdict) == hint


BLOCKED = "Nothing changes: a wall is in the way. You see a red ball 2 steps forward; a wall 1 step forward."
LEFT = "The mission is not done after 3 of 24 steps.\nThe red ball was never seen and is 4 steps away now."


@pytest.mark.parametrize(
    ("turn", "result", "verdict", "hint"),
    [
        ("[act]\naction: go forward", BLOCKED, LEFT, "Nothing changes: a wall is in the way."),
        ("[act]\naction: jump", "Error: act can't be called like this.", LEFT, "Error: act can't be called like this."),
        ("[act]\naction: turn left", "You see a wall 1 step left.", LEFT, None),
        ("Done.", None, LEFT, "The mission is not done after 3 of 24 steps."),
        ("Done.", None, "The mission is done after 3 of 24 steps; the reward is 0.89.", None),
    ],
)
def test_of_a_game_the_steps_without_an_effect_and_an_early_end_get_what_the_environment_says(
    turn: str, result: str | None, verdict: str, hint: str | None
) -> None:
    parts = (*([Evidence("tool", result)] if result else []), Evidence("verdict", verdict))
    asked = Questions(b"secret").question(HindsightPair(0, "Your mission: go to the red ball.", turn, parts))
    vote = parse_vote(answer(JUDGE_SYSTEM_PROMPT, asked, "game"))
    assert (vote.decision, vote.hint) == (-1 if hint is None else 1, hint)


def test_of_a_whole_game_the_step_that_lost_an_object_is_named_first() -> None:
    go, see = "[act]\naction: go forward", "You see a red ball 1 step forward."
    turns = {
        go: BLOCKED,
        f"{go} ": "Error: act can't be called like this.",
        f"{go}  ": see,
        "[act]\nturn left": "You see.",
    }
    seen = LEFT.partition("\n")[0] + "\nThe red ball was first seen after step 0, last seen after step {}, was never "
    seen += "nearer than 1 step, and is 1 step away now."
    named = about_trajectory({**turns, "Done.": ""}, seen.format(2), "game")
    assert list(named) == [4, 1, 2], "two of three steps were seen, and one turn was none"
    assert named[4] == seen.format(2).partition("\n")[2]
    assert named[1] == "Nothing changes: a wall is in the way."
    assert list(about_trajectory({**turns, "Done.": ""}, seen.format(3), "game")) == [1, 2, 5], (
        "it was in view at the end"
    )
    assert about_trajectory({go: see}, "The mission is done after 1 of 24 steps; the reward is 0.96.", "game") == {}
