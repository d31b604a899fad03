"""Recorded sessions become conversations in which each answer is learned once, with the reply that it received."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from agentic_opd.core.types import StopReason
from agentic_opd.gateway.foreign import ForeignTurn
from agentic_opd.gateway.journal import Ending, Journal, SessionRow, SessionState
from agentic_opd.gateway.recorded import RecordedLog, is_journal, read_recorded
from agentic_opd.gateway.sessions import Sessions
from agentic_opd.logs.messages import read_log
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.runs.distill import rendered_log

from .fakes import AGAIN, MORE, TOOL, USER
from .foreign import Recording, call, chat_answer, recording_gateway, sessions_in

SYSTEM = {"role": "system", "content": "You are an agent."}


def record(folder: Path, *requests: Sequence[Any], **settings: Any) -> RecordedLog:
    """Send conversations that end with the answer which the upstream gives; return what becomes of them."""

    async def handler(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response(next(answers))

    async def talk() -> None:
        async with recording_gateway(handler, folder, **settings) as gateway:
            for number, (history, _) in enumerate(sent, start=1):
                await gateway.post("/sessions/mine/v1/chat/completions", {"messages": history, "tools": tools})
                await gateway.recorded(number)
            await end(gateway)

    async def end(gateway: Recording) -> None:
        if ending:
            await gateway.post("/sessions/mine/end", ending)

    tools, ending = settings.pop("tools", [TOOL]), settings.pop("ending", None)
    sent = [(request[:-1], request[-1]) for request in requests]
    answers = iter([answer if isinstance(answer, dict) else chat_answer(answer) for _, answer in sent])
    asyncio.run(talk())
    return read_recorded(folder / "journal.sqlite")


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def context(content: str) -> dict[str, Any]:
    return {**said(content), "weight": 0}


def test_a_conversation_is_one_row_with_its_tools_and_feedback(tmp_path: Path) -> None:
    ending = {"reward": 0.5, "feedback": "It runs."}
    requests = [[SYSTEM, USER, "First."], [SYSTEM, USER, said("First."), MORE, "Second."]]
    log = record(tmp_path, *requests, ending=ending)
    (conversation,) = log.conversations
    rated = {"role": "user", "content": "It runs.\n(The answer was rated 0.5.)"}
    assert conversation.fields["messages"] == [SYSTEM, USER, said("First."), MORE, said("Second."), rated]
    assert [tool["function"]["name"] for tool in conversation.fields["tools"]] == ["run"]
    assert conversation.name.startswith("session-")
    assert conversation.name.endswith("/2")
    assert log.text() == "recorded sessions 1, answers 2, conversations 1"


def test_each_answer_is_learned_in_one_branch(tmp_path: Path) -> None:
    log = record(
        tmp_path,
        [USER, "First."],
        [USER, said("First."), MORE, "Second."],
        [USER, said("First."), AGAIN, "Third."],
    )
    first, second = [conversation.fields["messages"] for conversation in log.conversations]
    assert first == [USER, said("First."), MORE, said("Second.")]
    assert second == [USER, context("First."), AGAIN, said("Third.")]


def test_a_history_that_was_not_recorded_is_context(tmp_path: Path) -> None:
    log = record(tmp_path, [USER, said("Of yesterday."), MORE, "Today."])
    assert log.conversations[0].fields["messages"] == [USER, context("Of yesterday."), MORE, said("Today.")]


def test_a_changed_answer_keeps_the_reply_to_the_recorded_one(tmp_path: Path) -> None:
    """The client changed the text that it received: the recorded text is learned, with the reply as evidence."""
    log = record(tmp_path, [USER, "First."], [USER, said("Another."), MORE, "Second."])
    first, second = [conversation.fields["messages"] for conversation in log.conversations]
    assert first == [USER, said("First."), MORE]
    assert second == [USER, context("Another."), MORE, said("Second.")]


def test_answers_that_were_cut_off_or_are_about_pictures_are_context(tmp_path: Path) -> None:
    look = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
    cut = chat_answer("Cut", reason="length")
    requests = [
        [look, "A cat."],
        [look, said("A cat."), MORE, cut],
        [look, said("A cat."), MORE, said("Cut"), AGAIN, "Whole."],
    ]
    log = record(tmp_path, *requests)
    (conversation,) = log.conversations
    shown = {"role": "user", "content": "[picture]"}
    assert conversation.fields["messages"] == [shown, context("A cat."), MORE, context("Cut"), AGAIN, said("Whole.")]
    assert log.not_learned == {"cut off or broken off": 1, "about pictures or files": 1}
    assert "not learned: 1 about pictures or files, 1 cut off or broken off" in log.text()


def test_a_session_with_nothing_to_learn_makes_no_row(tmp_path: Path) -> None:
    log = record(tmp_path, [USER, chat_answer("Cut", reason="length")])
    assert (log.sessions, log.conversations) == (1, [])


def test_the_rows_render_for_the_student_as_any_log(tmp_path: Path, tokenizer: Any) -> None:
    """Learned are the recorded answers, calls included, with the ids of the student's own tokenizer."""
    called = call("call_1", code="f()")
    request = {"role": "assistant", "content": "I run it.", "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "error"}
    history = [SYSTEM, USER, request, result, "It fails."]
    answer = chat_answer("I run it.", [called], "tool_calls")
    log = record(tmp_path, [SYSTEM, USER, answer], history, [*history[:-1], said("It fails."), MORE, "Done."])
    (conversation,) = log.conversations
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, [TOOL])
    (trace,) = rendered_log(read_log(conversation.fields, chat.tools), chat).traces
    texts = [tokenizer.decode(trace.tokens_T[turn.start : turn.end]) for turn in trace.turns]
    assert len(texts) == 3
    assert '"name": "run"' in texts[0]
    assert (texts[1], texts[2]) == ("It fails.<|im_end|>", "Done.<|im_end|>")
    assert trace.messages[-2] == MORE


def test_a_journal_is_told_from_other_files(tmp_path: Path) -> None:
    log = record(tmp_path, [USER, "First."])
    assert log.sessions == 1
    assert is_journal(tmp_path / "journal.sqlite")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"messages": [USER]}))
    assert not is_journal(other)
    assert not is_journal(tmp_path / "none")


def test_a_learning_gateway_leaves_recorded_sessions_alone(tmp_path: Path) -> None:
    """One file may hold both: recorded sessions are neither resumed nor made into groups by a gateway with a policy."""
    record(tmp_path, [USER, "First."])
    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.sessions(SessionState.OPEN, SessionState.CLOSED) == []
    (row,) = journal.sessions(SessionState.RECORDING)
    journal.close_session(replace(row, ending=Ending(StopReason.IDLE, row.session_id)))
    assert [row.state for row in journal.sessions(*SessionState)] == [SessionState.RECORDED]
    journal.close()


def test_placing_needs_no_ids() -> None:
    sessions = Sessions[ForeignTurn](["https://api.example.org"], 4, opened_as=SessionState.RECORDING)
    session = sessions.open("owner", "mine")
    assert isinstance(session.row, SessionRow)
    assert session.row.state is SessionState.RECORDING
    turn = ForeignTurn(1, None, (USER, said("First.")), 1, "main", (), "big", "stop", is_whole=True, answer_id="a")
    sessions.add(session, turn)
    assert sessions.answered("owner", "a") == (session.session_id, 1)


def test_turns_come_back_as_they_were(tmp_path: Path) -> None:
    record(tmp_path, [SYSTEM, USER, "First."], [SYSTEM, USER, said("First."), MORE, "Second."])
    ((_, second),) = sessions_in(tmp_path).values()
    journal = Journal(tmp_path / "journal.sqlite")
    again = replace(second, turn_id=9, is_whole=False, left_out=("image",), usage={"input": 1})
    (row,) = journal.sessions(SessionState.RECORDING)
    journal.add_turns([(row, again)])
    assert journal.foreign_turns(row.session_id)[-1] == again
    journal.close()
