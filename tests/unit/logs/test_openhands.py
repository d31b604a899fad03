"""OpenHands' events of both versions: older logs, parallel calls, condensations, folders of events."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.logs.files import find_logs
from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.openhands import is_openhands, sessions
from agentic_opd.logs.session import LeftOut, Session

from .samples import RESULT, openhands, openhands_sdk


def read(*records: dict[str, Any]) -> list[Session]:
    return list(sessions(records, Counter()))


def test_actions_without_the_models_answer_are_calls_of_their_name() -> None:
    """As an evaluation of an older version has them: pairs in the history of a row, without ids."""
    row = {
        "instance_id": "i",
        "history": [
            [{"action": "message", "source": "user", "args": {"content": "Go."}}, {}],
            [
                {"action": "run", "command": "ls", "thought": "I look.", "is_confirmed": "confirmed"},
                {"observation": "run", "content": "a.py", "exit_code": 0},
            ],
        ],
    }
    assert is_openhands([row])
    (session,) = read(row)
    user, answer, result = read_log(session.fields(), ()).messages
    assert (user["content"], answer["content"], result["content"]) == ("Go.", "I look.", "a.py")
    assert answer["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"command": "ls"}'}
    assert session.label == "i"


def test_actions_of_one_answer_of_the_model_are_one_turn() -> None:
    events = openhands_sdk()
    second = {**events[2], "id": "x", "tool_call_id": "c2", "thought": []}
    result = {**events[3], "id": "y", "tool_call_id": "c2"}
    (session,) = read(*events[:3], second, events[3], result, *events[4:])
    log = read_log(session.fields(), ())
    assert [call["id"] for call in log.messages[2]["tool_calls"]] == ["c1", "c2"]
    assert not +log.notes


def test_a_condensation_begins_the_next_conversation_without_the_forgotten_events() -> None:
    old = {"action": "condensation", "source": "agent", "args": {}}
    new = {"kind": "Condensation", "source": "environment"}
    for events, condensation, ids in (
        (openhands(), old, {"forgotten_events_start_id": 2, "forgotten_events_end_id": 4}),
        (openhands_sdk(), new, {"forgotten_event_ids": ["event-2", "event-3", "event-4"]}),
    ):
        told = {**ids, "summary": "They were two.", "summary_offset": 2}
        event = {**condensation, "id": 99, **({"args": told} if "args" in condensation else told)}
        first, second = read(*events[:-2], event, *events[-2:])
        assert len(first.messages) == 5
        texts = [message["content"] for message in read_log(second.fields(), ()).messages]
        assert texts[2:] == ["They were two.", "No, count the folders too.", "Two files and no folder."]


def test_answers_before_a_condensation_are_learned_once() -> None:
    event = {"kind": "Condensation", "source": "environment", "forgotten_event_ids": ["event-2", "event-3"]}
    _, second = read(*openhands_sdk()[:-2], event, *openhands_sdk()[-2:])
    assert read_log(second.fields(), ()).context == {2: LogNote.REPEATED}


def test_events_in_files_of_a_folder_are_one_session(tmp_path: Path) -> None:
    for number, event in enumerate([*openhands(), {"id": 10, "source": "agent", "action": "message"}]):
        path = tmp_path / "session/events" / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(event))
    other = openhands_sdk()
    other[1]["llm_message"]["content"][0]["text"] = "Which folders?"
    for number, event in enumerate(other):
        path = tmp_path / "other/events" / f"event-{number:05d}-a.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(event))
    found = find_logs([tmp_path])
    assert [entry.name for entry in found.sessions] == ["other", "session"]
    assert found.tallies["OpenHands"].answers == 7


def test_rows_of_an_evaluation_of_version_1_have_a_history_of_events() -> None:
    row = {"instance_id": "i", "history": openhands_sdk(), "test_result": {}}
    assert is_openhands([row])
    assert read(row)[0].messages == read(*openhands_sdk())[0].messages


def test_a_result_of_version_1_is_what_the_model_reads() -> None:
    events = openhands_sdk()
    metadata = {"exit_code": 1, "working_dir": "/w", "prefix": "", "suffix": ""}
    events[3]["observation"] |= {"is_error": True, "metadata": metadata}
    events[3]["extended_content"] = [{"type": "text", "text": " A rule."}]
    (session,) = read(*events)
    assert read_log(session.fields(), ()).messages[3]["content"] == (
        f"[An error occurred during execution.]\n{RESULT}\n[Current working directory: /w]"
        "\n[Command finished with exit code 1] A rule."
    )
    events[3] = {"kind": "UserRejectObservation", "tool_call_id": "c1", "rejection_reason": "Not here."}
    (session,) = read(*events)
    assert read_log(session.fields(), ()).messages[3]["content"] == "Action rejected: Not here."


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
        {"responses_reasoning_item": {"summary": ["Hm."], "content": None, "encrypted_content": "x"}},
    ],
)
def test_thoughts_of_version_1_are_the_answers(fields: dict[str, Any]) -> None:
    events = openhands_sdk()
    events[2] |= fields
    (session,) = read(*events)
    assert read_log(session.fields(), ()).messages[2]["reasoning_content"] == "Hm."


def test_events_beside_the_conversation_are_counted() -> None:
    counts = Counter[str]()
    hook = {"kind": "HookExecutionEvent", "source": "hook", "hook_command": "x"}
    call = {"kind": "ACPToolCallEvent", "source": "agent", "title": "Edit", "tool_kind": "edit"}
    (session,) = sessions([*openhands_sdk(), hook, call], counts)
    assert session.messages == read(*openhands_sdk())[0].messages
    assert counts == {LeftOut.BOOKKEEPING: 1, "calls that the provider ran (edit)": 1}


def test_an_export_is_the_session_of_its_events() -> None:
    (expected,) = read(*openhands())
    for name in ("trajectory", "events"):
        document = {name: openhands()}
        assert is_openhands([document])
        (session,) = read(document)
        assert session == expected
