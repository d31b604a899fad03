"""The turns of a conversation in text that somebody replied to."""

from agentic_opd.logs.turns import replied_turns

TOOL = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": {"type": "object"}}}
MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "assistant", "content": "Welcome."},
    {"role": "user", "content": "Write f."},
    {"role": "assistant", "content": "def f(): pass"},
    {"role": "user", "content": "It must return 1."},
    {"role": "assistant", "content": "", "weight": 0},
    {"role": "user", "content": "Well?"},
    {"role": "assistant", "content": "def f(): return 1"},
    {"role": "assistant", "content": "I stop."},
    {"role": "tool", "content": "ok", "tool_call_id": "x"},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Bye."},
]


def test_turns_before_a_user_without_a_reply_or_not_learned_are_left_out() -> None:
    turns = list(replied_turns({"messages": MESSAGES, "tools": [TOOL]}))
    assert [turn.message_index for turn in turns] == [3, 8]
    first, last = turns
    assert [message["content"] for message in first.history] == ["S", "Welcome.", "Write f."]
    assert [message["content"] for message in last.reply] == ["ok", "Thanks."]
    assert [tool["function"]["name"] for tool in first.tools] == ["run"]
