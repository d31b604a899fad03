"""`python -m agentic_opd.env process` as a person runs it, on a real server: it works, stops, goes on, complains."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from atroposlib.api.server import ScoredData

from .conftest import hear_sigint
from .scripted_judge import POSITIVE, judge_server

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
HUMANEVAL = ROOT.parent / "shared" / "data" / "HumanEval.jsonl.gz"


def command(server_url: str, out: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "agentic_opd.env", "process", "--config", str(ROOT / "configs" / "demo.yaml")),
        *("--openai.base_url", f"{server_url}/v1", "--env.data_path_to_save_groups", str(out)),
        *("--env.overwrite", "false", "--env.server_retry_s", "2", *flags),
    ]


def process(server_url: str, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(server_url, out, *flags), cwd=ROOT, capture_output=True, text=True, timeout=300)


def groups(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def items(out: Path) -> list[str]:
    return [group["group_overrides"]["item_id"] for group in groups(out)]


def validate(out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentic_opd.validate", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def demo_run(vllm_server: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo") / "groups.jsonl"
    done = process(vllm_server.base_url, out)
    assert done.returncode == 0, done.stderr
    return out, done.stderr


def test_the_demo_makes_valid_groups_with_hints(demo_run: tuple[Path, str]) -> None:
    out, shown = demo_run
    assert len(items(out)) == len(set(items(out))) == 8
    assert "8 of 8 groups" in shown
    checked = validate(out)
    assert checked.returncode == 0, checked.stdout
    outcomes = [turn["outcome"] for g in groups(out) for o in g["overrides"] for turn in o["opd"]["turns"]]
    assert outcomes.count("scored") >= 8
    assert outcomes.count("vote_failed") >= 8
    passed = [o["verification"]["passed"] == o["verification"]["total"] for g in groups(out) for o in g["overrides"]]
    assert 0 < sum(passed) < len(passed)


def test_groups_are_what_the_api_takes(demo_run: tuple[Path, str]) -> None:
    for group in groups(demo_run[0]):
        taken = ScoredData.model_validate(group).model_dump()
        assert {name: taken[name] for name in group} == group


def test_the_arrays_take_a_tenth_of_the_padded_ones(demo_run: tuple[Path, str]) -> None:
    """The distillation arrays as JSON, against the same with 50 zeros at each unscored position.

    An unscored position costs 2% of a padded one. The rest depends on the share of scored tokens, which chance moves
    around 4% from run to run; so it is the mean sizes of a run that are put together at 4%.
    """
    scored, unscored, padded = [], [], []
    for group in groups(demo_run[0]):
        for name, zero in (("distill_token_ids", 0), ("distill_logprobs", 0.0)):
            rows = [row for sequence in group[name] for row in sequence]
            scored += [len(json.dumps(row)) for row in rows if row]
            unscored += [len(json.dumps(row)) for row in rows if not row]
            padded.append(len(json.dumps([zero] * 50)))
    assert fmean(unscored) <= 0.02 * fmean(padded)
    ours, others = (0.04 * fmean(scored) + 0.96 * (fmean(blank) + len(", ")) for blank in (unscored, padded))
    assert ours <= others / 10


def test_without_opd_nothing_of_it_is_written(vllm_server: Any, tmp_path: Path) -> None:
    asked: list[Any] = []

    def refuse(body: dict[str, Any]) -> int:
        asked.append(body)
        return 500

    out = tmp_path / "groups.jsonl"
    with judge_server(refuse) as judge:
        flags = ("--env.opd_enabled", "false", "--env.judge_base_url", judge, "--env.total_steps", "2")
        done = process(vllm_server.base_url, out, *flags)
    assert done.returncode == 0, done.stderr
    assert asked == []
    for group in groups(out):
        assert not [name for name in group if name.startswith("distill")]
        assert "opd" not in json.dumps([group["overrides"], group["group_overrides"]])
    assert validate(out).returncode == 0


def test_top_1_is_rectangular(vllm_server: Any, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    with judge_server(lambda body: [POSITIVE] * body["n"]) as judge:
        flags = ("--env.distill_topk", "1", "--env.total_steps", "2", "--env.judge_base_url", judge)
        done = process(vllm_server.base_url, out, *flags)
    assert done.returncode == 0, done.stderr
    for group in groups(out):
        for tokens, ids in zip(group["tokens"], group["distill_token_ids"], strict=True):
            assert ids == [[token] for token in tokens]
    assert validate(out).returncode == 0


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(lambda body: ["I like turtles."] * body["n"], "judge_error"), (lambda body: 500, "judge_error")],
    ids=["nonsense", "500s"],
)
def test_a_broken_judge_is_counted_and_the_run_completes(
    vllm_server: Any, tmp_path: Path, answer: Any, outcome: str
) -> None:
    out = tmp_path / "groups.jsonl"
    with judge_server(answer) as judge:
        done = process(vllm_server.base_url, out, "--env.judge_base_url", judge, "--env.total_steps", "2")
    assert done.returncode == 0, done.stderr
    outcomes = {turn["outcome"] for g in groups(out) for o in g["overrides"] for turn in o["opd"]["turns"]}
    assert outcomes == {outcome}
    assert f"turn outcomes: {outcome}" in done.stderr


def start(server_url: str, out: Path, *flags: str) -> subprocess.Popen[str]:
    """Start a run that hears Ctrl-C, also where the tests themselves run in the background and ignore it."""
    return subprocess.Popen(
        command(server_url, out, *flags),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_sigint,
    )


def wait_for_lines(out: Path, count: int, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not (out.exists() and out.read_bytes().count(b"\n") >= count):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_goes_on_where_it_was(vllm_server: Any, tmp_path: Path, stop: signal.Signals, code: int) -> None:
    out = tmp_path / "groups.jsonl"
    flags = ("--env.total_steps", "16", "--env.max_concurrent_groups", "2")
    running = start(vllm_server.base_url, out, *flags)
    wait_for_lines(out, 2, running)
    running.send_signal(stop)
    _, shown = running.communicate(timeout=60)
    assert running.returncode == code
    if stop is not signal.SIGKILL:
        assert "--env.resume" in shown
    before = out.read_bytes()
    assert 2 <= before.count(b"\n") < 16

    again = process(vllm_server.base_url, out, *flags)
    assert again.returncode == 1
    assert "--env.resume" in again.stderr
    done = process(vllm_server.base_url, out, *flags, "--env.resume")
    assert done.returncode == 0, done.stderr
    assert len(items(out)) == len(set(items(out))) == 16
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert validate(out).returncode == 0


@pytest.fixture
def mortal_server(start_vllm: Any) -> Iterator[Any]:
    with start_vllm() as server:
        yield server


def test_a_server_that_dies_in_the_middle_loses_nothing(mortal_server: Any, start_vllm: Any, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    flags = ("--env.total_steps", "64", "--env.max_concurrent_groups", "2")
    running = start(mortal_server.base_url, out, *flags)
    wait_for_lines(out, 2, running)
    mortal_server.kill()
    _, shown = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "stopped early" in shown
    assert "--env.resume" in shown
    finished = items(out)
    assert 2 <= len(finished) < 64
    with start_vllm() as other:
        done = process(other.base_url, out, "--env.total_steps", str(len(finished) + 2), "--env.resume")
    assert done.returncode == 0, done.stderr
    assert items(out)[: len(finished)] == finished
    assert len(set(items(out))) == len(finished) + 2


def test_a_server_without_the_plugin_is_used_and_said_to_be_slow(start_vllm: Any, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    with start_vllm(plugin=False) as server:
        done = process(server.base_url, out, "--env.total_steps", "2")
        refused = process(server.base_url, tmp_path / "x.jsonl", "--env.distill_topk", "999")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("slower") == 1
    assert validate(out).returncode == 0
    assert refused.returncode == 1
    assert "--max-logprobs" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--openai.base_url", "http://127.0.0.1:9/v1"), 1, "gave no usable answer for 2 s"),
        (("--env.distill_topk", "900"), 1, "--max-logprobs 900"),
        (("--env.max_token_length", "100000"), 1, "--max-model-len 100000"),
        (("--env.tokenizer_name", "/nowhere"), 2, "env.tokenizer_name"),
        (("--env.renderer", "qwen33"), 2, "qwen33"),
        (("--env.dataset_name", "nowhere.jsonl"), 1, "nowhere.jsonl"),
        (("--env.prm_votes", "0", "--env.group_size", "x"), 2, "env.prm_votes"),
        (("--env.data_path_to_save_groups", "/dev/null/groups.jsonl"), 1, "data_path_to_save_groups"),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_error(
    vllm_server: Any, tmp_path: Path, flags: tuple[str, ...], code: int, message: str
) -> None:
    done = process(vllm_server.base_url, tmp_path / "groups.jsonl", *flags)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_datasets_say_what_is_there(vllm_server: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"question": "Write f.", "test_code": "assert True"}) + "\n")
    for file, message in ((empty, "empty"), (odd, "question")):
        done = process(vllm_server.base_url, tmp_path / "groups.jsonl", "--env.dataset_name", str(file))
        assert done.returncode == 1, done.stderr
        assert message in done.stderr
    assert not (tmp_path / "groups.jsonl").exists()


@pytest.mark.skipif(not HUMANEVAL.exists(), reason="HumanEval.jsonl.gz is not beside the checkout (../shared/data)")
def test_humaneval_runs_to_its_end(vllm_server: Any, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "agentic_opd.env", "process", "--config", "configs/humaneval.yaml"),
            *("--openai.base_url", f"{vllm_server.base_url}/v1", "--env.dataset_name", str(HUMANEVAL)),
            *("--env.data_path_to_save_groups", str(out)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(items(out)) == sorted(f"HumanEval/{i}#0" for i in range(20))
    assert validate(out).returncode == 0
    assert "20 of 20 groups" in done.stderr
