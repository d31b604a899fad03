"""`serve` against the real trajectory API: it fills batches, evaluates, waits for an API that went away, and stops."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import free_port

from tests.support.environment import items, read_lines, serving
from tests.support.fake_plugin import FakePlugin
from tests.support.trajectory import Trajectories, trajectory_api
from tests.support.waiting import until


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


def test_batches_are_filled_and_evaluation_runs_beside_it(
    fake_server: FakePlugin, api: Trajectories, tmp_path: Path
) -> None:
    evals = tmp_path / "evals"
    flags = (
        "--env.steps_per_eval",
        "2",
        "--env.data_dir_to_save_evals",
        str(evals),
        "--env.max_batches_offpolicy",
        "2",
    )
    with serving(api.url, fake_server.base_url, tmp_path, *flags) as env:
        env.wait_for("waiting for a trainer")
        api.register_trainer(batch_size=8, num_steps=5)  # The API may count one more than it has handed out.
        batches = [api.batch() for _ in range(3)]
        until(lambda: api.queue_size() >= 4, 120)
        time.sleep(1)  # Nothing more may come: two batches of two groups wait.
        assert api.queue_size() == 4
        batches += [api.batch() for _ in range(2)]
        assert env.process.wait(120) == 0, env.said()
    for batch in batches:
        check_batch(batch, 8)
    scored = [row for batch in batches for group in batch for rows in group["distill_token_ids"] for row in rows if row]
    assert len(scored) > 0
    sent = [group["group_overrides"]["item_id"] for batch in batches for group in batch]
    written = items(tmp_path / "groups.jsonl")
    assert len(set(sent)) == len(sent) == 10
    assert set(sent) <= set(written)
    metrics = json.loads((evals / "metrics.json").read_text())["results"]["all"]
    samples = read_lines(evals / "samples.jsonl")
    assert len(samples) == metrics["eval/samples"] == 8
    assert "opd/hint_rate" in env.said()
    logged = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in logged] == sorted(line["step"] for line in logged)
    assert sum(line.get("train/episodes", 0) for line in logged) == 4 * len(written)
    assert sum(line.get("opd/outcome/scored", 0) for line in logged) > 0
    assert logged[-1]["eval/pass@1"] == metrics["eval/pass@1"], "the last evaluation is logged too"
    assert "Evaluation results saved" not in env.said()


def test_a_restarted_api_is_joined_again(fake_server: FakePlugin, tmp_path: Path) -> None:
    port = free_port()
    with serving(f"http://127.0.0.1:{port}", fake_server.base_url, tmp_path) as env:
        env.wait_for("waiting for the trajectory API")
        with trajectory_api(tmp_path / "first.log", port) as api:
            api.register_trainer(batch_size=4, num_steps=100)
            check_batch(api.batch(), 4)
        # Each time it has said so, and that it was no longer so: now it waits.
        until(lambda: env.said().count("waiting for the trajectory API") % 2 == 1, said=env.said)
        with trajectory_api(tmp_path / "second.log", port) as api:
            api.register_trainer(batch_size=4, num_steps=100)
            check_batch(api.batch(), 4)
            env.wait_for("registered again")
            os.kill(env.process.pid, signal.SIGTERM)
            assert env.process.wait(60) == 130, env.said()
            assert "Traceback" not in env.said()


def test_a_group_that_no_batch_can_hold_is_refused(fake_server: FakePlugin, api: Trajectories, tmp_path: Path) -> None:
    api.register_trainer(batch_size=2, num_steps=1)
    with serving(api.url, fake_server.base_url, tmp_path) as env:
        assert env.process.wait(240) == 2, env.said()
        assert "does not fit the trainer's batches of 2" in env.said()
