"""Conversations of datasets: names of speakers, of texts and of columns, results in tags, and untrained messages."""

import json
from typing import Any

import pytest

from agentic_opd.core.errors import AlignmentError
from agentic_opd.logs.detect import is_rows
from agentic_opd.logs.dialects import conversation_columns, tool_responses
from agentic_opd.logs.messages import LogNote, read_log

CALL = {"name": "look", "arguments": {"place": "attic"}}
OTHER_CALL = {"name": "look", "arguments": {"place": "cellar"}}
PLAIN = [("user", "Where?"), ("assistant", "Here."), ("user", "No.")]


def spoken(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in read_log(row, ()).messages]


@pytest.mark.parametrize("speaker", ["role", "from", "sender"])
@pytest.mark.parametrize("text", ["content", "value", "text"])
@pytest.mark.parametrize("names", [("human", "gpt"), ("user", "bing"), ("Human", "ChatGPT"), ("user", "model")])
@pytest.mark.parametrize("column", ["conversations", "traj", "trajectory", "items", "as text"])
def test_a_text_is_never_lost_to_the_name_of_its_field(
    speaker: str, text: str, names: tuple[str, str], column: str
) -> None:
    user, agent = names
    messages = [{speaker: who, text: said} for who, (_, said) in zip((user, agent, user), PLAIN, strict=True)]
    row = {"id": 3, "labels": ["a", "b"], column: json.dumps(messages) if column == "as text" else messages}
    assert spoken(row) == PLAIN
    assert is_rows([row])


def test_the_columns_of_a_table_are_all_there_and_one_has_a_value() -> None:
    messages = [
        {"from": "human", "value": "Where?", "role": None, "content": None},
        {"from": None, "value": None, "role": "assistant", "content": "Here."},
        {"from": "human", "value": "No.", "role": float("nan"), "content": float("nan")},
    ]
    assert spoken({"conversations": messages}) == PLAIN


@pytest.mark.parametrize("names", [("tool_call", "tool_response"), ("function-call", "function-response")])
@pytest.mark.parametrize("form", ["text", "object"])
def test_calls_in_a_row_are_made_at_once(names: tuple[str, str], form: str) -> None:
    caller, tool = names
    calls = [json.dumps(call) if form == "text" else call for call in (CALL, OTHER_CALL)]
    speakers = ("user", caller, caller, tool, "ipython", "assistant")
    contents = ("Where?", *calls, "dust", "wine", "In the cellar.")
    log = read_log(
        {"messages": [{"role": who, "content": text} for who, text in zip(speakers, contents, strict=True)]}, ()
    )
    roles = ["user", "assistant", "tool", "tool", "assistant"]
    assert [message["role"] for message in log.messages] == roles
    made = log.messages[1]["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["place"] for call in made] == ["attic", "cellar"]
    assert [message["tool_call_id"] for message in log.messages[2:4]] == [call["id"] for call in made]
    assert not log.context


def test_a_call_that_can_not_be_read_is_text_and_not_learned() -> None:
    messages = [{"role": "user", "content": "Where?"}]
    messages += [{"role": "tool_call", "content": text} for text in ("{'name': 'look'}", json.dumps(CALL))]
    log = read_log({"messages": messages}, ())
    assert log.context == {1: LogNote.ARGUMENTS}
    assert log.messages[1]["content"] == "{'name': 'look'}"
    assert log.messages[2]["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
def test_a_call_without_openais_wrapper_is_a_call(key: str) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "look", key: {"place": "attic"}, "id": "z"}]}
    log = read_log({"messages": [{"role": "user", "content": "Where?"}, called]}, ())
    (call,) = log.messages[1]["tool_calls"]
    assert call["id"] == "z"
    assert json.loads(call["function"]["arguments"]) == {"place": "attic"}


@pytest.mark.parametrize(
    ("text", "responses"),
    [
        ("<tool_response>\ndust\n</tool_response>", ["dust"]),
        (" <tool_response>dust</tool_response>\n<tool_response>\nwine</tool_response> ", ["dust", "wine"]),
        ("<tool_response></tool_response>", [""]),
        ("dust", []),
        ("<tool_response>dust", []),
        ("<tool_response>dust</tool_response> and wine", []),
        ("see <tool_response>dust</tool_response>", []),
        ("</tool_response>", []),
    ],
)
def test_results_in_tags_are_the_results(text: str, responses: list[str]) -> None:
    assert tool_responses(text) == responses
    for speaker in ("tool", "human"):
        row = {"conversations": [{"from": "human", "value": "Where?"}, {"from": speaker, "value": text}]}
        kept = [("user" if speaker == "human" else "tool", text)]
        assert spoken(row)[1:] == ([("tool", response) for response in responses] or kept)


@pytest.mark.parametrize("flag", [{"loss": False}, {"train": False}, {"training": 0}, {"loss_scale": 0.0}])
def test_what_a_file_excludes_from_training_is_context(flag: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here.", **flag}]
    assert read_log({"messages": messages}, ()).context == {1: LogNote.WEIGHT_0}
    messages[1] |= dict.fromkeys(flag, 1)
    assert not read_log({"messages": messages}, ()).context


def test_columns_that_hold_no_conversation_are_not_taken_for_one() -> None:
    question = [{"role": "user", "content": "Where?"}]
    row = {"prompt": question, "tags": [], "tools": [{"name": "look", "text": "a"}], "text": "[1, 2", "n": 3}
    assert not conversation_columns(row)
    assert not is_rows([row])
    with pytest.raises(AlignmentError, match="the row holds prompt, tags"):
        read_log(row, ())
