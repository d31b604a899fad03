import json
from typing import Any

import pytest

from agentic_opd.distill.turns import hindsight_pairs, message_text, shown_text, turn_text

from .fakes import TASK, VERDICT, call, make_episode, messages


def test_each_turn_is_paired_with_what_answered_it() -> None:
    first, last = hindsight_pairs(make_episode(), 4000)
    assert first.task_text == TASK.prompt
    assert first.turn_text == "I write it.\n\n[write_file]\npath: solution.py"
    assert (first.next_state, first.next_state_role) == ("wrote 2 lines to solution.py", "tool")
    assert last.turn_text == "Done."
    assert (last.next_state, last.next_state_role) == (VERDICT.report, "verdict")
    assert (first.turn_index, last.turn_index) == (0, 1)


def test_last_turn_that_was_cut_off_while_working_gets_its_results_and_then_the_verdict() -> None:
    chat = [*messages(), {"role": "tool", "tool_call_id": "x", "content": "3 of 5 examples passed"}]
    last = hindsight_pairs(make_episode(chat), 4000)[-1]
    assert last.next_state == f"3 of 5 examples passed\n\n{VERDICT.report}"
    assert last.next_state_role == "verdict"


def test_without_verification_the_last_turn_has_no_next_state() -> None:
    last = hindsight_pairs(make_episode(verification=None), 4000)[-1]
    assert (last.next_state, last.next_state_role) == (None, None)


def test_results_of_parallel_calls_are_joined_and_named() -> None:
    chat = messages()
    chat[2]["tool_calls"] = [call("write_file", "{}", "a"), call("terminal", "{}", "b"), call("", "{", "c")]
    chat[3:4] = [
        {"role": "tool", "tool_call_id": "a", "content": "wrote 8 lines to solution.py"},
        {"role": "tool", "tool_call_id": "b", "name": "terminal", "content": "ok   f(1)"},
        {"role": "tool", "tool_call_id": "c", "content": "Error: not valid JSON"},
    ]
    assert hindsight_pairs(make_episode(chat), 4000)[0].next_state == (
        "[write_file]\nwrote 8 lines to solution.py\n\n[terminal]\nok   f(1)\n\n"
        "[broken tool call]\nError: not valid JSON"
    )


def test_user_replies_follow_tool_results_and_give_the_role() -> None:
    chat = messages()
    chat.insert(4, {"role": "user", "content": "Now handle 0."})
    chat.append({"role": "user", "content": "Thanks."})
    first, last = hindsight_pairs(make_episode(chat, verification=None), 4000)
    assert (first.next_state, first.next_state_role) == ("wrote 2 lines to solution.py\n\nNow handle 0.", "user")
    assert (last.next_state, last.next_state_role) == ("Thanks.", "user")


def test_identical_turns_keep_their_own_next_states() -> None:
    chat = messages()
    chat[4] = {**chat[2]}
    chat.append({"role": "tool", "tool_call_id": "call_0", "name": "write_file", "content": "Error: disk full"})
    first, last = hindsight_pairs(make_episode(chat, verification=None), 4000)
    assert first.turn_text == last.turn_text
    assert (first.next_state, last.next_state) == ("wrote 2 lines to solution.py", "Error: disk full")


def test_long_next_state_is_cut_in_the_middle() -> None:
    chat = messages()
    chat[3]["content"] = "head" + "x" * 500 + "tail"
    state = hindsight_pairs(make_episode(chat), 100)[0].next_state
    assert state is not None
    assert state.startswith("headxxx")
    assert "[... 408 characters cut ...]" in state
    assert state.endswith("xxxtail")


@pytest.mark.parametrize("content", [None, "", "  \n"])
def test_an_empty_answer_is_no_next_state(content: str | None) -> None:
    chat = messages()
    chat[3]["content"] = content
    assert hindsight_pairs(make_episode(chat), 4000)[0].next_state is None


def test_turn_text_writes_arguments_line_by_line() -> None:
    arguments = {"path": "lösung.py", "content": "def f():\n    return '漢'\n", "mode": 0o644, "flags": ["ä", None]}
    message = {"role": "assistant", "content": "", "tool_calls": [call("write_file", json.dumps(arguments))]}
    assert turn_text(message) == (
        "[write_file]\npath: lösung.py\ncontent:\ndef f():\n    return '漢'\n\nmode: 420\nflags: [\"ä\", null]"
    )


@pytest.mark.parametrize(
    ("name", "raw"), [("write_file", '{"path": "a'), ("write_file", "[1]"), ("", "{}"), ("write_file", "")]
)
def test_turn_text_shows_a_broken_call_raw(name: str, raw: str) -> None:
    assert turn_text({"role": "assistant", "content": "x", "tool_calls": [call(name, raw)]}) == (
        f"x\n\n[broken tool call]\n{raw}"
    )


def test_turn_without_anything_has_a_text() -> None:
    assert turn_text({"role": "assistant", "content": None}) == "[empty turn]"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": "é"}, "é"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]}, "ab"),
    ],
)
def test_message_text_takes_every_form_of_content(message: dict[str, Any], text: str) -> None:
    assert message_text(message) == text


def test_shown_text_holds_what_the_agent_saw_and_not_the_hidden_tests() -> None:
    shown = shown_text(make_episode())
    assert TASK.prompt in shown
    assert "wrote 2 lines" in shown
    assert "path: solution.py" in shown
    assert TASK.hidden_tests.strip() not in shown
