"""An agent as anybody writes one, for `env.agent_command`: the `openai` library, two tools, and a loop."""

import json
import os
import subprocess
from pathlib import Path

from openai import OpenAI

TEXT = {"type": "string"}


def tool(name: str, description: str, **parameters: dict[str, str]) -> dict:
    schema = {"type": "object", "properties": parameters, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def run(name: str, arguments: dict[str, str]) -> str:
    if name == "write_file":
        Path(arguments["path"]).write_text(arguments["content"])
        return f"wrote {len(arguments['content'].splitlines())} lines to {arguments['path']}"
    done = subprocess.run(arguments["command"], shell=True, capture_output=True, text=True, timeout=30)
    return done.stdout + done.stderr or "[no output]"


TOOLS = [
    tool("terminal", "Run a shell command.", command=TEXT),
    tool("write_file", "Write a file.", path=TEXT, content=TEXT),
]
client, model = OpenAI(), os.environ["OPENAI_MODEL"]
messages = [{"role": "system", "content": "You are a coding agent."}, {"role": "user", "content": os.environ["TASK"]}]
while True:
    message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
    messages.append(message.to_dict())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        try:
            result = run(call.function.name, json.loads(call.function.arguments))
        except Exception as error:
            result = f"Error: {error!r}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
