"""Recorded traffic: requests of all protocols to a gateway and to an agent process, and what they leave behind as JSON.

The model is scripted and its logprobs are constant. Random ids are numbered in order of appearance, times are left out,
and sessions are sorted, so equal code gives equal JSON.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentic_opd.core.types import ProgramRun
from agentic_opd.gateway.journal import Journal, SessionState, turn_as_json
from agentic_opd.rollout.renderer import load_renderer
from tests.support.pictures import png, uri

from . import test_agent_process as programs
from .fakes import AGAIN, CALL, MORE, TOOL, USER, Running, ScriptedVllm, gateway_before, until

SYSTEM = {"role": "system", "content": "Answer briefly."}
SYSTEM_CHANGED = {"role": "system", "content": "Answer briefly. It is Monday."}
TITLE = {"role": "user", "content": "A title for it."}
COUNTING_TEMPLATE = (
    "{{ messages|length }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template whose prompts begin with the number of messages, so each request changes the earlier text."""
RESPONSES_TOOL = {"type": "function", **TOOL["function"]}
MESSAGES_TOOL = {"name": "run", "input_schema": TOOL["function"]["parameters"]}
_RANDOM_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{24,40}(?![0-9a-f])")
_TIMES = {"created", "created_at", "completed_at"}
_LONG_LIST = 8
"""Longer lists of token ids or logprobs are written as their digest."""


def script(prompt: str, choice: int) -> str:
    """Answer by what the prompt holds: reasoning, parallel calls, a call, a cut text or a numbered text."""
    last = prompt.rpartition("<|im_start|>user")[2]
    if "parallel" in last and "<tool_response>" not in last:
        return f"Both.\n{CALL}\n{CALL}"
    if "<tools>" in prompt and "<tool_response>" not in last and "run" in last:
        return f"I run it.\n{CALL}"
    if "long" in last:
        return "It goes on and on..."
    return f"Answer {prompt.count('<|im_start|>')}, choice {choice}. STOP here."


def normalised(value: Any) -> Any:
    """Return JSON data without times, with random ids numbered, and with digests of token ids and logprobs."""
    numbers: dict[str, str] = {}

    def clean(part: Any) -> Any:
        if isinstance(part, dict):
            return {clean(key): clean(item) for key, item in part.items() if key not in _TIMES}
        if isinstance(part, list):
            if len(part) > _LONG_LIST and all(isinstance(item, int | float) for item in part):
                return f"{len(part)} numbers, {blake2b(repr(part).encode(), digest_size=8).hexdigest()}"
            return [clean(item) for item in part]
        if isinstance(part, str):
            return _RANDOM_ID.sub(lambda match: numbers.setdefault(match[0], f"#{len(numbers) + 1}"), part)
        return part

    return clean(value)


def in_order(values: Iterable[Any]) -> list[Any]:
    return sorted(map(normalised, values), key=lambda value: json.dumps(value, sort_keys=True))


def renumbered(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a session's turns with ids that count from 1."""
    numbers: dict[Any, Any] = {turn["turn_id"]: number for number, turn in enumerate(turns, start=1)}
    for turn in turns:
        turn["turn_id"], turn["parent"] = numbers[turn["turn_id"]], numbers.get(turn["parent"])
        if turn["follows"] is not None:
            turn["follows"][0] = numbers[turn["follows"][0]]
    return turns


def journal_of(folder: Path) -> list[Any]:
    journal = Journal(folder / "journal.sqlite", only_read=True)
    sessions = []
    for row in journal.sessions(*SessionState):
        turns = [json.loads(turn_as_json(turn)) for turn in journal.turns(row.session_id)]
        ending = row.ending and [row.ending.stop, row.ending.reward, row.ending.feedback]
        about = {"name": row.name, "group": row.group_name, "is_part": row.parent is not None, "state": row.state}
        sessions.append({**about, "ending": ending, "turns": renumbered(turns)})
    journal.close()
    return in_order(sessions)


class Recorder:
    """Sends requests to a gateway, and keeps each reply."""

    def __init__(self, gateway: Running) -> None:
        self.gateway = gateway
        self.replies: list[Any] = []
        self.judged: list[Any] = []
        judge = gateway.gateway._writer.judge

        def watched(row: Any, path: Any, evidence: Any) -> Any:
            self.judged.append([[turn.messages[-1]["content"] for turn in path], list(evidence)])
            return judge(row, path, evidence)

        gateway.gateway._writer.judge = watched  # type: ignore[method-assign]

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
        response = await self.gateway.http.post(f"{self.gateway.url}{path}", json=body, headers=headers)
        if "event-stream" in response.headers["Content-Type"]:
            lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            content: Any = [json.loads(line) for line in lines]
        else:
            content = response.json()
        self.replies.append([path, response.status_code, content])
        return content

    async def chat(self, *messages: Any, headers: dict[str, str] | None = None, **body: Any) -> Any:
        answer = await self.post("/v1/chat/completions", headers, messages=[*messages], **body)
        return None if isinstance(answer, list) or "error" in answer else answer["choices"][0]["message"]


def results_of(answer: Any) -> list[Any]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in answer.get("tool_calls", ())]


async def chats(record: Recorder) -> None:
    first = await record.chat(SYSTEM, USER)
    await record.chat(SYSTEM, USER, first, MORE, stream=True, stream_options={"include_usage": True})
    await record.chat(SYSTEM, USER, first, MORE, n=2, logprobs=True, top_logprobs=2, return_token_ids=True)
    await record.chat(SYSTEM_CHANGED, USER, {**first, "content": "rewritten"}, MORE, stop="STOP")
    await record.chat(SYSTEM_CHANGED, USER, first, AGAIN, max_tokens=77, temperature=0.5, seed=3)
    await record.chat({"role": "user", "content": "A long text."}, stream=True, logprobs=True)
    await record.chat(SYSTEM, USER, first, temperature=0, top_k=5)
    await record.chat(USER, response_format={"type": "json_object"}, stop=["}", "STOP"])
    named = {"X-Session-Id": "named", "X-Group-Id": "a group"}
    tools: dict[str, Any] = {"tools": [TOOL]}
    question = {"role": "user", "content": "Please run both in parallel."}
    called = await record.chat(SYSTEM, question, headers=named, **tools)
    results = results_of(called)
    second = await record.chat(SYSTEM, question, called, *results, headers=named, **tools)
    await record.chat(SYSTEM, question, {**called, "content": None}, *results, second, MORE, headers=named, **tools)
    await record.chat(TITLE, headers={**named, "X-Turn-Type": "side"})
    await record.chat(SYSTEM, question, headers={**named, "X-Group-Id": "another group"}, **tools)
    await record.chat(USER, tool_choice="required", headers=named, **tools)
    await record.chat(USER, parallel_tool_calls=False, headers={"X-Session-Done": "true", **named}, **tools)
    agent = {"X-Claude-Code-Session-Id": "agent-session"}
    await record.chat(SYSTEM, {"role": "user", "content": "run it"}, headers=agent, **tools)
    helper = [{**TOOL, "function": {**TOOL["function"], "name": "look"}}]
    await record.chat({"role": "system", "content": "A helper."}, USER, headers=agent, tools=helper)
    await record.chat(USER, headers={**agent, "X-Claude-Code-Agent-Id": "sub"})
    await record.chat({"role": "user", "content": "word " * 2000})
    await record.chat({"role": "user", "content": "x" * 20000})
    await record.chat(USER, tool_choice="required")
    answer_id = record.replies[0][2]["id"]
    await record.post(f"/turns/{answer_id}/feedback", reward=1, text="Well done.")
    await record.post("/sessions/agent-session/turns/1/feedback", reward=1)
    await record.chat(USER, session_id="late")
    await record.post("/sessions/late/end", group="a group", reward=1)
    await record.post("/sessions/agent-session/end", reward=0.5, feedback="Thanks.")


async def responses(record: Recorder) -> None:
    tools = [RESPONSES_TOOL]
    first = await record.post("/v1/responses", input="Write f.", instructions="Answer briefly.")
    second = await record.post("/v1/responses", input="It fails.", previous_response_id=first["id"])
    await record.post("/v1/responses", input="And now?", previous_response_id=second["id"], instructions="More.")
    await record.post("/v1/responses/input_tokens", input="And now?", previous_response_id=second["id"])
    reference = {"type": "item_reference", "id": second["output"][0]["id"]}
    await record.post("/v1/responses", input=[{"role": "user", "content": "Write f."}, reference, MORE], stream=True)
    await record.post("/v1/responses", input="x", previous_response_id="resp_none")
    begun = await record.post("/v1/responses", input="Please run it.", tools=tools, top_logprobs=1)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in begun["output"]
        if item["type"] == "function_call"
    ]
    history = [{"role": "user", "content": "Please run it."}, *begun["output"], *results]
    await record.post("/v1/responses", input=history, tools=tools, stream=True)
    await record.post("/v1/responses", input=[*results, MORE], previous_response_id=begun["id"], tools=tools)
    session = (await record.gateway.http.post(f"{record.gateway.url}/v1/responses", json={"input": "Bye."})).headers
    answer = await record.post("/v1/responses", input="Bye again.", session_id="over")
    await record.post("/sessions/over/end", reward=-1)
    await record.gateway.gateway.drained()
    await record.post("/v1/responses", input="It fails.", previous_response_id=answer["id"])
    assert session["X-Session-Id"]


async def messages(record: Recorder) -> None:
    common: dict[str, Any] = {"max_tokens": 60, "tools": [MESSAGES_TOOL]}
    question = {"role": "user", "content": "Please run both in parallel."}
    called = await record.post("/v1/messages", messages=[question], system="Answer briefly.", **common)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
        for block in called["content"]
        if block["type"] == "tool_use"
    ]
    history = [question, {"role": "assistant", "content": called["content"]}, {"role": "user", "content": results}]
    await record.post("/v1/messages", messages=history, system="Answer briefly.", stream=True, **common)
    await record.post("/v1/messages/count_tokens", messages=history, system="Answer briefly.", tools=[MESSAGES_TOOL])
    await record.post("/v1/messages", messages=[USER], max_tokens=20, stop_sequences=["STOP"])
    await record.post("/v1/messages", messages=[USER], max_tokens=20, top_p=0.5, stream=True)
    await record.post("/v1/messages", messages=[{"role": "user", "content": "x" * 20000}], max_tokens=20)


async def equal_conversations(record: Recorder) -> None:
    """Let four clients have the same conversation, all requests of a step at the same time."""
    vllm, histories = record.gateway.vllm, [[{"role": "user", "content": "Please run it."}] for _ in range(4)]
    for _ in range(3):
        vllm.gate = asyncio.Event()
        begun, pending = len(vllm.asked), []
        for number, history in enumerate(histories, start=1):
            tools = [TOOL] if number < 4 else []
            pending.append(asyncio.create_task(record.chat(*history, tools=tools, stream=False)))

            async def is_sampled(count: int = begun + number) -> bool:
                return len(vllm.asked) == count

            await until(is_sampled)
        vllm.gate.set()
        for history, answer in zip(histories, await asyncio.gather(*pending), strict=True):
            calls = answer.get("tool_calls", ())
            history += [
                answer,
                *({"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls),
                MORE,
            ]


async def pictures(record: Recorder) -> None:
    image = {"type": "image_url", "image_url": {"url": uri(png(shade=1))}}
    look = {"role": "user", "content": [{"type": "text", "text": "Look: "}, image]}
    await record.chat(look, MORE, await record.chat(look), AGAIN)
    await record.chat(look, await record.chat(look), MORE)


async def restarts(folder: Path, tokenizer: Any, vllm: ScriptedVllm) -> list[Recorder]:
    """Talk to a gateway, to the next one with its journal, and to a third one."""
    records: list[Recorder] = []
    question, answer_id = {"role": "user", "content": "Please run it."}, ""
    history: list[Any] = [question]
    for _ in range(3):
        async with gateway_before(vllm, folder) as running:
            record = Recorder(running)
            records.append(record)
            answer = await record.chat(*history, tools=[TOOL])
            calls = answer.get("tool_calls", ())
            history += [
                answer,
                *({"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls),
                MORE,
            ]
            previous = {"previous_response_id": answer_id} if answer_id else {}
            answer_id = (await record.post("/v1/responses", input="It fails.", **previous))["id"]
            await record.chat(USER, headers={"X-Session-Id": "named", "X-Turn-Type": "main"})
    return records


async def rewriting_template(record: Recorder) -> None:
    first = await record.chat(USER)
    second = await record.chat(USER, first, MORE)
    await record.chat(USER, first, MORE, second, AGAIN)


async def program(client: programs.Client, replies: list[Any]) -> ProgramRun:
    """Act as a program: title beside the first turn, continuations, other protocols, and requests that are refused."""
    headers = {"x-api-key": client.key, "X-Session-Id": "mine", "X-Group-Id": "ours", "X-Session-Done": "true"}

    async def post(path: str, **body: Any) -> Any:
        response = await client.http.post(f"http://policy/v1/{path}", json=body, headers=headers)
        replies.append([path, response.status_code, response.json()])
        return response.json()

    first = await client.say(USER, temperature=0, seed=3, max_tokens=500)
    client.files.append("one")
    await client.say(TITLE, top_k=3)
    second = await client.say(USER, first, MORE, stop="STOP")
    answer = await post("responses", input="And now?", instructions="Answer briefly.")
    client.files.append("two")
    await post("responses", input="It fails.", previous_response_id=answer.get("id", "resp_x"))
    await post("responses", input="It fails.", previous_response_id="resp_none")
    await post("messages", messages=[USER, first, MORE, second, AGAIN], max_tokens=20)
    await post("chat/completions", messages=[USER, first, MORE, second, {"role": "user", "content": "word " * 2000}])
    await post("chat/completions", messages=[USER, {**first, "content": "another"}, MORE], n=2)
    return programs.ENDED


def episode_of(vllm: ScriptedVllm, **settings: Any) -> Any:
    replies: list[Any] = []
    episode = programs.run(vllm, programs.World(partial(program, replies=replies)), **settings)
    trace = episode.traces[0]
    return {
        "replies": replies,
        "stop": episode.stop_reason,
        "requests": episode.requests,
        "changes": [sorted(change) for change in episode.changes],
        "program": repr(episode.program),
        "reward": repr(episode.reward),
        "verification": repr(episode.verification),
        "messages": list(trace.messages),
        "tokens": list(trace.tokens_T),
        "masks": list(trace.masks_T),
        "turns": [repr(turn) for turn in trace.turns],
        "context": [repr(turn) for turn in trace.context_turns],
    }


def recording(tokenizer: Any, folder: Path, monkeypatch: Any) -> list[str]:
    """Send all traffic, and return what it left behind as lines of JSON."""
    traffic: dict[str, Any] = {}

    def play(name: str, talk: Callable[[Recorder], Awaitable[None]], vllm: ScriptedVllm, **settings: Any) -> None:
        async def run() -> None:
            (folder / name).mkdir()
            async with gateway_before(vllm, folder / name, **settings) as running:
                record = Recorder(running)
                await talk(record)
                groups = await running.groups() if (folder / name / "groups.jsonl").exists() else []
            traffic[name] = left_behind(folder / name, vllm, [record], groups)

        asyncio.run(run())

    play("chats", chats, ScriptedVllm(tokenizer, script), group_size=2)
    play("responses", responses, ScriptedVllm(tokenizer, script))
    play("messages", messages, ScriptedVllm(tokenizer, script))
    play("equal", equal_conversations, ScriptedVllm(tokenizer, script))
    play("pictures", pictures, ScriptedVllm(tokenizer, script, placeholder="<|endoftext|>"))
    vllm = ScriptedVllm(tokenizer, script)
    (folder / "restarts").mkdir()
    records = asyncio.run(restarts(folder / "restarts", tokenizer, vllm))
    traffic["restarts"] = left_behind(folder / "restarts", vllm, records, [])
    for name, settings in (("program", {}), ("short program", {"max_turns": 3, "max_tokens_per_turn": 9})):
        vllm = ScriptedVllm(tokenizer, script)
        traffic[name] = {"episode": in_order([episode_of(vllm, **settings)]), "sampled": in_order(vllm.asked)}
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", COUNTING_TEMPLATE)
        renderer = load_renderer(tokenizer, "default", {"tool_parser": "qwen3"})
        play("rewriting template", rewriting_template, ScriptedVllm(tokenizer, script), renderer=renderer)
    return [
        json.dumps([name, part, entry], sort_keys=True)
        for name, parts in traffic.items()
        for part, entries in parts.items()
        for entry in entries
    ]


def left_behind(folder: Path, vllm: ScriptedVllm, records: list[Recorder], groups: list[Any]) -> dict[str, Any]:
    return {
        "replies": in_order(reply for record in records for reply in record.replies),
        "sampled": in_order(vllm.asked),
        "judged": in_order(judged for record in records for judged in record.judged),
        "journal": journal_of(folder),
        "groups": in_order(groups),
    }
