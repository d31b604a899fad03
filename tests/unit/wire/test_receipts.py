"""The chain of receipts: what is named by hash, and what a check of it says of each change."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.validate import main
from agentic_opd.core.errors import PlaceError
from agentic_opd.core.text import json_line
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.receipts import (
    EarlierReceipt,
    GroupReceipt,
    Receipt,
    TrainedStep,
    WeightFiles,
    digest_of,
    find_receipt,
    folder_sha256,
    line_sha256,
    read_receipt,
    receipts_of_lines,
    settings_sha256,
    write_receipt,
)
from tests.unit.wire.sample import group

SETTINGS = {"lr": 1e-5, "loss.forward_kl": 1.0}


def named(name: str, session: str = "s") -> dict[str, Any]:
    line = group()
    line["group_overrides"] |= {"group_id": name, "session_id": session}
    return line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output_dir of a run of three versions, a group each after the first, and its file of groups."""
    lines = [json_line(named("a", "s1")), json_line(named("b", "s2"))]
    (tmp_path / "groups.jsonl").write_bytes(b"".join(lines))
    groups = list(receipts_of_lines(lines))
    folder, previous = tmp_path / "run" / "receipts", None
    for version in range(3):
        weights = tmp_path / "run" / "checkpoints" / f"step-{version:06d}"
        weights.mkdir(parents=True)
        (weights / "weights.bin").write_bytes(bytes([version]) * 10)
        steps = [TrainedStep(step=version, groups=[groups[version - 1]])] if version else []
        receipt = Receipt(
            version=version,
            previous=previous,
            settings=SETTINGS,
            settings_sha256=settings_sha256(SETTINGS),
            steps=steps,
            files={"checkpoint": WeightFiles(folder=f"checkpoints/{weights.name}", sha256=folder_sha256(weights))},
        )
        previous = EarlierReceipt(version=version, sha256=write_receipt(folder, receipt))
    return tmp_path / "run"


def check(capsys: pytest.CaptureFixture[str], *argv: Path | str) -> tuple[int, list[str]]:
    """The exit code of `validate`, and the lines it prints of the receipt."""
    code = main([str(word) for word in argv])
    printed = capsys.readouterr().out.splitlines()
    return code, printed[next(index for index, line in enumerate(printed) if line.startswith("version ")) :]


def test_a_group_is_named_by_its_line_its_sessions_and_its_hints() -> None:
    line = named("a", "talk")
    receipt = GroupReceipt.of(ScoredGroup.from_wire(line))
    hints = [turn["hint"] for one in line["overrides"] for turn in one["opd"]["turns"] if turn["outcome"] == "scored"]
    assert hints
    assert receipt.hints == list(dict.fromkeys(digest_of(hint.encode()) for hint in hints))
    assert (receipt.group_id, receipt.sessions) == ("a", ["talk"])
    written = json_line(ScoredGroup.from_wire(line).to_wire())
    assert receipt.sha256 == line_sha256(written) == digest_of(written[:-1])


def test_a_receipt_is_read_as_it_was_written(run: Path) -> None:
    receipt, digest = read_receipt(run / "receipts" / "step-000002.json")
    assert receipt.content == (run / "receipts" / "step-000002.json").read_bytes()
    assert digest == digest_of(receipt.content)
    assert sorted(path.name for path in (run / "receipts").iterdir()) == [f"step-{n:06d}.json" for n in range(3)]


def test_a_chain_without_a_change_has_no_difference(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (summary, verdict) = check(capsys, run.parent / "groups.jsonl", "--receipt", run)
    assert code == 0
    assert summary.startswith("version 2: 3 receipts back to version 0, its start; groups: 2, sessions: 2, hints: 1,")
    assert verdict.endswith("step-000002.json: no difference")


def test_a_version_is_named_by_its_receipt_its_run_or_its_weights(run: Path) -> None:
    receipts = run / "receipts"
    assert find_receipt(receipts / "step-000001.json") == receipts / "step-000001.json"
    assert find_receipt(run) == receipts / "step-000002.json"
    assert find_receipt(run / "checkpoints" / "step-000001") == receipts / "step-000001.json"
    with pytest.raises(PlaceError, match=r"there is no receipt of .*: name the file of a receipt"):
        find_receipt(run / "checkpoints")


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("checkpoints/step-000002/weights.bin", "\2", "\3", "weights.bin has the hash"),
        ("receipts/step-000001.json", '"s1"', '"s9"', "version 2 continues version 1 with the receipt"),
        ("receipts/step-000002.json", '"lr": 1e-05', '"lr": 1e-04', "settings do not have the hash"),
        ("receipts/step-000002.json", '"s2"', '"s9"', "has other sessions or hints in its line"),
        ("receipts/step-000002.json", '"version": 1', '"version": 2', "names version 2 as the one before it"),
        ("groups.jsonl", '"s2"', '"s9"', "is no line of the files"),
    ],
)
def test_each_change_is_said_in_a_sentence(
    file: str, before: str, after: str, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run / file if file != "groups.jsonl" else run.parent / file, before, after)
    code, (_, sentence, verdict) = check(capsys, run.parent / "groups.jsonl", "--receipt", run)
    assert code == 1
    assert sentence.startswith("version 2")
    assert said in sentence
    assert verdict.endswith(": 1 difference")


def test_a_missing_receipt_and_a_missing_file_of_weights_are_differences(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "receipts" / "step-000000.json").unlink()
    (run / "checkpoints" / "step-000002" / "weights.bin").rename(run / "checkpoints" / "step-000002" / "more.bin")
    code, (summary, chain, more, missing, _) = check(capsys, "--receipt", run)
    assert code == 1
    assert "(name their FILEs to check them)" in summary
    assert "version 1 continues version 0" in chain
    assert chain.endswith("and there is none")
    assert more.endswith("and its receipt states no such file")
    assert "weights.bin is missing" in missing


def test_weights_that_were_removed_are_no_difference(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer keeps the last ones only."""
    (run / "checkpoints" / "step-000002" / "weights.bin").unlink()
    (run / "checkpoints" / "step-000002").rmdir()
    code, (summary, _) = check(capsys, "--receipt", run)
    assert code == 0
    assert summary.endswith("files of weights: 0; checkpoints/step-000002 is gone")


def test_a_group_that_was_sent_in_parts_is_a_part_of_its_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "receipts" / "step-000002.json"
    receipt, _ = read_receipt(path)
    (whole,) = receipt.groups
    part = whole.model_copy(update={"sha256": "0" * 64, "group_id": "b/1"})
    write_receipt(path.parent, receipt.model_copy(update={"steps": [TrainedStep(step=2, groups=[part])]}))
    assert check(capsys, run.parent / "groups.jsonl", "--receipt", run)[0] == 0
    edit(path, '"s2"', '"s1"')
    code, (_, sentence, _) = check(capsys, run.parent / "groups.jsonl", "--receipt", run)
    assert (code, "the group b/1 000" in sentence) == (1, True)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": true}', "nan", "[" * 100_000])
def test_what_is_no_receipt_is_an_error(content: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "receipts" / "step-000002.json"
    path.write_text(content)
    assert main(["--receipt", str(path)]) == 2
    assert "is no receipt of a trainer" in capsys.readouterr().err


def test_hostile_names_are_printed_escaped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run / "receipts" / "step-000002.json", '"b"', json.dumps("b\x1b[31m\n"))
    edit(run / "receipts" / "step-000002.json", "checkpoints/step-000002", "x\\u001b[31m")
    main([str(run.parent / "groups.jsonl"), "--receipt", str(run)])
    assert "\x1b" not in capsys.readouterr().out


def test_neither_a_file_nor_a_receipt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "name a FILE of groups, or a receipt with --receipt" in capsys.readouterr().err
