"""`serve` against the real trajectory API: it fills batches, evaluates, waits for servers that went away, and stops."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.serving.local import free_port, stop

from .trajectory import Trajectories, trajectory_api

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


@dataclass
class Serving:
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"{text!r} was not said:\n{self.said()}"
            time.sleep(0.1)


@contextmanager
def serving(api_url: str, vllm_url: str, folder: Path, *flags: str) -> Generator[Serving]:
    folder.mkdir(exist_ok=True)
    argv = [
        *(sys.executable, "-m", "agentic_opd.env", "serve", "--config", str(ROOT / "configs" / "demo.yaml")),
        *("--openai.base_url", f"{vllm_url}/v1", "--env.rollout_server_url", api_url),
        *("--env.data_path_to_save_groups", str(folder / "groups.jsonl"), "--env.server_retry_s", "2", *flags),
    ]
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield Serving(process, log)
    finally:
        stop(process)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Trajectories]:
    with trajectory_api(tmp_path / "api.log") as running:
        yield running


def check_batch(batch: list[dict[str, Any]], size: int) -> None:
    """A batch holds `size` sequences, each field in step with the tokens."""
    assert sum(len(group["tokens"]) for group in batch) == size
    for group in batch:
        for i, tokens in enumerate(group["tokens"]):
            for name in ("masks", "inference_logprobs", "distill_token_ids", "distill_logprobs"):
                assert len(group[name][i]) == len(tokens), name


def test_batches_are_filled_and_evaluation_runs_beside_it(vllm_server: Any, api: Trajectories, tmp_path: Path) -> None:
    evals = tmp_path / "evals"
    flags = (
        "--env.steps_per_eval",
        "2",
        "--env.data_dir_to_save_evals",
        str(evals),
        "--env.max_batches_offpolicy",
        "2",
    )
    with serving(api.url, vllm_server.base_url, tmp_path, *flags) as env:
        env.wait_for("waiting for a trainer")
        api.register_trainer(batch_size=8, num_steps=5)  # The API may count one more than it has handed out.
        batches = [api.batch() for _ in range(3)]
        deadline = time.monotonic() + 120
        while api.queue_size() < 4 and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(3)  # Nothing more may come: two batches of two groups wait.
        assert api.queue_size() == 4
        batches += [api.batch() for _ in range(2)]
        assert env.process.wait(120) == 0, env.said()
    for batch in batches:
        check_batch(batch, 8)
    scored = [row for batch in batches for group in batch for rows in group["distill_token_ids"] for row in rows if row]
    assert len(scored) > 0
    sent = [group["group_overrides"]["item_id"] for batch in batches for group in batch]
    written = [
        json.loads(line)["group_overrides"]["item_id"] for line in (tmp_path / "groups.jsonl").read_text().splitlines()
    ]
    assert len(set(sent)) == len(sent) == 10
    assert set(sent) <= set(written)
    metrics = json.loads((evals / "metrics.json").read_text())["results"]["all"]
    samples = [json.loads(line) for line in (evals / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == metrics["eval/samples"] == 8
    assert "opd/hint_rate" in env.said()
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == sorted(line["step"] for line in logged)
    assert sum(line.get("train/episodes", 0) for line in logged) == 4 * len(written)
    assert sum(line.get("opd/outcome/scored", 0) for line in logged) > 0
    assert logged[-1]["eval/pass@1"] == metrics["eval/pass@1"], "the last evaluation is logged too"
    assert "Evaluation results saved" not in env.said()


def test_a_restarted_api_is_joined_again(vllm_server: Any, tmp_path: Path) -> None:
    port = free_port()
    with serving(f"http://127.0.0.1:{port}", vllm_server.base_url, tmp_path) as env:
        env.wait_for("waiting for the trajectory API")
        with trajectory_api(tmp_path / "first.log", port) as api:
            api.register_trainer(batch_size=4, num_steps=100)
            check_batch(api.batch(), 4)
        time.sleep(2)
        with trajectory_api(tmp_path / "second.log", port) as api:
            api.register_trainer(batch_size=4, num_steps=100)
            check_batch(api.batch(), 4)
            env.wait_for("registered again")
            os.kill(env.process.pid, signal.SIGTERM)
            assert env.process.wait(60) == 130, env.said()
            assert "Traceback" not in env.said()


def test_a_restarted_vllm_is_waited_for(start_vllm: Any, api: Trajectories, tmp_path: Path) -> None:
    port = free_port()
    with start_vllm(port=port) as first, serving(api.url, first.base_url, tmp_path) as env:
        api.register_trainer(batch_size=4, num_steps=100)
        check_batch(api.batch(), 4)
        first.kill()
        env.wait_for("waiting for vLLM")
        while api.ask("/batch")["batch"] is not None:
            pass
        with start_vllm(port=port):
            check_batch(api.batch(), 4)
            os.kill(env.process.pid, signal.SIGTERM)
            assert env.process.wait(60) == 130, env.said()


def test_a_group_that_no_batch_can_hold_is_refused(vllm_server: Any, api: Trajectories, tmp_path: Path) -> None:
    api.register_trainer(batch_size=2, num_steps=1)
    with serving(api.url, vllm_server.base_url, tmp_path) as env:
        assert env.process.wait(240) == 2, env.said()
        assert "does not fit the trainer's batches of 2" in env.said()
