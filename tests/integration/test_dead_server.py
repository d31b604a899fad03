"""A vLLM server that dies while a run of `process` uses it."""

import subprocess
from pathlib import Path

import pytest
from local_server import LocalServer

from tests.support.environment import items, process, process_command
from tests.support.places import ROOT
from tests.support.vllm import RootedServer
from tests.support.waiting import until

pytestmark = pytest.mark.vllm


def test_a_server_that_dies_in_the_middle_loses_nothing(
    rooted: RootedServer, vllm_server: LocalServer, tmp_path: Path
) -> None:
    """The run goes on at another server."""
    out = tmp_path / "groups.jsonl"
    argv = process_command(rooted.base_url, out, "--env.total_steps", "64", "--env.max_concurrent_groups", "2")
    running = subprocess.Popen(argv, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2, 120, running)
    rooted.kill()
    _, shown = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "stopped early" in shown
    assert "--env.resume" in shown
    finished = items(out)
    assert 2 <= len(finished) < 64
    steps = str(len(finished) + 2)
    done = process(vllm_server.base_url, out, "--env.total_steps", steps, "--env.resume")
    assert done.returncode == 0, done.stderr
    assert items(out)[: len(finished)] == finished
    assert len(set(items(out))) == len(finished) + 2
