"""Clients that `scripts/agents/try_agents` installs and runs: packages, a command, and a script of calls for each.

A command is run by bash in an empty work folder and finds the gateway by `OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL`, and
both protocols' key variables. A Python client is a program, as a user of the library writes it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

TASK = "Run three commands, then say that all is done."
SCRIPT_VARIABLE = "TRY_AGENTS_SCRIPT"
"""Names the file that holds the name of the client whose script `forced_sampling` follows."""
TOOL_TURNS = 3
END = "All is done."


@dataclass(frozen=True)
class AgentClient:
    """One client. `NUMBER` in `arguments` is replaced by that of the turn, from 1."""

    packages: tuple[str, ...]
    """Of its registry, in this order; the last one names the client's version."""
    command: str = "python agent.py"
    program: str = ""
    """Text of `agent.py` in the work folder."""
    tool: str = "shell"
    """The tool that the script calls; a request without it in its prompt is a side request."""
    arguments: dict[str, Any] = field(default_factory=lambda: {"command": "echo NUMBER"})
    result: str = "<tool_response>"
    """What each tool result is rendered with, by which the script counts them."""
    last: tuple[str, dict[str, Any]] | None = None
    """The call that ends the conversation; None: a text without a call does."""
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Files below the home folder: path -> text, in which `ADDRESS` is the gateway's address."""
    variables: dict[str, str] = field(default_factory=dict[str, str])
    settings: tuple[str, ...] = ()
    """Flags of the gateway that the client needs to be learned from."""
    is_npm: bool = False


def scripted(client: AgentClient, prompt: str, *, only_calls: bool = False) -> str:
    """Return what the policy of a client samples from a prompt: three calls of its tool, then the end.

    Args:
        client: The client.
        prompt: The rendered prompt.
        only_calls: No text before a call, as the grammar of forced calls demands.
    """
    results = prompt.count(client.result)
    if f'"name": "{client.tool}"' not in prompt:
        return "Three commands"
    if results >= TOOL_TURNS and client.last is None:
        return END
    tool, arguments = (client.tool, client.arguments) if results < TOOL_TURNS else client.last or ("", {})
    filled = {
        key: value.replace("NUMBER", str(results + 1)) if isinstance(value, str) else value
        for key, value in arguments.items()
    }
    call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': filled})}\n</tool_call>"
    return call if only_calls else f"I run it.\n{call}"


_SHELL = '''
def shell(command: str) -> str:
    """Run a shell command.

    Args:
        command: The command.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
'''
_SCHEMA = '{"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}'

_OPENAI = f"""
import json, subprocess
from openai import OpenAI
{_SHELL}
tools = [{{"type": "function", "function": {{"name": "shell", "description": "Runs it.", "parameters": {_SCHEMA}}}}}]
messages = [{{"role": "user", "content": {TASK!r}}}]
while True:
    reply = OpenAI().chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
    messages.append(reply)
    if not reply.tool_calls:
        break
    for call in reply.tool_calls:
        output = shell(**json.loads(call.function.arguments))
        messages.append({{"role": "tool", "tool_call_id": call.id, "content": output}})
"""
_RESPONSES = f"""
import json, subprocess
from openai import OpenAI
{_SHELL}
tools = [{{"type": "function", "name": "shell", "description": "Runs it.", "parameters": {_SCHEMA}, "strict": False}}]
items, previous = [{{"role": "user", "content": {TASK!r}}}], None
while items:
    answer = OpenAI().responses.create(model="policy", input=items, tools=tools, previous_response_id=previous)
    previous = answer.id
    items = [
        {{"type": "function_call_output", "call_id": one.call_id, "output": shell(**json.loads(one.arguments))}}
        for one in answer.output
        if one.type == "function_call"
    ]
"""
_ANTHROPIC = f"""
import subprocess
from anthropic import Anthropic
{_SHELL}
tools = [{{"name": "shell", "description": "Runs it.", "input_schema": {_SCHEMA}}}]
messages = [{{"role": "user", "content": {TASK!r}}}]
while True:
    with Anthropic().messages.stream(model="policy", max_tokens=500, messages=messages, tools=tools) as stream:
        reply = stream.get_final_message()
    messages.append({{"role": "assistant", "content": reply.content}})
    if reply.stop_reason != "tool_use":
        break
    results = [
        {{"type": "tool_result", "tool_use_id": one.id, "content": shell(**one.input)}}
        for one in reply.content
        if one.type == "tool_use"
    ]
    messages.append({{"role": "user", "content": results}})
"""
_LITELLM = _OPENAI.replace("from openai import OpenAI", "import litellm").replace(
    'OpenAI().chat.completions.create(model="policy"', 'litellm.completion(model="openai/policy"'
)
_OPENAI_AGENTS = f"""
import subprocess
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
{_SHELL}
set_tracing_disabled(True)
MODEL
agent = Agent(name="Helper", instructions="You help.", tools=[function_tool(shell)], model=model)
print(Runner.run_sync(agent, {TASK!r}).final_output)
"""
_SMOLAGENTS = f"""
import os, subprocess
from smolagents import OpenAIModel, ToolCallingAgent, tool
{_SHELL}
model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[tool(shell)], model=model).run({TASK!r}))
"""
_PYDANTIC_AI = f"""
import subprocess
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
{_SHELL}
print(Agent(OpenAIChatModel("policy"), tools=[shell]).run_sync({TASK!r}).output)
"""
_LANGGRAPH = f"""
import subprocess
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
{_SHELL}
agent = create_react_agent(ChatOpenAI(model="policy"), [shell])
print(agent.invoke({{"messages": [("user", {TASK!r})]}})["messages"][-1].content)
"""
_CODEX = """
model = "policy"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "ADDRESS/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
_OPENCODE = {
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "ADDRESS/v1", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"policy": {"name": "policy"}},
        }
    },
    **{"model": "gateway/policy", "small_model": "gateway/policy", "share": "disabled", "autoupdate": False},
}
_PI_MODEL = {
    **{"id": "policy", "name": "policy", "reasoning": False, "input": ["text"], "contextWindow": 100_000},
    **{"maxTokens": 4096, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}},
}
_PI = {
    "providers": {
        "gateway": {
            **{"baseUrl": "ADDRESS/v1", "apiKey": "OPENAI_API_KEY", "api": "openai-completions"},
            "models": [_PI_MODEL],
        }
    }
}
_OPENCLAW = {"models": _PI, "agents": {"defaults": {"model": {"primary": "gateway/policy"}}}}
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

CLIENTS = {
    "openai": AgentClient(("openai",), program=_OPENAI),
    "openai-responses": AgentClient(("openai",), program=_RESPONSES),
    "anthropic": AgentClient(("anthropic",), program=_ANTHROPIC),
    "litellm": AgentClient(("litellm",), program=_LITELLM),
    "openai-agents": AgentClient(
        ("openai-agents",),
        program=_OPENAI_AGENTS.replace("MODEL", 'model = OpenAIChatCompletionsModel("policy", AsyncOpenAI())'),
    ),
    "openai-agents-responses": AgentClient(
        ("openai-agents",), program=_OPENAI_AGENTS.replace("MODEL", 'model = "policy"')
    ),
    "smolagents": AgentClient(
        ("smolagents[openai]",),
        program=_SMOLAGENTS,
        result="<|im_start|>user\nObservation:",
        last=("final_answer", {"answer": "All is done."}),
        settings=("--env.learn_from_altered_sampling", "true"),  # It forces a call in every turn.
    ),
    "pydantic-ai": AgentClient(("pydantic-ai-slim[openai]",), program=_PYDANTIC_AI),
    "langgraph": AgentClient(("langchain-openai", "langgraph"), program=_LANGGRAPH),
    "mini-swe-agent": AgentClient(
        ("mini-swe-agent",),
        f"mini -m openai/policy -y --exit-immediately -t '{TASK}'",
        tool="bash",
        last=("bash", {"command": _SUBMIT}),
        variables={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
    "codex": AgentClient(
        ("@openai/codex",),
        f"codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox '{TASK}'",
        tool="exec_command",
        arguments={"cmd": "echo NUMBER"},
        files={".codex/config.toml": _CODEX},
        is_npm=True,
    ),
    "claude-code": AgentClient(
        ("@anthropic-ai/claude-code",),
        f"claude -p '{TASK}' --dangerously-skip-permissions --model claude-sonnet-4-5",
        tool="Bash",
        arguments={"command": "echo NUMBER", "description": "prints NUMBER"},
        variables={"DISABLE_TELEMETRY": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"},
        is_npm=True,
    ),
    "opencode": AgentClient(
        ("opencode-ai",),
        f"opencode run '{TASK}'",
        tool="bash",
        arguments={"command": "echo NUMBER", "description": "prints NUMBER"},
        files={".config/opencode/opencode.json": json.dumps(_OPENCODE)},
        is_npm=True,
    ),
    "pi": AgentClient(
        ("@mariozechner/pi-coding-agent",),
        f"pi --provider gateway --model policy -p '{TASK}'",
        tool="bash",
        files={".pi/agent/models.json": json.dumps(_PI)},
        is_npm=True,
    ),
    "qwen-code": AgentClient(
        ("@qwen-code/qwen-code",),
        f"OPENAI_MODEL=policy qwen --auth-type openai -y -p '{TASK}'",
        tool="run_shell_command",
        arguments={"command": "echo NUMBER", "is_background": False},
        is_npm=True,
    ),
    "openclaw": AgentClient(
        ("node@24", "openclaw"),
        f"openclaw agent --local --agent main --message '{TASK}'",
        tool="exec",
        files={".openclaw/openclaw.json": json.dumps(_OPENCLAW)},
        is_npm=True,
    ),
}
