"""`/v1/opd/score` on an engine whose logprobs are known."""

import base64
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .fakes import TABLE_VV, TableEngine, client_of, vllm_config

IDS = [3, 1, 4, 1, 5, 2, 6]


def decode(result: dict[str, Any], name: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(result[name]), dtype)


def ask(engine: TableEngine, sequences: list[tuple[list[int], int]], top_k: int = 3) -> dict[str, Any]:
    body = {"sequences": [{"token_ids": ids, "num_scored": n} for ids, n in sequences], "top_k": top_k}
    reply = client_of(engine).post("/v1/opd/score", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check(result: dict[str, Any], ids: list[int], num_scored: int, top_k: int) -> None:
    rows = TABLE_VV[ids[-num_scored - 1 : -1]]
    assert result["num_scored"] == num_scored
    assert result["top_k"] == top_k
    np.testing.assert_array_equal(
        decode(result, "actual_logprobs", "<f4"), rows[np.arange(num_scored), ids[-num_scored:]]
    )
    top = np.argsort(-rows, axis=1)[:, :top_k]
    np.testing.assert_array_equal(decode(result, "top_token_ids", "<i4").reshape(num_scored, top_k), top)
    np.testing.assert_array_equal(
        decode(result, "top_logprobs", "<f4").reshape(num_scored, top_k), np.take_along_axis(rows, top, axis=1)
    )


@pytest.mark.parametrize("num_scored", [1, 3, 6])
@pytest.mark.parametrize("top_k", [1, 4])
def test_the_last_rows_come_back(num_scored: int, top_k: int) -> None:
    reply = ask(TableEngine(), [(IDS, num_scored)], top_k)
    check(reply["results"][0], IDS, num_scored, top_k)
    assert reply["weight_version"] == 0


def test_results_are_in_the_order_of_the_sequences() -> None:
    sequences = [([1, 2, 3], 1), (IDS, 4), ([7, 7], 1)]
    reply = ask(TableEngine(version="12"), sequences)
    for result, (ids, n) in zip(reply["results"], sequences, strict=True):
        check(result, ids, n, 3)
    assert reply["weight_version"] == 12


@pytest.mark.parametrize(
    ("cached", "passes"),
    [
        (0, 1),
        (4, 1),  # of [3 1 4 1 5|2 6] positions 4 and 5 are wanted: their rows are about 2 and 6
        (5, 2),
        (6, 2),
    ],
)
def test_what_the_cache_covers_is_scored_again(cached: int, passes: int) -> None:
    engine = TableEngine(cached=cached)
    (result,) = ask(engine, [(IDS, 2)])["results"]
    check(result, IDS, 2, 3)
    assert [params.skip_reading_prefix_cache for params in engine.requests] == [False, True][:passes]
    assert result["num_cached_tokens"] == (cached if passes == 1 else 0)


V2 = vllm_config(use_v2_model_runner=True)


def named_scores(engine: TableEngine, sequences: list[dict[str, Any]], status: int = 200) -> Any:
    reply = client_of(engine).post("/v1/opd/score", json={"sequences": sequences, "top_k": 2})
    assert reply.status_code == status, reply.text
    return reply.json()


def test_a_cached_turn_is_scored_from_the_cache_up_to_its_rows() -> None:
    engine = TableEngine(cached=6, limits_hits=True, vllm_config=V2)
    sequences = [{"token_ids": IDS, "num_scored": 2}, {"token_ids": IDS, "num_scored": 2, "ids_of": [0]}]
    for result in named_scores(engine, sequences)["results"]:
        check(result, IDS, 2, 2)
        assert result["num_cached_tokens"] == 4
    assert [params.skip_reading_prefix_cache for params in engine.requests] == [False, False]


@pytest.mark.parametrize("cached", [0, 6])
def test_a_sequence_is_scored_at_the_ids_of_others(cached: int) -> None:
    other = [5, 2, 6]
    sequences = [
        {"token_ids": IDS, "num_scored": 2, "top_k": 1, "ids_of": [1]},
        {"token_ids": other, "num_scored": 2},
        {"token_ids": [7, *other], "num_scored": 2, "top_k": 1, "ids_of": [1, 0]},
    ]
    one, two, three = named_scores(TableEngine(cached=cached, vllm_config=V2), sequences)["results"]
    assert "named_logprobs" not in two
    ids = decode(two, "top_token_ids", "<i4").reshape(2, 2)
    np.testing.assert_array_equal(
        decode(one, "named_logprobs", "<f4").reshape(2, 2), np.take_along_axis(TABLE_VV[IDS[-3:-1]], ids, 1)
    )
    assert decode(three, "named_logprobs", "<f4").shape == (2 * 3,)


@pytest.mark.parametrize(
    ("ids_of", "message"),
    [
        ([[2], []], "2 is not a sequence"),
        ([[1], [0]], "refer to each other"),
        ([[0], []], "refer to each other"),
        ([[1, 1, 1], []], "6 is more than this server returns"),
    ],
)
def test_ids_of_others_that_cannot_be_scored_are_refused(ids_of: list[list[int]], message: str) -> None:
    sequences = [{"token_ids": IDS, "num_scored": 2, "ids_of": named} for named in ids_of]
    assert message in named_scores(TableEngine(vllm_config=V2), sequences, 400)["error"]["message"]


def test_other_scored_tokens_skipped_sequences_and_the_v1_runner_name_no_ids() -> None:
    first, second = {"token_ids": IDS, "num_scored": 2, "ids_of": [1]}, {"token_ids": IDS, "num_scored": 2}
    for other, message in (({"num_scored": 3}, "other scored tokens"), ({"unless_weight_version": 4}, "always scored")):
        answer = named_scores(TableEngine(vllm_config=V2), [first, {**second, **other}], 400)
        assert message in answer["error"]["message"]
    assert "model runner" in named_scores(TableEngine(), [first, second], 400)["error"]["message"]


def test_rows_that_do_not_fit_are_scored_again_whatever_the_engine_says_of_its_cache() -> None:
    class Forgetful(TableEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            async for output in super().generate(*args, **kwargs):
                output.num_cached_tokens = 0
                yield output

    engine = Forgetful(cached=6)
    check(ask(engine, [(IDS, 2)])["results"][0], IDS, 2, 3)
    assert len(engine.requests) == 2


def test_sequences_of_one_answer_are_scored_by_the_same_weights() -> None:
    class Reloaded(TableEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            self.version = str(min(len(self.requests), 1))
            async for output in super().generate(*args, **kwargs):
                yield output

    engine = Reloaded()
    assert ask(engine, [(IDS, 2), (IDS, 3)])["weight_version"] == 1
    assert len(engine.requests) == 4


SEQUENCE = {"token_ids": IDS, "num_scored": 2}


def post(engine: TableEngine, *sequences: dict[str, Any], top_k: int = 3) -> dict[str, Any]:
    reply = client_of(engine).post("/v1/opd/score", json={"sequences": sequences, "top_k": top_k})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_sequence_may_ask_for_other_top_logprobs() -> None:
    results = post(TableEngine(), SEQUENCE, {**SEQUENCE, "top_k": 4}, {**SEQUENCE, "top_k": 1})["results"]
    for result, top_k in zip(results, (3, 4, 1), strict=True):
        check(result, IDS, 2, top_k)


@pytest.mark.parametrize("known", ["0", "12"])
def test_a_sequence_that_depends_on_the_weights_is_scored_by_others_only(known: str) -> None:
    """Nothing is computed for it, and the engine is not asked, once the weights' version is known."""
    engine = TableEngine(version=known)
    client = client_of(engine)
    body = {"sequences": [SEQUENCE, {**SEQUENCE, "unless_weight_version": int(known)}], "top_k": 3}
    for passes in range(3):
        engine.requests.clear()
        reply = client.post("/v1/opd/score", json=body).json()
        assert reply["weight_version"] == int(known)
        check(reply["results"][0], IDS, 2, 3)
        assert reply["results"][1] is None
        if passes:
            assert len(engine.requests) == 1
    body["sequences"][1]["unless_weight_version"] = 99
    for result in client.post("/v1/opd/score", json=body).json()["results"]:
        check(result, IDS, 2, 3)


def test_what_depends_on_the_weights_may_be_all_there_is() -> None:
    only = {**SEQUENCE, "unless_weight_version": 12}
    engine = TableEngine(version="12")
    assert post(engine, only) == {"weight_version": 12, "results": [None]}
    engine.version = "13"
    reply = post(engine, only)
    assert reply["weight_version"] == 13
    check(reply["results"][0], IDS, 2, 3)


def test_weights_that_come_in_between_decide_for_all_sequences() -> None:
    """The first sequence is scored by version 7, then version 8 comes: both are scored again, by version 8."""

    class Reloaded(TableEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            async for output in super().generate(*args, **kwargs):
                self.version = "8"
                yield output

    engine = Reloaded(version="7")
    reply = post(engine, SEQUENCE, {**SEQUENCE, "unless_weight_version": 7})
    assert reply["weight_version"] == 8
    for result in reply["results"]:
        check(result, IDS, 2, 3)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"top_k": 3}, "sequences"),
        ({"sequences": [], "top_k": 3}, "sequences"),
        ({"sequences": [SEQUENCE]}, "top_k"),
        ({"sequences": [SEQUENCE], "top_k": 0}, "top_k"),
        ({"sequences": [SEQUENCE], "top_k": 5}, "top_k"),
        ({"sequences": [SEQUENCE], "top_k": True}, "top_k"),
        ({"sequences": [SEQUENCE], "top_k": "3"}, "top_k"),
        ({"sequences": [SEQUENCE], "top_k": 3, "topk": 3}, "topk"),
        ({"sequences": [SEQUENCE, {**SEQUENCE, "token_ids": []}], "top_k": 3}, "sequences[1].token_ids"),
        ({"sequences": [{**SEQUENCE, "token_ids": [1]}], "top_k": 3}, "sequences[0].token_ids"),
        ({"sequences": [{**SEQUENCE, "token_ids": [1] * 16}], "top_k": 3}, "sequences[0].token_ids"),
        ({"sequences": [{**SEQUENCE, "token_ids": "abc"}], "top_k": 3}, "sequences[0].token_ids"),
        ({"sequences": [{**SEQUENCE, "token_ids": [1, -1, 2]}], "top_k": 3}, "sequences[0].token_ids[1]"),
        ({"sequences": [{**SEQUENCE, "token_ids": [1, 2, 8]}], "top_k": 3}, "sequences[0].token_ids[2]"),
        ({"sequences": [{**SEQUENCE, "token_ids": [1, 2.5, 3]}], "top_k": 3}, "sequences[0].token_ids[1]"),
        ({"sequences": [{**SEQUENCE, "token_ids": [1, True, 3]}], "top_k": 3}, "sequences[0].token_ids[1]"),
        ({"sequences": [{**SEQUENCE, "num_scored": 0}], "top_k": 3}, "sequences[0].num_scored"),
        ({"sequences": [{**SEQUENCE, "num_scored": 7}], "top_k": 3}, "sequences[0].num_scored"),
        ({"sequences": [{"token_ids": IDS}], "top_k": 3}, "sequences[0].num_scored"),
        ({"sequences": [SEQUENCE, {**SEQUENCE, "top_k": 5}], "top_k": 3}, "sequences[1].top_k"),
        ({"sequences": [{**SEQUENCE, "top_k": 0}], "top_k": 3}, "sequences[0].top_k"),
        ({"sequences": [{**SEQUENCE, "unless_weight_version": -1}], "top_k": 3}, "sequences[0].unless_weight_version"),
        ({"sequences": [{**SEQUENCE, "unless_weight_version": "1"}], "top_k": 3}, "sequences[0].unless_weight_version"),
    ],
)
def test_bad_requests_are_refused_by_field(body: dict[str, Any], field: str) -> None:
    engine = TableEngine()
    reply = client_of(engine).post("/v1/opd/score", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["field"] == field
    assert reply.json()["error"]["message"]
    assert engine.requests == []


def test_a_body_that_is_no_json_is_refused() -> None:
    reply = client_of(TableEngine()).post("/v1/opd/score", content=b"{")
    assert reply.status_code == 400
    assert "JSON" in reply.json()["error"]["message"]


def test_both_forms_give_the_same_rows() -> None:
    """Prompt [5 6 7], two logprobs a row; no row about 5."""
    import torch
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.outputs import LogprobsTensors

    from agentic_opd.serving.engine import last_rows

    ids, logprobs = [[6, 1, 2], [7, 7, 3]], [[-2.0, -0.5, -1.0], [-0.25, -0.25, -3.0]]
    flat = FlatLogprobs()
    flat.append(None)
    for row, values in zip(ids, logprobs, strict=True):
        flat.append_fast(row, values, [1, 1, 2], [None] * 3)  # type: ignore[arg-type]
    tensors = LogprobsTensors(torch.tensor(ids, dtype=torch.int32), torch.tensor(logprobs), torch.tensor([3, 1]))
    for form in (flat, tensors):
        for rows in (1, 2):
            got_ids, got_logprobs = last_rows(form, rows)
            assert (got_ids.dtype, got_logprobs.dtype) == (np.int32, np.float32)
            assert got_ids.tolist() == ids[-rows:]
            assert got_logprobs.tolist() == logprobs[-rows:]


@pytest.mark.parametrize(
    ("ids", "logprobs", "fit"),
    [
        ([[4, 1], [5, 2]], [[-1.0, -0.5], [-2.0, -0.1]], True),
        ([[4, 1], [5, 2]], [[-1.0, -0.5], [-2.0, float("-inf")]], True),
        ([[4, 1], [6, 2]], [[-1.0, -0.5], [-2.0, -0.1]], False),
        ([[5, 2]], [[-2.0, -0.1]], False),
        ([[4, 1], [5, 2]], [[-1.0, -0.5], [float("-inf"), -0.1]], False),
        ([[4, 1], [5, 2]], [[-1.0, -0.5], [-2.0, float("nan")]], False),
        ([[4, 1], [5, 2]], [[-1.0, 0.5], [-2.0, -0.1]], False),
    ],
)
def test_rows_that_cannot_be_the_tokens_own_are_known(
    ids: list[list[int]], logprobs: list[list[float]], fit: bool
) -> None:
    from agentic_opd.serving.score import rows_fit

    assert rows_fit(np.array(ids, np.int32), np.array(logprobs, np.float32), [4, 5]) is fit
