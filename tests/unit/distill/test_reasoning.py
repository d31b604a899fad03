"""A vote is read behind reasoning in the marks of any model family; reasoning without an end is no vote."""

import time

import pytest

from agentic_opd.core.types import Vote
from agentic_opd.distill.hints import parse_step_vote, parse_vote

from .fakes import HINT, POSITIVE

DRAFT = "Maybe \\boxed{-1}? Or [HINT_START]Some draft of a hint.[HINT_END]"
MARKS = [
    *(("<think>", "</think>"), ("<thinking>\n", "\n</thinking>\n"), ("<thought>", "</thought>"), ("", "</think>")),
    *(("<reasoning>", "</reasoning>"), ("<seed:think>", "</seed:think>"), ("<mm:think>", "</mm:think>")),
    *(("[THINK]", "[/THINK]"), ("[REASONING]", "[/REASONING]"), ("\u25c1think\u25b7", "\u25c1/think\u25b7")),
    *(("<|think|>", "<|/think|>"), ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>")),
    ("<|begin_of_thought|>", "<|end_of_thought|>\n\n<|begin_of_solution|>"),
    *(("<|inner_prefix|>", "<|inner_suffix|>"), ("<|channel>thought\n", "<channel|>"), ("<ifm|think>", "</ifm|think>")),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"),
    *(("analysis", "assistantfinal"), ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>")),
    ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ("<|message_model|><|content_thinking|>", "<|end_message|><|message_model|><|content_text|>"),
    ("<\uff5cbegin\u2581of\u2581thinking\uff5c>", "<\uff5cend\u2581of\u2581thinking\uff5c>"),
    ("Here is my thought process: ", " Here is my response: "),
    ("Here's my thought process:\n", "\nHere's my response:\n"),
    *(("<scratchpad>", "</scratchpad>"), ("<analysis>", "</analysis>"), ("<inner_monologue>", "</inner_monologue>")),
    *(("<reflection>", "</reflection>"), ("<think_fast>", "< /think_fast >"), ("<unused94>thought\n", "<unused95>")),
    *(("Thinking...\n", "\n...done thinking.\n"), ("## Reasoning\n", "\n--- end of reasoning ---\n")),
    *(("<\u601d\u8003>", "</\u601d\u8003>"), ("", "</\u63a8\u7406>"), ("[[think]]", "[[/think]]")),
    *(("<|thinking|>", "<|/thinking|>"), ("<|begin_think|>", "<|end_think|>"), ("<think:x>", "</think:x>")),
    *(("<musing>", "</musing>"), ("[notes]", "[/notes]"), ("<a>x</a>\n<b>", "</b>")),
    *(("", "\n<answer>"), ("<think>", "</think>\n<answer>\n"), ("**Reasoning:** ", "\n**Final answer:** ")),
    *(("Reasoning: ", "\nAnswer: "), ("", "\n### Verdict\n")),
]


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_a_vote_is_read_behind_reasoning(begin: str, end: str) -> None:
    text = f"{begin}{DRAFT}{end}{POSITIVE}"
    assert parse_vote(text) == Vote(1, HINT, text)
    assert parse_step_vote(f"{begin}Maybe \\boxed{{0}}?{end}\\boxed{{-1}}") == -1


@pytest.mark.parametrize("tail", ["</answer>", "<|end|>", "<|return|>", "<|END_RESPONSE|>", "\n</response>\n"])
def test_marks_behind_a_vote_change_nothing(tail: str) -> None:
    assert parse_vote(f"<think>{DRAFT}</think>\n<answer>{POSITIVE}{tail}").hint == HINT
    assert parse_vote(POSITIVE + tail).hint == HINT


@pytest.mark.parametrize(
    "begin",
    [
        *(
            "<think>",
            "<thinking>",
            " [THINK]",
            "<seed:think>",
            "\u25c1think\u25b7",
            "<|START_THINKING|>",
            "<thought>\n",
        ),
        *("<|channel|>analysis<|message|>", "<|channel>thought\n", "Here is my thought process: ", "<reasoning>"),
    ],
)
def test_reasoning_without_an_end_is_no_vote(begin: str) -> None:
    assert parse_vote(begin + POSITIVE).decision is None
    assert parse_step_vote(f"{begin}\\boxed{{1}}") is None


@pytest.mark.parametrize("end", ["</think>", "</reasoning>", "[/THINK]", "<|END_THINKING|>", "</seed:think>"])
def test_reasoning_without_an_answer_is_no_vote(end: str) -> None:
    assert parse_vote(POSITIVE + end).decision is None


@pytest.mark.parametrize(
    "hint",
    [
        "Close the </think> tag, and the [/THINK] one.",
        "Say 'Here is my response:' before the answer.",
        "Write <answer> first, then </reasoning>.",
        "The tag <thinking> is never closed.",
    ],
)
def test_marks_in_a_hint_belong_to_the_hint(hint: str) -> None:
    for begin in ("", "<think>hm</think>", "Here is my thought process: a Here is my response: "):
        assert parse_vote(f"{begin}\\boxed{{1}} [HINT_START]{hint}[HINT_END]").hint == hint


@pytest.mark.parametrize(
    "text",
    [
        f"<hint>[HINT_START]{HINT}[HINT_END]</hint>\n\\boxed{{1}}",
        f"<vote>\\boxed{{1}}</vote><hint>[HINT_START]{HINT}[HINT_END]</hint>",
        f"{POSITIVE}\nFinal answer: \\boxed{{1}}",
        f"{POSITIVE}\n<answer>\\boxed{{1}}</answer>",
        f"The turn [its reasoning ends here] is wrong. {POSITIVE}",
        f"The extended thinking <extended_thinking> is fine. {POSITIVE}",
    ],
)
def test_what_was_a_vote_stays_a_vote(text: str) -> None:
    assert parse_vote(text).hint == HINT


@pytest.mark.parametrize(
    "piece", ["<", "</think", "<a>", "[", "[HINT_END]", "Here is my response:", "\nAnswer", "<|", "|>"]
)
def test_long_texts_are_read_in_linear_time(piece: str) -> None:
    begin = time.process_time()
    parse_vote((piece * 100_000)[:100_000])
    assert time.process_time() - begin < 2
