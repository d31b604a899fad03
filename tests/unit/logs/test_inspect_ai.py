"""inspect's logs: samples in a zip and in a document."""

import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.zstd import ZSTD_LIBRARY
from agentic_opd.logs.files import find_logs
from agentic_opd.logs.inspect_ai import is_inspect, sessions
from agentic_opd.logs.messages import LogNote, read_log
from agentic_opd.logs.session import LeftOut

from .samples import RESULT, inspect_sample


def written(path: Path, *members: tuple[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members:
            archive.writestr(name, text)
    return path


def test_samples_of_a_zip_and_of_a_document_are_the_same(tmp_path: Path) -> None:
    document = {"version": 2, "status": "success", "eval": {"task": "t"}, "samples": [inspect_sample()]}
    assert is_inspect([document])
    (session,) = sessions([document], Counter())
    samples = ("samples/1_epoch_1.json", json.dumps(inspect_sample())), ("samples/2_epoch_1.json", "{")
    found = find_logs([written(tmp_path / "log.eval", ("header.json", "{}"), *samples)])
    (entry,) = found.sessions
    assert entry.session.messages == list(session.messages)
    assert found.tallies["inspect"].left_out == {"lines that are not JSON": 1}
    assert entry.name == "log/sample 1 epoch 1"


def test_an_attachment_is_put_in_its_place() -> None:
    (session,) = sessions([inspect_sample()], Counter())
    assert read_log(session.fields(), ()).messages[2]["content"] == RESULT


def test_a_failed_calls_error_is_its_result() -> None:
    sample = inspect_sample()
    sample["messages"][2] |= {"content": "", "error": {"type": "timeout", "message": "Too slow."}}
    (session,) = sessions([sample], Counter())
    assert read_log(session.fields(), ()).messages[2]["content"] == "Too slow."


@pytest.mark.parametrize("members", [(), (("a.txt", "a"),), (("samples/1.json", "{}"),)])
def test_a_zip_without_a_log_is_skipped(members: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    written(tmp_path / "log.eval", *members)
    (reason,) = find_logs([tmp_path]).skipped
    assert reason in ("a zip without an evaluation of inspect", "no JSON")


def zstd(path: Path, *members: tuple[str, str]) -> Path:
    """Write a zip as inspect does: of members that zstd packed, in two frames each."""
    compress = pytest.importorskip(ZSTD_LIBRARY).compress
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members:
            half = len(text) // 2
            archive.writestr(name, compress(text[:half].encode()) + compress(text[half:].encode()))
        for info, (_, text) in zip(archive.infolist(), members, strict=True):
            info.compress_type, info.file_size = 93, len(text.encode())
    return path


def test_a_zip_that_zstd_packed_is_read(tmp_path: Path) -> None:
    members = ("header.json", "{}"), ("samples/1_epoch_1.json", json.dumps(inspect_sample()))
    plain = find_logs([written(tmp_path / "a.eval", *members)]).sessions[0].session
    packed = find_logs([zstd(tmp_path / "b.eval", *members)])
    assert packed.sessions[0].session == plain
    assert not packed.skipped


def test_a_sample_in_pieces_is_the_whole_one(tmp_path: Path) -> None:
    sample = inspect_sample()
    messages, events = sample.pop("messages"), sample.pop("events")
    messages[2]["content"] = "attachment://1"
    sample.pop("attachments")
    folder = "samples/1_epoch_1"
    members = (
        ("header.json", "{}"),
        (f"{folder}/sample.json", json.dumps({**sample, "message_refs": [[0, 4], [5, 7]]})),
        (f"{folder}/messages/4.json", json.dumps([{"role": "user", "content": "Another's."}, *messages[4:]])),
        (f"{folder}/messages/0.json", json.dumps(messages[:4])),
        (f"{folder}/events/0.json", json.dumps(events)),
        (f"{folder}/events/stats.json", "{}"),
        (f"{folder}/attachments/0.json", json.dumps(["", RESULT])),
        (f"{folder}/skeleton.json", "{}"),
        ("samples/2_epoch_1/messages/0.json", "[]"),
    )
    found = find_logs([written(tmp_path / "log.eval", *members)])
    (whole,) = sessions([inspect_sample()], Counter())
    session = found.sessions[0].session
    assert (session.messages, session.tools) == (list(whole.messages), whole.tools)
    assert found.tallies["inspect"].left_out == {"lines that are not JSON": 1}


def test_the_tools_are_those_of_the_model_whose_answers_the_sample_has() -> None:
    sample = inspect_sample()
    sample["messages"][1]["id"] = "m1"
    answer = {"choices": [{"message": {"id": "m1"}, "stop_reason": "max_tokens"}]}
    grader = {"event": "model", "tools": [], "output": {"choices": [{"message": {"id": "g"}}]}}
    sample["events"] = [{**sample["events"][0], "output": answer}, grader]
    (session,) = sessions([sample], Counter())
    assert [tool["name"] for tool in session.tools] == ["bash"]
    assert read_log(session.fields(), ()).context == {1: LogNote.STOPPED}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"source": "input"}, LogNote.PROMPT),
        ({"tool_calls": [{"id": "c1", "function": "bash", "arguments": {}, "parse_error": "no"}]}, LogNote.ARGUMENTS),
    ],
)
def test_an_answer_that_the_model_did_not_write_so_is_not_learned(fields: dict[str, Any], reason: LogNote) -> None:
    sample = inspect_sample()
    sample["messages"][1] |= fields
    (session,) = sessions([sample], Counter())
    assert read_log(session.fields(), ()).context == {1: reason}


def test_encrypted_reasoning_and_calls_of_the_provider_are_counted() -> None:
    sample, counts = inspect_sample(), Counter[str]()
    search = {"type": "tool_use", "tool_type": "web_search", "id": "s", "name": "web_search", "arguments": "{}"}
    sample["messages"][3]["content"] = [
        {"type": "reasoning", "reasoning": "gAAA", "redacted": True},
        {"type": "reasoning", "reasoning": "gAAA", "redacted": True, "summary": "Hm."},
        {**search, "result": "[]"},
        {"type": "text", "text": "Two."},
    ]
    (session,) = sessions([sample], counts)
    answer = read_log(session.fields(), ()).messages[3]
    assert (answer["content"], answer["reasoning_content"], "tool_calls" in answer) == ("Two.", "Hm.", False)
    assert counts == {LeftOut.HIDDEN_REASONING: 1, "calls that the provider ran (web search)": 1}
