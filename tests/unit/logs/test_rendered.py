"""The sessions of agents are learned by the same path as all conversations in text."""

from collections import Counter
from typing import Any

import pytest

from agentic_opd.logs.detect import format_of
from agentic_opd.logs.messages import read_log
from agentic_opd.logs.session import without_repeats
from agentic_opd.logs.tools import plain_tools
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.runs.distill import rendered_log

from .samples import ANSWER, FILES, REPLY


@pytest.mark.parametrize("name", FILES)
def test_every_answer_of_a_session_is_learned(name: str, tokenizer: Any) -> None:
    """With the tools of the log, or without tools where it has none."""
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, [])
    log_format = format_of(FILES[name])
    assert log_format is not None
    read = without_repeats(list(log_format.sessions(FILES[name], Counter())))
    (session,) = [session for session in read if session is not None]
    chat = chat.with_tools(plain_tools(session.fields()))
    rendered = rendered_log(read_log(session.fields(), chat.tools), chat)
    turns = [chat.text(trace.tokens_T[turn.start : turn.end]) for trace in rendered.traces for turn in trace.turns]
    assert [turn.removesuffix("<|im_end|>") for turn in turns[1:]] == [ANSWER, "Two files and no folder."]
    assert '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>' in turns[0]
    assert REPLY in chat.text(rendered.traces[-1].tokens_T)
