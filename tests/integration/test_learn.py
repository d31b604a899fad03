"""`scripts/learn --quick`: modes of each kind through real servers and a real trainer, and what is written of them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentic_opd.wire.group import ScoredGroup
from tests.support.environment import exit_code_of, read_lines
from tests.support.places import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

MODES = ["opd", "grpo", "no-hint"]


def learn(*options: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "learn"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture
def learn_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """The command in this process, which saves what a process of its own imports."""
    from learning.__main__ import main

    before = signal.getsignal(signal.SIGTERM)

    def run(*options: str) -> int:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["scripts/learn", *options])
        return exit_code_of(main)

    yield run
    signal.signal(signal.SIGTERM, before)


def metrics(folder: Path, mode: str) -> list[dict[str, float]]:
    """The last line of each step: a step that was killed before its checkpoint is made, and logged, again."""
    (file,) = (folder / mode).glob("seed-0-*/metrics.jsonl")
    return [*{line["step"]: line for line in read_lines(file)}.values()]


def killed_after_a_step(folder: Path, *options: str) -> None:
    """Start the command, and kill its process group when the first step of the first mode is saved."""
    command = [str(ROOT / "scripts" / "learn"), *options]
    with (folder / "killed.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: any(folder.glob("opd/*/checkpoints/step-000001")), 600, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.all
def test_every_mode_trains_and_is_measured_though_the_first_run_was_killed(
    tmp_path: Path, learn_here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--quick", "--modes", *MODES, "--out", str(tmp_path))
    killed_after_a_step(tmp_path, *flags)
    start = tmp_path / "start" / "seed-0" / "samples.jsonl"
    measured = start.stat().st_mtime_ns
    done = learn(*flags)
    assert start.stat().st_mtime_ns == measured
    (groups,) = tmp_path.glob("opd/*/rollouts/groups.jsonl")
    items = [ScoredGroup.from_wire(line).item_id for line in read_lines(groups)]
    assert len(set(items)) == len(items) >= 4
    assert done.returncode == 0, done.stderr
    curves = json.loads((tmp_path / "results.json").read_text())
    assert list(curves) == MODES
    for seeds in curves.values():
        ((rollouts, first, episodes), (last_rollouts, last, last_episodes)) = seeds["0"]
        assert (rollouts, episodes, last_rollouts, last_episodes) == (0, 8, 16, 8)
        assert 0 <= first <= 1
        assert 0 <= last <= 1
    assert {curves[mode]["0"][0][1] for mode in MODES} == {curves["opd"]["0"][0][1]}  # One start, measured once.
    samples = [path.read_text().splitlines() for path in tmp_path.rglob("samples.jsonl")]
    assert [len(lines) for lines in samples] == [8] * (1 + len(MODES))  # The start, and where each mode came.
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for mode in MODES:
        assert mode in (tmp_path / "results.md").read_text()
        assert mode in done.stderr

    rows = {mode: metrics(tmp_path, mode) for mode in MODES}
    assert all([step["step"] for step in steps] == [1, 2] for steps in rows.values())
    assert all(step["push_difference"] < 1e-3 for steps in rows.values() for step in steps)
    assert all(step["scored_tokens"] == 0 for step in rows["grpo"])
    for mode in ("opd", "no-hint"):
        assert sum(step["scored_tokens"] for step in rows[mode]) > 0
    # Without a hint the teacher is the student, with one it is not.
    assert abs(rows["no-hint"][0]["gap_mean"]) < 1e-3 < abs(rows["opd"][0]["gap_mean"])
    assert rows["no-hint"][0]["grad_norm"] < 1e-2 * rows["opd"][0]["grad_norm"]

    assert learn_here("--quick", "--modes", *MODES, "--out", str(tmp_path)) == 0
    said = capsys.readouterr().err
    assert "nothing is left to do" in said
    assert json.loads((tmp_path / "results.json").read_text()) == curves

    assert learn_here("--out", str(tmp_path)) == 2
    assert "holds curves of other settings (rollouts 16, epochs 1, minibatches 1" in capsys.readouterr().err


@pytest.mark.all
def test_it_trains_on_a_complaining_users_sessions(tmp_path: Path) -> None:
    done = learn("--quick", "--talk", "--without-examples", "--modes", "opd", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in ("results.json", "first_solutions.json"):
        points = json.loads((tmp_path / name).read_text())["opd"]["0"]
        assert [(rollouts, episodes) for rollouts, _, episodes in points] == [(0, 8), (16, 8)]
    (file,) = (tmp_path / "opd").glob("seed-0-*/groups.jsonl")
    rollouts = [one for line in read_lines(file) for one in ScoredGroup.from_wire(line).rollouts]
    assert len(rollouts) >= 16
    assert not any(one.is_rewarded for one in rollouts)
    complained = [one for one in rollouts if sum(message["role"] == "user" for message in one.messages) > 1]
    assert 0 < len(complained) < len(rollouts)
    hints = [turn.hint for one in complained for turn in one.turns or () if "later" in turn.evidence]
    assert len([hint for hint in hints if hint]) > len(hints) / 2 > 0
    assert sum(step["scored_tokens"] for step in metrics(tmp_path, "opd")) > 0


def test_wrong_settings_are_refused(learn_here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert learn_here("--batch-sizes", "6") == 2
    assert "multiple of --group-size (4)" in capsys.readouterr().err
