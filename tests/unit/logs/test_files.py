"""Files and folders: what is skipped and why, hostile files, duplicates of sessions."""

import gzip
import json
import os
import resource
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from agentic_opd.core.errors import PlaceError
from agentic_opd.core.zstd import ZSTD_LIBRARY, ZSTD_MARK
from agentic_opd.logs import files
from agentic_opd.logs.files import FoundLogs, find_logs
from agentic_opd.logs.messages import read_log
from agentic_opd.logs.session import LeftOut
from agentic_opd.runs.distill_file import read_inputs

from .samples import FILES, chat, claude_code, codex, mini_swe_agent, openclaw


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def left_out(found: FoundLogs, name: str) -> dict[str, int]:
    return dict(found.tallies[name].left_out)


def test_a_folder_is_searched_and_everything_in_it_is_accounted_for(tmp_path: Path) -> None:
    for name, records in FILES.items():
        (tmp_path / "deep" / name).mkdir(parents=True)
        (tmp_path / "deep" / name / "session.jsonl").write_text(lines(records))
    (tmp_path / "rows.jsonl").write_text(lines([{"messages": chat()}]))
    (tmp_path / "notes.md").write_text("# Notes\n")
    (tmp_path / "settings.json").write_text('{"a": 1}')
    (tmp_path / "events.jsonl").write_text(lines([{"type": "thread.started"}, {"type": "item.completed", "item": {}}]))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 10)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep/loop").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    found = find_logs([tmp_path])
    assert {name: tally.files for name, tally in found.tallies.items()} == {
        "Claude Code": 1,
        "Codex": 1,
        "OpenClaw": 1,
        "OpenCode": 2,
        "SWE-agent": 1,
        "mini-swe-agent": 1,
        "OpenHands": 2,
        "ATIF": 1,
        "inspect": 1,
        "verifiers": 1,
        "requests": 1,
        "list of messages": 1,
    }
    assert found.row_files == [tmp_path / "rows.jsonl"]
    assert {reason: [path.name for path in paths] for reason, paths in found.skipped.items()} == {
        "no JSON": ["binary", "notes.md"],
        "No such file or directory": ["broken"],
        "nothing in it": ["empty.jsonl"],
        "it is a named pipe (FIFO), expected a regular file": ["pipe"],
        "no known format of logs": ["settings.json"],
        "the events of `codex exec --json`, which lack the prompts; the rollouts in ~/.codex/sessions have them": [
            "events.jsonl"
        ],
    }
    text = "\n".join(found.lines())
    assert "Claude Code: files 1, conversations 1, answers 3" in text
    assert f"skipped, no JSON: {tmp_path / 'binary'}, {tmp_path / 'notes.md'}" in text


def test_a_file_under_two_names_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/rows.jsonl").write_text(lines([{"messages": chat()}]))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a/rows.jsonl")
    assert len(read_inputs([tmp_path, tmp_path / "a"]).lines) == 1


@pytest.mark.parametrize("record", [{"action": "opened", "number": 1}, {"action": "login", "source": "web"}])
def test_other_programs_logs_of_actions_are_no_events(record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record))
    (tmp_path / "b.jsonl").write_text(lines([record, record]))
    assert list(find_logs([tmp_path]).skipped) == ["no known format of logs"]


def test_a_file_that_can_not_be_opened_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(lines(codex()))
    opened = Path.open

    def refused(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name == "a.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refused)
    assert list(find_logs([tmp_path]).skipped) == ["Permission denied"]


@pytest.mark.parametrize("name", ["Claude Code", "Codex", "OpenClaw", "requests", "OpenHands"])
def test_a_log_that_a_kill_cut_off_is_read_up_to_there(name: str, tmp_path: Path) -> None:
    whole = lines(FILES[name])
    (tmp_path / "log.jsonl").write_text(whole[:-20])
    found = find_logs([tmp_path])
    assert left_out(found, name)[LeftOut.CUT_LINE] == 1
    assert found.tallies[name].answers == 2
    (tmp_path / "log.jsonl").write_bytes(whole.encode() + b"\0" * 5000)
    assert left_out(find_logs([tmp_path]), name)[LeftOut.CUT_LINE] == 1


def test_broken_lines_are_counted_by_kind(tmp_path: Path) -> None:
    records = [json.dumps(record) for record in claude_code()]
    deep = "[" * 300 + "]" * 300
    hostile = ["{", "[1]", '"text"', "\udcff", f'{{"type": "user", "a": {deep}}}', '{"a": ' + "[" * 200_000, "NaN"]
    mixed = [*records[:3], *hostile, *records[3:]]
    (tmp_path / "log.jsonl").write_bytes("\n".join(mixed).encode(errors="surrogateescape") + b"\n")
    found = find_logs([tmp_path])
    assert found.tallies["Claude Code"].answers == 3
    counts = left_out(found, "Claude Code")
    assert counts[LeftOut.BROKEN_LINE] == 3
    assert counts[LeftOut.NO_OBJECT] == 3
    assert counts[LeftOut.DEEP] == 1


@pytest.mark.parametrize(
    ("name", "steps"),
    [(name, key) for name, records in FILES.items() for key in ("steps", "messages", "history") if key in records[0]],
)
def test_steps_that_are_no_object_are_counted(name: str, steps: str, tmp_path: Path) -> None:
    first, *others = FILES[name]
    broken = {**first, steps: [*first[steps], "text", None, 7]}
    (tmp_path / "log.jsonl").write_text(lines([broken, *others]))
    (tally,) = find_logs([tmp_path]).tallies.values()
    assert tally.left_out[LeftOut.NO_STEP] == 3


def test_steps_of_a_zipped_sample_are_counted_too(tmp_path: Path) -> None:
    (sample,) = FILES["inspect"]
    with zipfile.ZipFile(tmp_path / "log.eval", "w") as archive:
        archive.writestr("header.json", "{}")
        archive.writestr("samples/1_epoch_1.json", json.dumps({**sample, "messages": [*sample["messages"], None]}))
    assert left_out(find_logs([tmp_path]), "inspect")[LeftOut.NO_STEP] == 1


def test_a_log_whose_first_line_is_broken_is_read(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{\n" + lines(codex()))
    found = find_logs([tmp_path])
    assert found.tallies["Codex"].answers == 3
    assert left_out(found, "Codex")[LeftOut.BROKEN_LINE] == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "gzip", "zstd"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    text = lines(claude_code())
    pack = {"gzip": gzip.compress, "zstd": pytest.importorskip(ZSTD_LIBRARY).compress}.get(encoding)
    data = pack(text.encode()) if pack else text.encode(encoding)
    (tmp_path / "log.jsonl").write_bytes(data)
    assert find_logs([tmp_path]).tallies["Claude Code"].answers == 3


def test_a_damaged_archive_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(codex()).encode())[:-30])
    packed = pytest.importorskip(ZSTD_LIBRARY).compress(lines(codex()).encode())
    (tmp_path / "a.jsonl.zst").write_bytes(packed[:-30])
    (tmp_path / "b.jsonl.zst").write_bytes(ZSTD_MARK + bytes(100))
    (tmp_path / "b.eval").write_bytes(b"PK\x03\x04" + bytes(100))
    assert {name for names in find_logs([tmp_path]).skipped.values() for name in names} == set(tmp_path.iterdir())


def test_rows_that_zstd_packed_are_skipped_by_name(tmp_path: Path) -> None:
    rows = lines([{"messages": chat()}]).encode()
    (tmp_path / "rows.jsonl.zst").write_bytes(pytest.importorskip(ZSTD_LIBRARY).compress(rows))
    found = find_logs([tmp_path])
    assert not found.row_files
    assert list(found.skipped) == ["rows that zstd packed: unpack the file"]


def test_a_document_may_be_written_over_many_lines_or_be_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(mini_swe_agent(), indent=2))
    (tmp_path / "b.json").write_text(json.dumps([{"role": "user", "content": "Please."}, *chat()[1:4]], indent=2))
    found = find_logs([tmp_path])
    assert {name: tally.answers for name, tally in found.tallies.items()} == {
        "mini-swe-agent": 3,
        "list of messages": 2,
    }


def test_a_long_line_is_counted_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LONGEST_LINE", 4096)
    records = [json.dumps(record) for record in openclaw()]
    records.insert(4, json.dumps({"type": "message", "message": {"role": "user", "content": "x" * 20_000}}))
    (tmp_path / "log.jsonl").write_text("\n".join(records) + "\n")
    found = find_logs([tmp_path])
    assert found.tallies["OpenClaw"].answers == 3
    assert left_out(found, "OpenClaw") == {LeftOut.LONG_LINE: 1, LeftOut.BOOKKEEPING: 1}


def test_a_file_of_2_gigabytes_is_not_read_to_see_that_it_is_no_log(tmp_path: Path) -> None:
    """One file is a line without an end, one a document, one has other records."""
    big = 2 * 2**30
    for name, start in (("a", b"x"), ("b.json", b'{"a": "'), ("c.jsonl", b'{"a": 1}\n' * 1_000_000)):
        with (tmp_path / name).open("wb") as file:
            file.write(start)
            file.truncate(big)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = find_logs([tmp_path / "a", tmp_path / "c.jsonl"])
    assert list(found.skipped) == ["no JSON", "no known format of logs"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_a_large_document_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LARGEST_DOCUMENT", 500)
    (tmp_path / "a.json").write_text(json.dumps(mini_swe_agent(), indent=2))
    assert list(find_logs([tmp_path]).skipped) == ["a document of more than 512 MiB"]


# ----------------------------------------------------------------------------------------------------------- duplicates


def renamed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**record, "sessionId": "t"} for record in records]


def test_a_session_that_was_resumed_or_copied_is_learned_once(tmp_path: Path) -> None:
    """Claude Code copies the records of the session that it resumes to a new file."""
    records = claude_code()
    more = {"uuid": "r7", "parentUuid": "r6", "sessionId": "t", "type": "user"}
    answer = {"uuid": "r8", "parentUuid": "r7", "sessionId": "t", "type": "assistant"}
    resumed = [
        *renamed(records),
        {**more, "message": {"role": "user", "content": "And now?"}},
        {**answer, "message": {"role": "assistant", "content": "Still two."}},
    ]
    for name, stored in (("a", records), ("b", resumed), ("c", records)):
        (tmp_path / f"{name}.jsonl").write_text(lines(stored))
    found = find_logs([tmp_path])
    assert [entry.name for entry in found.sessions] == ["b"]
    assert left_out(found, "Claude Code")[LeftOut.DUPLICATE] == 2
    assert not read_log(found.sessions[0].session.fields(), ()).context


def test_a_fork_learns_what_is_new_in_it(tmp_path: Path) -> None:
    records = claude_code()
    fork = [*renamed(records[:-1]), {**records[-1], "message": {"role": "assistant", "content": "None."}}]
    (tmp_path / "a.jsonl").write_text(lines(records))
    (tmp_path / "b.jsonl").write_text(lines(fork))
    contexts = [len(read_log(entry.session.fields(), ()).context) for entry in find_logs([tmp_path]).sessions]
    assert contexts == [0, 2]


# --------------------------------------------------------------------------------------------------------------- inputs


def test_inputs_are_the_rows_and_sessions_of_all_paths_under_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = [{"messages": chat()}, {"messages": chat()[:4]}]
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.jsonl").write_text(lines(rows))
    (tmp_path / "in/c.jsonl").write_text(lines([{"messages": chat()}, {"messages": []}]))
    (tmp_path / "in/out.jsonl").write_text(lines(rows))
    (tmp_path / "log.jsonl").write_text(lines(codex()))
    inputs = read_inputs([tmp_path / "in", tmp_path / "log.jsonl"], but=tmp_path / "in/out.jsonl")
    assert [line.item_id for line in inputs.lines] == ["line-1", "line-2", "b/line-1", "b/line-2", "log"]
    assert inputs.lines[2].location == f"{str(tmp_path / 'in/b.jsonl')!r}, line 1"
    assert any("c.jsonl', line 2: messages" in sentence for sentence in inputs.summary)


def test_a_file_that_is_named_and_can_not_be_read_is_an_error(tmp_path: Path) -> None:
    for name, text, said in (
        ("a.json", '{"a": 1}', "line 1: tokens and messages: expected"),
        ("b.md", "# Notes", "line 1: not valid JSON"),
        ("c.parquet", "PAR1", "a parquet or Arrow file that can't be read: Parquet file size is 4 bytes"),
        (
            "d.jsonl",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "a pointer of Git LFS; `git lfs pull`",
        ),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(PlaceError, match=said):
            read_inputs([tmp_path / name])
    with pytest.raises(FileNotFoundError):
        read_inputs([tmp_path / "nothing"])


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file", "no conversation", "damaged"])
def test_tables_of_datasets_are_read(kind: str, tmp_path: Path) -> None:
    """Nulls that a table adds are no part of a message; a time or bytes in another column do not matter."""
    rows = [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            **dict.fromkeys(("day", "picture")),
        },
        {"messages": chat(), "day": date(2026, 1, 2), "picture": b"\xff"},
    ]
    table = pa.Table.from_pylist(rows if kind != "no conversation" else [{"text": "a"}])
    path = tmp_path / "in/data"
    path.parent.mkdir()
    if kind.startswith("arrow"):
        writer = pa.ipc.new_stream if kind == "arrow stream" else pa.ipc.new_file
        with path.open("wb") as file, writer(file, table.schema) as written:
            written.write_table(table)
    else:
        parquet.write_table(table, path)
    if kind == "damaged":
        path.write_bytes(path.read_bytes()[:-20])
    for found in (tmp_path / "in", path):
        if kind in ("no conversation", "damaged") and found == path:
            with pytest.raises(PlaceError, match="the row holds text" if kind == "no conversation" else "read: "):
                read_inputs([found])
            continue
        inputs = read_inputs([found])
        if kind in ("no conversation", "damaged"):
            assert not inputs.lines
            assert "no known format" in inputs.summary[0] or "can't be read" in inputs.summary[0]
            continue
        assert [len(read_log(line.fields, ()).messages) for line in inputs.lines] == [2, len(chat())]
        assert inputs.lines[1].fields["day"] == "2026-01-02"


def test_a_pointer_of_git_lfs_is_told_from_a_log(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    (sentence,) = find_logs([tmp_path]).lines()
    assert "a pointer of Git LFS: `git lfs pull` fetches the file" in sentence


def test_a_conversation_that_the_log_form_refuses_is_skipped_with_its_field(tmp_path: Path) -> None:
    broken = mini_swe_agent()
    broken["messages"][1]["reasoning"] = "x"
    broken["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"a": "b"}
    broken["messages"][2]["tool_call_id"] = None
    (tmp_path / "a.traj.json").write_text(json.dumps(broken))
    assert len(read_inputs([tmp_path]).lines) == 1
