"""What a request may cost: the text of others, its size and its shape, and clients that leave at the worst moment."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.gateway import web
from agentic_opd.gateway.choice import Finished
from agentic_opd.gateway.exchange import Begun
from agentic_opd.gateway.protocols.base import Reply
from agentic_opd.gateway.web import make_app
from agentic_opd.rollout.renderer import load_renderer

from .fakes import CALL, MORE, TOOL, USER, Running, ScriptedVllm, gateway_before

JSON = {"Content-Type": "application/json"}


def run(folder: Path, vllm: ScriptedVllm, talk: Callable[[Running], Awaitable[Any]], **settings: Any) -> Any:
    async def with_gateway() -> Any:
        async with gateway_before(vllm, folder, **settings) as running:
            return await talk(running)

    return asyncio.run(with_gateway())


class WatchedRenderer:
    """Does as its renderer does, and remembers on which threads it rendered."""

    def __init__(self, renderer: Any, threads: list[str]) -> None:
        self.renderer, self.threads = renderer, threads

    def __getattr__(self, name: str) -> Any:
        if name in ("render", "bridge_to_next_turn"):
            self.threads.append(threading.current_thread().name)
        return getattr(self.renderer, name)

    def __deepcopy__(self, memo: Any) -> "WatchedRenderer":
        return WatchedRenderer(self.renderer, self.threads)


# ------------------------------------------------------------------------------------------- halves of surrogate pairs


@pytest.mark.parametrize(
    "said",
    [
        r'{"name": "run", "arguments": {"code": "# \ud83d"}}',
        r'{"name": "r\udc80n", "arguments": {"code": "f()"}}',
        r'{"name": "run", "arguments": {"c\ud83d": [{"\udfff": "\ude00\ud83d"}]}}',
        r'{"name": "run", "arguments": {"code": "\ud83d\ude00"}}',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_of_the_policy_loses_no_turn(
    tokenizer: Any, tmp_path: Path, said: str, stream: bool
) -> None:
    said = f"<tool_call>\n{said}\n</tool_call>"

    async def talk(at: Running) -> Any:
        response = await at.chat(USER, tools=[TOOL], session_id="s", stream=stream)
        assert response.status_code == 200
        if stream:
            events = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
            assert events[-1] == "[DONE]"
            deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
            (call,) = next(delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
            message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            message = response.json()["choices"][0]["message"]
            (call,) = message["tool_calls"]
        json.dumps(call, ensure_ascii=False).encode()
        result = {"role": "tool", "tool_call_id": call["id"], "content": "half: \ud83d"}
        assert (await at.chat(USER, message, result, tools=[TOOL], session_id="s")).status_code == 200
        assert await at.metric("rewritten_histories_total") == 0
        await at.end("s")
        return await at.groups()

    replies = iter([said, "Done."])
    (group,) = run(tmp_path, ScriptedVllm(tokenizer, lambda *_: next(replies)), talk)
    assert group["overrides"][0]["turns"] == 2
    assert "half: \ufffd" in [message["content"] for message in group["messages"][0]]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "\ud83d"},
        {"role": "user", "content": [{"type": "text", "text": "\udc80"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "run", "arguments": r'{"a": "\ud83d"}'}}
            ],
        },
        {"role": "assistant", "content": "x", "reasoning_content": "\ud83d"},
    ],
)
def test_half_a_surrogate_pair_of_a_client_is_replaced(tokenizer: Any, tmp_path: Path, message: Any) -> None:
    async def talk(at: Running) -> Any:
        response = await at.chat(USER, message, MORE, session_id="s", tools=[TOOL])
        assert response.status_code == 200, response.text
        await at.http.post(f"{at.url}/sessions/s/end", content=r'{"feedback": "\ud83d"}', headers=JSON)
        return await at.groups()

    (group,) = run(tmp_path, ScriptedVllm(tokenizer), talk)
    assert group["messages"][0][-1]["content"] == "\ufffd"


# ------------------------------------------------------------------------------------------------------ calls unasked


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_client_without_tools_is_given_no_tool_calls(
    tokenizer: Any, tmp_path: Path, options: dict[str, Any], stream: bool, thinks: bool
) -> None:
    said = f"So I run it.\n{CALL}"
    replies = iter(["<think>\nHm.\n</think>\n\n" + said if thinks else said, "Done."])

    async def talk(at: Running) -> Any:
        response = await at.chat(USER, session_id="s", stream=stream, **options)
        assert "tool_calls" not in response.text
        if stream:
            events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
            deltas = [event["choices"][0]["delta"] for event in events]
            message = {
                name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")
            }
        else:
            message = response.json()["choices"][0]["message"]
        assert message["content"] == said
        assert (message.get("reasoning_content") or "").strip() == ("Hm." if thinks else "")
        await at.say(USER, {"role": "assistant", **message}, MORE, session_id="s", **options)
        assert await at.metric("rewritten_histories_total") == thinks, "Qwen3's template drops earlier reasoning"

    renderer = load_renderer(tokenizer, "qwen3", {"enable_thinking": thinks})
    run(tmp_path, ScriptedVllm(tokenizer, lambda *_: next(replies)), talk, renderer=renderer)


# ------------------------------------------------------------------------------------------------------- size and shape


def call(arguments: str, count: int = 1) -> dict[str, Any]:
    one = {"id": "a", "type": "function", "function": {"name": "run", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [one] * count}


def tool(**about: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "t", **about}}


LONG = "word " * 100_000
RESULT = {"role": "tool", "tool_call_id": "a", "content": "x"}
TOO_LARGE: dict[str, dict[str, Any]] = {
    "a tool's description": {"messages": [USER], "tools": [tool(description=LONG)]},
    "a tool's parameters": {"messages": [USER], "tools": [tool(parameters={"properties": {"a": {"title": LONG}}})]},
    "many tools": {"messages": [USER], "tools": [tool(description="does this and that")] * 1100},
    "a call's arguments": {"messages": [USER, call(json.dumps({"a": LONG})), RESULT]},
    "many calls": {"messages": [USER, call("{}", 1100), RESULT]},
    "a call's id": {"messages": [USER, {**RESULT, "tool_call_id": LONG}]},
    "a name": {"messages": [{**USER, "name": LONG}]},
    "many messages": {"messages": [USER] * 1100},
    "a user message": {"messages": [{"role": "user", "content": LONG}]},
    "one character": {"messages": [{"role": "user", "content": "a" * 100_000}]},
    "parts of a text": {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": LONG}, RESULT]},
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_is_certain_not_to_fit_is_refused_before_it_is_rendered(tokenizer: Any, tmp_path: Path, what: str) -> None:
    threads = list[str]()
    renderer = WatchedRenderer(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), threads)

    async def talk(at: Running) -> Any:
        first = await at.say(USER, session_id="s")
        threads.clear()
        new = await at.http.post(f"{at.url}/v1/chat/completions", json=TOO_LARGE[what])
        body = {**TOO_LARGE[what], "messages": [USER, first, *TOO_LARGE[what]["messages"]], "session_id": "s"}
        known = await at.http.post(f"{at.url}/v1/chat/completions", json=body)
        assert [one.json()["error"]["code"] for one in (new, known)] == ["context_length_exceeded"] * 2
        assert (await at.http.get(f"{at.url}/sessions/s")).json()["turns"] == 1
        assert await at.metric("open_sessions") == 1, "nothing is kept of a session without a turn"
        assert await at.metric('requests_total{status="400"}') == 2

    run(tmp_path, ScriptedVllm(tokenizer), talk, renderer=renderer)
    assert threads == []


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(("is_kept", "status"), [(True, 400), (False, 200)])
def test_earlier_reasoning_counts_where_the_template_writes_it(
    tokenizer: Any, tmp_path: Path, is_kept: bool, status: int, inline: bool
) -> None:
    class Keeping(WatchedRenderer):
        def render(self, messages: list[Any], **options: Any) -> Any:
            told = [
                {**m, "content": m.get("reasoning_content", "") + m["content"].replace("</think>", "")}
                for m in messages
            ]
            return self.renderer.render(told, **options)

    renderer = load_renderer(tokenizer, "qwen3", {"enable_thinking": True})
    said = {"content": f"<think>{LONG}</think>x"} if inline else {"content": "x", "reasoning_content": LONG}

    async def talk(at: Running) -> int:
        return (await at.chat(USER, {"role": "assistant", **said}, MORE)).status_code

    kind = Keeping if is_kept else WatchedRenderer
    assert run(tmp_path, ScriptedVllm(tokenizer), talk, renderer=kind(renderer, [])) == status


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": [{"role": "user", "content": LONG[:20_000]}]}, 200),
        ({"messages": [USER], "tools": [tool(description=LONG[:20_000])]}, 200),
        ({"messages": [USER, call(json.dumps({"a": LONG[:20_000]})), RESULT]}, 200),
    ],
)
def test_a_long_request_is_rendered_beside_the_event_loop(
    tokenizer: Any, tmp_path: Path, body: dict[str, Any], status: int
) -> None:
    threads = list[str]()
    renderer = WatchedRenderer(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), threads)

    async def talk(at: Running) -> int:
        return (await at.http.post(f"{at.url}/v1/chat/completions", json=body)).status_code

    assert run(tmp_path, ScriptedVllm(tokenizer, context=32768), talk, renderer=renderer) == status
    assert {name.partition("_")[0] for name in threads} == {"rendering"}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": [tool(parameters={"properties": {"a": nested(251)}})]}, "levels deep"),
        ({"tools": [tool(parameters={"properties": {"a": nested(260)}})]}, "levels deep"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": nested(260)}}}, "levels deep"),
        ({"metadata": nested(450)}, "levels deep"),
        ({"logit_bias": {str(i): 1 for i in range(70_000)}}, "values"),
        ({"stop_token_ids": [1] * 70_000}, "values"),
        ({"metadata": {"a": [[]] * 70_000}}, "values"),
    ],
)
def test_a_body_of_a_shape_that_nothing_can_hold_is_refused_before_it_is_sampled(
    tokenizer: Any, tmp_path: Path, options: dict[str, Any], said: str, stream: bool
) -> None:
    vllm = ScriptedVllm(tokenizer)

    async def talk(at: Running) -> None:
        response = await at.chat(USER, stream=stream, **options)
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
        assert await at.metric('requests_total{status="400"}') == 1

    run(tmp_path, vllm, talk)
    assert vllm.asked == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_deepest_schema_that_is_taken_is_kept_in_the_journal(tokenizer: Any, tmp_path: Path, stream: bool) -> None:
    async def talk(at: Running) -> Any:
        tools = [tool(parameters={"properties": {"a": nested(250)}})]
        schema = {"type": "json_schema", "json_schema": {"schema": nested(253)}}
        response = await at.chat(USER, tools=tools, response_format=schema, session_id="s", stream=stream)
        assert response.status_code == 200
        return (await at.end("s")).json()["turns"]

    assert run(tmp_path, ScriptedVllm(tokenizer, context=8192), talk) == 1


# -------------------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("headers", [{}, {"X-Session-Done": "true"}])
def test_a_turn_whose_client_leaves_while_it_is_recorded_is_in_a_group(
    tokenizer: Any, tmp_path: Path, headers: dict[str, str]
) -> None:
    writing, goes_on = threading.Event(), threading.Event()

    async def talk(at: Running) -> Any:
        journal = at.gateway._journal
        add_turns = journal.add_turns

        def slowly(turns: Any) -> None:
            writing.set()
            goes_on.wait(10)
            add_turns(turns)

        journal.add_turns = slowly  # type: ignore[method-assign]
        gone = asyncio.Event()
        answering = asyncio.create_task(asked_and_left(at, {**headers, "X-Session-Id": "s"}, gone))
        await asyncio.to_thread(writing.wait, 10)
        gone.set()
        for _ in range(20):  # Starlette cancels the stream at each step of the loop.
            await asyncio.sleep(0)
        goes_on.set()
        await answering
        if (await at.http.get(f"{at.url}/sessions/s")).json()["state"] == "open":
            await at.end("s")
        return await at.groups()

    (group,) = run(tmp_path, ScriptedVllm(tokenizer), talk)
    assert group["overrides"][0]["turns"] == 1


async def asked_and_left(at: Running, headers: dict[str, str], gone: asyncio.Event) -> None:
    """Ask for a stream as a web server does, and leave when `gone` is set."""
    body = json.dumps({"messages": [USER], "stream": True}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        if (message := next(messages, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        "headers": [
            (name.lower().encode(), value.encode())
            for name, value in {**headers, "Host": "127.0.0.1", "Content-Type": "application/json"}.items()
        ],
    }
    await make_app(at.gateway)(scope, receive, send)


# --------------------------------------------------------------------------------------------- what one client may take


@pytest.mark.parametrize(("most", "keys", "first", "second"), [(8, 2, 6, 2), (8, 1, 8, 0), (12, 3, 8, 2), (1, 2, 1, 0)])
def test_no_key_takes_all_sessions(
    tokenizer: Any, tmp_path: Path, most: int, keys: int, first: int, second: int
) -> None:
    """The last sessions are kept for keys that have fewer than their own part, and come back when some end."""

    async def opened(at: Running, key: str, count: int) -> int:
        statuses = [await at.chat(USER, key=key, session_id=f"{key}-{number}") for number in range(count)]
        for refused in statuses:
            assert refused.status_code == 200 or refused.json()["error"]["code"] == "too_many_sessions"
            assert refused.status_code in (200, 429)
            assert refused.status_code == 200 or "/sessions/NAME/end" in refused.json()["error"]["message"]
        return sum(one.status_code == 200 for one in statuses)

    async def talk(at: Running) -> None:
        assert await opened(at, "key0", most + 1) == first
        if keys > 1:
            assert await opened(at, "key1", second + 1) >= second
        headers = {"Authorization": "Bearer key0"}
        assert (await at.http.post(f"{at.url}/sessions/key0-0/end", headers=headers)).status_code == 200
        assert (await at.chat(USER, key=f"key{keys - 1}", session_id="again")).status_code == 200

    run(tmp_path, ScriptedVllm(tokenizer), talk, api_keys=[f"key{n}" for n in range(keys)], max_open_sessions=most)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_decoded_once_and_written_in_parts(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Each token of an answer has 21 entries; what arrives together is written 32 tokens at a time."""
    decoded: list[int] = []
    threads: list[str] = []
    sizes: list[int] = []
    decode, write, take = type(tokenizer).decode, web._written, Reply.take

    def watched(self: Any, ids: Any, *args: Any, **options: Any) -> str:
        if not isinstance(ids, int) and len(ids) == 1:
            decoded.append(ids[0])
        return decode(self, ids, *args, **options)

    def written(reply: Reply) -> Any:
        threads.append(threading.current_thread().name)
        before = len(decoded)
        response = write(reply)
        assert len(decoded) == before, "tokenizers are not thread-safe"
        return response

    def taken(self: Reply, event: Any) -> None:
        if not isinstance(event, Begun):
            sizes.append(len((event.rest if isinstance(event, Finished) else event).tokens))
        take(self, event)

    monkeypatch.setattr(type(tokenizer), "decode", watched)
    monkeypatch.setattr(web, "_written", written)
    monkeypatch.setattr(Reply, "take", taken)

    async def talk(at: Running) -> Any:
        decoded.clear()
        response = await at.chat(USER, logprobs=True, top_logprobs=2, stream=stream)
        assert response.status_code == 200
        return response.text

    text = run(tmp_path, ScriptedVllm(tokenizer, lambda *_: "ab cd ef " * 60), talk)
    assert text.count("top_logprobs") == sum(sizes)
    assert len(decoded) <= 2 * len(set(decoded)), "once for a token of the answer, once more for its text so far"
    assert threads == ([] if stream else [threads[0]])
    assert "MainThread" not in threads
