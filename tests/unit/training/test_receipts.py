"""The receipts of a run: which groups each version adds, wherever the run is stopped, killed or resumed."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.validate import main
from agentic_opd.core.errors import OutputError
from agentic_opd.core.text import json_line
from agentic_opd.training import trainer as trainer_module
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.receipts import Receipts
from agentic_opd.training.trainer import open_trainer
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.receipts import read_chain, read_receipt, receipt_file
from tests.support.tiny_model import save_tiny_model
from tests.unit.wire.sample import group

SECRET = "s3cret"


def groups(*names: str) -> list[ScoredGroup]:
    return [ScoredGroup.from_wire({**group(), "group_overrides": {"group_id": name}}) for name in names]


def config(folder: Path, **changes: Any) -> TrainerConfig:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "model.safetensors").write_bytes(b"base")
    settings = {"model": str(model), "output_dir": folder / "train", "vllm_api_key": SECRET, **changes}
    return TrainerConfig.model_validate(settings)


def weights(folder: Path, version: int, content: bytes = b"w") -> Path:
    path = folder / "train" / "checkpoints" / f"step-{version:06d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "weights").write_bytes(content)
    return path


async def make(receipts: Receipts, folder: Path, version: int, *names: str) -> dict[str, Any]:
    """Make a version from these groups, and return its receipt as the checkpoint has it."""
    receipts.trained(version, groups(*names))
    draft = receipts.draft(version)
    await receipts.add_files(version, "checkpoint", weights(folder, version))
    return draft


def chain(folder: Path, version: int) -> list[tuple[int, list[str]]]:
    """Each version from which this one continues, and the groups that it adds."""
    receipts, differences = read_chain(receipt_file(folder / "train" / "receipts", version))
    assert not differences
    return [(receipt.version, [group.group_id or "" for group in receipt.groups]) for receipt in receipts]


def test_a_version_adds_the_groups_since_the_one_before_it(tmp_path: Path) -> None:
    """Versions 1 and 3 are neither pushed nor saved."""

    async def run() -> None:
        receipts = Receipts(config(tmp_path))
        await receipts.begin()
        receipts.trained(1, groups("a"))
        await make(receipts, tmp_path, 2, "b", "c")
        receipts.trained(3, groups("d"))
        receipts.write(4)
        await receipts.add_files(4, "pushed", weights(tmp_path, 4))
        await receipts.add_files(4, "final", weights(tmp_path, 4))

    asyncio.run(run())
    assert chain(tmp_path, 4) == [(4, ["d"]), (2, ["a", "b", "c"]), (0, [])]
    folder = tmp_path / "train" / "receipts"
    files = {number: read_receipt(receipt_file(folder, number))[0].files for number in (0, 4)}
    assert list(files[4]) == ["pushed", "final"]
    assert files[4]["pushed"].folder == "checkpoints/step-000004"
    assert files[0]["base"].folder == str((tmp_path / "model").resolve())
    assert SECRET not in "".join(path.read_text() for path in folder.iterdir())


def test_a_resumed_run_continues_from_its_checkpoint_and_sets_later_versions_aside(tmp_path: Path) -> None:
    async def run() -> None:
        killed = Receipts(config(tmp_path))
        await killed.begin()
        for version, name in enumerate("abc", start=1):
            draft = await make(killed, tmp_path, version, name)
            if version == 2:
                saved = draft
        resumed = Receipts(config(tmp_path))
        await resumed.resume(2, saved, weights(tmp_path, 2))
        await make(resumed, tmp_path, 3, "d")

    asyncio.run(run())
    assert chain(tmp_path, 3) == [(3, ["d"]), (2, ["b"]), (1, ["a"]), (0, [])]
    (dropped,) = (tmp_path / "train" / "receipts" / "dropped").iterdir()
    receipts, differences = read_chain(dropped)
    assert [receipt.version for receipt in receipts] == [3, 2, 1, 0]
    assert not differences


@pytest.mark.parametrize("is_pushed", [False, True])
def test_a_kill_between_a_checkpoint_and_its_receipt_loses_no_group(is_pushed: bool, tmp_path: Path) -> None:
    async def run() -> None:
        killed = Receipts(config(tmp_path))
        await killed.begin()
        killed.trained(1, groups("a"))
        if is_pushed:
            killed.write(1)
        saved = json.loads(json.dumps(killed.draft(1)))
        resumed = Receipts(config(tmp_path))
        await resumed.resume(1, saved, weights(tmp_path, 1))
        await make(resumed, tmp_path, 2, "b")

    asyncio.run(run())
    assert chain(tmp_path, 2) == [(2, ["b"]), (1, ["a"]), (0, [])]
    assert "checkpoint" in read_receipt(tmp_path / "train" / "receipts" / "step-000001.json")[0].files


def test_after_a_roll_back_the_chain_continues_from_the_good_version(tmp_path: Path) -> None:
    async def run() -> None:
        receipts = Receipts(config(tmp_path))
        await receipts.begin()
        for version, name in enumerate("abc", start=1):
            await make(receipts, tmp_path, version, name)
        receipts.trained(4, groups("never pushed"))
        receipts.return_to(1)
        await receipts.add_files(5, "checkpoint", weights(tmp_path, 5))
        await make(receipts, tmp_path, 6, "d")

    asyncio.run(run())
    assert chain(tmp_path, 6) == [(6, ["d"]), (5, []), (1, ["a"]), (0, [])]
    assert chain(tmp_path, 3) == [(3, ["c"]), (2, ["b"]), (1, ["a"]), (0, [])]


def test_a_checkpoint_of_an_earlier_program_begins_a_chain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        resumed = Receipts(config(tmp_path))
        await resumed.resume(7, {}, weights(tmp_path, 7))
        await make(resumed, tmp_path, 8, "a")

    asyncio.run(run())
    assert chain(tmp_path, 8) == [(8, ["a"]), (7, [])]
    assert "version 7 is the first with a receipt" in caplog.text
    assert main(["--receipt", str(tmp_path / "train")]) == 0
    assert "back to version 7, the first with a receipt" in capsys.readouterr().out


def test_what_can_not_be_read_or_written_is_an_error(tmp_path: Path) -> None:
    receipts = Receipts(config(tmp_path))
    with pytest.raises(OutputError, match="is no receipt of a trainer: version: 'one', expected"):
        asyncio.run(receipts.resume(1, {"version": "one"}, weights(tmp_path, 1)))
    with pytest.raises(OutputError, match="cannot read"):
        asyncio.run(receipts.add_files(1, "pushed", tmp_path / "nowhere"))
    (tmp_path / "train" / "receipts").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        receipts.write(2)


class Killed(Exception):
    """What stands for SIGKILL."""


def train(folder: Path, lines: Sequence[ScoredGroup], **changes: Any) -> TrainerConfig:
    """Train a tiny model on a file of these groups."""
    model = folder / "tiny"
    if not model.exists():
        save_tiny_model(model, "float32", tied=False)
    path = folder / "groups.jsonl"
    path.write_bytes(b"".join(json_line(line.to_wire()) for line in lines))
    places = {"model": str(model), "groups": [path], "output_dir": folder / "train", "device": "cpu"}
    steps = {"batch_size": 2, "save_every": 1, "epochs_per_batch": 1, "minibatches": 1}
    settings = TrainerConfig.model_validate({**places, **steps, **changes})

    async def run() -> None:
        await open_trainer(settings).run()

    asyncio.run(run())
    return settings


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_that_is_killed_and_resumed_is_what_its_receipts_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed after its second checkpoint, before the receipt of it."""
    lines = groups("a", "b", "c", "d")
    original = trainer_module.save_checkpoint

    def until_it_is_killed(folder: Path, progress: Any, *arguments: Any) -> Path:
        target = original(folder, progress, *arguments)
        if progress.step == 2:
            raise Killed
        return target

    monkeypatch.setattr(trainer_module, "save_checkpoint", until_it_is_killed)
    with pytest.raises(Killed):
        train(tmp_path, lines)
    monkeypatch.undo()
    train(tmp_path, lines, resume=True)
    added = [names for _, names in chain(tmp_path, 4)]
    assert [len(names) for names in added] == [1, 1, 1, 1, 0]
    assert sorted(name for names in added for name in names) == ["a", "b", "c", "d"]
    output_dir = tmp_path / "train"
    for version in (output_dir, output_dir / "final", output_dir / "checkpoints" / "step-000003"):
        capsys.readouterr()
        assert main([str(tmp_path / "groups.jsonl"), "--receipt", str(version)]) == 0, capsys.readouterr()
    (output_dir / "final" / "model.safetensors").write_bytes(b"other")
    assert main(["--receipt", str(output_dir)]) == 1
    assert "model.safetensors has the hash" in capsys.readouterr().out
