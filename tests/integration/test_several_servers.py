"""Two servers in one configuration: they share the episodes, and each turn is scored where it was sampled.

Both are proxies before one vLLM server, for what passes through which is all that is asked.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support import commands
from tests.support.places import ROOT
from tests.support.recording_proxy import RecordingProxy, recording_proxy
from tests.support.vllm import SharedServer

pytestmark = pytest.mark.vllm

GROUPS, GROUP_SIZE = 8, 2


class Sampled(NamedTuple):
    """One answer of a server: what it read, and what it wrote."""

    prompt: list[int]
    turn: list[int]


class Scored(NamedTuple):
    """One sequence that a server was asked to score: its last `num_scored` tokens."""

    ids: list[int]
    num_scored: int


def sampled(proxy: RecordingProxy) -> list[Sampled]:
    return [
        Sampled(one.request["prompt"]["prompt_token_ids"], turn)
        for one in proxy.of("/generate")
        for turn in one.answer["token_ids"]
        if one.request.get("max_tokens", 0) > 1
    ]


def scored(proxy: RecordingProxy) -> list[Scored]:
    sequences = [sequence for one in proxy.of("/v1/opd/score") for sequence in one.request["sequences"]]
    return [Scored(sequence["token_ids"], sequence["num_scored"]) for sequence in sequences]


def episodes_begun(turns: Sequence[Sampled]) -> int:
    """Turns whose prompt goes on from no other turn of the server."""
    ends = [turn.prompt + turn.turn for turn in turns]
    return sum(not any(turn.prompt[: len(end)] == end for end in ends) for turn in turns)


def comes_from(one: Scored, turns: Sequence[Sampled]) -> bool:
    """Whether one of the turns is what is scored, with a prompt that is the same but for one insertion."""
    prompt, turn = one.ids[: -one.num_scored], one.ids[-one.num_scored :]
    return any(turn == other.turn and is_prompt_with_hint(prompt, other.prompt) for other in turns)


def is_prompt_with_hint(longer: list[int], prompt: list[int]) -> bool:
    pairs = zip(longer, prompt, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    rest = len(prompt) - same
    return len(longer) >= len(prompt) and (rest == 0 or longer[-rest:] == prompt[-rest:])


def config_for(urls: Sequence[str], folder: Path) -> Path:
    settings: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    settings["env"] |= {
        "group_size": GROUP_SIZE,
        "total_steps": GROUPS,
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
    }
    settings["openai"] = [{**settings["openai"], "base_url": f"{url}/v1"} for url in urls]
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_episodes_are_shared_and_scored_where_they_were_sampled(vllm_server: SharedServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(recording_proxy(url)) for url in [vllm_server.base_url] * 2]
        config = config_for([proxy.url for proxy in proxies], tmp_path)
        done = commands.run("agentic_opd.env", "process", "--config", str(config), timeout_s=1200)
        assert done.returncode == 0, done.stdout + done.stderr
    begun = [episodes_begun(sampled(proxy)) for proxy in proxies]
    assert sum(begun) == GROUPS * GROUP_SIZE  # So no episode went on at another server than it began at.
    assert min(begun) >= 0.35 * sum(begun), begun
    one, other = (sampled(proxy) for proxy in proxies)
    here = [(score, one, other) for score in scored(proxies[0])] + [(score, other, one) for score in scored(proxies[1])]
    assert min(len(scored(proxy)) for proxy in proxies) >= 3
    assert all(comes_from(score, own) for score, own, _ in here)
    # So small a policy writes some turns word for word on both servers; those say nothing about where they were scored.
    assert sum(not comes_from(score, others) for score, _, others in here) >= 0.5 * len(here)
