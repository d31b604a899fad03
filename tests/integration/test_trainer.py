"""The loop closed on one machine: vLLM, the trajectory API, `serve` and the trainer, all of them real."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.serving.local import stop
from agentic_opd.training.metrics import TRAINER_METRICS

from .scripted_judge import POSITIVE, judge_server
from .test_serve import serving
from .trajectory import Trajectories, trajectory_api

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


def trainer(folder: Path, api: Trajectories, vllm_url: str, *changes: str) -> list[str]:
    return [
        *(sys.executable, "-m", "agentic_opd.training.trainer", "--config", str(ROOT / "configs" / "train_demo.yaml")),
        *("--output_dir", str(folder / "train"), "--weights_dir", str(folder / "weights"), "--api_url", api.url),
        *(f"--vllm_urls=[{vllm_url}]", "--total_steps=3", "--batch_size=8", "--save_every=1", *changes),
    ]


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]


def weight_version(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/opd/info", timeout=10) as answer:
        return json.loads(answer.read())["weight_version"]


def test_the_loop_runs_and_every_push_is_proved(start_vllm: Any, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    with (
        start_vllm("--weights-root", str(weights)) as vllm,
        judge_server(lambda body: [POSITIVE] * body["n"]) as judge,
        trajectory_api(tmp_path / "api.log") as api,
        serving(
            *(api.url, vllm.base_url, tmp_path, "--env.max_batches_offpolicy", "1", "--env.total_steps", "20"),
            *("--env.judge_base_url", judge, "--env.judge_model_name", "j"),
        ),
    ):
        done = subprocess.run(
            trainer(tmp_path, api, vllm.base_url), cwd=ROOT, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr
        assert weight_version(vllm.base_url) == 3
        rows = metrics(tmp_path)
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert all(row["push_difference"] < 1e-3 for row in rows)
        assert rows[0]["logprob_drift"] < 1e-3  # Fresh weights: engine and trainer see the same numbers.
        assert rows[0]["staleness"] == 0
        assert all(0 <= row["staleness"] <= 3 for row in rows)
        assert all(row["scored_tokens"] > 0 for row in rows)
        weightless = {f"loss/{part}" for part in ("forward_kl", "reverse_kl", "jensen_shannon", "grpo")}
        assert {name for row in rows for name in row} == {m.name for m in TRAINER_METRICS} - weightless | {"step"}
        assert (tmp_path / "train" / "final" / "model.safetensors").exists()
        assert len(list(weights.glob("step-*"))) == 2
        more = trainer(tmp_path, api, vllm.base_url, "--total_steps=4", "--resume", "--probe_tolerance=1e-12")
        stopped = subprocess.run(more, cwd=ROOT, capture_output=True, text=True, timeout=150)
        assert stopped.returncode == 1, stopped.stderr
        assert "does not compute what the trainer does" in stopped.stderr


def test_a_trainer_that_is_stopped_resumes_where_it_was(vllm_server: Any, tmp_path: Path) -> None:
    with (
        trajectory_api(tmp_path / "api.log") as api,
        serving(api.url, vllm_server.base_url, tmp_path, "--env.total_steps", "999"),
    ):
        settings = ("--vllm_urls=[]", "--warmup_steps=0", "--save_every=50")
        argv = trainer(tmp_path, api, vllm_server.base_url, *settings, "--total_steps=50")
        process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "train" / "metrics.jsonl").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(60) == 130
        finally:
            assert process.stderr is not None
            process.stderr.close()
            stop(process)
        before = int(metrics(tmp_path)[-1]["step"])
        assert [path.name for path in (tmp_path / "train" / "checkpoints").iterdir()] == [f"step-{before:06d}"]
        more = ("--resume", f"--total_steps={before + 1}")
        argv = trainer(tmp_path, api, vllm_server.base_url, *settings, *more)
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        assert [row["step"] for row in metrics(tmp_path)] == list(range(1, before + 2))
