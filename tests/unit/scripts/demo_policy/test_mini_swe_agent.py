"""What the policy is taught of mini-swe-agent is what its configuration makes of the same steps."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from demo_policy import POLICY_DIR
from demo_policy.merge import write_merged
from demo_policy.mini_swe_agent import ADAPTER_DIR, RATES, SUBMIT, Format, Output, ShellAuthor, ShellWorld, shell_turn
from demo_policy.script import Step, plan_episode
from demo_policy.tokenizer import train_tokenizer
from demo_policy.transcripts import Mix
from demo_policy.variants import load_variants
from safetensors import safe_open

from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks

pytestmark = pytest.mark.slow

TASK = builtin_tasks()[0]
VARIANTS = load_variants()["fizzbuzz"]
FORM = Format()
FORM.timeout_s *= 10  # A command ends by itself, however busy the machine is.
WORLD = ShellWorld(FORM)
ONE_FAULT = replace(RATES, visible_fault=1.0, hidden_fault=0.0, read_first=0.0, write_alone=0.0, opening_text=0.0)
REPAIRED = replace(ONE_FAULT, repair=1.0, repair_works=1.0, read_before_repair=0.0, repair_text=1.0)
ONLY_ACT = Mix(without_examples=0.0, judged_turns=0.0, judged_steps=0.0, undone=0.0, hinted_first=0.0, hinted_other=0.0)


def make_author() -> ShellAuthor:
    tokenizer = train_tokenizer([FORM.system_prompt, TASK.prompt, *VARIANTS.correct], vocab_size=600)
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, ())
    author = ShellAuthor(chat, WORLD, ONE_FAULT, replace(ONLY_ACT, hinted_faulty=0.0))
    author.tasks = {True: author.tasks[True][:1], False: author.tasks[False][:1]}
    return author


@pytest.mark.parametrize("seed", range(20))
def test_every_turn_holds_one_command_and_the_last_one_submits(seed: int):
    rates = replace(RATES, read_first=0.5, write_alone=0.5, read_before_repair=0.5, repair=0.5)
    steps = plan_episode(VARIANTS, Random(seed), rates)
    turns = [FORM.commands(shell_turn(step)) for step in steps]
    assert all(len(commands) == 1 for commands in turns)
    assert [commands == [SUBMIT] for commands in turns] == [False] * (len(steps) - 1) + [True]


def test_a_turn_is_written_as_mini_swe_agent_reads_it():
    write, repair, end = plan_episode(VARIANTS, Random(2), REPAIRED)
    solution = write.after.solution or ""
    assert shell_turn(write) == (
        f"```mswea_bash_command\ncat > solution.py <<'EOF'\n{solution}EOF\npython test_solution.py\n```"
    )
    assert shell_turn(repair).startswith(f"{repair.text}\n\n```mswea_bash_command\ncat > ")
    assert shell_turn(end) == f"{end.text}\n\n```mswea_bash_command\n{SUBMIT}\n```"


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (Output("ok\n", 0), "ok"),
        (Output("", 0), "[no output]"),
        (Output("FAIL f(1)\n", 1), "FAIL f(1)\n[exit code 1]"),
        (Output("", -1, "It was stopped."), "It was stopped.\n[no output]\n[exit code -1]"),
        (Output("x" * 5000, 0), "x" * 2000),
    ],
    ids=["output", "none", "failure", "stopped", "long"],
)
def test_what_a_command_did_is_shown_shortly(output: Output, text: str):
    assert FORM.observation(output) == text


def test_an_episode_is_played_by_a_real_shell():
    author = make_author()
    episode = author.play(author.tasks[True][0], plan_episode(VARIANTS, Random(2), REPAIRED), Random(0))
    roles = [message["role"] for message in episode.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert episode.messages[0]["content"] == FORM.system_prompt
    assert "FAIL fizzbuzz(" in episode.messages[3]["content"]
    assert episode.messages[3]["content"].endswith("[exit code 1]")
    assert episode.messages[5]["content"].endswith("examples passed")
    assert episode.verification is not None
    assert episode.verification.correctness == 1.0


def test_the_transcript_holds_each_turn_as_it_was_written():
    author = make_author()
    (row,) = author.write(Random(4))
    text = author.chat.tokenizer.decode([i for i, own in zip(row.token_ids, row.is_target, strict=True) if own])
    assert text.count("```mswea_bash_command\n") == text.count("<|im_end|>") == 2
    assert text.endswith(f"{SUBMIT}\n```<|im_end|>")
    assert row.decisions
    assert all(row.is_target[position] for position in row.decisions)


@pytest.mark.parametrize("turn", ["solution.py is written.", 2 * "```mswea_bash_command\nls\n```\n"], ids=["0", "2"])
def test_a_turn_without_exactly_one_command_is_an_error_of_format(turn: str):
    reply, solution = asyncio.run(WORLD.answer(TASK, "x = 1\n", {"role": "assistant", "content": turn}))
    assert reply is not None
    assert reply.startswith("Expected exactly one command block, found ")
    assert solution == "x = 1\n"


def test_a_hinted_repair_is_a_whole_file():
    author = make_author()
    fault = VARIANTS.visible[0]
    steps = plan_episode(VARIANTS, Random(2), REPAIRED)
    patch: Step = replace(steps[1], calls=(("patch", {"path": "solution.py", "old": fault.bad, "new": fault.good}),))
    assert f"<<'EOF'\n{patch.after.solution}EOF\n```" in author.written(patch)
    assert author.decisions(patch, VARIANTS, 0)


def tensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def product(up: Any, down: Any) -> Any:
    return up.astype("float32") @ down.astype("float32")


def test_the_shipped_adapter_is_small_and_merges_into_the_policy(tmp_path: Path):
    """Each matrix W becomes W + alpha / r * B A."""
    assert sum(path.stat().st_size for path in ADAPTER_DIR.iterdir()) < 2e6
    write_merged(tmp_path / "merged")
    adapter, config = tensors(ADAPTER_DIR / "adapter_model.safetensors"), ADAPTER_DIR / "adapter_config.json"
    scale = (settings := json.loads(config.read_text()))["lora_alpha"] / settings["r"]
    before, after = (tensors(folder / "model.safetensors") for folder in (POLICY_DIR, tmp_path / "merged"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        part = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{part}.lora_A.weight" in adapter:
            expected = weight + scale * product(adapter[f"{part}.lora_B.weight"], adapter[f"{part}.lora_A.weight"])
        assert abs(after[name] - expected).max() < 1e-4
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (POLICY_DIR / "tokenizer.json").read_bytes()
