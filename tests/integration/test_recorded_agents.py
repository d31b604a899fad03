"""Agents from their registries, as they are, before a recording gateway and a scripted upstream: one is one session.

See scripts/agents/try_agents.py: a client reaches nothing but the gateway, and follows a script of three calls.
"""

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agents.clients import CLIENTS, END, TOOL_TURNS, AgentClient
from agents.try_agents import FOLDER, Relay, converse, install, scratch_folder
from aiohttp import web

from agentic_opd.gateway.foreign import ForeignTurn
from agentic_opd.gateway.recorded import read_recorded
from agentic_opd.gateway.turns import TurnTree
from tests.unit.gateway.foreign import (
    Handler,
    call,
    call_item,
    chat_answer,
    chat_stream,
    message_item,
    messages_answer,
    messages_stream,
    recording_gateway,
    response,
    responses_stream,
    sessions_in,
)

pytestmark = [pytest.mark.all, pytest.mark.sandbox]

KEY = "sk-of-the-upstream-0123456789"


def num_results(body: Mapping[str, Any]) -> int:
    """Return the number of tool results in a request of any protocol."""
    items = body.get("messages") or body.get("input") or ()
    blocks = [block for item in items if isinstance(item.get("content"), list) for block in item["content"]]
    kinds = [part.get("type") for part in (*items, *blocks) if isinstance(part, dict)]
    of_chat = [item for item in items if item.get("role") == "tool"]
    return len(of_chat) + kinds.count("tool_result") + kinds.count("function_call_output")


def has_tool(body: Mapping[str, Any], name: str) -> bool:
    names = [tool.get("name") or (tool.get("function") or {}).get("name") for tool in body.get("tools") or ()]
    return name in names


def follows(client: AgentClient) -> Handler:
    """Return an upstream that lets a client call its tool three times, in each protocol, streamed or not."""

    async def handler(request: web.Request, data: bytes) -> web.StreamResponse:
        assert KEY in str(request.headers), "the client's own key reaches the upstream"
        if request.method != "POST" or not request.path.endswith(("/completions", "/messages", "/responses")):
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        body = json.loads(data)
        results = num_results(body)
        is_call = has_tool(body, client.tool) and results < TOOL_TURNS
        text = "I run it." if is_call else END if has_tool(body, client.tool) else "Three commands"
        arguments = {name: value.replace("NUMBER", str(results + 1)) for name, value in client.arguments.items()}
        answer = answered(request.path, text, f"call_{results}", client.tool if is_call else "", arguments)
        stream, whole = answer
        if body.get("stream"):
            return web.Response(body=stream, headers={"Content-Type": "text/event-stream"})
        return web.json_response(whole)

    return handler


def answered(path: str, text: str, call_id: str, tool: str, arguments: dict[str, Any]) -> tuple[bytes, Any]:
    """Return an answer of the protocol at `path` as a stream and as a whole; no call if there is no tool."""
    if path.endswith("/completions"):
        calls, reason = ([call(call_id, tool, **arguments)], "tool_calls") if tool else ([], "stop")
        return chat_stream([text], calls, reason), chat_answer(text, calls, reason)
    if path.endswith("/messages"):
        used = [{"type": "tool_use", "id": call_id, "name": tool, "input": arguments}] if tool else []
        blocks = [{"type": "text", "text": text}, *used]
        reason = "tool_use" if tool else "end_turn"
        return messages_stream(*blocks, reason=reason), messages_answer(*blocks, reason=reason)
    items = [message_item(text), *([call_item(call_id, tool, **arguments)] if tool else [])]
    return responses_stream(*items), response(*items)


@pytest.mark.parametrize("name", ["claude-code", "codex", "openclaw"])
def test_an_agents_conversation_is_recorded_as_one_session(name: str) -> None:
    if shutil.which("npm") is None:
        pytest.skip("the client is an npm package")
    client = CLIENTS[name]
    programs = install(client, FOLDER)

    async def talk(scratch: Path) -> None:
        async with recording_gateway(follows(client), scratch) as gateway:
            relay = Relay(scratch / "socket", int(gateway.url.rpartition(":")[2]))
            listener = relay.serve()
            try:
                await asyncio.to_thread(converse, client, programs, scratch, KEY)
            finally:
                listener.close()
            await gateway.recorded(TOOL_TURNS + 1)
            assert await gateway.metric("unrecorded_total") == 0

    with scratch_folder(None) as scratch:
        asyncio.run(talk(scratch))
        sessions = sessions_in(scratch)
        assert len(sessions) == 1
        tree = TurnTree[ForeignTurn].of(turns := next(iter(sessions.values())))
        main = [turn for turn in turns if turn.turn_id not in tree.side_turns()]
        called = [turn.messages[-1].get("tool_calls", ()) for turn in main]
        assert [len(calls) for calls in called] == [1] * TOOL_TURNS + [0]
        assert {calls[0]["function"]["name"] for calls in called if calls} == {client.tool}
        assert main[-1].messages[-1]["content"] == END
        log = read_recorded(scratch / "journal.sqlite")
        learned = [
            message
            for conversation in log.conversations
            for message in conversation.fields["messages"]
            if message["role"] == "assistant" and message.get("weight") != 0
        ]
        assert len(learned) == len(main), "each answer is learned once"
        written = [path for path in scratch.iterdir() if path.is_file()]
        assert not any(KEY.encode() in path.read_bytes() for path in written)
