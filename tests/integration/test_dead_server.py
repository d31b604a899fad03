"""A policy's server that dies while a run of `process` uses it; test_counts kills a real one."""

from pathlib import Path

from tests.support import commands
from tests.support.environment import items, process, process_command
from tests.support.fake_plugin import FakePlugin, fake_plugin
from tests.support.waiting import until


def test_a_server_that_dies_in_the_middle_loses_nothing(fake_server: FakePlugin, tmp_path: Path) -> None:
    """The run goes on at another server."""
    out = tmp_path / "groups.jsonl"
    with fake_plugin() as dying:
        argv = process_command(dying.base_url, out, "--env.total_steps", "64", "--env.max_concurrent_groups", "2")
        running = commands.start(*argv, stderr=commands.PIPE)
        until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2, 600, running)
        dying.kill()
        _, shown = running.communicate(timeout=600)
    assert running.returncode == 1
    assert "stopped early" in shown
    assert "--env.resume" in shown
    finished = items(out)
    assert 2 <= len(finished) < 64
    steps = str(len(finished) + 2)
    done = process(fake_server.base_url, out, "--env.total_steps", steps, "--env.resume")
    assert done.returncode == 0, done
    assert items(out)[: len(finished)] == finished
    assert len(set(items(out))) == len(finished) + 2
