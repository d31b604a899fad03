"""Small sessions in the form in which each agent writes them, in own words."""

from typing import Any

Record = dict[str, Any]

QUESTION, RESULT, ANSWER = "Which files are here?", "a.py\nb.py", "Two files: a.py and b.py."
REPLY = "No, count the folders too."
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
    }
]


def call(call_id: str = "c1", command: str = "ls") -> Record:
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": f'{{"command": "{command}"}}'}}


def chat() -> list[Record]:
    """The session as messages of OpenAI's chat completions, which each reader returns in its own words."""
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "I look.", "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "c1", "content": RESULT},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": REPLY},
        {"role": "assistant", "content": "Two files and no folder."},
    ]


def anthropic() -> list[Record]:
    """The same as Anthropic's messages."""
    use = {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": RESULT}]}
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
        {"role": "user", "content": REPLY},
        {"role": "assistant", "content": [{"type": "text", "text": "Two files and no folder."}]},
    ]


def claude_code() -> list[Record]:
    """A transcript; the first answer is written in two records."""
    messages = anthropic()
    first = messages[1]["content"]
    messages[1:2] = [{"role": "assistant", "content": [part], "id": "msg_1"} for part in first]
    records: list[Record] = [{"type": "summary", "summary": "Files", "leafUuid": "r6"}]
    for number, message in enumerate(messages):
        parent = f"r{number - 1}" if number else None
        head = {"uuid": f"r{number}", "parentUuid": parent, "isSidechain": False, "sessionId": "s"}
        records.append({**head, "type": message["role"], "message": message})
    return records


def codex() -> list[Record]:
    """A rollout."""

    def text(role: str, words: str) -> Record:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}

    items = [
        text("user", QUESTION),
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        text("assistant", "I look."),
        {"type": "function_call", "name": "bash", "call_id": "c1", "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": "c1", "output": RESULT},
        text("assistant", ANSWER),
        text("user", REPLY),
        text("assistant", "Two files and no folder."),
    ]
    meta = {"type": "session_meta", "payload": {"id": "s", "cwd": "/w", "base_instructions": {"text": "Help."}}}
    event = {"type": "event_msg", "payload": {"type": "user_message", "message": QUESTION}}
    return [meta, event, *({"type": "response_item", "payload": item} for item in items)]


def openclaw() -> list[Record]:
    """A session of pi, which OpenClaw writes too."""
    use = {"type": "toolCall", "id": "c1", "name": "bash", "arguments": {"command": "ls"}}
    parts = [{"type": "text", "text": "I look."}, use]
    result = {"role": "toolResult", "toolCallId": "c1", "content": [{"type": "text", "text": RESULT}]}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": parts, "stopReason": "toolUse"},
        result,
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}], "stopReason": "stop"},
        {"role": "user", "content": REPLY},
        {"role": "assistant", "content": [{"type": "text", "text": "Two files and no folder."}]},
    ]
    records: list[Record] = [{"type": "session", "version": 3, "id": "s", "cwd": "/w"}]
    for number, message in enumerate(messages):
        parent = f"e{number - 1}" if number else None
        records.append({"type": "message", "id": f"e{number}", "parentId": parent, "message": message})
    return records


def opencode() -> Record:
    """An exported session."""

    def message(number: int, role: str, *parts: Record) -> Record:
        info = {"id": f"m{number}", "sessionID": "s", "role": role, "time": {"created": number}}
        named = [{"id": f"m{number}p{index}", "messageID": info["id"], **part} for index, part in enumerate(parts)]
        return {"info": info, "parts": named}

    def text(words: str) -> Record:
        return {"type": "text", "text": words}

    state = {"status": "completed", "input": {"command": "ls"}, "output": RESULT}
    used = {"type": "tool", "callID": "c1", "tool": "bash", "state": state}
    first = (
        {"type": "step-start"},
        text("I look."),
        used,
        {"type": "step-finish"},
        {"type": "step-start"},
        text(ANSWER),
    )
    messages = [
        message(1, "user", text(QUESTION)),
        message(2, "assistant", *first),
        message(3, "user", text(REPLY)),
        message(4, "assistant", {"type": "step-start"}, text("Two files and no folder.")),
    ]
    return {"info": {"id": "s", "title": "Files"}, "messages": messages}


def opencode_2() -> Record:
    """The same session as version 2 exports it."""
    tool_state = {"status": "completed", "input": {"command": "ls"}, "content": [{"type": "text", "text": RESULT}]}
    used = {"type": "tool", "id": "c1", "name": "bash", "state": tool_state}

    def answer(*content: Record) -> Record:
        return {"type": "assistant", "agent": "build", "content": [*content], "finish": "stop"}

    messages = [
        {"type": "agent-switched", "agent": "build"},
        {"type": "user", "text": QUESTION},
        answer({"type": "text", "text": "I look."}, used),
        answer({"type": "text", "text": ANSWER}),
        {"type": "user", "text": REPLY},
        answer({"type": "text", "text": "Two files and no folder."}),
    ]
    numbered = [{"id": f"msg_{index}", **message, "time": {"created": index}} for index, message in enumerate(messages)]
    return {"info": {"id": "s", "title": "Files", "location": {"directory": "/w"}}, "messages": numbered}


def swe_agent() -> Record:
    """A trajectory with a demonstration."""
    demonstration = [
        {"role": "user", "content": "Show it.", "agent": "main", "is_demo": True},
        {"role": "assistant", "content": "Like this.", "agent": "main", "is_demo": True},
    ]
    history = [{**message, "agent": "main", "message_type": "x"} for message in chat()]
    history[2]["tool_call_ids"] = [history[2].pop("tool_call_id")]
    return {"trajectory": [], "history": [*demonstration, *history], "info": {}}


def mini_swe_agent() -> Record:
    """A trajectory."""
    messages = [*chat(), {"role": "exit", "content": "done"}]
    return {"trajectory_format": "mini-swe-agent-1.1", "info": {"exit_status": "Submitted"}, "messages": messages}


def openhands() -> list[Record]:
    """Events of version 0."""

    def answer(response_id: str, message: Record) -> Record:
        response = {"id": response_id, "choices": [{"message": message}]}
        return {"function_name": "bash", "tool_call_id": "c1", "model_response": response}

    messages = chat()
    asked = {"source": "user", "action": "message"}
    agent = {"source": "agent"}
    return [
        {"id": 0, **agent, "action": "system", "args": {"content": "Help.", "tools": TOOLS}},
        {"id": 1, **asked, "args": {"content": QUESTION, "image_urls": []}},
        {"id": 2, **agent, "action": "run", "args": {"command": "ls"}, "tool_call_metadata": answer("r1", messages[1])},
        {"id": 3, **agent, "observation": "run", "content": RESULT, "cause": 2, "tool_call_metadata": answer("r1", {})},
        {"id": 4, **agent, "action": "message", "args": {"content": ANSWER}},
        {"id": 5, **asked, "args": {"content": REPLY}},
        {"id": 6, **agent, "action": "message", "args": {"content": "Two files and no folder."}},
    ]


def openhands_sdk() -> list[Record]:
    """Events of version 1."""

    def message(source: str, words: str) -> Record:
        role = "assistant" if source == "agent" else "user"
        content = [{"type": "text", "text": words}]
        return {"kind": "MessageEvent", "source": source, "llm_message": {"role": role, "content": content}}

    call_of = {"id": "c1", "name": "bash", "arguments": '{"command": "ls"}'}
    action = {"kind": "ActionEvent", "source": "agent", "thought": [{"type": "text", "text": "I look."}]}
    action |= {"tool_name": "bash", "tool_call_id": "c1", "tool_call": call_of, "llm_response_id": "r1"}
    content = [{"type": "text", "text": RESULT}]
    observation = {"kind": "ObservationEvent", "source": "environment", "observation": {"content": content}}
    observation |= {"tool_name": "bash", "tool_call_id": "c1"}
    prompt = {"type": "text", "text": "Help."}
    events = [
        {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": prompt, "tools": TOOLS},
        message("user", QUESTION),
        action,
        observation,
        message("agent", ANSWER),
        message("user", REPLY),
        message("agent", "Two files and no folder."),
    ]
    return [{"id": f"event-{number}", **event} for number, event in enumerate(events)]


def atif() -> Record:
    """A trajectory of Harbor's; the first answer is written in two steps."""
    used = {"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}
    result = {"source_call_id": "c1", "content": RESULT}
    calling = {"message": "Executed bash c1", "tool_calls": [used], "observation": {"results": [result]}}
    steps: list[Record] = [
        {"source": "user", "message": QUESTION},
        {"source": "agent", "message": "I look."},
        {"source": "agent", **calling},
        {"source": "agent", "message": ANSWER},
        {"source": "user", "message": REPLY},
        {"source": "agent", "message": [{"type": "text", "text": "Two files and no folder."}]},
    ]
    agent = {"name": "claude-code", "version": "2", "tool_definitions": TOOLS}
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    return {"schema_version": "ATIF-v1.6", "session_id": "s-atif", "agent": agent, "steps": numbered}


def inspect_sample() -> Record:
    """A sample of an evaluation; the result is an attachment."""
    messages = chat()
    messages[1]["tool_calls"] = [{"id": "c1", "function": "bash", "arguments": {"command": "ls"}}]
    messages[2]["content"] = "attachment://a1"
    tool = TOOLS[0]["function"]
    return {
        "id": 1,
        "epoch": 1,
        "input": QUESTION,
        "target": "2",
        "messages": messages,
        "attachments": {"a1": RESULT},
        "events": [{"event": "model", "tools": [tool]}],
    }


def verifiers() -> Record:
    """A result of an evaluation."""
    messages = chat()
    return {
        "example_id": 0,
        "prompt": messages[:1],
        "completion": messages[1:],
        "reward": 1.0,
        "info": {"oai_tools": TOOLS},
    }


def request_log() -> list[Record]:
    """The requests of the session with their answers, of OpenAI's chat completions."""
    messages = chat()
    return [
        {
            "request": {"model": "m", "messages": messages[:index], "tools": TOOLS},
            "response": {"choices": [{"message": message}]},
        }
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


FILES: dict[str, list[Record]] = {
    "Claude Code": claude_code(),
    "Codex": codex(),
    "OpenClaw": openclaw(),
    "OpenCode": [opencode()],
    "OpenCode 2": [opencode_2()],
    "SWE-agent": [swe_agent()],
    "mini-swe-agent": [mini_swe_agent()],
    "OpenHands": openhands(),
    "OpenHands 1": openhands_sdk(),
    "ATIF": [atif()],
    "inspect": [inspect_sample()],
    "verifiers": [verifiers()],
    "requests": request_log(),
    "list of messages": anthropic(),
}
"""Format -> the records of a file of it; a number after the name is a version."""
