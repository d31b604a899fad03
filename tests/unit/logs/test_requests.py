"""Logs of requests of three protocols, lists of messages, verifiers' results."""

import json
from collections import Counter
from typing import Any

import pytest

from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.requests import (
    is_message_list,
    is_request_log,
    is_verifiers,
    message_list_sessions,
    request_sessions,
    verifiers_sessions,
)
from agentic_opd.logs.session import LeftOut, Session, without_repeats

from .samples import TOOLS, anthropic, chat, request_log, verifiers

EXPECTED = read_log({"messages": chat()}, ()).messages


def learned(sessions: list[Session]) -> list[tuple[int, list[int]]]:
    """For each conversation that is left the number of its messages, and the answers that are learned."""
    left = [session for session in without_repeats(sessions) if session is not None]
    logs = [read_log(session.fields(), ()) for session in left]
    return [
        (
            len(log.messages),
            [i for i, one in enumerate(log.messages) if one["role"] == "assistant" and i not in log.context],
        )
        for log in logs
    ]


def test_the_requests_of_a_session_are_one_conversation() -> None:
    assert is_request_log(request_log())
    assert learned(list(request_sessions(request_log(), Counter()))) == [(6, [1, 3, 5])]


def test_requests_with_another_end_share_what_is_before() -> None:
    last = request_log()[-1]
    other = {**last, "response": {"choices": [{"message": {"role": "assistant", "content": "One."}}]}}
    assert learned(list(request_sessions([*request_log(), other], Counter()))) == [(6, [1, 3, 5]), (6, [5])]


ANSWER = chat()[-1]


def stream(*events: dict[str, Any]) -> str:
    """The text of a stream, as proxies keep it."""
    return "".join(f"event: {event.get('type', 'chunk')}\ndata: {json.dumps(event)}\n\n" for event in events)


TEXT = ANSWER["content"]
STREAMS = {
    "chat": stream({"choices": [{"delta": {"content": TEXT[:2]}}]}, {"choices": [{"delta": {"content": TEXT[2:]}}]}),
    "messages": stream(
        {"type": "message_start", "message": {"type": "message", "role": "assistant", "content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ),
    "responses": stream(
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": TEXT}]},
        },
        {"type": "response.completed", "response": {"id": "r", "status": "completed"}},
    ),
}
PAIRS: dict[str, dict[str, Any]] = {
    **{
        f"streamed {name}": {"request": {"body": {"messages": chat()[:-1]}}, "response": {"body_raw": text}}
        for name, text in STREAMS.items()
    },
    "streamed, as the answer itself": {"request": {"messages": chat()[:-1]}, "response": STREAMS["chat"]},
    "JSON text": {key: json.dumps(value) for key, value in request_log()[-1].items()},
    "one object": {"messages": chat()[:-1], "choices": [{"message": ANSWER}]},
    "batch": {
        "body": {"messages": chat()[:-1]},
        "response": {"status_code": 200, "body": {"choices": [{"message": ANSWER}]}},
    },
    "proxy": {
        "request": {"method": "POST", "url": "u", "body": {"messages": chat()[:-1]}},
        "response": {"status_code": 200, "body": {"choices": [{"message": ANSWER}]}},
    },
    "anthropic": {
        "request": {"model": "m", "system": [{"type": "text", "text": "Help."}], "messages": anthropic()[:-1]},
        "response": {
            "type": "message",
            "role": "assistant",
            "content": anthropic()[-1]["content"],
            "stop_reason": "end",
        },
    },
    "responses": {
        "request": {
            "model": "m",
            "instructions": "Help.",
            "input": [
                {"role": "user", "content": chat()[0]["content"]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
                {"type": "function_call_output", "call_id": "c1", "output": chat()[2]["content"]},
                {"role": "assistant", "content": chat()[3]["content"]},
                {"role": "user", "content": chat()[4]["content"]},
            ],
        },
        "response": {
            "output": [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": ANSWER["content"]}],
                }
            ]
        },
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_form_of_a_request_and_its_answer_is_read(name: str) -> None:
    assert is_request_log([PAIRS[name]])
    (session,) = request_sessions([PAIRS[name]], Counter())
    messages = read_log(session.fields(), ()).messages
    assert [one for one in messages if one["role"] != "system"] == EXPECTED


@pytest.mark.parametrize("text", ["data: {broken\n\n", "event: ping\n\n", 'data: {"choices": {}}\n\n', "not streamed"])
def test_a_stream_without_an_answer_is_counted(text: str) -> None:
    counts = Counter[str]()
    request = {"messages": chat()[:-1]}
    assert not [
        message
        for session in request_sessions([{"request": request, "response": {"body_raw": text}}], counts)
        for message in session.messages[len(request["messages"]) :]
    ]
    assert counts[LeftOut.NO_ANSWER] == 1


def test_a_request_that_names_the_answer_before_it_continues_its_conversation() -> None:
    def turn(number: int, words: str, previous: str | None) -> dict[str, Any]:
        output = [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"Yes {number}."}]}
        ]
        request = {"model": "m", "input": words, "previous_response_id": previous}
        return {"request": request, "response": {"id": f"r{number}", "output": output}}

    counts = Counter[str]()
    records = [turn(1, "One?", None), turn(2, "Two?", "r1"), turn(3, "Three?", "elsewhere")]
    sessions = list(request_sessions(records, counts))
    assert learned(sessions) == [(4, [1, 3])]
    assert counts == {LeftOut.NO_BEGINNING: 1}


def test_an_answer_in_another_form_in_a_later_request_is_learned_once() -> None:
    first, second, third = request_log()
    for record in (second, third):
        answer = record["request"]["messages"][1]
        call = {**answer["tool_calls"][0], "index": 0}
        record["request"]["messages"][1] = {
            "role": "assistant",
            "content": [{"type": "text", "text": answer["content"], "cache_control": {"type": "ephemeral"}}],
            "tool_calls": [call],
            "function_call": None,
        }
    assert learned(list(request_sessions([first, second, third], Counter()))) == [(6, [1, 3, 5])]


def test_a_row_of_messages_is_no_request() -> None:
    assert not is_request_log([{"messages": chat(), "tools": TOOLS}])


def test_a_request_without_an_answer_and_a_tool_of_the_provider_are_counted() -> None:
    counts = Counter[str]()
    record = request_log()[-1]
    record["request"]["tools"] = [*TOOLS, {"type": "web_search"}]
    alone, session = request_sessions([{"request": record["request"], "response": None}, record, {"a": 1}], counts)
    assert len(alone.messages) == len(session.messages) - 1
    assert session.tools == TOOLS
    assert counts == {LeftOut.NO_ANSWER: 1, LeftOut.NO_FUNCTION: 2, "records of unknown type 'None'": 1}


def test_messages_one_a_line_are_a_conversation() -> None:
    assert is_message_list(anthropic())
    (session,) = message_list_sessions(anthropic(), Counter())
    assert read_log(session.fields(), ()).messages == EXPECTED


def test_the_prompt_of_a_result_is_not_learned_and_a_text_is_counted() -> None:
    counts = Counter[str]()
    shown = [{"role": "user", "content": "Show it."}, {"role": "assistant", "content": "Like this."}]
    row = {**verifiers(), "prompt": [*shown, *verifiers()["prompt"]], "info": json.dumps({"oai_tools": TOOLS})}
    (session,) = verifiers_sessions([row, {**row, "completion": "text"}], counts)
    assert read_log(session.fields(), ()).context == {1: LogNote.PROMPT}
    assert session.tools == TOOLS
    assert counts == {LeftOut.TEXT_PROMPT: 1}


@pytest.mark.parametrize("name", PAIRS)
def test_an_answer_that_was_cut_off_is_not_learned(name: str) -> None:
    text = json.dumps(PAIRS[name])
    for whole, cut in (('"stop"', '"length"'), ('"end_turn"', '"max_tokens"'), ("completed", "incomplete")):
        text = text.replace(whole, cut).replace(whole.replace('"', '\\"'), cut.replace('"', '\\"'))
    (session,) = request_sessions([json.loads(text)], Counter())
    context = read_log(session.fields(), ()).context
    has_reason = text != json.dumps(PAIRS[name])
    assert (LogNote.STOPPED in context.values()) == has_reason


def trace(**fields: Any) -> dict[str, Any]:
    """A trace of verifiers with two branches; calls are flat."""
    messages = chat()[:4]
    messages[1]["tool_calls"] = [{"id": "c1", "name": "bash", "arguments": '{"command": "ls"}'}]
    other = {"role": "assistant", "content": "None."}
    parents = (None, 0, 1, 2, 2)
    nodes = [
        {"parent": parent, "message": message, "sampled": message["role"] == "assistant"}
        for parent, message in zip(parents, [*messages, other], strict=True)
    ]
    tool = {**TOOLS[0]["function"], "description": "Run it."}
    calls = [{"node": 4, "finish_reason": "length"}]
    return {"id": "t", "task": {"data": {}}, "tools": [tool], "nodes": nodes, "calls": calls, **fields}


@pytest.mark.parametrize("is_episode", [True, False])
def test_each_branch_of_a_trace_is_a_conversation(is_episode: bool) -> None:
    record = {"id": "e", "env": {}, "traces": [trace()]} if is_episode else trace()
    assert is_verifiers([record])
    first, second = verifiers_sessions([record], Counter())
    assert read_log(first.fields(), ()).messages == read_log({"messages": chat()[:4]}, ()).messages
    assert [tool["name"] for tool in first.tools] == ["bash"]
    log = read_log(second.fields(), ())
    assert (log.messages[3]["content"], log.context) == ("None.", {3: LogNote.STOPPED})


def test_what_no_model_of_the_run_wrote_is_not_learned() -> None:
    record = trace()
    record["nodes"][1]["sampled"] = False
    counts = Counter[str]()
    first, _ = verifiers_sessions([record, trace(agent={"trainable": False})], counts)
    assert read_log(first.fields(), ()).context == {1: LogNote.PROMPT}
    assert counts == {LeftOut.NOT_TRAINED: 1}


def test_the_last_answer_of_a_truncated_result_is_not_learned() -> None:
    (session,) = verifiers_sessions([{**verifiers(), "is_truncated": True}], Counter())
    assert read_log(session.fields(), ()).context == {5: LogNote.STOPPED}
