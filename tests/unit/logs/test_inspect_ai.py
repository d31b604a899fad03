"""inspect's logs: samples in a zip and in a document."""

import json
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from agentic_opd.logs.files import find_logs
from agentic_opd.logs.inspect_ai import is_inspect, sessions
from agentic_opd.logs.messages import read_log

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
