"""An agent as anybody writes one, for `env.agent.command`: the `openai` library, two tools, and a loop."""

import json
import os
import subprocess
from pathlib import Path

from openai import OpenAI


def tool(name: str, *parameters: str) -> dict:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in parameters}, "required": parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def run(name: str, arguments: dict[str, str]) -> str:
    if name == "write_file":
        Path(arguments["path"]).write_text(arguments["content"])
        return f"wrote {len(arguments['content'].removesuffix(chr(10)).split(chr(10)))} lines to {arguments['path']}"
    process = subprocess.run(arguments["command"], check=False, shell=True, capture_output=True, text=True, timeout=30)
    return process.stdout + process.stderr or "[no output]"


client = OpenAI()
tools = [tool("terminal", "command"), tool("write_file", "path", "content")]
messages = [{"role": "system", "content": "You are a coding agent."}, {"role": "user", "content": os.environ["TASK"]}]
while True:
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=tools)
    messages.append(answer.choices[0].message.to_dict())
    if not answer.choices[0].message.tool_calls:
        break
    for call in answer.choices[0].message.tool_calls:
        try:
            result = run(call.function.name, json.loads(call.function.arguments))
        except Exception as error:  # noqa: BLE001 - the model reads it
            result = f"Error: {error!r}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
