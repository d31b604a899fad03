"""`scripts/learning/measure_hints` on the server that sampled the demo run."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import LocalServer

from agentic_opd.report.lifts import Lifts, lifts_path, read_lifts
from tests.support import commands
from tests.support.waiting import until

from .conftest import DemoRun

pytestmark = [pytest.mark.vllm, pytest.mark.all]

SAMPLES = 4


@pytest.fixture
def file(demo: DemoRun, tmp_path: Path) -> Path:
    """A copy of the demo run's file, with its settings beside it."""
    for suffix in (".jsonl", ".run.json"):
        shutil.copy(demo.path.with_suffix(suffix), tmp_path / f"groups{suffix}")
    return tmp_path / "groups.jsonl"


def command(file: Path, server: LocalServer, *flags: str, samples: int = SAMPLES) -> list[str]:
    base = ["learning.hint_lifts", str(file), "--samples", str(samples)]
    return [*base, "--openai.base_url", f"{server.base_url}/v1", "--env.server_retry_s", "5", *flags]


def hints(file: Path, server: LocalServer, *flags: str, samples: int = SAMPLES) -> "subprocess.CompletedProcess[str]":
    return commands.run(*command(file, server, *flags, samples=samples))


def lifts_of(file: Path) -> Lifts:
    lifts = read_lifts(lifts_path(file))
    assert lifts is not None
    return lifts


def hinted(demo: DemoRun) -> list[tuple[int, int, int]]:
    return [
        (line, index, at)
        for line, group in enumerate(demo.groups, start=1)
        for index, overrides in enumerate(group["overrides"])
        for at, turn in enumerate(overrides["opd"]["turns"])
        if turn["hint"] is not None and turn["insert_at"] is not None
    ]


def test_some_turns_are_measured_then_the_rest(file: Path, demo: DemoRun, vllm_server: LocalServer) -> None:
    done = hints(file, vllm_server, "--turns", "3")
    assert done.returncode == 0, done
    first = lifts_of(file)
    assert (first.samples, len(first.turns), first.planned) == (SAMPLES, 3, 3)
    assert {turn.key for turn in first.turns} < set(hinted(demo))
    assert all(0 <= turn.passed_with <= SAMPLES and 0 <= turn.passed_without <= SAMPLES for turn in first.turns)
    assert "3 of 3 turns measured" in " ".join(done.stderr.split())
    again = hints(file, vllm_server)
    assert again.returncode == 2
    assert "Continue it with --env.resume, or replace it with --env.overwrite" in " ".join(again.stderr.split())
    other = hints(file, vllm_server, "--env.resume", samples=SAMPLES + 1)
    assert other.returncode == 2
    assert f"was measured with samples {SAMPLES}, now it is {SAMPLES + 1}" in " ".join(other.stderr.split())
    assert lifts_of(file) == first
    whole = hints(file, vllm_server, "--env.resume")
    assert whole.returncode == 0, whole
    lifts = lifts_of(file)
    assert [turn.key for turn in lifts.turns] == hinted(demo)
    assert set(first.turns) <= set(lifts.turns)


def test_an_interruption_leaves_a_whole_file(file: Path, demo: DemoRun, vllm_server: LocalServer) -> None:
    argv = command(file, vllm_server, "--env.max_concurrent_groups", "1")
    running = commands.start(*argv, stderr=commands.PIPE)
    until(lifts_path(file).exists, 300, running)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert "the same command with --env.resume continues" in " ".join(said.split())
    assert 1 <= len(lifts_of(file).turns) < len(hinted(demo))


def changed(file: Path, change: Any) -> None:
    groups = [json.loads(line) for line in file.read_text().splitlines()]
    for group in groups:
        change(group)
    file.write_text("".join(json.dumps(group) + "\n" for group in groups))


def test_other_weights_than_those_that_sampled_are_refused(file: Path, vllm_server: LocalServer) -> None:
    def newer(group: dict[str, Any]) -> None:
        group["group_overrides"]["weight_version"] = 5
        for overrides in group["overrides"]:
            for turn in overrides["opd"]["turns"]:
                turn.update({name: 5 for name in ("weight_version", "scored_version") if name in turn})

    changed(file, newer)
    done = hints(file, vllm_server)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "has the weights of version 0, but the hinted turns were sampled by version 5" in said
    assert not lifts_path(file).exists()


def test_other_weights_of_the_same_version_are_refused(file: Path, vllm_server: LocalServer) -> None:
    """As those of a policy that was trained anew, whose server counts from 0 too."""

    def less_likely(group: dict[str, Any]) -> None:
        for logprobs, masks in zip(group["inference_logprobs"], group["masks"], strict=True):
            logprobs[:] = [x - 0.7 * (mask != -100) for x, mask in zip(logprobs, masks, strict=True)]

    changed(file, less_likely)
    done = hints(file, vllm_server)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "has other weights than those that sampled the file" in said
    assert "0.7 nats away" in said


def test_a_file_of_another_tokenizer_is_refused(file: Path, vllm_server: LocalServer) -> None:
    def other(group: dict[str, Any]) -> None:
        for messages in group["messages"]:
            for message in messages:
                if message["role"] == "user":
                    message["content"] = "Something that these tokens do not spell."

    changed(file, other)
    done = hints(file, vllm_server)
    assert done.returncode == 1
    assert "was not made with the tokenizer" in " ".join(done.stderr.split())
