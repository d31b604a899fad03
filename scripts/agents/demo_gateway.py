"""A vLLM server with the demo policy, a gateway, four sessions as any agent would hold them, and their groups, checked.

Takes three minutes on two busy cores. Further options go to `agentic-opd gateway`.
"""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.local_server import ServerFailedError, child_process, free_port, local_server
from install.active_environment import command_parser
from openai import OpenAI

from agentic_opd.core.processes import end_of
from agentic_opd.core.types import Task, ToolCall
from agentic_opd.gateway.config import KEY_VARIABLE
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs" / "gateway"
CONFIG = "configs/demo_gateway.yaml"
POLICY = "scripts/demo_policy/policy"
MOST_TURNS = 4


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that takes requests."""

    url: str
    key: str
    pid: int

    @property
    def base_url(self) -> str:
        """The address for OpenAI's clients."""
        return f"{self.url}/v1"

    def ask(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        method: str | None = None,
    ) -> Any:
        """One of the gateway's own routes."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", **headers}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@contextmanager
def gateway(
    vllm_url: str, *flags: str, folder: Path = FOLDER, config: str = CONFIG, key: str | None = None
) -> Generator[Served]:
    """Start a gateway on a free port; its log is in `folder`. `key` None: a random one; empty: it needs none."""
    port, log = free_port(), folder / "gateway.log"
    key = secrets.token_urlsafe(16) if key is None else key
    address = ("--openai.base_url", f"{vllm_url}/v1", "--env.port", str(port))
    command = (
        sys.executable,
        "-m",
        "agentic_opd",
        "gateway",
        "--config",
        config,
        *address,
        *flags,
    )
    with child_process(command, log, {KEY_VARIABLE: key}, ROOT) as process:
        served = Served(f"http://127.0.0.1:{port}", key, process.pid)
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{served.url}/health", timeout=60):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailedError(f"the gateway did not start:\n{end_of(log)}")
            time.sleep(0.2)
        yield served


def streamed(client: OpenAI, **request: Any) -> dict[str, Any]:
    """The assistant's message, put together from a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in client.chat.completions.create(stream=True, **request):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
    return message


def answer_of(client: OpenAI, *, stream: bool, **request: Any) -> dict[str, Any]:
    if stream:
        return streamed(client, **request)
    return client.chat.completions.create(**request).choices[0].message.model_dump(exclude_none=True)


async def hold(client: OpenAI, task: Task, session: str, *, stream: bool, rewrite: bool) -> float:
    """One session: an agent works in a sandbox, its user says once what fails. Returns the share of checks passed."""
    world = CodingWorld(WorldConfig())
    request: dict[str, Any] = {"model": POLICY, "tools": list(world.tools), "max_tokens": 400}
    request["extra_headers"] = {"X-Session-Id": session}
    messages: list[Any] = [{"role": "system", "content": world.system_prompt}, {"role": "user", "content": task.prompt}]
    async with world.session(task) as sandbox:
        complained = False
        for _ in range(MOST_TURNS):
            answer = answer_of(client, stream=stream, messages=messages, **request)
            messages.append({**answer, "content": answer.get("content") or ""})
            calls = answer.get("tool_calls") or []
            for call in calls:
                arguments, raw = None, call["function"]["arguments"]
                with contextlib.suppress(ValueError):
                    arguments = json.loads(raw)
                tool_call = ToolCall(
                    call["id"], call["function"]["name"], arguments, raw, None if arguments else "not JSON"
                )
                result = await sandbox.run_tool(tool_call)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.content})
            if rewrite and len(messages) > 3:  # As agents do that shorten what they have seen.
                messages[2] = {**messages[2], "content": "(a first try)"}
            if calls:
                continue
            verdict = await world.verify(task, await sandbox.collect())
            if verdict.correctness == 1 or complained:
                break
            complained = True
            last_line = verdict.judge_report.rpartition("\n")[2]
            messages.append({"role": "user", "content": f"That is not right: {last_line}"})
        return (await world.verify(task, await sandbox.collect())).correctness


async def demo(served: Served) -> None:
    """Hold a few sessions, end them, and wait until their groups are written."""
    client = OpenAI(base_url=served.base_url, api_key=served.key)
    mark = secrets.token_hex(3)
    for number, task in enumerate(builtin_tasks()[:4]):
        name = f"demo-{mark}-{number}"
        worth = await hold(client, task, name, stream=number == 1, rewrite=number == 2)
        reward = {} if number == 3 else {"reward": worth}
        ended = served.ask(f"/sessions/{name}/end", {**reward, "feedback": f"{worth:.0%} of the checks passed."})
        kind = {1: ", streamed", 2: ", with a rewritten history", 3: ", without a reward"}.get(number, "")
        print(f"{name}: {task.task_id}, {ended['turns']} turns, {worth:.0%} of the checks passed{kind}", flush=True)
        while served.ask(f"/sessions/{name}")["state"] == "closed":  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "scripts/agents/demo_gateway")
    parser.add_argument("--keep", action="store_true", help="leave both servers up, and print address and key")
    arguments, flags = parser.parse_known_args(argv)
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"Starting vLLM with the demo policy (log: {FOLDER.relative_to(ROOT)}/vllm.log) ...", file=sys.stderr)
    vllm = local_server(POLICY, "--max-model-len", "4096", log=FOLDER / "vllm.log", cwd=ROOT)
    try:
        with vllm as policy, gateway(policy.base_url, *flags) as served:
            asyncio.run(demo(served))
            if arguments.keep:
                print(f"export OPENAI_BASE_URL={served.base_url} OPENAI_API_KEY={served.key}")
                print("Ctrl-C ends both.", file=sys.stderr)
                with contextlib.suppress(KeyboardInterrupt):
                    while True:
                        time.sleep(3600)
    except ServerFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "agentic_opd.validate", str(FOLDER / "groups.jsonl")]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
