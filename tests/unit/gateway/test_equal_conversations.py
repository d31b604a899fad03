"""Conversations with equal messages at the same time: each has its own session, told by requests that are being
answered, and exactly by the ids of its tool calls.
"""

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from .fakes import AGAIN, CALL, MORE, TOOL, USER, Running, ScriptedVllm, gateway_before, until
from .test_gateway import checked, run

TURNS = 5
REPEATED_ID = Path(__file__).parents[4] / "shared/cases4/gateway/repeated_call_id.json"


class Client:
    """A client that names no session. Its conversation, and the sessions that the gateway answered from."""

    def __init__(self, gateway: Running, **body: Any) -> None:
        self.gateway, self.body = gateway, body
        self.messages: list[Any] = [USER]
        self.sessions: list[str] = []

    async def take_turn(self, change: Callable[[Any], Any] = lambda message: message) -> dict[str, Any]:
        """Ask for a turn, and answer it: its calls, or else with one more message. `change` is applied to the turn."""
        response = await self.gateway.chat(*self.messages, **self.body)
        assert response.status_code == 200, response.text
        self.sessions.append(response.headers["X-Session-Id"])
        message = response.json()["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message.get("tool_calls", ())
        ]
        self.messages += [change(message), *(results or [MORE])]
        return message

    def call_ids(self) -> list[str]:
        return [call["id"] for message in self.messages for call in message.get("tool_calls", ())]


def turns_by_session(gateway: Running) -> list[int]:
    return sorted(len(session.tree.turns) for session in gateway.gateway._sessions)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [2, 8])
@pytest.mark.parametrize("answer", ["Done.", CALL])
def test_clients_with_equal_conversations_have_a_session_each(
    answer: str, clients: int, tokenizer: Any, tmp_path: Path
) -> None:
    async def talk(gateway: Running) -> list[int]:
        async def conversation() -> None:
            client = Client(gateway, tools=[TOOL])
            for _ in range(TURNS):
                await client.take_turn()

        await asyncio.gather(*(conversation() for _ in range(clients)))
        return turns_by_session(gateway)

    assert run(tmp_path, ScriptedVllm(tokenizer, lambda *_: answer), talk) == [TURNS] * clients


def test_a_request_that_is_being_answered_continues_its_turn(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda *_: "Done.")

    async def talk(gateway: Running) -> None:
        first, second = Client(gateway), Client(gateway)
        for client in (first, second):
            await client.take_turn()
        vllm.gate = asyncio.Event()
        pending = [asyncio.create_task(client.take_turn()) for client in (first, second)]

        async def both_are_sampled() -> bool:
            return len(vllm.asked) == 4

        await until(both_are_sampled)
        vllm.gate.set()
        await asyncio.gather(*pending)
        assert turns_by_session(gateway) == [2, 2]

    run(tmp_path, vllm, talk)


def test_a_request_that_failed_does_not_continue_its_turn(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda *_: "Done.")

    async def talk(gateway: Running) -> None:
        client = Client(gateway)
        await client.take_turn()
        other = Client(gateway)
        await other.take_turn()
        vllm.status = 400
        assert (await gateway.chat(*client.messages)).status_code == 400
        vllm.status = 200
        await client.take_turn()
        await other.take_turn()
        assert turns_by_session(gateway) == [2, 2]

    run(tmp_path, vllm, talk)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0, 2)])
def test_the_ids_of_its_calls_lead_a_conversation_back_to_its_own_session(
    order: tuple[int, ...], tokenizer: Any, tmp_path: Path
) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: "Done." if prompt.count("<tool_response>") > 1 else CALL)

    async def talk(gateway: Running) -> list[dict[str, Any]]:
        clients = [Client(gateway, tools=[TOOL]) for _ in range(3)]
        for client in clients:
            await client.take_turn()
        for _ in range(TURNS):
            for number in order:
                await clients[number].take_turn()
        for number, client in enumerate(clients):
            assert len({*client.sessions}) == 1, "each turn of a client is in the session of its first"
            await gateway.end(client.sessions[0], reward=float(number))
        assert len({client.sessions[0] for client in clients}) == 3
        return await gateway.groups()

    groups = checked(run(tmp_path, vllm, talk))
    assert sorted(group["scores"][0] for group in groups) == [0.0, 1.0, 2.0]
    assert {len(group["tokens"]) for group in groups} == {1}, "each conversation is one sequence"


def without_text(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": None}


def with_another_text(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": "(calls a tool)"}


@pytest.mark.parametrize(("change", "sequences"), [(without_text, 1), (with_another_text, 3)])
def test_a_turn_whose_text_a_client_drops_or_changes_is_found_by_its_call(
    change: Callable[[Any], Any], sequences: int, tokenizer: Any, tmp_path: Path
) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: f"I run it.\n{CALL}")

    async def talk(gateway: Running) -> list[dict[str, Any]]:
        clients = [Client(gateway, tools=[TOOL]) for _ in range(2)]
        for _ in range(3):
            for client in clients:
                await client.take_turn(change)
        for client in clients:
            assert len({*client.sessions}) == 1
        assert clients[0].sessions[0] != clients[1].sessions[0]
        await gateway.end(clients[0].sessions[0])
        return await gateway.groups()

    (group,) = checked(run(tmp_path, vllm, talk))
    assert len(group["tokens"]) == sequences
    if change is without_text:
        assert vllm.sampled[-1][0][: len(vllm.sampled[0][0] + vllm.sampled[0][1])] == [
            *vllm.sampled[0][0],
            *vllm.sampled[0][1],
        ], "the sampled text stays in the prompt"


def test_results_without_their_turn_are_the_next_state_of_the_turn_with_their_ids(
    tokenizer: Any, tmp_path: Path
) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: CALL)

    async def talk(gateway: Running) -> None:
        clients = [Client(gateway, tools=[TOOL]) for _ in range(2)]
        for client in clients:
            await client.take_turn()
        for client in reversed(clients):
            client.messages = [AGAIN, *client.messages[2:]]
            await client.take_turn()
            assert client.sessions[0] == client.sessions[1]
        for session in gateway.gateway._sessions:
            first, second = session.tree.turns.values()
            assert second.follows is not None
            assert second.follows.turn_id == first.turn_id
            assert (second.follows.start, second.follows.stop) == (1, 2)

    run(tmp_path, vllm, talk)


def test_a_conversation_keeps_its_session_when_the_gateway_starts_again(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: CALL)

    async def talk() -> None:
        async with gateway_before(vllm, tmp_path) as gateway:
            clients = [Client(gateway, tools=[TOOL]) for _ in range(2)]
            for client in clients:
                await client.take_turn()
        async with gateway_before(vllm, tmp_path) as gateway:
            for client in clients:
                client.gateway = gateway
                await client.take_turn(without_text)
                await client.take_turn()
                assert len({*client.sessions}) == 1

    asyncio.run(talk())


def test_ids_that_an_earlier_version_gave_to_several_turns_name_none(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: CALL)

    async def talk() -> None:
        async with gateway_before(vllm, tmp_path) as gateway:
            clients = [Client(gateway, tools=[TOOL]) for _ in range(2)]
            for client in clients:
                await client.take_turn()
        old_id = "call_1_0"
        with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
            for number, (text,) in enumerate(
                journal.execute("SELECT CAST(body AS TEXT) FROM turns").fetchall(), start=1
            ):
                turn = text.replace(clients[number - 1].call_ids()[0], old_id)
                assert turn != text
                journal.execute("UPDATE turns SET body = ? WHERE turn_id = ?", (turn, number))
        async with gateway_before(vllm, tmp_path) as gateway:
            for client in clients:
                client.gateway = gateway
                client.messages = json.loads(json.dumps(client.messages).replace(client.call_ids()[0], old_id))
                await client.take_turn()
            assert turns_by_session(gateway) == [2, 2]

    asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
def test_call_ids_are_unique_over_conversations_turns_and_choices(stream: bool, tokenizer: Any, tmp_path: Path) -> None:
    async def talk(gateway: Running) -> list[str]:
        ids: list[str] = []
        for _ in range(2):
            response = await gateway.chat(USER, tools=[TOOL], n=2, stream=stream)
            lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            chunks = map(json.loads, lines if stream else [response.text])
            messages = [choice["delta" if stream else "message"] for chunk in chunks for choice in chunk["choices"]]
            ids += [call["id"] for message in messages for call in message.get("tool_calls", ())]
        return ids

    ids = run(tmp_path, ScriptedVllm(tokenizer, lambda *_: f"{CALL}\n{CALL}"), talk)
    assert len(ids) == len({*ids}) == 8


@pytest.mark.skipif(not REPEATED_ID.exists(), reason="the inputs that failed are not beside the checkout")
def test_a_new_call_has_no_id_of_the_history(tokenizer: Any, tmp_path: Path) -> None:
    body = json.loads(REPEATED_ID.read_text())
    history = [call["id"] for message in body["messages"] for call in message.get("tool_calls") or ()]

    async def talk(gateway: Running) -> Any:
        return await gateway.say(*body.pop("messages"), **body)

    name = body["tools"][0]["function"]["name"]
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    message = run(tmp_path, ScriptedVllm(tokenizer, lambda *_: call), talk)
    assert history
    assert message["tool_calls"][0]["id"] not in history


async def by_responses(gateway: Running, items: list[Any]) -> tuple[str, list[Any]]:
    tool = {"type": "function", **TOOL["function"]}
    response = await gateway.http.post(f"{gateway.url}/v1/responses", json={"input": items, "tools": [tool]})
    output = response.json()["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in output
        if item["type"] == "function_call"
    ]
    return response.headers["X-Session-Id"], [*items, *output, *results]


async def by_messages(gateway: Running, messages: list[Any]) -> tuple[str, list[Any]]:
    tool = {"name": "run", "input_schema": TOOL["function"]["parameters"]}
    body = {"messages": messages, "tools": [tool], "max_tokens": 100}
    response = await gateway.http.post(f"{gateway.url}/v1/messages", json=body)
    content = response.json()["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
        for block in content
        if block["type"] == "tool_use"
    ]
    turn = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    return response.headers["X-Session-Id"], [*messages, *turn]


@pytest.mark.parametrize("protocol", [by_responses, by_messages])
def test_each_protocol_sends_the_ids_that_lead_back(
    protocol: Callable[[Running, list[Any]], Awaitable[tuple[str, list[Any]]]], tokenizer: Any, tmp_path: Path
) -> None:
    async def talk(gateway: Running) -> None:
        histories = {number: [USER] for number in range(2)}
        sessions: dict[int, set[str]] = {number: set() for number in histories}
        for _ in range(3):
            for number in histories:
                session, histories[number] = await protocol(gateway, histories[number])
                sessions[number].add(session)
        assert [len(names) for names in sessions.values()] == [1, 1]
        assert sessions[0] != sessions[1]

    run(tmp_path, ScriptedVllm(tokenizer, lambda *_: CALL), talk)
