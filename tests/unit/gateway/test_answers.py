"""Streams of the three protocols become what the client's next request says that the answer was."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_opd.gateway.answers import ForeignAnswer, UnrecordableError, read_answers, without_media

from .foreign import (
    call,
    call_item,
    chat_stream,
    message_item,
    messages_answer,
    messages_stream,
    responses_stream,
    sse,
)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def only(path: str, data: bytes) -> ForeignAnswer:
    (answer,) = read_answers(path, data)
    return answer


def chunks(*deltas: dict[str, Any], reason: str | None = "stop", **more: Any) -> bytes:
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more} for delta in deltas]
    return sse(*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_stream_is_read_with_any_line_ends(line_end: str) -> None:
    stream = chat_stream(["Hel", "lo."], [call("c1", code="f()")], "tool_calls").replace(b"\n", line_end.encode())
    answer = only(CHAT, stream)
    (message,) = answer.items
    assert (message["content"], message["tool_calls"]) == ("Hello.", [call("c1", code="f()")])
    assert (answer.finish_reason, answer.model, answer.answer_id) == ("tool_calls", "big", "chatcmpl-1")
    assert answer.usage == {"input": 7, "output": 3}


def test_chat_streams_of_other_servers_are_read() -> None:
    """Reasoning in either field, calls without an index, names in every piece, the legacy form, a null choice."""
    (message,) = only(CHAT, chunks({"reasoning": "I "}, {"reasoning": "think."}, {"content": "Yes."})).items
    assert (message["reasoning"], message["content"]) == ("I think.", "Yes.")
    whole = [{"id": f"c{number}", "function": {"name": "run", "arguments": "{}"}} for number in (1, 2)]
    (message,) = only(CHAT, chunks({"tool_calls": whole[:1]}, {"tool_calls": whole[1:]})).items
    assert [called["id"] for called in message["tool_calls"]] == ["c1", "c2"]
    pieces = [{"index": 0, "id": "c", "function": {"name": "run", "arguments": half}} for half in ('{"a"', ": 1}")]
    (message,) = only(CHAT, chunks(*({"tool_calls": [piece]} for piece in pieces))).items
    assert message["tool_calls"] == [{"id": "c", "function": {"name": "run", "arguments": '{"a": 1}'}}]
    (message,) = only(CHAT, chunks({"function_call": {"name": "run"}}, {"function_call": {"arguments": "{}"}})).items
    assert message["tool_calls"][0]["function"] == {"name": "run", "arguments": "{}"}
    custom = {"index": 0, "id": "c", "type": "custom", "custom": {"name": "patch", "input": "+a"}}
    (message,) = only(CHAT, chunks({"tool_calls": [custom]}, choices=None) + chunks({"tool_calls": [custom]})).items
    assert message["tool_calls"][0]["custom"] == {"name": "patch", "input": "+a"}


def test_each_choice_is_an_answer() -> None:
    events = [{"choices": [{"index": number, "delta": {"content": f"{number}."}}]} for number in (1, 0)]
    assert [answer.items[0]["content"] for answer in read_answers(CHAT, sse(*events))] == ["0.", "1."]


def test_a_call_that_broke_off_is_left_out_and_the_text_before_it_stays() -> None:
    blocks = [{"type": "text", "text": "I run it."}, {"type": "tool_use", "id": "t", "name": "run", "input": {"a": 1}}]
    stream = messages_stream(*blocks)
    answer = only(MESSAGES, stream[: stream.rindex(b"event: content_block_delta")])
    assert answer.items[0]["content"] == blocks[:1]
    assert (answer.is_whole, answer.finish_reason) == (False, "")
    stream = responses_stream(message_item("I run it."), call_item("c", a=1))
    answer = only(RESPONSES, stream[: stream.rindex(b"event: response.output_item.done")])
    assert [item["type"] for item in answer.items] == ["message"]
    assert (answer.is_whole, answer.finish_reason) == (False, "")


def test_a_message_that_broke_off_keeps_what_arrived() -> None:
    stream = responses_stream(message_item("Hello."))
    answer = only(RESPONSES, stream[: stream.index(b"event: response.output_item.done")])
    assert answer.items[0]["content"] == [{"type": "output_text", "text": "Hello."}]
    assert not answer.is_whole


@pytest.mark.parametrize(
    ("path", "body", "is_whole"),
    [
        (CHAT, {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]}, False),
        (CHAT, {"choices": [{"message": {"content": "a"}, "finish_reason": "content_filter"}]}, False),
        (CHAT, {"choices": [{"message": {"content": "a"}, "finish_reason": "tool_calls"}]}, True),
        (MESSAGES, messages_answer(reason="max_tokens"), False),
        (MESSAGES, messages_answer(reason="refusal"), False),
        (MESSAGES, messages_answer(reason="stop_sequence"), True),
        (
            RESPONSES,
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": []},
            False,
        ),
        (RESPONSES, {"status": "completed", "output": []}, True),
    ],
)
def test_an_answer_is_whole_if_the_model_ended_it(path: str, body: Any, is_whole: bool) -> None:
    answer = only(path, json.dumps(body).encode())
    assert answer.is_whole is is_whole
    assert answer.finish_reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["index", "delta", "text"]), inner),
    max_leaves=6,
)
NAMES = ("choices", "delta", "index", "tool_calls", "function", "content", "content_block", "item", "response", "type")
EVENTS = st.lists(
    st.dictionaries(st.sampled_from((*NAMES, "output_index", "message", "output", "usage")), JSON), max_size=4
)
TYPES = ("content_block_start", "content_block_delta", "message_start", "message_delta")
TYPES += ("response.output_item.added", "response.output_item.done", "response.output_text.delta")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(events=EVENTS, kinds=st.lists(st.sampled_from(TYPES), min_size=4, max_size=4))
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_any_events_are_read_or_refused(path: str, events: list[Any], kinds: list[str]) -> None:
    typed = [{"type": kind, **event} for kind, event in zip(kinds, events, strict=False)]
    for data in (sse(*events), sse(*typed), json.dumps(events[0] if events else {}).encode()):
        try:
            answers = read_answers(path, data)
        except UnrecordableError:
            continue
        assert all(isinstance(answer, ForeignAnswer) for answer in answers)


def test_only_parts_of_messages_are_replaced() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "AA"}}
    text = {"type": "document", "source": {"type": "text", "data": "kept"}}
    arguments = {"type": "tool_use", "input": {"content": [image], "type": "image"}, "id": "t", "name": "f"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image, {"type": "text", "text": "a"}]}
    kinds: list[str] = []
    messages = [{"role": "user", "content": [image, text]}, {"role": "assistant", "content": [arguments]}]
    replaced = without_media([*messages, {"role": "user", "content": [result]}], kinds)
    shown = {"type": "text", "text": "[picture]"}
    assert replaced[0]["content"] == [shown, text]
    assert replaced[1] == messages[1]
    assert replaced[2]["content"][0]["content"] == [shown, {"type": "text", "text": "a"}]
    assert kinds == ["image", "image"]
