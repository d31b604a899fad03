"""What clients may count on of the plugin's routes, held by the real plugin and by the fake that other tests use.

A test that needs something else of the fake states it here first. Numbers are compared with a forward pass in
test_plugin.py.
"""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.fake_plugin import FakePlugin, fake_plugin
from tests.support.places import MODEL, ROOT
from tests.support.plugin_client import TOLERANCE, ask, random_ids, running_requests, score
from tests.support.vllm import RootedServer
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

Plugin = Any
"""A server: `base_url`."""


@pytest.fixture(params=["real", "fake"])
def plugin(request: pytest.FixtureRequest) -> Iterator[Plugin]:
    """One that takes other weights."""
    if request.param == "real":
        rooted: RootedServer = request.getfixturevalue("rooted")
        yield rooted.server
        return
    with fake_plugin(takes_weights=True) as fake:
        yield fake


def generated(plugin: Plugin, **body: Any) -> Any:
    reply = ask(plugin, "/generate", body)
    assert reply.status == 200, reply.body
    return reply.body


def streamed(plugin: Plugin, **body: Any) -> list[dict[str, Any]]:
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{plugin.base_url}/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [line.removeprefix(b"data: ") for line in answer.read().splitlines() if line]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def own(rows: list[list[dict[str, float]]]) -> list[tuple[int, float]]:
    """The first entry of each row."""
    return [(int(token), logprob) for (row,) in rows for token, logprob in [next(iter(row.items()))]]


def test_it_says_what_it_serves(plugin: Plugin) -> None:
    config = json.loads((ROOT / MODEL / "config.json").read_text())
    info = ask(plugin, "/v1/opd/info").body
    assert {name: info[name] for name in ("model", "vocab_size", "max_model_len", "weight_version")} == {
        "model": MODEL,
        "vocab_size": config["vocab_size"],
        "max_model_len": config["max_position_embeddings"],
        "weight_version": 0,
    }
    assert info["max_logprobs"] >= 51
    assert info["vllm_version"]
    assert info["logprobs_mode"] == "raw_logprobs"
    assert {"plugin_version", "max_body_bytes", "max_adapters", "max_lora_rank", "weight_transfer", "workers"} < {*info}
    (model,) = ask(plugin, "/v1/models").body["data"][:1]
    assert (model["id"], model["root"], model["max_model_len"]) == (MODEL, MODEL, info["max_model_len"])


def test_text_and_ids_are_one_prompt(plugin: Plugin) -> None:
    text = "def f(x):\n    return x\n"
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    ids = ask(plugin, "/tokenize", body).body["tokens"]
    assert ask(plugin, "/detokenize", {"model": MODEL, "tokens": ids}).body["prompt"] == text
    for prompt in (text, {"prompt": text}, ids, {"prompt_token_ids": ids}):
        assert generated(plugin, prompt=prompt, max_tokens=8, temperature=0.0)["prompt_token_ids"] == ids


def test_what_is_sampled_is_what_is_scored(plugin: Plugin) -> None:
    prompt = random_ids(12, 50, 1000)
    answer = generated(plugin, prompt={"prompt_token_ids": prompt}, n=3, max_tokens=20, logprobs=0, ignore_eos=True)
    assert answer["prompt_token_ids"] == prompt
    assert answer["finish_reasons"] == ["length"] * 3
    assert answer["weight_version"] == 0
    assert [len(ids) for ids in answer["token_ids"]] == [20] * 3
    for ids, rows in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert [token for token, _ in own(rows)] == ids
        (scored,) = score(plugin, [(prompt + ids, 20)], top_k=5)
        np.testing.assert_allclose(scored.actual_R, [logprob for _, logprob in own(rows)], atol=TOLERANCE, rtol=0)


def test_a_stream_says_the_same_in_steps(plugin: Plugin) -> None:
    body: dict[str, Any] = {"prompt": random_ids(7, 60, 1000), "max_tokens": 19, "min_tokens": 19}
    body |= {"temperature": 0.0, "logprobs": 3}
    whole = generated(plugin, **body)
    for interval in (1, 4):
        events = streamed(plugin, **body, stream_interval=interval)
        assert len(events) > 1
        assert [one for event in events for one in event["token_ids"]] == whole["token_ids"][0]
        for (mine,), (theirs,) in zip(
            (row for event in events for row in event["logprobs"]), whole["logprobs"][0], strict=True
        ):
            assert next(iter(mine)) == next(iter(theirs))
            assert len(mine) in (3, 4), "the three most likely, and the token where it is none of them"
            assert mine == pytest.approx(theirs, abs=TOLERANCE)
        assert [event["index"] for event in events] == [0] * len(events)
        ends = [(event["finish_reason"], event["weight_version"]) for event in events]
        assert ends == [(None, None)] * (len(events) - 1) + [(whole["finish_reasons"][0], 0)]


def test_rows_are_the_most_likely_tokens_of_a_distribution(plugin: Plugin) -> None:
    sequences = [(random_ids(seed, length, 1000), n) for seed, (length, n) in enumerate([(2, 1), (40, 39), (64, 5)])]
    for (ids, n), one in zip(sequences, score(plugin, sequences, top_k=50), strict=True):
        assert one.top_ids_RK.shape == one.top_logprobs_RK.shape == (n, 50)
        assert (np.diff(one.top_logprobs_RK, axis=1) <= 0).all()
        assert (np.exp(one.top_logprobs_RK.astype(float)).sum(1) <= 1 + 1e-5).all()
        for row, (token, logprob) in enumerate(zip(ids[-n:], one.actual_R, strict=True)):
            among = one.top_logprobs_RK[row][one.top_ids_RK[row] == token]
            assert among == pytest.approx(logprob, abs=1e-4) if among.size else logprob <= one.top_logprobs_RK[row, -1]


def test_a_sequence_is_left_out_unless_the_weights_are_others(plugin: Plugin) -> None:
    ids = random_ids(3, 30, 1000)
    sequence = {"token_ids": ids, "num_scored": 4}
    sequences = [
        sequence,
        {**sequence, "unless_weight_version": 0},
        {**sequence, "top_k": 2, "unless_weight_version": 9},
    ]
    body = ask(plugin, "/v1/opd/score", {"sequences": sequences, "top_k": 5}).body
    first, left_out, last = body["results"]
    assert (body["weight_version"], first["top_k"], left_out, last["top_k"]) == (0, 5, None, 2)


def test_other_weights_have_a_version_and_other_numbers(plugin: Plugin, request: pytest.FixtureRequest) -> None:
    """What is under way ends with the weights that it began with."""
    if not isinstance(plugin, FakePlugin):
        from .test_weights import write_moved

        write_moved(request.getfixturevalue("rooted").root / "other")
    ids = random_ids(5, 60, 1000)

    def reloaded(**body: Any) -> int:
        reply = ask(plugin, "/v1/opd/reload_weights", body)
        assert reply.status == 200, reply.body
        return reply.body["weight_version"]

    before = score(plugin, [(ids, 20)])[0].actual_R
    assert reloaded(path="other") == 1
    assert np.abs(score(plugin, [(ids, 20)])[0].actual_R - before).max() > 0.1
    assert generated(plugin, prompt=ids, max_tokens=4)["weight_version"] == 1
    assert reloaded(path="first", version=0) == 0
    np.testing.assert_allclose(score(plugin, [(ids, 20)])[0].actual_R, before, atol=TOLERANCE, rtol=0)


def test_what_nobody_waits_for_is_not_sampled_on(plugin: Plugin) -> None:
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 8000, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{plugin.base_url}/generate", body, {"Content-Type": "application/json"})

    def at_work() -> float:
        return plugin.under_way if isinstance(plugin, FakePlugin) else running_requests(plugin)

    with pytest.raises(TimeoutError):
        urllib.request.urlopen(request, timeout=1)
    until(lambda: at_work() == 0)


SCORE, GENERATE = "/v1/opd/score", "/generate"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (SCORE, {"sequences": [{"token_ids": [], "num_scored": 1}], "top_k": 1}, "sequences[0].token_ids"),
        (SCORE, {"sequences": [{"token_ids": [1, 10**6], "num_scored": 1}], "top_k": 1}, "token_ids[1]"),
        (SCORE, {"sequences": [{"token_ids": [1, -1], "num_scored": 1}], "top_k": 1}, "token_ids[1]"),
        (SCORE, {"sequences": [{"token_ids": [1, True], "num_scored": 1}], "top_k": 1}, "token_ids[1]"),
        (SCORE, {"sequences": [{"token_ids": [1] * 8192, "num_scored": 1}], "top_k": 1}, "token_ids"),
        (SCORE, {"sequences": [{"token_ids": [1, 2], "num_scored": 2}], "top_k": 1}, "num_scored"),
        (SCORE, {"sequences": [{"token_ids": [1, 2], "num_scored": 0}], "top_k": 1}, "num_scored"),
        (SCORE, {"sequences": [{"token_ids": [1, 2], "num_scored": 1}], "top_k": 257}, "top_k"),
        (SCORE, b"{", "JSON"),
        (GENERATE, {"prompt": {"prompt_token_ids": []}}, "prompt"),
        (GENERATE, {"prompt": {"prompt_token_ids": [10**6]}}, "prompt.prompt_token_ids[0]"),
        (GENERATE, {"prompt": [1] * 8192}, "prompt"),
        (GENERATE, {"prompt": "a", "temperature": -1}, "temperature"),
        (GENERATE, {"prompt": "a", "logprobs": 257}, "logprobs"),
        (GENERATE, {"prompt": "a", "stream": True, "stream_interval": 0}, "stream_interval"),
    ],
)
def test_bad_requests_are_refused(plugin: Plugin, path: str, body: Any, field: str) -> None:
    reply = ask(plugin, path, body)
    assert reply.status == 400, reply.body
    assert field in f"{reply.body['error']['field']} {reply.body['error']['message']}"


def test_the_fake_wants_its_key_as_the_real_one_does() -> None:
    """The real one is asked in test_sql_world.py."""
    with fake_plugin(key="a key") as fake:
        for path, body in ((GENERATE, {"prompt": [1], "max_tokens": 1}), ("/v1/opd/info", None)):
            assert ask(fake, path, body).status == ask(fake, path, body, "wrong").status == 401
            assert ask(fake, path, body, "a key").status == 200


def test_the_fake_loses_what_is_under_way_when_it_is_killed_and_comes_back_at_its_port() -> None:
    """As any server does whose process ends."""
    with fake_plugin(step_s=10.0) as fake:
        import threading

        lost: list[Exception] = []

        def wait() -> None:
            try:
                ask(fake, GENERATE, {"prompt": [1], "max_tokens": 5, "ignore_eos": True})
            except OSError as error:
                lost.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: fake.under_way == 1)
        fake.kill()
        waiting.join(20)
        assert len(lost) == 1
        with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
            ask(fake, "/v1/opd/info")
        fake.start()
        assert ask(fake, "/v1/opd/info").status == 200
