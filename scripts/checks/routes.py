"""Does the gateway answer as vLLM's own route of the same protocol does?

    scripts/checks/routes [--protocols chat responses messages] [--exchanges 200] [--json FILE]

Conversations of four turns with the demo policy, greedy, are held with each of vLLM's routes and recorded: with tools
and without, with results of calls, cut off by the token limit, ended by a stop sequence. Each request is then sent to a
gateway before the same server, as a session by itself. Compared are the text, the calls, the finish reason, and the
numbers of prompt and completion tokens. Exit code 1: an answer differs. vLLM's server parses calls by its parser
`hermes`. Two differences are vLLM's. That parser leaves the newline between a text and a call, which the chat template
writes, in the text, so that the next prompt has two; it is not compared. Its messages route loses the text of a call
that the policy writes without having been given tools, which the gateway gives as text; such answers are counted.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from agents.demo_gateway import ROOT, gateway
from bench.local_server import ServerFailedError, local_server
from install.active_environment import command_parser

from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.tools import TOOL_SPECS
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig

DEMO = "scripts/demo_policy/policy"
TURNS, AT_ONCE = 4, 8
COMPLAINT = "That is not right: read the task again."
RESULT = "exit code 0\n(no output)"
Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What an answer says, whatever its protocol."""

    text: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments, as JSON with sorted keys, of each call."""
    finish: str
    prompt_tokens: int
    completion_tokens: int


def call_of(name: str, arguments: str | Json) -> tuple[str, str]:
    """Return a call in the form that is compared."""
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    return name, json.dumps(read, sort_keys=True)


class Protocol(ABC):
    """Bodies of a protocol, and what its answers say."""

    path: ClassVar[str]
    counts: ClassVar[tuple[str, str]] = ("input_tokens", "output_tokens")

    @abstractmethod
    def body(self, task: str, *, tools: bool, limit: int, stop: str | None) -> Json:
        """Return the first request of a conversation."""

    @abstractmethod
    def say(self, body: Json, answer: Json, reply: Reply) -> None:
        """Add the answer to the body, and what comes next: results of its calls, or a complaint."""

    @abstractmethod
    def parts(self, answer: Json) -> tuple[str, list[tuple[str, str]], str]:
        """Return text, calls and finish reason of an answer."""

    def read(self, answer: Json) -> Reply:
        """Return what an answer says."""
        text, calls, finish = self.parts(answer)
        text = text.removesuffix("\n") if calls else text
        prompt, completion = (answer["usage"][name] for name in self.counts)
        return Reply(text, tuple(calls), finish, prompt, completion)


class _Chat(Protocol):
    path = "/v1/chat/completions"
    counts = ("prompt_tokens", "completion_tokens")

    def body(self, task: str, *, tools: bool, limit: int, stop: str | None) -> Json:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
        more = ({"tools": [*TOOL_SPECS]} if tools else {}) | ({"stop": stop} if stop else {})
        return {"messages": messages, "max_tokens": limit, **more}

    def say(self, body: Json, answer: Json, reply: Reply) -> None:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or ()
        assistant = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]
        body["messages"] += [assistant, *(results or [{"role": "user", "content": COMPLAINT}])]

    def parts(self, answer: Json) -> tuple[str, list[tuple[str, str]], str]:
        (choice,) = answer["choices"]
        functions = (call["function"] for call in choice["message"].get("tool_calls") or ())
        calls = [call_of(call["name"], call["arguments"]) for call in functions]
        return choice["message"]["content"] or "", calls, choice["finish_reason"]


class _Responses(Protocol):
    path = "/v1/responses"

    def body(self, task: str, *, tools: bool, limit: int, stop: str | None) -> Json:
        flat = [{"type": "function", **tool["function"]} for tool in TOOL_SPECS]
        more = ({"tools": flat} if tools else {}) | ({"stop": [stop]} if stop else {})
        return {
            "instructions": SYSTEM,
            "input": [{"role": "user", "content": task}],
            "max_output_tokens": limit,
            **more,
        }

    def say(self, body: Json, answer: Json, reply: Reply) -> None:
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": RESULT} for call in calls]
        body["input"] += [*answer["output"], *(results or [{"role": "user", "content": COMPLAINT}])]

    def parts(self, answer: Json) -> tuple[str, list[tuple[str, str]], str]:
        texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        return "".join(texts), [call_of(call["name"], call["arguments"]) for call in calls], answer["status"]


class _Messages(Protocol):
    path = "/v1/messages"

    def body(self, task: str, *, tools: bool, limit: int, stop: str | None) -> Json:
        functions = (tool["function"] for tool in TOOL_SPECS)
        flat = [
            {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
            for function in functions
        ]
        more = ({"tools": flat} if tools else {}) | ({"stop_sequences": [stop]} if stop else {})
        return {"system": SYSTEM, "messages": [{"role": "user", "content": task}], "max_tokens": limit, **more}

    def say(self, body: Json, answer: Json, reply: Reply) -> None:
        fields = ("type", "text", "id", "name", "input")
        blocks = [{name: block[name] for name in fields if block.get(name) is not None} for block in answer["content"]]
        uses = [block for block in blocks if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": RESULT} for use in uses]
        body["messages"] += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": results or COMPLAINT},
        ]

    def parts(self, answer: Json) -> tuple[str, list[tuple[str, str]], str]:
        texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
        uses = [block for block in answer["content"] if block["type"] == "tool_use"]
        finish = f"{answer['stop_reason']} {answer.get('stop_sequence') or ''}".strip()
        return "".join(texts), [call_of(use["name"], use["input"]) for use in uses], finish


PROTOCOLS = {"chat": _Chat(), "responses": _Responses(), "messages": _Messages()}
SYSTEM = CodingWorld(WorldConfig()).system_prompt


@dataclass
class Client:
    """Asks one server."""

    session: aiohttp.ClientSession
    url: str
    key: str
    model: str

    async def ask(self, protocol: Protocol, body: Json, **headers: str) -> Json:
        """Return the answer to a request, sampled greedily."""
        headers["Authorization"] = f"Bearer {self.key}"
        request = {"model": self.model, "temperature": 0, **body}
        async with self.session.post(f"{self.url}{protocol.path}", json=request, headers=headers) as answer:
            assert answer.status == 200, f"{self.url}{protocol.path}: {answer.status}: {await answer.text()}"
            return await answer.json()


def is_lost_by_vllm(body: Json, expected: Reply, answered: Reply) -> bool:
    """Whether vLLM lost the text of a call without tools."""
    is_call = answered.text.lstrip().startswith("<tool_call>")
    return "tools" not in body and is_call and expected == replace(answered, text="")


async def compare(protocol: Protocol, vllm: Client, ours: Client, exchanges: int) -> tuple[list[Json], int]:
    """Hold the conversations with both; return the pairs of answers that differ, and how many vLLM lost the text of."""
    slots, differing, tasks, lost = asyncio.Semaphore(AT_ONCE), list[Json](), builtin_tasks(), 0

    async def converse(number: int, turns: int) -> None:
        nonlocal lost
        limits = {0: (12, None), 1: (160, "\n\n"), 2: (160, "def ")}
        limit, stop = limits.get(number % 6, (160, None))
        task = f"{tasks[number % len(tasks)].prompt}\nThis is request {number}."
        body = protocol.body(task, tools=number % 4 != 3, limit=limit, stop=stop)
        async with slots:
            for turn in range(turns):
                expected = protocol.read(answer := await vllm.ask(protocol, body))
                session = f"{type(protocol).__name__}-{number}-{turn}"
                answered = protocol.read(await ours.ask(protocol, body, **{"X-Session-Id": session}))
                if is_lost_by_vllm(body, expected, answered):
                    lost += 1
                elif answered != expected:
                    differing.append({"request": json.loads(json.dumps(body)), "vllm": asdict(expected)})
                    differing[-1]["gateway"] = asdict(answered)
                protocol.say(body, answer, expected)

    conversations, rest = divmod(exchanges, TURNS)
    lengths = [TURNS] * conversations + ([rest] if rest else [])
    await asyncio.gather(*(converse(number, turns) for number, turns in enumerate(lengths)))
    return differing, lost


async def run(args: argparse.Namespace, vllm_url: str, model: str, url: str, key: str) -> dict[str, list[Json]]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        vllm, ours = Client(session, vllm_url, "none", model), Client(session, url, key, model)
        differing: dict[str, list[Json]] = {}
        for name in args.protocols:
            differing[name], lost = await compare(PROTOCOLS[name], vllm, ours, args.exchanges)
            loses = f"; vLLM lost the text of {lost}" if lost else ""
            print(f"{name}: {args.exchanges} exchanges, {len(differing[name])} differ{loses}", flush=True)
            for exchange in differing[name][:3]:
                print(f"  vLLM     {exchange['vllm']}\n  gateway  {exchange['gateway']}", flush=True)
        return differing


def main() -> int:
    parser = command_parser(__doc__, "scripts/checks/routes")
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=[*PROTOCOLS], help="all")
    parser.add_argument("--exchanges", type=int, default=200, help="of each protocol: 200")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the exchanges that differ, by protocol")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="compare-routes-") as name:
        folder = Path(name)
        parses = ("--", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        groups = ("--env.opd_enabled", "false", "--env.data_path_to_save_groups", str(folder / "groups.jsonl"))
        try:
            with (
                local_server(DEMO, *parses, log=folder / "vllm.log", cwd=ROOT) as vllm,
                gateway(vllm.base_url, *groups, folder=folder) as served,
            ):
                differing = asyncio.run(run(args, vllm.base_url, vllm.model, served.url, served.key))
        except ServerFailedError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if args.json is not None:
        args.json.write_text(json.dumps(differing, indent=1) + "\n")
    return int(any(differing.values()))


if __name__ == "__main__":
    sys.exit(main())
