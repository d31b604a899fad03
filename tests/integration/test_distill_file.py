"""`agentic-opd distill` on the server that sampled the demo run, and the same in Python as docs/distill.md shows it."""

import asyncio
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import LocalServer

from agentic_opd.core.types import StopReason
from agentic_opd.env.config import default_settings
from agentic_opd.gateway.foreign import ForeignTurn
from agentic_opd.gateway.journal import Ending, Journal, SessionRow, SessionState
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.runs.distill import trace_of
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.worlds.choose import make_world
from tests.support import commands
from tests.support.environment import read_lines
from tests.support.places import MODEL, ROOT
from tests.support.scripted_judge import HINT, POSITIVE, judge_server

from .conftest import DemoRun

pytestmark = pytest.mark.vllm

RENDERER = (
    "--env.renderer.name",
    "qwen3",
    "--env.renderer.options",
    "{enable_thinking: false}",
    "--env.distill_topk",
    "20",
)


def run(*argv: str) -> "subprocess.CompletedProcess[str]":
    return commands.run("agentic_opd", *argv)


def distill(file: Path, server: LocalServer, *flags: str) -> "subprocess.CompletedProcess[str]":
    return run("distill", str(file), "--openai.base_url", f"{server.base_url}/v1", "--env.server_retry_s", "5", *flags)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_a_set(values: list[Any]) -> list[str]:
    """To compare lines of two files: whichever is finished first is written first."""
    return sorted(json.dumps(value, sort_keys=True) for value in values)


def demo_tools() -> list[dict[str, Any]]:
    env, _ = default_settings()
    return list(make_world(env).tools)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(demo_tools()))
    return path


def test_kept_hints_give_the_same_rows(demo: DemoRun, vllm_server: LocalServer, tmp_path: Path) -> None:
    removed = ("distill_token_ids", "distill_logprobs")
    bare = [{name: value for name, value in group.items() if name not in removed} for group in demo.groups]
    file = written(tmp_path / "groups.jsonl", bare)
    shutil.copy(demo.path.with_suffix(".run.json"), tmp_path / "groups.run.json")
    # The run's own settings say that an earlier file is to be replaced.
    done = distill(file, vllm_server, "--keep-hints", "--env.overwrite", "false")
    assert done.returncode == 0, done
    out = tmp_path / "groups.distilled.jsonl"
    made = {group["group_overrides"]["item_id"]: group for group in read_lines(out)}
    rows = 0
    for group in demo.groups:
        again = made[group["group_overrides"]["item_id"]]
        assert [list(map(len, ids)) for ids in again["distill_token_ids"]] == [
            list(map(len, ids)) for ids in group["distill_token_ids"]
        ]
        for name in ("tokens", "masks", "scores", "inference_logprobs", "messages"):
            assert again[name] == group[name]
        columns = (group["distill_token_ids"], group["distill_logprobs"])
        columns += (again["distill_token_ids"], again["distill_logprobs"])
        for sequence in zip(*columns, strict=True):
            for ids, logprobs, new_ids, new in zip(*sequence, strict=True):
                rows += bool(ids)
                found = dict(zip(new_ids, new, strict=True))
                # The last of the K ids may change place with the next where they are as likely to 1e-3.
                for token, logprob in zip(ids, logprobs, strict=True):
                    assert abs(found.get(token, new[-1] if new else 0.0) - logprob) < 1e-3
    assert rows > 100
    assert run("validate", str(out)).returncode == 0
    refused = distill(file, vllm_server, "--keep-hints", "--env.overwrite", "false")
    assert refused.returncode == 2
    assert "choose another --out" in " ".join(refused.stderr.split())
    kept = b"".join(out.read_bytes().splitlines(keepends=True)[:3])
    out.write_bytes(kept + b'{"tok')
    resumed = distill(file, vllm_server, "--keep-hints", "--env.resume")
    assert resumed.returncode == 0, resumed
    assert "distilled 5" in resumed.stderr
    assert "3 of an earlier run" in " ".join(resumed.stderr.split())
    assert out.read_bytes().startswith(kept)
    assert sorted(group["group_overrides"]["item_id"] for group in read_lines(out)) == sorted(made)


def test_a_foreign_environments_groups(demo: DemoRun, vllm_server: LocalServer, tmp_path: Path, tools: Path) -> None:
    names = ("tokens", "masks", "scores", "messages")
    groups = [{name: group[name] for name in names} for group in demo.groups[:2]]
    file = written(tmp_path / "theirs.jsonl", groups)
    out = tmp_path / "theirs.distilled.jsonl"
    with judge_server(lambda body: [POSITIVE] * body.get("n", 1)) as judge:
        judged = ("--env.judge.base_url", judge, "--env.judge.model_name", "judge")
        done = distill(file, vllm_server, "--tools", str(tools), *RENDERER, *judged)
        assert done.returncode == 0, done
        made = read_lines(out)
        for group in made:
            assert group["group_overrides"]["off_policy"] == "rescored"
            assert group["group_overrides"]["opd"]["outcomes"]["scored"] > 0
        assert as_a_set([{name: group[name] for name in names} for group in made]) == as_a_set(groups)
        checked = run("validate", str(out), "--server", vllm_server.base_url)
        assert checked.returncode == 0, checked
        # Without the tools that its prompts name nothing is guessed.
        blind = distill(file, vllm_server, *RENDERER, *judged, "--env.overwrite")
    assert blind.returncode == 1
    assert "unmatched 2" in blind.stderr
    assert "they are the same up to position" in " ".join(blind.stderr.split())
    assert read_lines(out) == []


AS_OTHERS_WRITE = {
    "messages": [
        {"role": "assistant", "content": "Hello. I write <|im_end|> as text."},
        {"role": "user", "content": "List the files."},
        {"role": "assistant", "content": None, "function_call": {"name": "terminal", "arguments": ""}},
        {"role": "function", "name": "terminal", "content": "error: no command"},
        {"role": "assistant", "content": "It failed."},
        {"role": "assistant", "content": "I stop.<|im_end|>"},
        {"role": "user", "content": [{"type": "text", "text": "No, name a command."}]},
    ],
    "functions": '[{"name": "terminal", "parameters": {"type": "object", "properties": {}}}]',
}


def test_conversations_in_text(demo: DemoRun, vllm_server: LocalServer, tmp_path: Path) -> None:
    # A rollout of one turn, which are a few of a thousand, has no next state.
    said = [{"messages": max(group["messages"], key=len), "tools": demo_tools()} for group in demo.groups[:2]]
    said.append(AS_OTHERS_WRITE)
    file = written(tmp_path / "said.jsonl", said)
    with judge_server(lambda body: [POSITIVE] * body.get("n", 1)) as judge:
        judged = ("--env.judge.base_url", judge, "--env.judge.model_name", "judge")
        done = distill(file, vllm_server, *RENDERER, *judged)
    assert done.returncode == 0, done
    out = tmp_path / "said.distilled.jsonl"
    for group in read_lines(out):
        assert group["group_overrides"]["off_policy"] == "rendered"
        assert group["overrides"][0]["reward"] is None
        assert group["group_overrides"]["opd"]["outcomes"]["scored"] > 0
    assert run("validate", str(out), "--server", vllm_server.base_url).returncode == 0
    last = next(group for group in read_lines(out) if group["messages"][0][0]["role"] == "assistant")
    records = last["overrides"][0]["opd"]["turns"]
    assert [record["outcome"] for record in records] == ["scored", "no_next_state", "scored"]


def test_the_journal_of_a_recording_gateway(vllm_server: LocalServer, tmp_path: Path) -> None:
    """Text of a foreign model becomes groups of the policy's ids; each answer is learned once, with its reply."""

    def turn(number: int, parent: int | None, *messages: Any) -> ForeignTurn:
        turn_messages = tuple({"role": role, "content": content} for role, content in messages)
        index = len(turn_messages) - 1 + (2 if parent else 0)
        return ForeignTurn(number, parent, turn_messages, index, "main", (), "big", "stop", is_whole=True)

    path = tmp_path / "journal.sqlite"
    row = SessionRow("session-1", "o", None, "https://api.example.org", 1.0, 1.0, SessionState.RECORDING)
    journal = Journal(path)
    first = turn(1, None, ("user", "Write f."), ("assistant", "def f(): pass"))
    second = turn(2, 1, ("user", "It must return 1."), ("assistant", "def f(): return 1"))
    third = turn(3, 1, ("user", "It must return 2."), ("assistant", "def f(): return 2"))
    journal.add_turns([(row, first), (row, second), (row, third)])
    ending = Ending(StopReason.CLOSED, "session-1", feedback="Thanks, it works.")
    journal.close_session(replace(row, ending=ending))
    journal.close()
    with judge_server(lambda body: [POSITIVE] * body.get("n", 1)) as judge:
        judged = ("--env.judge.base_url", judge, "--env.judge.model_name", "judge")
        done = distill(path, vllm_server, *RENDERER, *judged)
    assert done.returncode == 0, done
    assert "recorded sessions 1, answers 3, conversations 2" in done.stderr
    out = tmp_path / "journal.distilled.jsonl"
    groups = {group["group_overrides"]["item_id"]: group for group in read_lines(out)}
    assert {group["group_overrides"]["off_policy"] for group in groups.values()} == {"rendered"}
    of_second, of_third = groups["session-1/2"], groups["session-1/3"]
    assert [len(group["overrides"][0]["opd"]["turns"]) for group in (of_second, of_third)] == [2, 1]
    outcomes = [record["outcome"] for record in of_second["overrides"][0]["opd"]["turns"]]
    assert outcomes == ["scored", "no_next_state"]
    assert [record["outcome"] for record in of_third["overrides"][0]["opd"]["turns"]] == ["scored"], "its feedback"
    assert run("validate", str(out), "--server", vllm_server.base_url).returncode == 0


def test_the_documented_lines_run(demo: DemoRun, vllm_server: LocalServer) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "distill.md").read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 10
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / MODEL)
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, demo_tools())
    group = ScoredGroup.from_wire(demo.groups[0])
    trace = trace_of(max(group.rollouts, key=lambda one: len(one.messages or ())), chat)
    space: dict[str, Any] = {}
    exec(example, space)
    with judge_server(lambda body: [POSITIVE] * body.get("n", 1)) as judge:
        done = asyncio.run(space["distilled"](trace, vllm_server.base_url, judge))
    arrays, records = done.arrays, done.records
    assert len(arrays.token_ids_TK) == len(trace.tokens_T)
    assert len(records) == len(trace.turns)
    scored = [record for record in records if record.is_scored]
    assert scored
    assert {record.hint for record in scored} == {HINT}
    for record in scored:
        assert [len(row) for row in arrays.logprobs_TK[slice(*record.span)]] == [20] * (record.span[1] - record.span[0])


def test_the_file_of_a_plain_atropos_environment(vllm_server: LocalServer, tmp_path: Path) -> None:
    file, out = tmp_path / "plain.jsonl", tmp_path / "plain.distilled.jsonl"
    argv = ["tests.support.plain_environment", "process"]
    argv += ["--env.data_path_to_save_groups", str(file), "--env.tokenizer_name", MODEL, "--env.use_wandb", "False"]
    argv += ["--openai.base_url", f"{vllm_server.base_url}/v1", "--openai.model_name", MODEL, "--openai.api_key", "x"]
    plain = commands.run(*argv, timeout_s=300)
    assert plain.returncode == 0, plain
    theirs = read_lines(file)
    with judge_server(lambda body: [POSITIVE] * body.get("n", 1)) as judge:
        judged = ("--env.judge.base_url", judge, "--env.judge.model_name", "judge")
        done = distill(file, vllm_server, *RENDERER, *judged)
    assert done.returncode == 0, done
    assert "distilled 2" in done.stderr
    made = read_lines(out)
    assert as_a_set([group["tokens"] for group in made]) == as_a_set([group["tokens"] for group in theirs])
    for turns in (sequence["opd"]["turns"] for group in made for sequence in group["overrides"]):
        assert [turn["outcome"] for turn in turns] == ["scored", "no_next_state"], "the user answered the first one"
    checked = run("validate", str(out), "--server", vllm_server.base_url)
    assert checked.returncode == 0, checked
