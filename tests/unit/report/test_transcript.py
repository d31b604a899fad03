from agentic_opd.core.types import ContextTurn
from agentic_opd.report.transcript import (
    Passage,
    Region,
    called_names,
    context_parts,
    message_text,
    regions,
    split_messages,
)

from .sample import CHAT

CONTROL = ("<|im_start|>", "<|im_end|>", "</tool_response>")


def test_messages_are_found_in_what_the_model_read() -> None:
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "name": "ann", "content": "Go."}]
    parts = context_parts(text, messages)
    assert "".join(part.text for part in parts) == text
    assert [part for part in parts if part.role != "template"] == [
        Passage("system", "Be brief."),
        Passage("user", "Go.", "ann"),
    ]


def test_a_message_is_found_though_its_control_tokens_were_broken() -> None:
    said = "no end: </tool_response>, <|im_end|>"
    read = "no end: < /tool_response>, < |im_end|>"
    parts = context_parts(f"<|im_start|>tool\n{read}<|im_end|>\n", [{"role": "tool", "content": said}], CONTROL)
    assert [part for part in parts if part.role != "template"] == [Passage("tool", read)]
    assert context_parts(read, [{"role": "tool", "content": said}]) == [Passage("context", read)]
    assert context_parts(said, [{"role": "tool", "content": said}], CONTROL) == [Passage("tool", said)]


def test_what_is_not_there_word_for_word_stays_in_one_piece() -> None:
    assert context_parts("abc", [{"role": "user", "content": "x"}]) == [Passage("context", "abc")]
    assert context_parts("abc", [{"role": "user", "content": ""}]) == [Passage("context", "abc")]
    assert context_parts("abc", []) == [Passage("template", "abc")]


def test_an_answer_behind_the_last_token_was_not_read() -> None:
    assert context_parts("", [{"role": "tool", "name": "ls", "content": "a"}]) == [Passage("tool", "a", "ls", True)]


def test_each_stretch_between_turns_has_its_messages() -> None:
    stretches = split_messages(CHAT, 2)
    assert [len(others) for _, others in stretches] == [2, 1, 0]
    assert [called_names(said) for said, _ in stretches] == [[], ["terminal"], []]
    assert split_messages(CHAT, 3) == [(None, [])] * 4
    assert split_messages([], 0) == [(None, [])]


def test_an_assistants_message_that_is_context_stands_among_the_others() -> None:
    said = [message for message in CHAT if message["role"] == "assistant"]
    place = CHAT.index(said[0])
    whole, later = split_messages(CHAT, 2), split_messages(CHAT, 1, {place: ContextTurn(place, "side")})
    named = {**said[0], "name": "not learned from here: a side turn"}
    assert later[0] == (None, [*whole[0][1], named, *whole[1][1]])
    assert later[1] == whole[2]
    changed = {place: ContextTurn(place, "altered_sampling", ("top_p", "top_k"))}
    (_, messages), _ = split_messages(CHAT, 1, changed)
    assert messages[-2]["name"] == "not learned from here: its distribution was changed by top_p, top_k"


def test_content_and_calls_of_any_shape_are_text() -> None:
    assert message_text({"content": None}) == ""
    assert message_text({"content": [{"type": "text", "text": "é"}]}) == '[{"type": "text", "text": "é"}]'
    assert called_names({"tool_calls": "x"}) == []
    assert called_names({"tool_calls": [1, {}, {"function": {"name": 5}}]}) == ["5"]


def test_calls_and_reasoning_are_whole_tokens() -> None:
    """The marks need not begin or end where a token does."""
    texts = ["<think>", "hm", "</think>\n", "\n<tool", "_call>", "{}", "</tool_call>", " and <tool_call>{", "}"]
    assert regions(texts) == [Region("think", 0, 3), Region("call", 3, 7), Region("call", 7, 9)]
    assert regions(["", "a", ""]) == []
    assert regions([]) == []
    assert regions(["x", "[TOOL_CALLS]", "[{}]"]) == [Region("call", 1, 3)]
    assert regions(["<tool_call>a</tool_call><tool_call>b</tool_call>"]) == [Region("call", 0, 1)]
