"""`Hindsight` on a real vLLM with the trajectory API and the trainer: the tests' environment, and archived ones."""

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import stop

from tests.support import commands
from tests.support.archived_environment import ENVIRONMENTS, VARIABLE, call, load, write_data
from tests.support.environment import read_lines
from tests.support.places import MODEL, ROOT
from tests.support.scripted_policy import Said, scripted_policy
from tests.support.training import metrics, trainer
from tests.support.trajectory import trajectory_api
from tests.support.vllm import RootedServer

pytestmark = pytest.mark.vllm

LEARNING = ("--env.hint.source", "feedback", "--env.distill_topk", "8")


def flags(url: str) -> tuple[str, ...]:
    tokenizer = str(ROOT / MODEL)
    return ("--openai.base_url", f"{url}/v1", "--openai.model_name", tokenizer, "--openai.api_key", "x", *LEARNING)


@contextmanager
def served(module: str, out: Path, policy: str, api: str, *more: str, **options: Any) -> Iterator[None]:
    """An environment that serves two rollouts a group, and writes them."""
    own = {
        "tokenizer_name": ROOT / MODEL,
        "use_wandb": False,
        "wandb_name": "some",
        "group_size": 2,
        "rollout_server_url": api,
        "data_path_to_save_groups": out,
        "ensure_scores_are_not_same": False,
        "max_num_workers": 2,
        "eval_handling": "NONE",
    }
    given = [text for name, value in own.items() for text in (f"--env.{name}", str(value))]
    log = out.with_suffix(".log")
    with log.open("w") as file:
        env = commands.start(module, *more, "serve", *given, *flags(policy), stdout=file, stderr=file, **options)
        try:
            yield
        except BaseException:
            print(log.read_text()[-6000:])
            raise
        finally:
            stop(env)


def trained(rooted: RootedServer, tmp_path: Path, api: str) -> list[dict[str, Any]]:
    """Train two steps; what the trainer has logged."""
    weights = rooted.root / tmp_path.name
    weights.mkdir()
    changes = (f"--weights_dir={weights}", "--total_steps=2", "--batch_size=4")
    done = commands.run(*trainer(tmp_path, api, rooted.base_url, *changes), kind="train")
    assert done.returncode == 0, done
    return metrics(tmp_path)


def turns(groups: Sequence[dict[str, Any]]) -> list[str]:
    return [turn["outcome"] for group in groups for one in group["overrides"] for turn in one["opd"]["turns"]]


def test_a_plain_environment_is_trained_on(rooted: RootedServer, tmp_path: Path) -> None:
    """The game without messages, of which every turn but the last has a reply to learn from."""
    rooted.renew()
    out = tmp_path / "groups.jsonl"
    with (
        trajectory_api(tmp_path / "api.log") as api,
        served("tests.support.plain_environment_opd", out, rooted.base_url, api.url),
    ):
        rows = trained(rooted, tmp_path, api.url)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["scored_tokens"] > 0 for row in rows)
    assert rows[0]["logprob_drift"] < 1e-3
    groups = read_lines(out)
    assert {*turns(groups)} == {"scored", "no_next_state"}


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / MODEL)


def answering() -> Callable[[str], str]:
    """A prompt's text -> an answer that is right every second time."""
    number = itertools.count()

    def answer(prompt: str) -> str:
        wrong, asked = next(number) % 2, prompt.rpartition("user\n")[2]
        if found := re.search(r"What is (\d+) \+ (\d+)", asked):
            return f"I add the one to the other. It is \\boxed{{{int(found[1]) + int(found[2]) + wrong}}}"
        if found := re.search(r"How many (\w)s are in the string (\w+)", asked):
            return f"<think>I look at each.</think> <answer>{found[2].count(found[1]) + wrong}</answer>"
        if found := re.search(r"Add (\d+) and (\d+)", asked):
            return f"<think>\nI add.\n</think>\n{call(int(found[1]), int(found[2]) + wrong)}"
        if "take_action" in prompt:
            return call_of("stick" if wrong else "hit")
        return "1" if "Taxi" in asked else "It is a thing, and \\boxed{A} I would say."

    return answer


def call_of(action: str) -> str:
    return "<tool_call>\n" + json.dumps({"arguments": {"action": action}, "name": "take_action"}) + "\n</tool_call>"


@contextmanager
def policy(url: str) -> Iterator[str]:
    answer = answering()

    def said(prompt_ids: Sequence[int]) -> Said:
        text = answer(tokenizer().decode(prompt_ids))
        return Said(tokenizer().encode(f"{text}<|im_end|>", add_special_tokens=False), text=text)

    def talk(messages: Sequence[dict[str, Any]]) -> str:
        return answer("".join(f"{one['role']}\n{one['content']}" for one in messages))

    with scripted_policy(url, said, talk) as front:
        yield front


@pytest.mark.all
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_archived_environment_is_trained_on(
    name: str, rooted: RootedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a line of it is changed; what it samples is scripted, the numbers are of a real vLLM."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no copy of the Atropos repository")
    data, out = tmp_path / "data", tmp_path / "groups.jsonl"
    write_data(data)
    places = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), *filter(None, sys.path)])
    variables = {"NLTK_DATA": str(data), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        load(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    rooted.renew()
    with (
        policy(rooted.base_url) as front,
        trajectory_api(tmp_path / "api.log") as api,
        served(
            "tests.support.archived_environment",
            *(out, front, api.url, name),
            **{"cwd": data, "real": True, "PYTHONPATH": places},
        ),
    ):
        rows = trained(rooted, tmp_path, api.url)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["scored_tokens"] > 0 for row in rows)
    groups = read_lines(out)
    assert "scored" in turns(groups)
    rooted.renew()  # The first weights sampled the first groups.
    first = tmp_path / "first.jsonl"
    first.write_text(json.dumps(groups[0]) + "\n")
    checked = commands.run("agentic_opd", "validate", str(first), "--server", rooted.base_url)
    assert checked.returncode == 0, checked
    bare = {column: value for column, value in groups[0].items() if "distill" not in column and column != "messages"}
    bare["overrides"] = [{"feedback": one["feedback"]} for one in groups[0]["overrides"]]
    first.write_text(json.dumps(bare) + "\n")
    again = commands.run("agentic_opd", "distill", str(first), *flags(rooted.base_url)[:2], *LEARNING, *RENDERER)
    assert again.returncode == 0, again
    print(name, len(groups), len(turns(groups)), turns(groups).count("scored"), checked.stdout, again.stdout, rows)
    assert turns(read_lines(tmp_path / "first.distilled.jsonl")) == turns(groups[:1])


RENDERER = ("--env.renderer.name", "default", "--env.renderer.options", "{tool_parser: hermes}")
