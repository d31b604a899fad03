"""Agents from their registry, as they are, before a gateway: one conversation is one session of token-exact turns.

The policy is scripted: it calls the agent's shell tool three times and ends. Each agent is installed in a folder of its
own, and runs with a home in a scratch folder, telemetry off, and a proxy that leads nowhere for every other address.
"""

import asyncio
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.wire.checks import GroupChecker
from tests.unit.conftest import make_tokenizer
from tests.unit.gateway.fakes import Running, ScriptedVllm, gateway_before

pytestmark = [pytest.mark.all, pytest.mark.skipif(shutil.which("npm") is None, reason="the agents are npm packages")]

TASK = "Say hi by a command."
LIMIT_S = 150


@dataclass(frozen=True)
class Agent:
    """How an agent is installed and started; `ADDRESS` in its files, variables and command is the gateway's address."""

    package: str
    command: str
    tool: str
    arguments: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Files below the agent's home: path -> text."""


CODEX = """
model = "policy"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "ADDRESS/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
PI = {
    "baseUrl": "ADDRESS/v1",
    "apiKey": "key",
    "api": "openai-completions",
    "models": [
        {
            **{"id": "policy", "name": "policy", "reasoning": False, "input": ["text"], "contextWindow": 100_000},
            **{"maxTokens": 4096, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}},
        }
    ],
}
OPENCODE = {
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "ADDRESS/v1", "apiKey": "key"},
            "models": {"policy": {"name": "policy"}},
        }
    },
    **{"model": "gateway/policy", "small_model": "gateway/policy", "share": "disabled", "autoupdate": False},
}
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
SHELL = {"command": "echo hi", "description": "greets"}
AGENTS = {
    "codex": Agent(
        "@openai/codex",
        f"codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox '{TASK}'",
        "exec_command",
        {"cmd": "echo hi"},
        {"OPENAI_API_KEY": "key"},
        {".codex/config.toml": CODEX},
    ),
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        f"claude -p '{TASK}' --dangerously-skip-permissions --model claude-sonnet-4-5",
        "Bash",
        SHELL,
        {"ANTHROPIC_BASE_URL": "ADDRESS", "ANTHROPIC_API_KEY": "key", "DISABLE_TELEMETRY": "1", "IS_SANDBOX": "1"},
    ),
    "opencode": Agent(
        "opencode-ai",
        f"opencode run '{TASK}'",
        "bash",
        SHELL,
        files={".config/opencode/opencode.json": json.dumps(OPENCODE)},
    ),
    "pi": Agent(
        "@mariozechner/pi-coding-agent",
        f"pi --provider gateway --model policy -p '{TASK}'",
        "bash",
        {"command": "echo hi"},
        files={".pi/agent/models.json": json.dumps({"providers": {"gateway": PI}})},
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code",
        f"qwen --auth-type openai -y -p '{TASK}'",
        "run_shell_command",
        {"command": "echo hi", "is_background": False},
        {
            **{"OPENAI_BASE_URL": "ADDRESS/v1", "OPENAI_API_KEY": "key", "OPENAI_MODEL": "policy"},
            **dict.fromkeys(PROXIES, ""),  # It sends requests to this machine there too.
        },
    ),
}


async def finished(command: list[str], folder: Path, variables: dict[str, str]) -> None:
    """Run a command to its end in a folder."""
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=variables, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            code = await asyncio.wait_for(process.wait(), LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()
    assert code == 0, log.read_text(errors="replace")[-2000:]


@pytest.mark.parametrize("name", AGENTS)
def test_one_conversation_is_one_session(name: str, tmp_path: Path) -> None:
    agent, call = AGENTS[name], ""
    for folder in ("agent", "home", "work"):
        (tmp_path / folder).mkdir()

    def says(prompt: str, choice: int) -> str:
        results = prompt.count("<tool_response>")
        return f"All is done after {results}." if results >= 3 or f'"name": "{agent.tool}"' not in prompt else call

    call = f"I run it.\n<tool_call>\n{json.dumps({'name': agent.tool, 'arguments': agent.arguments})}\n</tool_call>"
    vllm = ScriptedVllm(make_tokenizer(), says, context=10**6)

    async def talk(at: Running) -> list[dict[str, Any]]:
        await finished(["npm", "install", "--no-audit", "--no-fund", agent.package], tmp_path / "agent", {**os.environ})
        for path, text in agent.files.items():
            file = tmp_path / "home" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("ADDRESS", at.url))
        nowhere = dict.fromkeys(PROXIES, "http://127.0.0.1:9")
        variables = {
            **{"PATH": f"{tmp_path}/agent/node_modules/.bin:{os.environ['PATH']}", "HOME": str(tmp_path / "home")},
            **{"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "TERM": "dumb", **nowhere},
            **{key: value.replace("ADDRESS", at.url) for key, value in agent.variables.items()},
        }
        await finished(["bash", "-c", agent.command], tmp_path / "work", variables)
        (session,) = at.gateway._sessions
        main = [turn for turn_id, turn in session.tree.turns.items() if turn_id not in session.tree.side_turns()]
        assert [len(turn.messages[-1].get("tool_calls", ())) for turn in main] == [1, 1, 1, 0]
        assert session.tree.line(main[-1].turn_id) == {turn.turn_id for turn in main}
        await at.gateway.end(session.row.owner, session.session_id, 1.0)
        return await at.groups()

    async def with_gateway() -> list[dict[str, Any]]:
        async with gateway_before(vllm, tmp_path, max_body_bytes=2**25) as at:
            return await talk(at)

    (group,) = asyncio.run(with_gateway())
    assert GroupChecker().read(group).problems == []
    sampled = [ids for prompt, ids in vllm.sampled if f'"name": "{agent.tool}"' in vllm.tokenizer.decode(prompt)]
    assert [token for mask in group["masks"] for token in mask if token != -100] == [
        one for ids in sampled for one in ids
    ]
    assert {about["reward"]["client"] for about in group["overrides"]} == {1.0}
