"""Kills at any moment: the journal's lines and the file of groups are whole, and nothing is done twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import OutputError, PlaceError
from agentic_opd.core.types import ProofVerdict
from agentic_opd.runs import proof_journal
from agentic_opd.runs.proof_journal import ProofJournal, TurnPosition
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.files import FileLock
from agentic_opd.wire.group import ProofRecord
from tests.unit.wire.sample import group

PROOF = ProofRecord((0, 4), (4, 4), ProofVerdict.PROVEN, 1.0, (0.25, 1.0), weight_version=7)
FIRST, LAST = TurnPosition(2, 0, 0), TurnPosition(3, 1, 0)


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """Three groups, with an empty line between the first two."""
    path = tmp_path / "groups.jsonl"
    lines = [json.dumps(group(), separators=(",", ":")) for _ in range(2)]
    path.write_text("\n" + "\n".join(lines) + "\n")
    return path


def proofs_in(path: Path) -> dict[TurnPosition, Any]:
    return {
        TurnPosition(line, sequence, turn): record["proof"]
        for line, text in enumerate(path.read_text().split("\n"), start=1)
        if text
        for sequence, overrides in enumerate(json.loads(text)["overrides"])
        for turn, record in enumerate(overrides["opd"]["turns"])
        if "proof" in record
    }


def test_proofs_are_written_into_their_records_and_nothing_else_changes(groups: Path) -> None:
    before = groups.read_text()
    journal = ProofJournal(groups)
    journal.add(FIRST, PROOF)
    journal.add(LAST, PROOF)
    assert groups.read_text() == before
    journal.write_groups()
    journal.close()
    assert [path.name for path in groups.parent.iterdir() if path.name != "groups.jsonl.lock"] == ["groups.jsonl"]
    written = proofs_in(groups)
    assert set(written) == {FIRST, LAST}
    assert written[FIRST]["interval"] == [0.25, 1.0]
    lines = [json.loads(line) for line in groups.read_text().split("\n") if line]
    assert all(not GroupChecker().read(line).problems for line in lines)
    for line in lines:
        for overrides in line["overrides"]:
            for record in overrides["opd"]["turns"]:
                record.pop("proof", None)
    assert lines == [json.loads(line) for line in before.split("\n") if line]


def test_after_a_kill_the_next_journal_writes_what_was_proven(groups: Path) -> None:
    killed = ProofJournal(groups)
    killed.add(FIRST, PROOF)
    killed.close()
    with killed.path.open("a") as file:
        file.write('{"turn": [3, 1, 0], "proof": {"with')
    journal = ProofJournal(groups)
    assert set(proofs_in(groups)) == {FIRST}
    assert not journal.path.exists()
    journal.add(LAST, PROOF)
    journal.write_groups()
    assert set(proofs_in(groups)) == {FIRST, LAST}
    journal.close()


def test_a_kill_between_the_groups_and_the_end_of_the_journal_writes_nothing_twice(groups: Path) -> None:
    killed = ProofJournal(groups)
    killed.add(FIRST, PROOF)
    remaining = killed.path.read_bytes()
    killed.write_groups()
    killed.close()
    digest = ProofJournal(groups)
    digest.close()
    after = groups.read_bytes()
    killed.path.write_bytes(remaining + json.dumps({"sha256": digest._digest}).encode() + b"\n")
    ProofJournal(groups).close()
    assert groups.read_bytes() == after
    assert not killed.path.exists()


def test_a_file_that_another_process_wrote_just_before_the_lock_is_not_taken_for_changed(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked_late(path: Path, setting: str) -> FileLock:
        with path.open("a") as file:
            file.write(json.dumps(group()) + "\n")
        return FileLock(path, setting)

    with monkeypatch.context() as patch:
        patch.setattr(proof_journal, "FileLock", locked_late)
        killed = ProofJournal(groups)
    killed.add(FIRST, PROOF)
    killed.close()
    ProofJournal(groups).close()
    assert set(proofs_in(groups)) == {FIRST}


def test_a_file_that_has_changed_is_refused_and_the_journal_kept(groups: Path) -> None:
    journal = ProofJournal(groups)
    journal.add(FIRST, PROOF)
    journal.close()
    with groups.open("a") as file:
        file.write(json.dumps(group()) + "\n")
    with pytest.raises(PlaceError, match="which has changed since"):
        ProofJournal(groups)
    assert journal.path.exists()
    with pytest.raises(PlaceError, match="which has changed since"):
        ProofJournal(groups)  # It is unlocked.


@pytest.mark.parametrize("line", ["garbage", "[]", '{"turn": [1, 2, 3]}', '{"turn": 5, "proof": {}}'])
def test_what_is_no_journal_is_not_written_anywhere(groups: Path, line: str) -> None:
    before = groups.read_bytes()
    groups.with_suffix(".proofs.jsonl").write_text(line + "\n")
    with pytest.raises(PlaceError, match="is not a journal of proofs"):
        ProofJournal(groups)
    assert groups.read_bytes() == before


def test_two_writers_and_gzipped_files_are_refused(groups: Path) -> None:
    journal = ProofJournal(groups)
    with pytest.raises(OutputError, match="is being written by"):
        ProofJournal(groups)
    journal.close()
    with pytest.raises(PlaceError, match="unpack it first"):
        ProofJournal(groups.with_suffix(".jsonl.gz"))
    with pytest.raises(PlaceError, match="No such file"):
        ProofJournal(groups.with_name("none.jsonl"))
