"""The judge of `scripts/learn --world functions`: what it reads of the question, and what it says."""

import pytest
from learning.scripted_judge import answer, evidence, in_words

from agentic_opd.core.types import Evidence, HindsightPair
from agentic_opd.distill.hints import Questions, parse_step_vote, parse_vote
from agentic_opd.distill.prompts import JUDGE_STEP_PROMPT, JUDGE_SYSTEM_PROMPT

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
