"""The loop closed on one machine: vLLM, the trajectory API, `serve` and the trainer, all of them real."""

import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest
from bench.local_server import stop

from agentic_opd.cli.validate import main as validate
from agentic_opd.training.config import PARTS
from agentic_opd.training.metrics import TRAINER_METRICS
from agentic_opd.wire.receipts import find_receipt, read_chain
from tests.support import commands
from tests.support.environment import serving
from tests.support.fake_plugin import FakePlugin
from tests.support.scripted_judge import POSITIVE, judge_server
from tests.support.training import metrics, run_together, trainer
from tests.support.trajectory import trajectory_api
from tests.support.vllm import RootedServer
from tests.support.waiting import until

pytestmark = pytest.mark.vllm


def weight_version(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/opd/info", timeout=60) as answer:
        return json.loads(answer.read())["weight_version"]


def test_the_loop_runs_and_every_push_is_proved(rooted: RootedServer, tmp_path: Path) -> None:
    """With two processes and in turns; test_up closes it with one, a batch ahead."""
    rooted.renew()
    weights, vllm = rooted.root / "loop", rooted.server
    weights.mkdir()
    with (
        judge_server(lambda body: [POSITIVE] * body["n"]) as judge,
        trajectory_api(tmp_path / "api.log") as api,
        serving(
            *(api.url, vllm.base_url, tmp_path, "--env.max_batches_offpolicy", "0", "--env.total_steps", "20"),
            *("--env.group_size", "2"),
            *("--env.judge.base_url", judge, "--env.judge.model_name", "judge"),
        ),
    ):
        small = (f"--weights_dir={weights}", "--batch_size=4")
        argv = trainer(tmp_path, api.url, vllm.base_url, *small)
        run_together(*argv, processes=2, log=tmp_path / "trainer.log")
        assert weight_version(vllm.base_url) == 3
        rows = metrics(tmp_path)
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert all(row["push_difference"] < 1e-3 for row in rows)
        assert rows[0]["logprob_drift"] < 1e-3  # Fresh weights: engine and trainer see the same numbers.
        assert all(row["staleness"] == 0 for row in rows)
        assert all(row["scored_tokens"] > 0 for row in rows)
        weightless = {f"loss/{part}" for part in PARTS if part != "forward_kl"} | {"contrast_mean", "loss/start_kl"}
        weightless |= {f"weight/{part}" for part in (*PARTS, "start_kl")} | {"kl_to_start"}
        weightless |= {"brake_score", "brake_fall", "brake_s", "rolled_back", "too_long"}
        weightless |= {"greedy_tokens", "truncated_tokens", "unknown_temperature_tokens", "left_out"}
        assert {name for row in rows for name in row} == {m.name for m in TRAINER_METRICS} - weightless | {"step"}
        assert (tmp_path / "train" / "final" / "model.safetensors").exists()
        assert len(list(weights.glob("step-*"))) == 2
        more = ("--total_steps=4", "--resume", "--probe_tolerance=1e-12")
        again = trainer(tmp_path, api.url, vllm.base_url, *small, *more)
        stopped = commands.run(*again, kind="train")
        assert stopped.returncode == 1, stopped
        assert "does not compute what the trainer does" in stopped.stderr


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.all)])
def test_a_trainer_that_is_stopped_resumes_where_it_was(
    fake_server: FakePlugin, tmp_path: Path, processes: int
) -> None:
    with (
        trajectory_api(tmp_path / "api.log") as api,
        serving(api.url, fake_server.base_url, tmp_path, "--env.total_steps", "999"),
    ):
        settings = ("--vllm_urls=[]", "--warmup_steps=0", "--save_every=50")
        argv = trainer(tmp_path, api.url, fake_server.base_url, *settings, "--total_steps=50", processes=processes)
        process = commands.start(*argv, stderr=commands.PIPE, start_new_session=True, kind="train", real=processes > 1)
        log = tmp_path / "train" / "metrics.jsonl"
        try:
            until(lambda: log.exists() and log.stat().st_size > 0, 600, process)
            os.kill(process.pid, signal.SIGTERM)
            code = process.wait(300)  # torchrun's own is 1, or that of an abort as its threads end
            assert code == 130 if processes == 1 else code in (1, -signal.SIGABRT)
        finally:
            assert process.stderr is not None
            process.stderr.close()
            stop(process)
        before = int(metrics(tmp_path)[-1]["step"])
        assert [path.name for path in (tmp_path / "train" / "checkpoints").iterdir()] == [f"step-{before:06d}"]
        more = ("--resume", f"--total_steps={before + 1}")
        argv = trainer(tmp_path, api.url, fake_server.base_url, *settings, *more)
        done = commands.run(*argv, kind="train")
        assert done.returncode == 0, done
        assert [row["step"] for row in metrics(tmp_path)] == list(range(1, before + 2))
        assert validate(["--receipt", str(tmp_path / "train")]) == 0
        receipts, _ = read_chain(find_receipt(tmp_path / "train"))
        assert [receipt.version for receipt in receipts] == [before + 1, before, 0]
        assert [step.step for receipt in receipts[::-1] for step in receipt.steps] == list(range(1, before + 2))
