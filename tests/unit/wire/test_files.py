import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import NoneType

import pytest

from agentic_opd.core.errors import AlignmentError, OutputError, PlaceError
from agentic_opd.wire.files import GroupFile, JsonLines
from agentic_opd.wire.group import ScoredGroup
from tests.support.disk import KINDS, largest_file, make
from tests.support.groups import group as make_group
from tests.support.groups import rollout

SETTINGS = {"group_size": 2, "seed": 0}


def group(item_id: str) -> ScoredGroup:
    return make_group(item_id=item_id)


def test_lines_are_whole_and_readable(tmp_path: Path) -> None:
    file = GroupFile(tmp_path / "new" / "groups.jsonl", SETTINGS)
    asyncio.run(file.write(group("a#0")))
    asyncio.run(file.write(replace(group("b#0"), extra={"text": "é\n数"})))
    assert [json.loads(line)["group_overrides"]["item_id"] for line in file.path.read_text().splitlines()] == [
        "a#0",
        "b#0",
    ]
    file.close()


def test_resume_drops_a_torn_line_and_repeats_nothing(tmp_path: Path) -> None:
    """groups.jsonl holds a whole line, then half of one: the half goes, the whole one counts as finished."""
    path = tmp_path / "groups.jsonl"
    first = GroupFile(path, SETTINGS)
    asyncio.run(first.write(group("a#0")))
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"scores":[1.0],"group_over')
    seen: list[str | None] = []
    second = GroupFile(path, SETTINGS, resume=True, on_group=lambda one: seen.append(one.item_id))
    assert second.finished == {"a#0"}
    asyncio.run(second.write(group("b#0")))
    second.close()
    assert path.read_bytes().startswith(whole)
    assert len(path.read_text().splitlines()) == 2
    assert seen == ["a#0", "b#0"]


@pytest.mark.parametrize("name", ["groups.jsonl.gz", "groups.html"])
def test_a_name_by_which_the_groups_could_not_be_read_or_would_be_replaced_is_refused(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(PlaceError, match="this name is"):
        GroupFile(tmp_path / name, SETTINGS, overwrite=True)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_is_no_earlier_run(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="Is a directory"):
        GroupFile(tmp_path, SETTINGS)


def test_an_earlier_file_is_neither_continued_nor_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    file = GroupFile(path, SETTINGS)
    asyncio.run(file.write(group("a#0")))
    file.close()
    with pytest.raises(PlaceError, match=r"--env\.resume"):
        GroupFile(path, SETTINGS)
    whole = path.read_bytes()
    GroupFile(path, SETTINGS, overwrite=True, resume=True).close()  # The file of settings says one, a flag the other.
    assert path.read_bytes() == whole
    GroupFile(path, SETTINGS, overwrite=True).close()
    assert path.read_bytes() == b""


def test_other_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    file = GroupFile(path, SETTINGS)
    asyncio.run(file.write(group("a#0")))
    file.close()
    with pytest.raises(PlaceError, match="group_size was 2, is 8"):
        GroupFile(path, {**SETTINGS, "group_size": 8}, resume=True)


def test_a_file_of_an_earlier_version_is_resumed_while_new_settings_do_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    file = GroupFile(path, SETTINGS)
    asyncio.run(file.write(group("a#0")))
    file.close()
    GroupFile(path, {**SETTINGS, "judge.scope": "turn", "hint.proof.type": "none"}, resume=True).close()
    with pytest.raises(PlaceError, match=r"judge\.scope was 'turn', is 'trajectory'"):
        GroupFile(path, {**SETTINGS, "judge.scope": "trajectory"}, resume=True)


def test_a_foreign_file_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    GroupFile(path, SETTINGS).close()
    path.write_text('{"hello": 1}\n')
    with pytest.raises(PlaceError, match="did not write"):
        GroupFile(path, SETTINGS, resume=True)
    path.with_suffix(".run.json").unlink()
    with pytest.raises(PlaceError, match="can't be read"):
        GroupFile(path, SETTINGS, resume=True)


def test_an_unwritable_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaceError, match="data_path_to_save_groups"):
        GroupFile(tmp_path / "file" / "groups.jsonl", SETTINGS)


def test_a_group_is_written_whole_though_its_writer_is_cancelled(tmp_path: Path) -> None:
    async def main(file: GroupFile) -> None:
        writing = [asyncio.create_task(file.write(group(f"{name}#0"))) for name in "abc"]
        await asyncio.sleep(0)
        writing[1].cancel()
        ended = await asyncio.gather(*writing, return_exceptions=True)
        assert [type(one) for one in ended] == [NoneType, asyncio.CancelledError, NoneType]

    seen = list[str | None]()
    file = GroupFile(tmp_path / "groups.jsonl", SETTINGS, on_group=lambda one: seen.append(one.item_id))
    asyncio.run(main(file))
    file.close()
    assert seen == ["a#0", "b#0", "c#0"]
    lines = file.path.read_text().splitlines()
    assert [ScoredGroup.from_wire(json.loads(line)).item_id for line in lines] == seen


def test_nan_never_reaches_the_file(tmp_path: Path) -> None:
    file = GroupFile(tmp_path / "groups.jsonl", SETTINGS)
    one = rollout(None)
    broken = replace(one, logprobs_T=[*one.logprobs_T[:-1], float("nan")])
    with pytest.raises(ValueError, match="JSON"):
        asyncio.run(file.write(make_group(broken)))
    for score in (float("nan"), 1e39, -1.7e308):
        with pytest.raises(AlignmentError, match=r"expected -1e\+06 to 1e\+06"):
            replace(one, score=score)
    file.close()
    assert file.path.read_bytes() == b""


def test_a_new_file_replaces_and_a_continued_one_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    for is_continued, expected in ((False, [1]), (True, [1, 1]), (False, [1])):
        lines = JsonLines(path, is_continued=is_continued)
        lines.write({"a": 1})
        lines.close()
        assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == expected
        path.write_text(path.read_text() + '{"a": 2')


@pytest.mark.parametrize("size", [0, 3, 8, 9, 15])
def test_after_a_full_disk_the_next_line_is_whole_again(tmp_path: Path, size: int) -> None:
    """Each write needs 8 bytes; the disk has room for `size`, so that a part of a line stays."""
    lines = JsonLines(tmp_path / "rows.jsonl")
    with largest_file(size):
        for number in range(1, 4):
            if number * 8 <= size:
                lines.write({"a": number}, durable=True)
            else:
                with pytest.raises(OutputError, match=r"rows\.jsonl.*File too large"):
                    lines.write({"a": number}, durable=True)
    for number in (4, 5):
        lines.write({"a": number}, durable=True)
    lines.close()
    written = [json.loads(line)["a"] for line in lines.path.read_text().splitlines()] if lines.path else []
    assert written == [*range(1, size // 8 + 1), 4, 5]


def test_a_line_that_was_written_but_not_synced_is_not_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.write({"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OutputError):
            lines.write({"a": 2}, durable=True)
    lines.write({"a": 2}, durable=True)
    lines.close()
    assert (tmp_path / "rows.jsonl").read_text() == '{"a":1}\n{"a":2}\n'


@pytest.mark.parametrize("left", [None, "", '{"a":1}\n', '{"a":1}\n{"a"'])
def test_a_file_that_was_made_smaller_meanwhile_is_continued(tmp_path: Path, left: str | None) -> None:
    """Somebody deletes or shortens it to make room."""
    path = tmp_path / "rows.jsonl"
    lines = JsonLines(path)
    for number in (1, 2):
        lines.write({"a": number})
    with largest_file(0), pytest.raises(OutputError):
        lines.write({"a": 3})
    path.unlink()
    if left is not None:
        path.write_text(left)
    lines.write({"a": 3})
    lines.close()
    assert path.read_text() == ('{"a":1}\n' if left else "") + '{"a":3}\n'


def test_a_closed_file_stays_closed(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.close()
    with pytest.raises(ValueError, match="closed"):
        lines.write({"a": 1})


@pytest.mark.parametrize("name", ["groups.jsonl", "groups.run.json", "groups.jsonl.lock"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_named_and_not_opened(tmp_path: Path, kind: str, name: str) -> None:
    make(kind, tmp_path / name)
    with pytest.raises(OutputError, match=f"{kind}|FIFO"):
        GroupFile(tmp_path / "groups.jsonl", SETTINGS, resume=True)
    with pytest.raises(PlaceError, match=f"{name}.*({kind}|FIFO)"):
        JsonLines(tmp_path / name, is_continued=True)


def test_standard_output_is_written_and_stays_open(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for number in (1, 2):
        lines = JsonLines(None)
        lines.write({"a": number})
        lines.close()
    assert capfdbinary.readouterr().out == b'{"a":1}\n{"a":2}\n'


@pytest.mark.slow
def test_one_process_writes_a_file_and_a_dead_one_holds_it_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    code = f"""
import sys, pathlib
from agentic_opd.wire.files import GroupFile
file = GroupFile(pathlib.Path({str(path)!r}), {SETTINGS!r}, resume=True)
print("held", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match=rf"is being written by process {holder.pid} on "):
            GroupFile(path, SETTINGS, resume=True)
        holder.kill()
        holder.wait()
        file = GroupFile(path, SETTINGS, resume=True)
        asyncio.run(file.write(group("a#0")))
        file.close()
    again = GroupFile(path, SETTINGS, resume=True)
    assert again.finished == {"a#0"}
    again.close()
