import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import OutputError, SandboxError, ServerRequestError, ServerUnreachableError
from agentic_opd.core.types import Task
from agentic_opd.env.config import default_settings
from agentic_opd.runs.environment import FinishedGroup
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.runs.process import RunProgress, RunSummary, process, run_items
from agentic_opd.wire.counts import RunCounts
from agentic_opd.wire.group import TaskItem
from tests.support.groups import group


class Recorder(RunProgress):
    """Progress that remembers."""

    def __init__(self) -> None:
        super().__init__(6, 0, RunCounts(), Console(file=io.StringIO()))
        self.done: list[str] = []
        self.failed: list[str] = []

    def group_done(self, item_id: str, scores: Sequence[float]) -> None:
        self.done.append(item_id[0])

    def group_failed(self, item_id: str, error: Exception) -> None:
        self.failed.append(item_id[0])


def finished(item: TaskItem) -> FinishedGroup:
    return FinishedGroup(group(item_id=item.item_id), (), None)


def letter(finished: FinishedGroup) -> str:
    return finished.group.item_id[0] if finished.group.item_id else ""


ITEMS = [TaskItem(Task(name, "p", "assert f()"), 0) for name in "abcdef"]


def run(collect: Any, *, write: Any = None, earlier: set[str] | None = None, concurrency: int = 2) -> Any:
    written: list[str] = []
    progress = Recorder()

    async def keep(group: FinishedGroup) -> None:
        written.append(letter(group))

    summary = asyncio.run(run_items(ITEMS, collect, write or keep, earlier or set(), concurrency, progress))
    return summary, written, progress


async def succeed(item: TaskItem) -> FinishedGroup:
    await asyncio.sleep(0)
    return finished(item)


def test_everything_is_written_once() -> None:
    summary, written, progress = run(succeed)
    assert sorted(written) == list("abcdef")
    assert sorted(progress.done) == list("abcdef")
    assert summary == RunSummary(total=6, written=6)
    assert summary.complete


def test_finished_items_are_not_repeated() -> None:
    summary, written, _ = run(succeed, earlier={"a#0", "c#0"})
    assert sorted(written) == list("bdef")
    assert (summary.skipped, summary.written, summary.complete) == (2, 4, True)


def test_concurrency_is_bounded_and_used() -> None:
    active, most, three = 0, 0, asyncio.Barrier(3)

    async def collect(item: TaskItem) -> FinishedGroup:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await three.wait()
        await asyncio.sleep(0.01)  # Were more allowed, they would begin now.
        active -= 1
        return finished(item)

    run(collect, concurrency=3)
    assert most == 3


def test_a_group_that_fails_by_itself_does_not_stop_the_run() -> None:
    async def collect(item: TaskItem) -> FinishedGroup:
        if item.item_id == "b#0":
            raise ServerRequestError("too long", 400)
        return finished(item)

    summary, written, progress = run(collect)
    assert sorted(written) == list("acdef")
    assert progress.failed == ["b"]
    assert summary.failed == {"b#0": "too long"}
    assert not summary.complete


def test_a_dead_server_stops_the_run_and_keeps_what_is_done() -> None:
    async def collect(item: TaskItem) -> FinishedGroup:
        if item.item_id == "c#0":
            raise ServerUnreachableError("gone")
        return finished(item)

    summary, written, _ = run(collect, concurrency=1)
    assert written == ["a", "b"]
    assert str(summary.stopped) == "gone"
    assert not summary.complete


def test_a_full_disk_stops_the_run() -> None:
    async def write(group: FinishedGroup) -> None:
        raise OutputError("no space left")

    summary, _, _ = run(succeed, write=write)
    assert isinstance(summary.stopped, OutputError)
    assert summary.written == 0


def test_cancellation_ends_in_a_summary() -> None:
    async def main() -> tuple[RunSummary, list[str]]:
        written, is_waiting = list[str](), asyncio.Event()

        async def collect(item: TaskItem) -> FinishedGroup:
            if item.item_id == "b#0":
                is_waiting.set()
                await asyncio.sleep(60)
            return finished(item)

        async def write(group: FinishedGroup) -> None:
            written.append(letter(group))

        running = asyncio.create_task(run_items(ITEMS, collect, write, set(), 1, Recorder()))
        await is_waiting.wait()
        running.cancel()
        return await running, written

    summary, written = asyncio.run(main())
    assert written == ["a"]
    assert isinstance(summary.stopped, asyncio.CancelledError)


def test_a_group_that_is_being_written_as_the_run_ends_counts() -> None:
    async def main() -> tuple[RunSummary, Recorder]:
        begun, progress = asyncio.Event(), Recorder()

        async def write(group: FinishedGroup) -> None:
            begun.set()
            await asyncio.sleep(0.05)

        running = asyncio.create_task(run_items(ITEMS, succeed, write, set(), 1, progress))
        await begun.wait()
        running.cancel()
        return await running, progress

    summary, progress = asyncio.run(main())
    assert (summary.written, progress.done) == (1, ["a"])
    assert isinstance(summary.stopped, asyncio.CancelledError)


def test_gather_all_raises_the_error_itself_and_cancels_the_rest() -> None:
    cancelled: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append("yes")
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ServerUnreachableError("gone")

    async def main() -> None:
        await gather_all([wait(), fail(), wait()])

    with pytest.raises(ServerUnreachableError, match="gone"):
        asyncio.run(main())
    assert cancelled == ["yes", "yes"]


def test_a_sandbox_that_does_not_work_stops_the_run() -> None:
    async def collect(item: TaskItem) -> FinishedGroup:
        if item.task.task_id == "b":
            raise SandboxError("no namespaces here")
        return await succeed(item)

    summary, written, _ = run(collect, concurrency=1)
    assert written == ["a"]
    assert isinstance(summary.stopped, SandboxError)
    assert summary.failed == {}


def test_a_run_without_groups_ends_with_its_own_errors_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to report on, which is no error of its own."""
    monkeypatch.chdir(tmp_path)
    config = default_settings()[0].model_copy(update={"data_path_to_save_groups": str(tmp_path / "groups.jsonl")})

    async def fail(item: TaskItem) -> FinishedGroup:
        raise ServerRequestError("no such parameter", 400)

    env: Any = SimpleNamespace(
        config=config,
        name="test",
        items=lambda: iter(ITEMS),
        collect=fail,
        roles=dict,
        line_settings=dict,
        default_line_settings=dict,
        tokenizer=None,
    )
    metrics = RunMetrics(config, str, list)
    try:
        summary = asyncio.run(process(env, metrics, len(ITEMS)))
    finally:
        metrics.close()
    assert (summary.written, len(summary.failed)) == (0, len(ITEMS))
    said = capsys.readouterr().err
    assert "no such parameter" in said
    assert "report" not in said
