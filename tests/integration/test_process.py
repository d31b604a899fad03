"""`python -m agentic_opd.env process` as a person runs it, on a real server: it works, stops, goes on, complains."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.env import command
from agentic_opd.env.opd import AgenticOPDEnv
from tests.support import commands
from tests.support.environment import items, process, process_command, read_lines, validate
from tests.support.fake_plugin import FakePlugin
from tests.support.places import HUMANEVAL, NO_HUMANEVAL
from tests.support.scripted_judge import POSITIVE, judge_server
from tests.support.waiting import until


def test_without_opd_nothing_of_it_is_written(fake_server: FakePlugin, tmp_path: Path) -> None:
    asked: list[Any] = []

    def refuse(body: dict[str, Any]) -> int:
        asked.append(body)
        return 500

    out = tmp_path / "groups.jsonl"
    with judge_server(refuse) as judge:
        flags = ("--env.opd_enabled", "false", "--env.judge.base_url", judge, "--env.total_steps", "2")
        done = process(fake_server.base_url, out, *flags)
    assert done.returncode == 0, done
    assert asked == []
    for group in read_lines(out):
        assert not [name for name in group if name.startswith("distill")]
        assert "opd" not in json.dumps([group["overrides"], group["group_overrides"]])
    assert validate(out).returncode == 0
    assert "INACTIVE" not in done.stderr
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert not [name for name in line if name.startswith("opd/")]


@pytest.mark.parametrize(
    ("source", "begins"),
    [
        ("feedback", ("If you answer as",)),
        ("reference", ("This is a right solution",)),
        ("sibling,reference", ("Another attempt at this task", "This is a right solution")),
    ],
)
def test_hints_without_a_judge(fake_server: FakePlugin, tmp_path: Path, source: str, begins: tuple[str, ...]) -> None:
    asked: list[Any] = []
    out = tmp_path / "groups.jsonl"
    with judge_server(lambda body: asked.append(body) or 500) as judge:
        flags = ("--env.hint.source", source, "--env.judge.base_url", judge, "--env.total_steps", "2")
        done = process(fake_server.base_url, out, *flags)
    assert done.returncode == 0, done
    assert asked == []
    records = [turn for group in read_lines(out) for one in group["overrides"] for turn in one["opd"]["turns"]]
    scored = [turn for turn in records if turn["outcome"] == "scored"]
    assert scored
    assert all(turn["hint"].startswith(begins) and turn["votes"] == [] for turn in scored)
    assert {turn["hint_source"] for turn in scored} <= set(source.split(","))
    assert {turn["outcome"] for turn in records} <= {"scored", "no_next_state", "too_long", "leaked"}
    assert "INACTIVE" not in done.stderr
    assert validate(out).returncode == 0


def test_top_1_is_rectangular(fake_server: FakePlugin, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    with judge_server(lambda body: [POSITIVE] * body["n"]) as judge:
        flags = ("--env.distill_topk", "1", "--env.total_steps", "2", "--env.judge.base_url", judge)
        done = process(fake_server.base_url, out, *flags)
    assert done.returncode == 0, done
    for group in read_lines(out):
        for tokens, ids in zip(group["tokens"], group["distill_token_ids"], strict=True):
            assert ids == [[token] for token in tokens]
    assert validate(out).returncode == 0


def test_a_judge_that_never_answers_costs_hints_and_no_group(fake_server: FakePlugin, tmp_path: Path) -> None:
    """It runs, for it lists its models; each turn is a counted outcome whose error names the settings."""
    out = tmp_path / "groups.jsonl"
    with judge_server(lambda body: None) as judge:
        flags = ("--env.judge.base_url", judge, "--env.judge.timeout_s", "1", "--env.total_steps", "2")
        done = process(fake_server.base_url, out, *flags)
    turns = [turn for group in read_lines(out) for one in group["overrides"] for turn in one["opd"]["turns"]]
    outcomes = {turn["outcome"] for turn in turns}
    assert len(read_lines(out)) == 2
    assert outcomes - {"no_next_state"} == {"judge_error"}
    errors = {turn["error"] for turn in turns if turn["outcome"] == "judge_error"}
    assert all("raise env.judge.timeout_s, lower env.judge.max_tokens" in error for error in errors)
    assert "turn outcomes: judge_error" in done.stderr


@pytest.mark.parametrize(
    ("answer", "said"),
    [(lambda body: ["I like turtles."] * body["n"], "no vote could be read"), (lambda body: 500, "")],
    ids=["nonsense", "500s"],
)
def test_a_broken_judge_is_counted_and_the_run_completes_and_says_that_it_distils_nothing(
    fake_server: FakePlugin, tmp_path: Path, answer: Any, said: str
) -> None:
    out = tmp_path / "a.jsonl"
    with judge_server(answer) as judge:
        done = process(fake_server.base_url, out, "--env.judge.base_url", judge, "--env.total_steps", "2")
    assert done.returncode == 0, done
    outcomes = {turn["outcome"] for g in read_lines(out) for o in g["overrides"] for turn in o["opd"]["turns"]}
    # A closing turn whose work passed is shown nothing, so nobody is asked about it.
    assert outcomes - {"no_next_state"} == {"judge_error"}
    assert "turn outcomes: judge_error" in done.stderr
    assert done.stderr.count("DISTILLATION IS INACTIVE") == 1
    assert said in done.stderr
    logged = read_lines(tmp_path / "a.metrics.jsonl")
    assert all("opd/gap_mean" not in line and line.get("opd/votes_readable", 0) == 0 for line in logged)


def wait_for_lines(out: Path, count: int, running: Any) -> None:
    until(lambda: out.exists() and out.read_bytes().count(b"\n") >= count, 120, running)


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_goes_on_where_it_was(
    fake_server: FakePlugin, tmp_path: Path, stop: signal.Signals, code: int
) -> None:
    out = tmp_path / "groups.jsonl"
    flags = ("--env.total_steps", "10", "--env.max_concurrent_groups", "2")
    fake_server.most = 36  # Three turns of 4 rollouts a group: enough for two groups, not for four.
    running = commands.start(*process_command(fake_server.base_url, out, *flags), stderr=commands.PIPE)
    wait_for_lines(out, 2, running)
    running.send_signal(stop)
    _, shown = running.communicate(timeout=60)
    assert running.returncode == code
    if stop is not signal.SIGKILL:
        assert "--env.resume" in shown
    before = out.read_bytes()
    assert 2 <= before.count(b"\n") < 4
    fake_server.most = None

    if stop is signal.SIGKILL:
        again = process(fake_server.base_url, out, *flags)
        assert again.returncode == 2
        assert "--env.resume" in again.stderr
    done = process(fake_server.base_url, out, *flags, "--env.resume")
    assert done.returncode == 0, done
    assert len(items(out)) == len(set(items(out))) == 10
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert validate(out).returncode == 0


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--openai.base_url", "http://127.0.0.1:9/v1"), 1, "gave no usable answer for 2 s"),
        (("--env.distill_topk", "900"), 1, "--max-logprobs 900"),
        (("--env.max_token_length", "100000"), 1, "--max-model-len 100000"),
        (("--env.tokenizer_name", "/nowhere"), 2, "env.tokenizer_name"),
        (("--env.renderer.name", "qwen33"), 2, "qwen33"),
        (("--env.world.dataset_name", "nowhere.jsonl"), 2, "nowhere.jsonl"),
        (("--env.prm_votes", "0", "--env.group_size", "x"), 2, "env.prm_votes"),
        (("--env.data_path_to_save_groups", "/dev/null/groups.jsonl"), 2, "data_path_to_save_groups"),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_error(
    fake_server: FakePlugin,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    complains(fake_server, tmp_path, capsys, flags, code, message)


def complains(
    server: Any, folder: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: int, message: str
) -> None:
    """The command in this process, which saves what a process of its own imports."""
    mode = process_command(server.base_url, folder / "groups.jsonl", *flags)[1:]
    assert command.main(AgenticOPDEnv, mode) == code
    said = capsys.readouterr().err
    assert message in said
    assert "error: " in said
    assert "Traceback" not in said
    assert not (folder / "groups.jsonl").exists()


def test_bad_datasets_say_what_is_there(
    fake_server: FakePlugin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"question": "Write f.", "test_code": "assert True"}) + "\n")
    for file, message in ((empty, "empty"), (odd, "question")):
        complains(fake_server, tmp_path, capsys, ("--env.world.dataset_name", str(file)), 2, message)


@pytest.mark.skipif(not HUMANEVAL.exists(), reason=NO_HUMANEVAL)
def test_humaneval_runs_to_its_end(fake_server: FakePlugin, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    done = commands.run(
        *("agentic_opd.env", "process", "--config", "configs/humaneval.yaml"),
        *("--openai.base_url", f"{fake_server.base_url}/v1", "--env.world.dataset_name", str(HUMANEVAL)),
        *("--env.data_path_to_save_groups", str(out)),
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 0, done
    assert sorted(items(out)) == sorted(f"HumanEval/{i}#0" for i in range(20))
    assert validate(out).returncode == 0
    assert "20 of 20 groups" in done.stderr
