"""Files that earlier versions wrote are read, or refused by name with what to do (tests/recordings/README.md)."""

import asyncio
import json
import re
import shutil
import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checks.recordings import lesson, settings_of

from agentic_opd.core.errors import OPDError
from agentic_opd.report.brake import brake_notes
from agentic_opd.training import collate
from agentic_opd.training.brake import Brake, read_scores
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.trainer import open_trainer
from tests.support import commands
from tests.support.environment import items, process, read_lines, validate
from tests.support.fake_plugin import FakePlugin
from tests.support.gateway import request, served
from tests.support.places import ROOT
from tests.support.training import ScriptedClient
from tests.support.waiting import until

SHELF = ROOT / "tests" / "recordings"
RECORDINGS = sorted(path.name for path in SHELF.iterdir() if path.is_dir())
REFUSED: dict[tuple[str, str], str] = {}
"""Recording and reader -> the error of this version, which names the file and says what to do."""
OTHER_SETTINGS = r"groups.jsonl' was written with other settings .* Set them back to continue, or use --env.overwrite"
"""A new setting of the environment changes what its lines depend on."""

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=RECORDINGS)
def recording(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a recording, which readers may continue."""
    return Path(shutil.copytree(SHELF / request.param, tmp_path / request.param))


def expects(recording: Path, reader: str) -> Any:
    """The context of a reader: nothing, or the refusal that `REFUSED` names."""
    said = REFUSED.get((recording.name, reader))
    return nullcontext() if said is None else pytest.raises(OPDError, match=said)


def test_groups_are_valid_and_trained_on(recording: Path) -> None:
    with expects(recording, "groups"):
        for file in ("process/groups.jsonl", "gateway/groups.jsonl"):
            assert validate(recording / file).returncode == 0
            assert len(collate(read_lines(recording / file))["input_ids"]) >= 1


def test_groups_are_reported(recording: Path) -> None:
    out = recording / "page.html"
    done = commands.run("agentic_opd", "report", str(recording / "process/groups.jsonl"), "--output", str(out))
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size > 10_000


def test_a_run_is_resumed(recording: Path, fake_server: FakePlugin) -> None:
    """Its one group is there, so that nothing is sampled; or the settings that this version has added are named."""
    file, flags = recording / "process/groups.jsonl", ("--env.distill_topk", "3", "--env.max_turns", "3")
    before = file.read_bytes()
    more = ("--env.total_steps", "1", "--env.group_size", "2", "--env.seed", "1", "--env.judge.step_votes", "1")
    done = process(fake_server.base_url, file, "--env.resume", "true", *flags, *more)
    assert file.read_bytes() == before
    if done.returncode != 0:
        assert re.search(OTHER_SETTINGS, " ".join(done.stderr.split())), done.stderr
    else:
        assert len(items(file)) == 1
        assert [line["step"] for line in read_lines(recording / "process/metrics.jsonl")] == [1]


def test_an_evaluation_is_read(recording: Path) -> None:
    samples = recording / "evaluate/samples.jsonl"
    with expects(recording, "samples"):
        scores = read_scores(samples, 0)
        metrics, *_ = json.loads((recording / "evaluate/metrics.json").read_text())["results"].values()
        assert len(scores) == metrics["eval/tasks"]


def test_a_gateway_goes_on_with_its_journal(recording: Path, fake_server: FakePlugin) -> None:
    """The session that was written stays so; the open one, which is idle by now, becomes a group."""
    folder = recording / "gateway"
    with closing(sqlite3.connect(folder / "journal.sqlite")) as journal:
        states = dict(journal.execute("SELECT name, state FROM sessions"))
        owner = journal.execute("SELECT owner FROM sessions").fetchone()[0]
    assert states == {"ended": "written", "rated": "open", "open": "open"}
    flags = ("--env.distill_topk", "3", "--env.session_idle_s", "1")
    with served(fake_server.base_url, folder, *flags) as gateway:

        def now() -> dict[str, str]:
            with closing(sqlite3.connect(f"file:{folder / 'journal.sqlite'}?mode=ro", uri=True)) as journal:
                return dict(journal.execute("SELECT name, state FROM sessions WHERE owner = ?", (owner,)))

        until(lambda: "open" not in now().values() and "closed" not in now().values(), 120, gateway.process)
        assert now() == {"ended": "written", "rated": "written", "open": "written"}
        assert request(f"{gateway.url}/health")
    assert validate(folder / "groups.jsonl").returncode == 0
    by_name = {line["group_overrides"]["session_id"]: line for line in read_lines(folder / "groups.jsonl")}
    assert by_name.keys() == states.keys()
    assert by_name["rated"]["scores"] == [0.5]
    assert [one["turns"] for one in by_name["open"]["overrides"]] == [2]


def test_a_training_run_is_resumed(recording: Path) -> None:
    """From its checkpoint, with the brake's verdicts, to its last step."""
    folder = recording / "train"
    config = TrainerConfig.model_validate({**settings_of(folder), "resume": True})
    with expects(recording, "checkpoint"):
        assert [version.number for version in Brake(config).versions] == [0, 1]
        assert brake_notes(folder / "run/brake.jsonl") == []
        trainer = open_trainer(config)
        assert trainer.state.step == 2
        before = torch.cat([parameter.detach().flatten() for parameter in trainer.learner.model.parameters()])
        trainer.source = ScriptedClient(config, [[], [], [lesson(2)], [lesson(3)]])
        asyncio.run(trainer.run())
        after = torch.cat([parameter.detach().flatten() for parameter in trainer.learner.model.parameters()])
        assert (after - before).abs().max() > 1e-4
        assert [line["step"] for line in read_lines(folder / "run/metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["groups.jsonl", "journal.sqlite", "step.json", "brake.jsonl", "samples.jsonl"])
def test_the_shelf_holds_every_kind_of_file(recording: Path, name: str) -> None:
    assert [file for file in recording.rglob(name) if file.stat().st_size]


def test_the_shelf_is_small() -> None:
    assert sum(file.stat().st_size for file in SHELF.rglob("*") if file.is_file()) < len(RECORDINGS) * 500_000
