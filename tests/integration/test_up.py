"""`agentic-opd up`: the demo loop in one command, interrupted, and with a part killed."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench.local_server import free_port

from tests.support import commands
from tests.support.environment import validate
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

STEPS = 4


class DemoLoop:
    """The demo's file with free ports and a folder of its own, and a quarter of the rollouts a step."""

    def __init__(self, folder: Path, steps: int = STEPS) -> None:
        self.out = folder / "up"
        settings = yaml.safe_load(Path("configs/up_demo.yaml").read_text())
        settings["output_dir"] = str(self.out)
        settings["servers"]["policy"]["port"], settings["api"]["port"] = free_port(), free_port()
        settings["trainer"]["flags"] |= {"batch_size": 8, "epochs_per_batch": 1, "minibatches": 1}
        settings["trainer"]["flags"]["total_steps"] = steps
        settings["environments"]["tasks"]["flags"] |= {"env.group_size": 2, "env.max_concurrent_groups": 4}
        self.file = folder / "up.yaml"
        self.file.write_text(yaml.safe_dump(settings, sort_keys=False))
        self.variables = {"LOOP": str(folder)}
        self.mark = f"LOOP={folder}".encode()
        self.said = folder / "said"

    def start(self, *flags: str, real: bool = True) -> Any:
        with self.said.open("ab") as said:
            argv = ("agentic_opd", "up", "--config", str(self.file), *flags)
            return commands.start(*argv, stderr=said, stdout=said, real=real, **self.variables)

    def has_stepped(self, number: int) -> bool:
        """Whether that many steps are done."""
        return (self.out / "metrics.jsonl").exists() and len(set(self.steps())) >= number

    def lines(self) -> list[dict[str, float]]:
        path = self.out / "metrics.jsonl"
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [json.loads(line) for line in whole]

    def steps(self) -> list[int]:
        return [int(line["step"]) for line in self.lines()]

    def running(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        return found

    def wait_for_end(self) -> None:
        """Wait until no process is left: the system takes a moment to end those that were killed."""
        until(lambda: self.running() == {}, timeout_s=100, said=lambda: str(self.running()))

    def kill(self, of: str) -> None:
        pid = min(pid for pid, line in self.running().items() if of in line and " up --config" not in line)
        os.kill(pid, signal.SIGKILL)


def test_the_loop_closes(tmp_path: Path) -> None:
    loop = DemoLoop(tmp_path, steps=2)
    process = loop.start()
    try:
        until(lambda: process.poll() is not None, timeout_s=1200, said=loop.said.read_text)
    finally:
        process.kill()
    assert process.returncode == 0, loop.said.read_text()
    assert loop.steps() == [1, 2]
    assert all(line["push_difference"] < 1e-3 for line in loop.lines())
    loop.wait_for_end()
    assert (loop.out / "final/model.safetensors").exists()
    assert validate(loop.out / "tasks.jsonl").returncode == 0
    again = loop.start(real=False)
    assert again.wait(300) == 2
    assert "holds an earlier run" in loop.said.read_text()


@pytest.mark.all
def test_the_loop_closes_though_it_is_interrupted_and_a_part_is_killed(tmp_path: Path) -> None:
    loop = DemoLoop(tmp_path)
    process = loop.start()
    said = loop.said.read_text
    try:
        until(lambda: loop.has_stepped(1), timeout_s=600, process=process, said=said)
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130, said()
        assert "continues from the last checkpoint" in said()
        loop.wait_for_end()
        before = max(loop.steps())
        assert (loop.out / f"checkpoints/step-{before:06d}").exists()
        again = loop.start()
        assert again.wait(300) == 2
        assert "holds an earlier run" in said()

        process = loop.start("--resume")
        until(lambda: loop.has_stepped(before + 1), timeout_s=600, process=process, said=said)
        loop.kill("agentic_opd serve ")
        assert process.wait(600) == 1, said()
        assert "tasks was killed by signal 9, so all parts are ended" in said()
        loop.wait_for_end()

        process = loop.start("--resume")
        until(lambda: process.poll() is not None, timeout_s=900, said=said)
    finally:
        process.kill()
    assert process.returncode == 0, said()
    assert set(loop.steps()) == {*range(1, STEPS + 1)}
    assert all(line["push_difference"] < 1e-3 for line in loop.lines())
    loop.wait_for_end()
    assert (loop.out / "final/model.safetensors").exists()
    assert validate(loop.out / "tasks.jsonl").returncode == 0
