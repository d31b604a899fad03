"""Every protocol of the gateway, read by its own client's library: whole answers, streams, sessions and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response

from agentic_opd.rollout.renderer import load_renderer

from .fakes import CALL, TOOL, Running, ScriptedVllm
from .test_gateway import checked, run

KEY = "a-key"
SCHEMA = TOOL["function"]["parameters"]
RESPONSES_TOOL = {"type": "function", "name": "run", "parameters": SCHEMA, "strict": False}
MESSAGES_TOOL = {"name": "run", "input_schema": SCHEMA}


def in_turns(*says: str) -> Callable[[str, int], str]:
    """What is sampled by the number of tool results and user messages that the prompt holds."""
    return lambda prompt, _: says[min(prompt.count("<|im_start|>user"), len(says)) - 1]


def openai_client(at: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{at.url}/v1", api_key=KEY, max_retries=0)


def anthropic_client(at: Running) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic's protocol is not installed")
    return anthropic.AsyncAnthropic(base_url=at.url, api_key=KEY, max_retries=0)


async def posted(at: Running, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    return await at.http.post(
        f"{at.url}{path}", content=json.dumps(body), headers={"Content-Type": "application/json", **(headers or {})}
    )


async def ended(at: Running, session: str, **body: Any) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert (await posted(at, f"/sessions/{session}/end", body, headers)).status_code == 200


def is_one_line(vllm: ScriptedVllm, groups: list[dict[str, Any]]) -> None:
    """One session of one branch, each of whose turns is the tokens that vLLM read and sampled."""
    (group,) = checked(groups)
    prompt, sampled = vllm.sampled[-1]
    assert group["tokens"] == [prompt + sampled]
    learned = [token for token in group["masks"][0] if token != -100]
    assert learned == [token for _, ids in vllm.sampled for token in ids]


# --------------------------------------------------------------------------------------------------------- responses


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "refers"), [(False, False), (True, False), (True, True)])
def test_a_session_of_responses_by_items(tokenizer: Any, tmp_path: Path, stream: bool, refers: bool) -> None:
    vllm = ScriptedVllm(tokenizer, in_turns(f"I run it.\n{CALL}", "It works.", "You are welcome."))

    async def talk(at: Running) -> Any:
        async with openai_client(at) as client:
            items: list[Any] = [{"role": "user", "content": "Write f."}]
            for more in ("result", "Thanks.", None):
                options: Any = {"model": "any", "instructions": "Be short.", "input": items, "tools": [RESPONSES_TOOL]}
                if stream:
                    async with client.responses.stream(**options) as events:
                        kinds = [event.type async for event in events]
                        answer = await events.get_final_response()
                    assert kinds[:2] == ["response.created", "response.in_progress"]
                    assert kinds[-1] == "response.completed"
                else:
                    answer = await client.responses.create(**options)
                assert answer.status == "completed"
                assert answer.usage is not None
                assert answer.usage.output_tokens == len(vllm.sampled[-1][1])
                if refers:
                    items += [{"type": "item_reference", "id": item.id} for item in answer.output]
                else:
                    items += [item.model_dump(exclude_none=True) for item in answer.output]
                calls = [item for item in answer.output if item.type == "function_call"]
                if calls:
                    assert (calls[0].name, calls[0].arguments) == ("run", '{"code": "f()"}')
                    assert answer.output_text == "I run it."
                    items.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "ok"})
                elif more is not None:
                    items.append({"role": "user", "content": more})
            assert answer.output_text == "You are welcome."
        (session,) = at.gateway._sessions
        await ended(at, session.session_id)
        return await at.groups()

    is_one_line(vllm, run(tmp_path, vllm, talk))


def test_an_item_is_found_by_its_id_when_its_session_is_over(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, in_turns("One.", "Two."))

    async def talk(at: Running) -> None:
        async with openai_client(at) as client:
            first = await client.responses.create(model="m", input="a")
            (session,) = at.gateway._sessions
            await ended(at, session.session_id)
            await at.groups()
            a, b = ({"role": "user", "content": text} for text in "ab")
            refers = {"type": "item_reference", "id": first.output[0].id}
            items: Any = [a, refers, b]
            assert (await client.responses.create(model="m", input=items)).output_text == "Two."
            own, other = {"Authorization": f"Bearer {KEY}"}, {}
            unknown, twice = [a, {**refers, "id": "x"}, b], [a, refers, b, refers, b]
            for wrong, headers, status in ((unknown, own, 404), (twice, own, 400), (items, other, 404)):
                lost = await posted(at, "/v1/responses", {"input": wrong}, headers)
                assert (lost.status_code, lost.json()["error"]["param"]) == (status, "input")

    run(tmp_path, vllm, talk)
    assert "One." in tokenizer.decode(vllm.sampled[1][0])


def test_previous_response_continues_the_turns_without_their_instructions(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, in_turns("One.", "Two.", "Three."))

    async def talk(at: Running) -> Any:
        async with openai_client(at) as client:
            first = await client.responses.create(model="m", input="a", instructions="Be short.")
            second = await client.responses.create(
                model="m", input="b", instructions="Be short.", previous_response_id=first.id
            )
            assert second.previous_response_id == first.id
            await client.responses.create(model="m", input="c", previous_response_id=second.id)
            lost = await posted(at, "/v1/responses", {"input": "d", "previous_response_id": "resp_none"})
        assert (lost.status_code, lost.json()["error"]["param"]) == (404, "previous_response_id")
        (session,) = at.gateway._sessions
        await ended(at, session.session_id, reward=1.0)
        return await at.groups(), first.id

    groups, first = run(tmp_path, vllm, talk)
    prompts = [tokenizer.decode(prompt) for prompt, _ in vllm.sampled]
    assert prompts[1].startswith(prompts[0])
    assert ["Be short." in prompt for prompt in prompts] == [True, True, False]
    assert "One." in prompts[2]
    assert "Two." in prompts[2]
    (group,) = checked(groups)
    assert sorted(map(len, group["tokens"])) == sorted(len(p) + len(s) for p, s in vllm.sampled[1:])
    assert group["scores"] == [1.0, 1.0]

    async def later(at: Running) -> Any:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"input": "b", "previous_response_id": first}
        return (await posted(at, "/v1/responses", body, headers)).status_code

    assert run(tmp_path, vllm, later) == 200, "the journal holds the answers of sessions that are over"
    assert "One." in tokenizer.decode(vllm.sampled[-1][0])


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_the_events_of_responses_are_numbered_and_complete(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: f"<think>\nHm.\n</think>\n\nI run it.\n{CALL}\n{CALL}")

    async def talk(at: Running) -> Any:
        body = {"input": "a", "tools": [RESPONSES_TOOL], "stream": True, "include": ["reasoning.encrypted_content"]}
        return (await posted(at, "/v1/responses", body)).text

    renderer = load_renderer(tokenizer, "qwen3", {"enable_thinking": True})
    events = events_of(run(tmp_path, vllm, talk, renderer=renderer))
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [data["sequence_number"] for _, data in events] == [*range(len(events))]
    item = ["response.output_item.added", "response.content_part.added"]
    done = ["response.content_part.done", "response.output_item.done"]
    call = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    deltas = ("response.reasoning_text.delta", "response.output_text.delta")
    kinds = [name for at, (name, _) in enumerate(events) if name not in deltas or events[at - 1][0] != name]
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(*item, "response.reasoning_text.delta", "response.reasoning_text.done", *done),
        *(*item, "response.output_text.delta", "response.output_text.done", *done),
        *(item[0], *call, done[1]),
        *(item[0], *call, done[1]),
        "response.completed",
    ]
    final = Response.model_validate(events[-1][1]["response"])
    assert [one.type for one in final.output] == ["reasoning", "message", "function_call", "function_call"]
    over = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert over == events[-1][1]["response"]["output"]
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens > 0


def test_custom_tools_namespaces_and_what_is_not_offered(tokenizer: Any, tmp_path: Path) -> None:
    patch = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    spaced = '<tool_call>\n{"name": "fs__read", "arguments": {}}\n</tool_call>'
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: f"{patch}\n{spaced}")
    tools = [
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "fs", "description": "files", "tools": [{"type": "function", "name": "read"}]},
        {"type": "web_search"},
    ]

    async def talk(at: Running) -> Any:
        answer = (await posted(at, "/v1/responses", {"input": "a", "tools": tools})).json()
        results = [
            {"type": "custom_tool_call_output", "call_id": answer["output"][0]["call_id"], "output": "done"},
            {
                "type": "function_call_output",
                "call_id": answer["output"][1]["call_id"],
                "output": [{"type": "input_text", "text": "text"}],
            },
        ]
        user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
        again = await posted(at, "/v1/responses", {"input": [user, *answer["output"], *results], "tools": tools})
        assert again.status_code == 200, again.text
        stream = await posted(at, "/v1/responses", {"input": "a", "tools": tools, "stream": True})
        return answer, [name for name, _ in events_of(stream.text)]

    answer, kinds = run(tmp_path, vllm, talk)
    custom, function = answer["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "*** Begin")
    assert (function["name"], function["namespace"]) == ("read", "fs")
    assert vllm.sampled[1][0][: len(vllm.sampled[0][0])] == vllm.sampled[0][0]
    assert "response.custom_tool_call_input.done" in kinds


# ---------------------------------------------------------------------------------------------------------- messages


@pytest.mark.slow  # The client of Anthropic's protocol takes seconds to import.
@pytest.mark.parametrize("stream", [False, True])
def test_a_session_of_messages_by_blocks(tokenizer: Any, tmp_path: Path, stream: bool) -> None:
    vllm = ScriptedVllm(tokenizer, in_turns(f"I run it.\n{CALL}", "It works.", "You are welcome."))

    async def talk(at: Running) -> Any:
        async with anthropic_client(at) as client:
            messages: list[Any] = [{"role": "user", "content": "Write f."}]
            for turn, more in enumerate(("result", "Thanks.", None)):
                billing = f"x-anthropic-billing-header: cch={turn};"
                system = [
                    {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
                    for text in (billing, "Be short.")
                ]
                options: Any = {
                    "model": "any",
                    "max_tokens": 50,
                    "system": system,
                    "messages": messages,
                    "tools": [MESSAGES_TOOL],
                }
                if stream:
                    async with client.messages.stream(**options) as events:
                        texts = [text async for text in events.text_stream]
                        answer = await events.get_final_message()
                    assert "".join(texts) == "".join(one.text for one in answer.content if one.type == "text")
                else:
                    answer = await client.messages.create(**options)
                assert answer.usage.output_tokens == len(vllm.sampled[-1][1])
                messages.append(
                    {"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in answer.content]}
                )
                calls = [one for one in answer.content if one.type == "tool_use"]
                assert answer.stop_reason == ("tool_use" if calls else "end_turn")
                if calls:
                    assert (calls[0].name, calls[0].input) == ("run", {"code": "f()"})
                    result = {
                        "type": "tool_result",
                        "tool_use_id": calls[0].id,
                        "content": [{"type": "text", "text": "ok"}],
                    }
                    messages.append({"role": "user", "content": [result]})
                elif more is not None:
                    messages.append({"role": "user", "content": [{"type": "text", "text": more}]})
            assert answer.content[0].text == "You are welcome."
            counted = await client.messages.count_tokens(
                model="m", messages=messages[:1], system=system, tools=[MESSAGES_TOOL]
            )
            assert counted.input_tokens == len(vllm.sampled[0][0])
            said = [*messages[:1], {"role": "assistant", "content": "You are welcome."}]
            longer = await client.messages.count_tokens(model="m", messages=said, system=system, tools=[MESSAGES_TOOL])
            assert longer.input_tokens > counted.input_tokens
        (session,) = at.gateway._sessions
        await ended(at, session.session_id)
        return await at.groups()

    is_one_line(vllm, run(tmp_path, vllm, talk))


def test_the_events_of_messages(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: f"<think>\nHm.\n</think>\n\nI run it.\n{CALL}")

    async def talk(at: Running) -> Any:
        body = {
            "max_tokens": 90,
            "messages": [{"role": "user", "content": "a"}],
            "tools": [MESSAGES_TOOL],
            "stream": True,
        }
        return (await posted(at, "/v1/messages", body)).text

    renderer = load_renderer(tokenizer, "qwen3", {"enable_thinking": True})
    events = events_of(run(tmp_path, vllm, talk, renderer=renderer))
    kinds = [
        (name, data.get("index"), (data.get("delta") or data.get("content_block") or {}).get("type"))
        for name, data in events
    ]
    assert [one for at, one in enumerate(kinds) if kinds[at - 1] != one] == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, "thinking"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "text"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("said", "options", "reason", "sequence"),
    [
        ("Long and lon...", {}, "max_tokens", None),
        ("def f(x): return x", {"stop_sequences": [" return"]}, "stop_sequence", " return"),
    ],
)
def test_why_a_message_ended(
    tokenizer: Any, tmp_path: Path, said: str, options: dict[str, Any], reason: str, sequence: str | None
) -> None:
    async def talk(at: Running) -> Any:
        body = {"max_tokens": 90, "messages": [{"role": "user", "content": "a"}], **options}
        return (await posted(at, "/v1/messages", body)).json()

    answer = run(tmp_path, ScriptedVllm(tokenizer, lambda prompt, _: said), talk)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


# ------------------------------------------------------------------------------------------------------------ errors

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
}
"""The smallest body of each protocol."""
WRONG = [{"a": [1]}, [[{}]], "\ud83d", -7.5, "x" * 50]
FIELDS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": (
        "messages",
        "tools",
        "tool_choice",
        "response_format",
        "stop",
        "n",
        "max_tokens",
        "logit_bias",
    ),
    "/v1/responses": (
        "input",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "max_output_tokens",
        "include",
        "temperature",
    ),
    "/v1/messages": (
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "max_tokens",
        "stop_sequences",
        "metadata",
    ),
}


@pytest.mark.parametrize("path", PATHS)
def test_hostile_fields_are_refused_by_name_in_the_protocols_own_form(
    tokenizer: Any, tmp_path: Path, path: str
) -> None:
    nested: Any = "x"
    for _ in range(300):
        nested = [nested]

    async def talk(at: Running) -> None:
        for field in FIELDS[path]:
            for wrong in (*WRONG, nested):
                response = await posted(at, path, {**PATHS[path], field: wrong})
                assert response.status_code in (200, 400), (field, wrong, response.text)
                if response.status_code == 200:
                    continue
                error = response.json()["error"]
                if wrong is not nested:
                    told = error["message"] if path == "/v1/messages" else error["param"]
                    assert told.startswith(field), (field, wrong, error)
                assert error["type"] == "invalid_request_error"
                assert (response.json().get("type") == "error") == (path == "/v1/messages")
        stop = "stop_sequences" if path == "/v1/messages" else "stop"
        assert (await posted(at, path, {**PATHS[path], stop: [""]})).status_code == 400, "it ends every text"
        unknown = await posted(at, path, {**PATHS[path], "temperatur": 1})
        assert (unknown.status_code, "temperatur" in unknown.text) == (400, True)
        long = json.loads(json.dumps(PATHS[path]).replace('"a"', json.dumps("word " * 6000)))
        over = await posted(at, path, long)
        assert (over.status_code, "maximum context length is 1024 tokens" in over.text) == (400, True)
        assert ("prompt is too long" in over.text) == (path == "/v1/messages")
        for content, status in ((b"[" * 100_000, 400), (b"[]", 400), (b"\xff", 400), (b'"x"', 400)):
            response = await at.http.post(
                f"{at.url}{path}", content=content, headers={"Content-Type": "application/json"}
            )
            assert response.status_code == status
        assert (await at.http.get(f"{at.url}{path}")).status_code == 405

    run(tmp_path, ScriptedVllm(tokenizer), talk)


def test_an_answer_can_be_read_again(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: f"I run it.\n{CALL}")
    custom = {"type": "custom", "name": "note"}

    async def talk(at: Running) -> None:
        async with openai_client(at) as client:
            tools: Any = [RESPONSES_TOOL, custom]
            given = await client.responses.create(model="any", input="Write f.", tools=tools, temperature=0.7)
            for is_open in (True, False):
                again = await client.responses.retrieve(given.id)
                assert [(item.type, item.status) for item in again.output] == [  # type: ignore[union-attr]
                    ("message", "completed"),
                    ("function_call", "completed"),
                ]
                for name in ("id", "output_text", "usage", "status", "temperature", "model"):
                    assert getattr(again, name) == getattr(given, name), name
                called = again.output[1]
                assert called.to_dict()["arguments"] == given.output[1].to_dict()["arguments"]
                if is_open:
                    (row,) = at.gateway._sessions
                    await ended(at, row.session_id)
            with pytest.raises(NotFoundError):
                await client.responses.retrieve("resp_other")
        async with AsyncOpenAI(base_url=f"{at.url}/v1", api_key="another", max_retries=0) as other:
            with pytest.raises(NotFoundError):
                await other.responses.retrieve(given.id)

    run(tmp_path, vllm, talk)


def test_items_and_blocks_that_are_not_read_are_named(tokenizer: Any, tmp_path: Path) -> None:
    user = {"role": "user", "content": "a"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
    read = {"type": "tool_result", "tool_use_id": "c", "content": [pdf]}
    cases = [
        ("/v1/responses", {"input": [{"type": "mesage", "role": "user", "content": "a"}]}, "input.0.type"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [user, {"type": "function_call", "name": "f"}]}, "input.1.call_id"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0",
        ),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
        ("/v1/responses", {"input": "a", "conversation": "c"}, "conversation"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [image]}], "max_tokens": 9},
            "messages.0.content.0.source.data",
        ),
        *(
            ("/v1/messages", {"messages": [{"role": "user", "content": [block]}], "max_tokens": 9}, field)
            for block, field in (
                (pdf, "messages.0.content.0.source.type"),
                (read, "messages.0.content.0.content.0.source.type"),
                ({"type": "document"}, "messages.0.content.0"),
                ({**image, "source": {"type": "text", "data": "x"}}, "messages.0.content.0.source.type"),
            )
        ),
        ("/v1/messages", {"messages": [user]}, "max_tokens"),
        (
            "/v1/messages",
            {"messages": [user, {"role": "assistant", "content": "{"}], "max_tokens": 9},
            "messages.1.role",
        ),
        ("/v1/messages", {"messages": [user], "max_tokens": 9, "tools": [{"name": "a b"}]}, "tools.0.name"),
    ]

    async def talk(at: Running) -> None:
        for path, body, field in cases:
            response = await posted(at, path, body)
            assert response.status_code == 400, (path, body, response.text)
            error = response.json()["error"]
            assert field == error.get("param", field), error
            assert path != "/v1/messages" or error["message"].startswith(field), error

    run(tmp_path, ScriptedVllm(tokenizer), talk)


def test_documents_of_text_are_read_where_they_are(tokenizer: Any, tmp_path: Path) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "The sky is green."}
    blocks = {"type": "content", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}
    asked = [{"type": "document", "source": plain, "title": "sky.txt"}, {"type": "text", "text": "Is it?"}]
    call = {"type": "tool_use", "id": "c", "name": "run", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "document", "source": blocks}]}
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    vllm = ScriptedVllm(tokenizer)

    async def talk(at: Running) -> None:
        body = {"messages": messages, "tools": [MESSAGES_TOOL], "max_tokens": 9}
        assert (await posted(at, "/v1/messages", body)).status_code == 200

    run(tmp_path, vllm, talk)
    prompt = tokenizer.decode(vllm.sampled[0][0])
    assert "user\nsky.txt\nThe sky is green.\n\nIs it?" in prompt
    assert "One.\nTwo." in prompt


@pytest.mark.slow
def test_errors_of_the_clients_libraries(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        async with openai_client(at) as client:
            with pytest.raises(BadRequestError) as refused:
                await client.responses.create(model="m", input="word " * 6000)
            assert refused.value.code == "context_length_exceeded"
            assert (await client.models.retrieve("gpt-5")).id == "gpt-5"
            (model,) = (await client.models.list()).data
            assert model.model_extra is not None
            assert model.model_extra["max_model_len"] == 1024
        anthropic = pytest.importorskip("anthropic")
        async with anthropic_client(at) as client:
            with pytest.raises(
                anthropic.BadRequestError, match=r"prompt is too long: .* maximum context length is 1024"
            ):
                await client.messages.create(
                    model="m", max_tokens=5, messages=[{"role": "user", "content": "word " * 6000}]
                )
            assert [one.id async for one in client.models.list()] == ["policy"]

    run(tmp_path, ScriptedVllm(tokenizer), talk)


def test_a_route_that_is_not_there_names_those_that_are(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        return await posted(at, "/v1/completions", {"prompt": "a"})

    answer = run(tmp_path, ScriptedVllm(tokenizer), talk)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "no_route")
    assert all(path in error["message"] for path in PATHS)
