"""One run in which the trainer, run-api and vLLM are each killed outright: it ends, and every group is counted."""

import os
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import free_port, stop

from tests.support import commands
from tests.support.environment import serving
from tests.support.recording_proxy import Exchange, RecordingProxy, recording_proxy
from tests.support.training import metrics, trainer
from tests.support.trajectory import handed_out, sent, trajectory_api
from tests.support.vllm import RootedServer
from tests.support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.all]

STEPS, GROUPS = 6, 2
"""Steps of the whole run, and groups of 4 rollouts a batch."""


@contextmanager
def training(folder: Path, proxy: RecordingProxy, vllm_url: str, *changes: str) -> Generator[Any]:
    argv = trainer(folder, proxy.url, vllm_url, f"--total_steps={STEPS}", *changes)
    with (folder / "trainer.log").open("ab") as output:
        process = commands.start(*argv, stdout=output, stderr=output, start_new_session=True, kind="train")
    try:
        yield process
    finally:
        stop(process)


def is_killed_in_a_step(process: Any, folder: Path, proxy: RecordingProxy) -> bool:
    """Kill the trainer if it holds a batch; it is paused during the check."""
    os.killpg(process.pid, signal.SIGSTOP)
    state = Path(f"/proc/{process.pid}/stat")  # A line that it is writing comes to its end before.
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", process=process)
    with proxy.between_exchanges() as seen:
        is_in_step = len(handed_out(seen)) > trained(folder)
    os.killpg(process.pid, signal.SIGKILL if is_in_step else signal.SIGCONT)
    if is_in_step:
        process.wait()
    return is_in_step


def trained(folder: Path) -> int:
    """Groups in all steps that were taken, those that a kill made undone included."""
    return sum(int(row["groups"]) for row in metrics(folder)) if (folder / "train" / "metrics.jsonl").exists() else 0


def accepted(exchanges: Sequence[Exchange]) -> set[str]:
    ids = sent(exchanges)
    assert len(set(ids)) == len(ids)
    return set(ids)


def test_counts_agree_when_everything_was_killed_once(rooted: RootedServer, tmp_path: Path) -> None:
    weights, log, vllm_url = rooted.root / "counts", tmp_path / "trainer.log", rooted.base_url
    weights.mkdir()
    api_port = free_port()

    def training_until(holds: Callable[[], bool], process: Any) -> None:
        until(holds, 600, process, log.read_text)

    with ExitStack() as stack:
        proxy = stack.enter_context(recording_proxy(f"http://127.0.0.1:{api_port}"))
        env = stack.enter_context(serving(proxy.url, vllm_url, tmp_path, "--env.max_batches_offpolicy", "1"))
        with trajectory_api(tmp_path / "first.log", api_port) as api:
            with training(tmp_path, proxy, vllm_url, f"--weights_dir={weights}") as first:
                training_until(lambda: trained(tmp_path) >= 2 * GROUPS, first)
                training_until(lambda: is_killed_in_a_step(first, tmp_path, proxy), first)
            in_hand = len(handed_out(proxy.exchanges)) - trained(tmp_path)
            second = stack.enter_context(training(tmp_path, proxy, vllm_url, f"--weights_dir={weights}", "--resume"))
            training_until(lambda: trained(tmp_path) >= 3 * GROUPS, second)
            with proxy.between_exchanges() as before:
                api.kill()
                proxy.disconnect()
            assert api.received() == len(accepted(before))
        with trajectory_api(tmp_path / "second.log", api_port) as api:
            training_until(lambda: trained(tmp_path) >= 4 * GROUPS, second)
            rooted.lose_engine()
            env.wait_for("waiting for vLLM", 600)
            rooted.start()
            assert second.wait(600) == 0, log.read_text()
            assert env.process.wait(600) == 0, env.said()
            left = api.left_over()
            after = proxy.exchanges[len(before) :]
            assert api.received() == len(accepted(after))
    assert [row["step"] for row in metrics(tmp_path)][-1] == STEPS
    assert metrics(tmp_path)[-1]["duplicates"] == 0
    handed = handed_out(before) + handed_out(after)
    assert len(set(handed)) == len(handed)
    lost = accepted(before) - set(handed)
    assert in_hand == GROUPS
    assert trained(tmp_path) == len(handed) - in_hand
    assert len(accepted(after)) == len(handed_out(after)) + left
    everything = len(accepted(before) | accepted(after))
    assert everything == trained(tmp_path) + in_hand + len(lost) + left
    assert f"{everything} groups sent" in env.said()
    assert "0 failed, 0 unsent" in env.said()
