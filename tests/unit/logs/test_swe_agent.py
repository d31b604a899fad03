"""SWE-agent's and mini-swe-agent's trajectories."""

from collections import Counter
from typing import Any

import pytest

from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.session import LeftOut
from agentic_opd.logs.swe_agent import (
    is_mini_swe_agent,
    is_swe_agent,
    mini_swe_agent_sessions,
    swe_agent_sessions,
)

from .samples import chat, mini_swe_agent, swe_agent


def test_demonstrations_are_read_and_not_learned() -> None:
    (session,) = swe_agent_sessions([swe_agent()], Counter())
    assert read_log(session.fields(), ()).context == {1: LogNote.DEMONSTRATION}


def test_each_attempt_and_each_agent_is_a_conversation() -> None:
    first, second = swe_agent()["history"][2:], swe_agent()["history"][2:]
    second = [*second, {"role": "user", "content": "Judge.", "agent": "judge"}]
    second.append({"role": "assistant", "content": "Good.", "agent": "judge"})
    document = {"attempts": [{"history": first}, {"history": second}], "info": {}}
    assert is_swe_agent([document])
    sessions = list(swe_agent_sessions([document], Counter()))
    assert [session.label for session in sessions] == ["main 1", "main 2", "judge 2"]
    assert [len(session.messages) for session in sessions] == [6, 6, 2]


def test_the_exit_message_is_left_out() -> None:
    counts = Counter[str]()
    (session,) = mini_swe_agent_sessions([mini_swe_agent()], counts)
    assert [message["role"] for message in session.messages] == [message["role"] for message in chat()]
    assert counts == {LeftOut.BOOKKEEPING: 1}


def test_trajectories_of_a_responses_model_have_its_items() -> None:
    output = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
    ]
    messages: list[dict[str, Any]] = [
        chat()[0],
        {"object": "response", "output": output, "extra": {}},
        {"type": "function_call_output", "call_id": "c1", "output": chat()[2]["content"], "extra": {}},
    ]
    document = {"info": {"mini_version": "2.0"}, "messages": messages}
    assert is_mini_swe_agent([document])
    (session,) = mini_swe_agent_sessions([document], Counter())
    assert read_log(session.fields(), ()).messages == read_log({"messages": chat()[:3]}, ()).messages


@pytest.mark.parametrize("is_response", [True, False])
def test_an_answer_of_mini_swe_agent_that_was_cut_off_is_not_learned(is_response: bool) -> None:
    document = mini_swe_agent()
    cut_off: dict[str, Any] = {**chat()[1], "extra": {"response": {"choices": [{"finish_reason": "length"}]}}}
    if is_response:
        call = {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"}
        cut_off = {"object": "response", "status": "incomplete", "output": [call]}
    document["messages"][1] = cut_off
    (session,) = mini_swe_agent_sessions([document], Counter())
    assert read_log(session.fields(), ()).context == {1: LogNote.STOPPED}


@pytest.mark.parametrize(
    ("text", "action", "is_learned"),
    [
        ("Exit due to context window", "", False),
        ("Exit due to cost limit", "exit_cost", False),
        ("Exiting due to forfeit", "", False),
        ("Exit due to an error: run it again.", "run", True),
        ("I look.", "", True),
    ],
)
def test_what_swe_agent_writes_when_it_stops_the_agent_is_not_learned(text: str, action: str, is_learned: bool) -> None:
    document = swe_agent()
    document["history"].append(
        {"role": "assistant", "content": text, "action": action, "agent": "main", "message_type": "action"}
    )
    (session,) = swe_agent_sessions([document], Counter())
    context = read_log(session.fields(), ()).context
    assert (len(session.messages) - 1 not in context) == is_learned
    assert is_learned or context[len(session.messages) - 1] is LogNote.STOPPED
