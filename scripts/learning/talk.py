"""A scripted user who only complains: sessions through OpenAI's client, each tried on inputs of the user's own.

In: a gateway, tasks and a name for each session. Out: sessions that are over, without a reward. The user's program runs
the tool calls in a sandbox, as an agent's client does. When the agent says that it is done, the user tries what it left
on inputs that are none of the hidden tests', and says what came for the first that fails; never what to do about it.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random
from typing import Any, Literal, Protocol

from agents.demo_gateway import Served
from demo_policy.transcripts import complaint
from openai import AsyncOpenAI, BadRequestError

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.types import Task, ToolCall, WorldSession
from agentic_opd.rollout.loop import first_messages
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig

TRIES = {
    "fizzbuzz": """
        fizzbuzz(12) == 'Fizz'; fizzbuzz(25) == 'Buzz'; fizzbuzz(60) == 'FizzBuzz'; fizzbuzz(75) == 'FizzBuzz'
        fizzbuzz(22) == '22'
    """,
    "is_palindrome": """
        is_palindrome('Never odd or even') == True; is_palindrome("Madam, I'm Adam") == True
        is_palindrome('Rotor') == True; is_palindrome('kayaks') == False; is_palindrome('1a2') == False
    """,
    "two_sum": """
        two_sum([4, 6, 1], 10) == [0, 1]; two_sum([8, 1, 9, 5], 14) == [2, 3]; two_sum([7, 1, 7], 14) == [0, 2]
        two_sum([6, 2], 12) == []; two_sum([1, 2, 4], 50) == []
    """,
    "flatten": """
        flatten([7, [8, [9]]]) == [7, 8, 9]; flatten(['x', ['y', ['z']]]) == ['x', 'y', 'z']
        flatten([[], [4]]) == [4]; flatten([(3, 4), [5]]) == [(3, 4), 5]
    """,
    "longest_common_prefix": """
        longest_common_prefix(['inter', 'internal', 'internet']) == 'inter'
        longest_common_prefix(['stone', 'star', 'sky']) == 's'; longest_common_prefix(['deer', 'dog']) == 'd'
        longest_common_prefix(['pear', 'peach', 'plum']) == 'p'
    """,
    "group_anagrams": """
        group_anagrams(['note', 'tone', 'sun']) == [['note', 'tone'], ['sun']]
        group_anagrams(['arc', 'car', 'arm', 'ram']) == [['arc', 'car'], ['arm', 'ram']]
        group_anagrams(['off', 'of', 'fof']) == [['off', 'fof'], ['of']]
    """,
    "valid_parentheses": """
        valid_parentheses('x = (y[1])') == True; valid_parentheses('[()]') == True
        valid_parentheses('[(])') == False; valid_parentheses('{}()[') == False
        valid_parentheses('(a + b') == False; valid_parentheses('a) + b') == False
    """,
    "merge_intervals": """
        merge_intervals([[1, 2], [2, 5]]) == [[1, 5]]; merge_intervals([[7, 9], [1, 3]]) == [[1, 3], [7, 9]]
        merge_intervals([[1, 8], [3, 5]]) == [[1, 8]]
        merge_intervals([[2, 6], [4, 9], [12, 15]]) == [[2, 9], [12, 15]]
    """,
}
"""What the user tries of each task, and what should come: neither the hidden tests' inputs nor the examples'."""
MOST_TURNS = 6
"""Answers of a session, as many as an episode's turns."""
MOST_COMPLAINTS = 2
AT_ONCE = 8
"""Sessions that are held at the same time."""
MOST_TOKENS = 512
"""Of an answer."""
WireProtocol = Literal["chat", "messages"]
"""Of the gateway: OpenAI's chat completions, or Anthropic's messages."""


def tries_of(task: Task) -> list[str]:
    """The user's tries of a built-in task, each `call == expected`."""
    return [
        attempt.strip() for line in TRIES[task.entry_point or ""].strip().split("\n") for attempt in line.split(";")
    ]


def tried(task: Task) -> Task:
    """The task with the user's tries in the place of its hidden tests."""
    asserts = "".join(f"assert {attempt}\n" for attempt in tries_of(task))
    return replace(task, hidden_tests=f"from solution import {task.entry_point}\n\n{asserts}")


class TalkFailedError(Exception):
    """A session became no group, so that its batch would stay short."""


@dataclass(frozen=True, slots=True)
class User:
    """Holds sessions at a gateway."""

    served: Served
    client: AsyncOpenAI
    model: str
    world: CodingWorld
    slots: asyncio.Semaphore
    through: WireProtocol = "chat"

    @classmethod
    def connected(cls, served: Served, model: str, through: WireProtocol = "chat") -> "User":
        """A user of the model behind a gateway, who speaks this protocol."""
        return cls(served, client_of(served), model, CodingWorld(WorldConfig()), asyncio.Semaphore(AT_ONCE), through)

    async def session(self, task: Task, name: str) -> None:
        """Hold a session, end it, and wait until the gateway has written its group.

        Raises:
            TalkFailedError: no group was made of it.
            OpenAIError: a request failed.
            OSError: the gateway is gone.
        """
        async with self.slots:
            await self._talk(task, name)
            await end_session(self.served, name, {})

    async def _talk(self, task: Task, name: str) -> None:
        messages: list[Any] = list(first_messages(self.world, task))
        rng, complaints = Random(name), 0
        async with self.world.session(task) as sandbox:
            for _ in range(MOST_TURNS):
                try:
                    answer = await self._answer(messages, name)
                except BadRequestError:  # The conversation has become longer than the model reads.
                    return
                messages.append({"content": "", **answer})
                calls = answer.get("tool_calls") or []
                messages += [await _result(sandbox, call) for call in calls]
                if calls:
                    continue
                verdict = await self.world.verify(tried(task), await sandbox.collect())
                if verdict.passed == verdict.total or complaints == MOST_COMPLAINTS:
                    return
                complaints += 1
                messages.append({"role": "user", "content": complaint(verdict.report, rng)})

    async def _answer(self, messages: Sequence[Any], name: str) -> dict[str, Any]:
        if self.through == "messages":
            tools = [as_anthropic_tool(tool["function"]) for tool in self.world.tools]
            body = {"model": self.model, "max_tokens": MOST_TOKENS, "tools": tools, **as_anthropic(messages)}
            named: Any = {"headers": {"X-Session-Id": name}}
            answer: Any = await self.client.post("/messages", body=body, options=named, cast_to=object)
            return as_chat(answer["content"])
        completion = await self.client.chat.completions.create(
            model=self.model,
            messages=list(messages),
            tools=list(self.world.tools),  # pyright: ignore[reportArgumentType]
            max_tokens=MOST_TOKENS,
            extra_headers={"X-Session-Id": name},
        )
        return completion.choices[0].message.model_dump(exclude_none=True)


def as_anthropic_tool(function: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of Anthropic's protocol."""
    return {
        **{"name": function["name"], "description": function["description"]},
        "input_schema": function["parameters"],
    }


def as_anthropic(messages: Sequence[Any]) -> dict[str, Any]:
    """The conversation in the form of Anthropic's protocol: the results of a turn's calls are one user message."""
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    turns: list[dict[str, Any]] = []
    for message in messages:
        role, blocks = message["role"], [{"type": "text", "text": message["content"]}] if message["content"] else []
        if role == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            if turns[-1]["role"] != "user":
                turns.append({"role": "user", "content": []})
            turns[-1]["content"].append(result)
        elif role != "system":
            for call in message.get("tool_calls") or ():
                use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
                blocks.append({**use, "input": json.loads(call["function"]["arguments"])})
            turns.append({"role": role, "content": blocks})
    return {"system": system, "messages": turns}


def as_chat(blocks: Sequence[Any]) -> dict[str, Any]:
    """An answer of Anthropic's protocol as a chat message."""
    calls = [
        {
            **{"id": block["id"], "type": "function"},
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


async def _result(session: WorldSession, call: dict[str, Any]) -> dict[str, str]:
    """The message with a tool's result."""
    arguments, raw = None, call["function"]["arguments"]
    with suppress(ValueError):
        arguments = json.loads(raw)
    tool_call = ToolCall(
        call["id"], call["function"]["name"], arguments, raw, None if arguments is not None else "not JSON"
    )
    result = await session.run_tool(tool_call)
    return {"role": "tool", "tool_call_id": call["id"], "content": result.content}


def client_of(served: Served) -> AsyncOpenAI:
    """OpenAI's client of a gateway."""
    return AsyncOpenAI(base_url=served.base_url, api_key=served.key, timeout=600)


async def end_session(served: Served, name: str, ending: dict[str, Any]) -> None:
    """End a session, and wait until the gateway has written its group.

    Raises:
        TalkFailedError: no group was made of it.
    """
    await asyncio.to_thread(served.ask, f"/sessions/{name}/end", ending)
    while (state := (await asyncio.to_thread(served.ask, f"/sessions/{name}"))["state"]) == "closed":  # noqa: ASYNC110
        await asyncio.sleep(0.5)  # Another process makes the group.
    if state != "written":
        raise TalkFailedError(f"the session {name} is {state}, expected written")


class Talker(Protocol):
    """Who holds sessions."""

    client: AsyncOpenAI

    async def session(self, task: Task, name: str) -> None:
        """Hold one to its end."""
        ...


async def converse(
    user: Talker, tasks: Sequence[Task], batches: range, batch_size: int, trained: Callable[[], int]
) -> None:
    """Hold the sessions of each batch once the weights of the earlier batches are loaded.

    Args:
        user: Who holds them.
        tasks: What they are about, in turns.
        batches: Which to hold; a resumed run has held those before.
        batch_size: Sessions of each.
        trained: Says how many batches were trained on.

    Raises:
        TalkFailedError, OpenAIError, OSError: as `User.session` says.
    """
    order = islice(cycle(tasks), batches.start * batch_size, None)
    for batch in batches:
        while trained() < batch:  # noqa: ASYNC110 - the trainer is another process.
            await asyncio.sleep(0.2)
        numbered = enumerate(islice(order, batch_size))
        await gather_all(user.session(task, f"batch-{batch}-{number}") for number, task in numbered)
