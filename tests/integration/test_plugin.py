"""The plugin on a real vLLM server (CPU, float32): its numbers, Atropos' own client on it, and what vLLM refuses.

What clients count on is in test_plugin_contract.py.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from bench.local_server import LocalServer

from tests.support.places import MODEL, ROOT
from tests.support.plugin_client import TOLERANCE, ask, check, random_ids, score
from tests.support.vllm import Forward

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def vocab(vllm_server: LocalServer) -> int:
    return ask(vllm_server, "/v1/opd/info").body["vocab_size"]


# ------------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("top_k", [1, 50])
def test_a_batch_of_sequences(vllm_server: LocalServer, forward: Forward, vocab: int, top_k: int) -> None:
    """Among them the shortest there is, one row, all rows, and lengths around the cache's block of 32."""
    shapes = [(2, 1), (3, 2), (31, 5), (32, 31), (33, 32), (64, 1), (97, 96), (500, 150), (700, 1), (1200, 1199)]
    sequences = [(random_ids(seed, length, vocab), n) for seed, (length, n) in enumerate(shapes)]
    for scored, (ids, n) in zip(score(vllm_server, sequences, top_k), sequences, strict=True):
        check(scored, ids, n, top_k, forward(ids))


@pytest.mark.parametrize("num_scored", [1, 40, 399])
def test_a_sequence_scored_again_and_again(
    vllm_server: LocalServer, forward: Forward, vocab: int, num_scored: int
) -> None:
    """The second time the cache covers the rows, and the engine's rows are garbage."""
    ids = random_ids(100 + num_scored, 400, vocab)
    expected = forward(ids)
    for _ in range(3):
        check(score(vllm_server, [(ids, num_scored)])[0], ids, num_scored, 50, expected)


def test_every_num_scored_of_a_cached_sequence(vllm_server: LocalServer, forward: Forward, vocab: int) -> None:
    """The border between rows that the cache covers and rows that it does not lies at every place once."""
    ids = random_ids(7, 100, vocab)
    expected = forward(ids)
    ask(vllm_server, "/generate", {"prompt": ids, "max_tokens": 1})
    for n in range(1, 100):
        check(score(vllm_server, [(ids, n)], 5)[0], ids, n, 5, expected)


def test_the_context_of_a_rollout_is_not_computed_again(vllm_server: LocalServer, forward: Forward, vocab: int) -> None:
    """[context | hint | turn] after [context | turn] was sampled: only the hint and the turn are new.

    Without the hint the cache holds the turn too, but rows are computed, so it is read up to the turn.
    """
    context, hint, turn = (random_ids(seed, n, vocab) for seed, n in ((8, 640), (9, 60), (10, 150)))
    ask(vllm_server, "/generate", {"prompt": context + turn, "max_tokens": 1})
    for ids, at_least in ((context + hint + turn, 640), (context + turn, 512)):  # Whole blocks are cached.
        (scored,) = score(vllm_server, [(ids, len(turn))])
        assert scored.num_cached_tokens is not None
        assert at_least <= scored.num_cached_tokens <= 640
        check(scored, ids, len(turn), 50, forward(ids))


def test_many_clients_at_once(vllm_server: LocalServer, forward: Forward, vocab: int) -> None:
    """Sequences that share prefixes, each sent twice, while others are being sampled."""
    stem = random_ids(11, 300, vocab)
    sequences = [(stem[: 40 * (i + 1)] + random_ids(20 + i, 30 + i, vocab), 20 + i) for i in range(7)] * 2
    with ThreadPoolExecutor(20) as pool:
        body = {"prompt": stem, "max_tokens": 30, "ignore_eos": True}
        sampled = [pool.submit(ask, vllm_server, "/generate", body) for _ in range(4)]
        answers = list(pool.map(lambda sequence: score(vllm_server, [sequence])[0], sequences))
        assert [future.result().status for future in sampled] == [200] * 4
    for scored, (ids, n) in zip(answers, sequences, strict=True):
        check(scored, ids, n, 50, forward(ids))


# ----------------------------------------------------------------------------------------------------------- /generate


def test_sampled_tokens_come_with_the_models_logprobs(vllm_server: LocalServer, forward: Forward, vocab: int) -> None:
    prompt = random_ids(12, 50, vocab)
    body = {"prompt": {"prompt_token_ids": prompt}, "n": 3, "max_tokens": 20, "temperature": 1.0, "logprobs": 0}
    reply = ask(vllm_server, "/generate", {**body, "ignore_eos": True}).body
    assert reply["prompt_token_ids"] == prompt
    assert reply["finish_reasons"] == ["length"] * 3
    assert len({tuple(ids) for ids in reply["token_ids"]}) == 3
    for ids, rows in zip(reply["token_ids"], reply["logprobs"], strict=True):
        expected = forward(prompt + ids)[len(prompt) - 1 : -1]
        assert [int(next(iter(row[0]))) for row in rows] == ids
        got = [next(iter(row[0].values())) for row in rows]
        np.testing.assert_allclose(got, expected[np.arange(20), ids], atol=TOLERANCE, rtol=0)


@pytest.fixture
def atropos(vllm_server: LocalServer) -> VLLMServer:
    """Atropos' own client, as it is."""
    config = APIServerConfig(
        base_url=f"{vllm_server.base_url}/v1", model_name=str(ROOT / MODEL), api_key="none", health_check=False
    )
    return VLLMServer(config)


def test_atropos_samples(atropos: VLLMServer, forward: Forward, vocab: int) -> None:
    prompt = random_ids(13, 40, vocab)
    sampled = asyncio.run(
        atropos.tokens_and_logprobs_completion(input_ids=prompt, n=2, max_tokens=12, temperature=1.0, top_p=1.0)
    )
    prompt_tokens, outputs, logprobs, reasons = sampled
    assert prompt_tokens == prompt
    assert len(outputs) == len(reasons) == 2
    for ids, got in zip(outputs, logprobs, strict=True):
        expected = forward(prompt + ids)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(got, expected[np.arange(len(ids)), ids], atol=TOLERANCE, rtol=0)


def test_atropos_managed_server_tracks_what_was_sampled(atropos: VLLMServer) -> None:
    async def talk() -> Any:
        managed = ManagedServer(atropos, tokenizer=atropos.tokenizer)
        messages = [{"role": "user", "content": "Write `add(a, b)`."}]
        reply = await managed.chat_completion(messages=messages, max_tokens=16, temperature=1.0)
        return reply, managed.get_state()["nodes"]

    reply, (node,) = asyncio.run(talk())
    sampled = [token for token in node.masked_tokens if token != -100]
    assert node.tokens[-len(sampled) :] == sampled
    assert all((lp <= 0) == (mask != -100) for lp, mask in zip(node.logprobs, node.masked_tokens, strict=True))
    assert reply.choices[0].message.content == atropos.tokenizer.decode(sampled, skip_special_tokens=True)


def test_atropos_reads_prompt_logprobs(atropos: VLLMServer, forward: Forward, vocab: int) -> None:
    ids = random_ids(14, 60, vocab)
    expected = forward(ids)
    payload = asyncio.run(atropos.get_logprobs(input_ids=ids, top_k=3))
    assert payload["prompt_tokens"] == ids
    first, *rows = zip(payload["prompt_topk_token_ids"], payload["prompt_topk_logprobs"], strict=True)
    assert first == ([], [])
    for p, (row_ids, row) in enumerate(rows):
        assert row_ids[0] == ids[p + 1]
        assert set(expected[p].argsort()[-3:].tolist()) <= set(row_ids)
        np.testing.assert_allclose(row, expected[p, row_ids], atol=TOLERANCE, rtol=0)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ("/generate", {"prompt": "a", "stop_token_ids": ["a"]}, "stop_token_ids"),
        ("/generate", {"prompt": "a", "stop_token_ids": [10**6], "min_tokens": 2}, "stop_token_ids"),
        ("/generate", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [10**6]}, "logprob_token_ids"),
        ("/generate", {"prompt": "a " * 10**6}, "maximum context length"),
        ("/v1/opd/reload_weights", {"path": "x"}, "--weights-root"),
    ],
)
def test_bad_requests_are_refused(vllm_server: LocalServer, path: str, body: Any, field: str) -> None:
    reply = ask(vllm_server, path, body)
    assert reply.status in (400, 403)
    assert field in f"{reply.body['error']['field']} {reply.body['error']['message']}"
