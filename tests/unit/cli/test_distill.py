"""`agentic-opd distill` on groups of other environments, against a small policy server."""

import gzip
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.distill import _PROBE_S, main
from agentic_opd.cli.validate import main as validate
from agentic_opd.core.types import sampled_spans
from tests.support.fake_plugin import END, FakePlugin, decode, encode, fake_plugin
from tests.support.places import MODEL
from tests.unit.logs.samples import TOOLS, claude_code, codex

PROMPT = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TOLD = {"role": "user", "content": "What is 12 + 30?"}


@pytest.fixture(scope="module")
def policy() -> Generator[FakePlugin]:
    with fake_plugin() as server:
        yield server


def group(**columns: Any) -> dict[str, Any]:
    """A group of one single-turn rollout, with the empty columns of Atropos' default `collect_trajectories`."""
    prompt, answer = encode(PROMPT), [*encode("41"), END]
    rollout = {
        "tokens": [[*prompt, *answer]],
        "masks": [[-100] * len(prompt) + answer],
        "scores": [-1.0],
        "messages": [[TOLD, {"role": "assistant", "content": "41"}]],
    }
    return {**rollout, "advantages": [], "ref_logprobs": [], "overrides": [], "images": [], **columns}


def distill(tmp_path: Path, url: str, group: Any, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    file, out = tmp_path / "theirs.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps(group) + "\n")
    renderer = ("--env.renderer.name", "qwen3", "--env.renderer.options", "{enable_thinking: false}")
    own = ("--env.tokenizer_name", MODEL, "--env.distill_topk", "4", "--openai.base_url", url)
    code = main([str(file), "--out", str(out), *renderer, *own, *flags])
    return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_feedback_in_words_is_the_verdict(policy: FakePlugin, tmp_path: Path) -> None:
    code, (made,) = distill(tmp_path, policy.base_url, group(overrides=[{"feedback": "Wrong: it is 42."}]))
    (turn,) = made["overrides"][0]["opd"]["turns"]
    assert (code, turn["outcome"], turn["evidence"]) == (0, "scored", ["verdict"])
    assert "Wrong: it is 42." in turn["question"]
    assert made["overrides"][0]["feedback"] == "Wrong: it is 42."
    assert validate([str(tmp_path / "out.jsonl")]) == 0


def test_a_torn_or_broken_gz_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, file = gzip.compress(json.dumps(group()).encode()), tmp_path / "theirs.jsonl.gz"
    for content in (packed[:-20], packed[:10] + b"\xff" * 20):
        file.write_bytes(content)
        assert main([str(file)]) == 2
        assert f"error: cannot read {str(file)!r}: " in capsys.readouterr().err


def test_without_feedback_a_single_turn_has_no_evidence(policy: FakePlugin, tmp_path: Path) -> None:
    code, (made,) = distill(tmp_path, policy.base_url, group())
    assert (code, made["overrides"][0]["opd"]["turns"][0]["outcome"]) == (0, "no_next_state")


@pytest.mark.parametrize("messages", [[], [[TOLD]]])
def test_a_group_without_the_conversation_is_read_from_its_tokens(
    messages: list[Any], policy: FakePlugin, tmp_path: Path
) -> None:
    overrides = [{"feedback": "Wrong: it is 42."}]
    code, (made,) = distill(tmp_path, policy.base_url, group(messages=messages, overrides=overrides))
    (turn,) = made["overrides"][0]["opd"]["turns"]
    assert (code, turn["outcome"], turn["span"]) == (0, "scored", [len(encode(PROMPT)), len(made["tokens"][0])])
    assert "12 + 30" in turn["question"]
    assert "41" in turn["question"]


@pytest.mark.slow
def test_a_wrong_port_ends_it_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, made = distill(tmp_path, "http://127.0.0.1:9/v1", group())
    assert (code, made) == (1, [])
    said = capsys.readouterr().err
    assert "127.0.0.1:9" in said
    assert f"gave no usable answer for {_PROBE_S:g} s" in said, "else it would be asked for a minute"


CUT = {"role": "assistant", "content": "41"}
LOG = [
    TOLD,
    {**CUT, "content": "<think>\nHm.\n</think>\n\n41"},
    TOLD,
    {"role": "assistant", "content": None},
    TOLD,
    {"role": "assistant", "content": None, "refusal": "I can't."},
    TOLD,
]


def learned(made: dict[str, Any]) -> list[str]:
    """The text of each sampled span of a group's sequences."""
    rows = zip(made["tokens"], made["masks"], strict=True)
    return [decode(tokens[start:end]) for tokens, masks in rows for start, end in sampled_spans(masks)]


def test_what_is_not_learned_of_logs_is_counted_at_the_end(
    policy: FakePlugin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An array of conversations is read as its elements."""
    silent = {"messages": [TOLD, {"role": "assistant", "content": " "}]}
    code, (made,) = distill(tmp_path, policy.base_url, [{"messages": LOG}, silent])
    assert code == 1, "the second conversation has nothing to learn"
    assert learned(made) == ["41<|im_end|>", "I can't.<|im_end|>"]
    shown = " ".join(capsys.readouterr().err.split())
    assert "line 2, unmatched: the assistant says nothing in it that answers a user and can be learned" in shown
    assert "turns that are read and not learned: 2 without text or call" in shown
    assert "changed: 1 turns learned without their reasoning, for which the prompt has no place" in shown
    assert validate([str(tmp_path / "out.jsonl")]) == 0


def test_a_folder_with_the_sessions_of_two_agents(
    policy: FakePlugin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was read, left out and skipped is said; keys are masked unless they are to be kept."""
    key = "sk-ant-api03-" + "a1B2c3D4" * 10
    records = claude_code()
    records[1]["message"]["content"] += f" The key is {key}."
    folder = tmp_path / "logs"
    folder.mkdir()
    for name, lines in (("claude.jsonl", records), ("codex.jsonl", codex())):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "notes.md").write_text("# Notes")
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    renderer = ("--env.renderer.name", "qwen3", "--env.renderer.options", "{enable_thinking: false}")
    own = ("--env.tokenizer_name", MODEL, "--env.distill_topk", "4", "--openai.base_url", policy.base_url)
    for flags in ((), ("--keep-secrets",)):
        out = tmp_path / f"out{len(flags)}.jsonl"
        assert main([str(folder), "--out", str(out), "--tools", str(tools), *renderer, *own, *flags]) == 0
        groups = [json.loads(line) for line in out.read_text().splitlines()]
        assert {group["group_overrides"]["item_id"] for group in groups} == {"claude", "codex"}
        assert all(len(learned(group)) == 3 for group in groups)
        assert all(group["group_overrides"]["off_policy"] == "rendered" for group in groups)
        shown = " ".join(capsys.readouterr().err.split())
        assert "Claude Code: files 1, conversations 1, answers 3" in shown
        assert "Codex, left out: 2 records without a part of the conversation, 1 encrypted reasoning" in shown
        assert f"skipped, no JSON: {folder / 'notes.md'}" in shown
        assert ("1 secrets masked" in shown) == (not flags)
        assert (key in out.read_text()) == bool(flags)
        assert validate([str(out)]) == 0


def test_a_folder_without_logs_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.md").write_text("# Notes")
    assert main([str(tmp_path), "--out", str(tmp_path / "out.jsonl")]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "no group and no conversation in these paths; skipped, no JSON:" in shown


def test_a_log_longer_than_the_context_keeps_the_turns_that_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"messages": [TOLD, CUT] * 40}
    with fake_plugin(context=300) as policy:
        code, (made,) = distill(tmp_path, policy.base_url, long)
    assert (code, len(made["tokens"])) == (0, 1)
    assert 250 < len(made["tokens"][0]) < 300
    turns = made["overrides"][0]["opd"]["turns"]
    assert {turn["outcome"] for turn in turns} <= {"scored", "too_long"}
    assert f"not learned: {40 - len(turns)} beyond the policy's context" in " ".join(capsys.readouterr().err.split())


def test_tools_of_another_client_are_refused_or_shown_in_the_chat_form(
    policy: FakePlugin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = tmp_path / "tools.json"
    for listed, expected in (([{"name": "f", "input_schema": schema}], 0), ([{"type": "web_search"}], 2)):
        tools.write_text(json.dumps(listed))
        code, made = distill(tmp_path, policy.base_url, {"messages": LOG}, "--tools", str(tools), "--env.overwrite")
        assert code == expected
        if code == 0:
            prompt = decode(made[0]["tokens"][0])
            assert '"parameters": {"type": "object"' in prompt
            assert "input_schema" not in prompt
    assert "tools[0].type: 'web_search' is a tool of its provider" in " ".join(capsys.readouterr().err.split())


def test_help_shows_the_settings_that_have_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help", "all"])
    shown = capsys.readouterr().out
    for name in ("distill_topk", "judge.base_url", "renderer.options", "resume"):
        assert f"--env.{name} " in shown
    for name in ("agent.command", "sandbox.type", "dataset_name", "use_wandb", "temperature", "opd_enabled"):
        assert f"--env.{name} " not in shown


def test_kept_hints_need_no_judge(policy: FakePlugin, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, (made,) = distill(tmp_path, policy.base_url, group(overrides=[{"feedback": "Wrong: it is 42."}]))
    gone = ("--env.judge.base_url", "http://127.0.0.1:9/v1", "--env.server_retry_s", "0.1", "--env.overwrite", "true")
    code, (again,) = distill(tmp_path, policy.base_url, made, *gone, "--keep-hints")
    (before,), (after,) = (entry["overrides"][0]["opd"]["turns"] for entry in (made, again))
    assert (code, after["outcome"], after["hint"]) == (0, "scored", before["hint"])
    assert distill(tmp_path, policy.base_url, made, *gone)[0] == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_a_kept_hint_with_another_text_than_its_tokens_is_an_error(
    policy: FakePlugin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, (made,) = distill(tmp_path, policy.base_url, group(overrides=[{"feedback": "Wrong: it is 42."}]))
    kept, (turn,) = ("--keep-hints", "--env.overwrite", "true"), made["overrides"][0]["opd"]["turns"]
    written = turn["hint"]
    turn["hint"] = f" {written}\n"
    assert distill(tmp_path, policy.base_url, made, *kept)[0] == 0
    turn["hint"] = f"{written} Then say so."
    assert distill(tmp_path, policy.base_url, made, *kept)[0] == 1
    assert "but its hint_token_ids have another text" in capsys.readouterr().err
