"""Families by their real tokenizers and formats: a body with random weights, served by vLLM, and a policy by script.

The policy thinks if its family does, calls a tool, calls two at once, answers, is cut off, and ends. Which turn is due
it reads from the prompt, where the world counts its steps:

    step 0  ->  one call  ->  step 1  ->  two calls  ->  step 3  ->  text  ->  step 4  ->  cut off  ->  the last word
"""

import json
import re
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from bench.local_server import local_server

from tests.support.environment import process, read_lines
from tests.support.families import FAMILIES, Call, Family, build
from tests.support.gateway import served
from tests.support.places import ROOT
from tests.support.plugin_client import TOLERANCE
from tests.support.scripted_policy import Said, scripted_policy

pytestmark = [pytest.mark.vllm, pytest.mark.all]

LOOK: Call = ("look", {"place": "left"})
NOTE: Call = ("note", {"text": "a door"})
CUT_OFF = "was cut off"


class Model(NamedTuple):
    """A family's model, served, and the scripted policy before it."""

    family: Family
    folder: Path
    url: str


@cache
def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def script(family: Family, folder: Path) -> Any:
    """Prompt ids -> what the family's model would say at this step."""
    tokenizer, thought = tokenizer_of(folder), "I wonder." if family.thinks else ""
    turns = {
        "0": family.write(thought, "Looking.", [LOOK]),
        "1": family.write(thought, "", [LOOK, NOTE]),
        "2": family.write(thought, "", [NOTE]),
        "3": family.write(thought, "Is it this?", []),
        "4": family.write(thought * 3, "It is what I see, and more.", []),
        CUT_OFF: family.write(thought, "A door.", []),
    }

    def said(prompt_ids: Sequence[int]) -> Said:
        found = re.findall(rf"step (\d)|({CUT_OFF})", tokenizer.decode(prompt_ids))[-1]
        step = found[0] or found[1]
        ids = tokenizer.encode(turns[step], add_special_tokens=False)
        return Said(ids[: len(ids) // 2], is_cut_off=True) if step == "4" else Said(ids)

    return said


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    family: Family = request.param
    try:
        folder = build(family)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{family.package} can't be had: {error}")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    launcher = (str(ROOT / "scripts" / "serve_vllm"),)
    with (
        local_server(folder, "--max-model-len", "4096", log=log, launcher=launcher, cwd=ROOT) as server,
        scripted_policy(server.base_url, script(family, folder)) as url,
    ):
        yield Model(family, folder, url)


def flags(model: Model) -> tuple[str, ...]:
    options = json.dumps(dict(model.family.options))
    served_by = ("--openai.model_name", str(model.folder))
    of_family = model.family.flags
    return ("--env.renderer.name", model.family.renderer, "--env.renderer.options", options, *served_by, *of_family)


@cache
def network(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def differences(group: dict[str, Any], folder: Path) -> list[float]:
    """Between each scored row of a group and transformers' own reading of what the teacher read, in nats."""
    import torch

    found = list[float]()
    for index, tokens in enumerate(group["tokens"]):
        for turn in group["overrides"][index]["opd"]["turns"]:
            if turn["outcome"] != "scored":
                continue
            (start, end), place = turn["span"], turn["insert_at"]
            ids = tokens[:place] + turn["hint_token_ids"] + tokens[place:end]
            with torch.inference_mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                logprobs = network(folder)(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
            for position in range(start, end):
                row = logprobs[len(ids) - end + position - 1]
                written = group["distill_logprobs"][index][position]
                found += np.abs(row[group["distill_token_ids"][index][position]] - written).tolist()
    return found


def sampled(group: dict[str, Any], index: int) -> list[int]:
    return [mask for mask in group["masks"][index] if mask != -100]


@pytest.mark.parametrize("placement", ["end", "last_user"])
def test_the_loop(model: Model, placement: str, tmp_path: Path) -> None:
    out, family, tokenizer = tmp_path / "groups.jsonl", model.family, tokenizer_of(model.folder)
    own = (
        "--env.world",
        f"{ROOT / 'tests/support/rooms.py'}:Rooms",
        "--env.hint.source",
        "feedback",
        "--env.group_size",
        "1",
    )
    more = ("--env.hint.placement", placement, "--env.total_steps", "1", "--env.max_turns", "8")
    done = process(model.url, out, *flags(model), *own, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    (group,) = read_lines(out)
    messages = group["messages"][-1]
    calls = [
        [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        for message in messages
        if message["role"] == "assistant"
    ]
    both = [[LOOK, NOTE]] if family.parallel else [[LOOK], [NOTE]]
    assert calls == [[LOOK], *both, [], [], []], "parsed as they were written"
    # A user speaks twice: in answer to the text, and of the turn that was cut off.
    assert len(group["tokens"]) == family.branches
    assert len({one.get("session_id") for one in group["overrides"]}) == 1
    turns = [turn for one in group["overrides"] for turn in one["opd"]["turns"]]
    assert [turn["outcome"] for turn in turns[:-1]] == ["scored"] * (len(turns) - 1)
    assert [turn["truncated"] for turn in turns if turn.get("truncated")] == [True]
    assert bool(turns[0].get("reasoning_tokens")) == family.thinks
    every = [token for index in range(len(group["tokens"])) for token in sampled(group, index)]
    said = script(family, model.folder)
    expected = [
        token
        for step in ("0", "1", *("23" if not family.parallel else "3"), "4", CUT_OFF)
        for token in said(tokenizer.encode(CUT_OFF if step == CUT_OFF else f"step {step}")).token_ids
    ]
    assert every == expected, "each sampled token is there once, and as it was sampled"
    found = differences(group, model.folder)
    assert len(found) > 100
    assert max(found) < TOLERANCE


def test_the_gateway(model: Model, tmp_path: Path) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "See.",
                "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in arguments}},
            },
        }
        for name, arguments in (LOOK, NOTE)
    ]
    said: list[dict[str, Any]] = [{"role": "system", "content": "You look around."}]
    said.append({"role": "user", "content": "step 0: what is here?"})
    with served(model.url, tmp_path, *flags(model), "--env.hint.source", "feedback") as gateway:
        step, session = 0, "s"
        for _ in range(8):
            answer = gateway.chat(*said, session=session, model=str(model.folder), tools=tools, max_tokens=200)
            message = answer.choices[0].message
            said.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                step += 1
                said.append({"role": "tool", "tool_call_id": call.id, "content": f"A door. step {step}"})
            if not message.tool_calls:
                if said[-2]["content"] == "step 4: Go on.":
                    break
                said.append({"role": "user", "content": "step 4: Go on."})
        group = gateway.end(session, reward=1.0)
    assert answer.choices[0].finish_reason == "length"
    assert step == 3, "two turns or three with the three calls"
    assert len(group["tokens"]) == (2 if model.family.branches > 1 else 1), "a user spoke once more"
    assert max(differences(group, model.folder)) < TOLERANCE
