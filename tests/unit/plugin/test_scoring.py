import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agentic_opd.core import http
from agentic_opd.core.errors import AlignmentError, ServerRequestError, ServerUnreachableError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import TeacherRequest
from agentic_opd.distill.insertion import insert_hint
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import ServerInfo
from agentic_opd.plugin.scoring import ReadBy, Reading, TeacherReply
from tests.unit.distill.fakes import (
    TURNS,
    VERSION,
    VOCAB,
    Script,
    b64,
    make_trace,
    next_token_logprobs,
    plugin,
    plugin_answer,
    result_of,
    served,
    table_rows,
)

REQUEST = insert_hint(make_trace(), TURNS[0], 3, (70, 71))
INFO = ServerInfo("m", 1000, has_plugin=True, max_logprobs=20, vocab_size=VOCAB)


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BACKOFF_S", (0.01, 0.02))


def completions(body: dict[str, Any]) -> dict[str, Any]:
    """As vLLM writes it: top-k by rank, and the prompt's own token first where it is not among them."""
    ids, rows = body["prompt"], [None]
    for i in range(1, len(ids)):
        logprobs = next_token_logprobs(ids[:i])
        order = np.argsort(-logprobs, kind="stable")
        rank = int(np.where(order == ids[i])[0][0]) + 1
        row = {str(ids[i]): {"logprob": float(logprobs[ids[i]]), "rank": rank, "decoded_token": "?"}}
        for r, token in enumerate(order[: body["prompt_logprobs"]].tolist()):
            row[str(token)] = {"logprob": float(logprobs[token]), "rank": r + 1, "decoded_token": "?"}
        rows.append(row)  # type: ignore[arg-type]
    return {"choices": [{"index": 0, "text": "x", "prompt_token_ids": ids, "prompt_logprobs": rows}]}


def score(
    script: Script,
    path: str = "/v1/opd/score",
    top_k: int = 5,
    retry_s: float = 60.0,
    also: Sequence[Reading] = (),
) -> TeacherReply:
    info = replace(INFO, has_plugin=path == "/v1/opd/score")

    async def run() -> TeacherReply:
        async with served({path: script}) as url:
            teacher = PluginClient(JsonClient(f"{url}/v1", "key", retry_s=retry_s), info, max_concurrent=2)
            try:
                return await teacher.score(REQUEST, top_k, also)
            finally:
                await teacher.close()

    return asyncio.run(run())


BOTH = pytest.mark.parametrize(("path", "answer"), [("/v1/opd/score", plugin), ("/v1/completions", completions)])


@BOTH
@pytest.mark.parametrize("top_k", [1, 5])
def test_both_ways_give_the_same_rows(path: str, answer: Any, top_k: int) -> None:
    script = Script(answer)
    rows, latency, cached, version, also = score(script, path, top_k)
    expected = table_rows(REQUEST, top_k)
    assert latency > 0
    assert (cached, version, also) == ((0, VERSION, ()) if path == "/v1/opd/score" else (None, None, ()))
    assert rows.actual_R.tolist() == expected.actual_R.tolist()
    assert rows.top_ids_RK.tolist() == expected.top_ids_RK.tolist()
    assert rows.top_logprobs_RK.tolist() == expected.top_logprobs_RK.tolist()
    assert script.headers[0]["Authorization"] == "Bearer key"


def test_plugin_is_sent_the_ids_and_how_many_to_score() -> None:
    script = Script(plugin)
    score(script)
    assert script.bodies == [{"sequences": [{"token_ids": list(REQUEST.token_ids), "num_scored": 3}], "top_k": 5}]


@pytest.mark.parametrize(
    ("max_adapters", "read_by", "sent"),
    [
        (0, "policy", {}),
        (0, "base", {"read_by": "base"}),
        (3, "policy", {"prefer_weight_version": VERSION}),
        (3, "teacher", {"prefer_weight_version": VERSION, "read_by": "teacher"}),
    ],
)
def test_whose_weights_read_is_asked_for_where_the_server_has_several(
    max_adapters: int, read_by: ReadBy, sent: dict[str, Any]
) -> None:
    script = Script(plugin)

    async def run() -> None:
        async with served({"/v1/opd/score": script}) as url:
            info = replace(INFO, max_adapters=max_adapters)
            teacher = PluginClient(JsonClient(f"{url}/v1"), info, max_concurrent=2, read_by=read_by)
            try:
                await teacher.score(replace(REQUEST, weight_version=VERSION), 5)
                await teacher.score(replace(REQUEST, weight_version=None), 5)
            finally:
                await teacher.close()

    asyncio.run(run())
    known, unknown = ({k: v for k, v in body.items() if k not in ("sequences", "top_k")} for body in script.bodies)
    assert known == sent
    assert unknown == {k: v for k, v in sent.items() if k == "read_by"}


UNHINTED = insert_hint(make_trace(), TURNS[0], 3, ())


def test_further_readings_go_in_the_same_request() -> None:
    script = Script(plugin)
    also = (
        Reading(UNHINTED, 1, VERSION),
        Reading(UNHINTED, 1, VERSION + 1),
        Reading(UNHINTED, 9),
        Reading(UNHINTED, 5),
    )
    reply = score(script, also=also)
    ids = {"token_ids": list(UNHINTED.token_ids), "num_scored": 3}
    (body,) = script.bodies
    assert body["sequences"][1:] == [
        {**ids, "top_k": 1, "unless_weight_version": VERSION},
        {**ids, "top_k": 1, "unless_weight_version": VERSION + 1},
        {**ids, "top_k": 9},
        ids,
    ]
    assert reply.rows.top_ids_RK.tolist() == table_rows(REQUEST, 5).top_ids_RK.tolist()
    skipped, *read = reply.also
    assert skipped is None
    for rows, reading in zip(read, also[1:], strict=True):
        assert rows is not None
        assert rows.top_logprobs_RK.tolist() == table_rows(UNHINTED, reading.top_k).top_logprobs_RK.tolist()


def test_the_cache_is_counted_over_all_that_was_read() -> None:
    def cached(body: dict[str, Any]) -> dict[str, Any]:
        answer = plugin(body)
        for result in filter(None, answer["results"]):
            result["num_cached_tokens"] = 4
        return answer

    assert score(Script(cached), also=(Reading(UNHINTED, 1), Reading(UNHINTED, 1, VERSION))).cached_tokens == 8

    def silent(body: dict[str, Any]) -> dict[str, Any]:
        answer = cached(body)
        del answer["results"][1]["num_cached_tokens"]
        return answer

    assert score(Script(silent), also=(Reading(UNHINTED, 1),)).cached_tokens is None


def test_a_server_without_versions_reads_what_does_not_depend_on_them() -> None:
    script = Script(completions)
    reply = score(script, "/v1/completions", also=(Reading(UNHINTED, 3), Reading(UNHINTED, 1, VERSION)))
    assert len(script.bodies) == 2
    first, second = reply.also
    assert first is not None
    assert first.actual_R.tolist() == table_rows(UNHINTED, 3).actual_R.tolist()
    assert second is None


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([None, result_of(table_rows(UNHINTED, 1))], "can't be read: TypeError"),
        ([result_of(table_rows(REQUEST, 5)), None], "can't be read: TypeError"),
        ([result_of(table_rows(REQUEST, 5))], "can't be read: ValueError"),
        ([result_of(table_rows(REQUEST, 5)), result_of(table_rows(UNHINTED, 2))], "got=2, expected=1"),
    ],
)
def test_every_reading_must_be_answered(results: Any, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        score(Script({"weight_version": 0, "results": results}), also=(Reading(UNHINTED, 1),))


def test_completions_are_sent_ids_and_never_text() -> None:
    script = Script(completions)
    score(script, "/v1/completions")
    (body,) = script.bodies
    assert body["prompt"] == list(REQUEST.token_ids)
    assert (body["model"], body["prompt_logprobs"], body["max_tokens"], body["return_token_ids"]) == ("m", 5, 1, True)


@BOTH
@pytest.mark.parametrize("trouble", [500, "hang up", "{garbage"])
def test_passing_trouble_is_retried(path: str, answer: Any, trouble: Any) -> None:
    script = Script(trouble, trouble, answer)
    assert len(score(script, path).rows.actual_R) == 3
    assert len(script.bodies) == 3


def test_lasting_trouble_is_an_unreachable_server() -> None:
    with pytest.raises(ServerUnreachableError, match="HTTP 500"):
        score(Script(500), retry_s=0.1)


def test_refusal_is_not_retried() -> None:
    script = Script(422)
    with pytest.raises(ServerRequestError, match="HTTP 422"):
        score(script)
    assert len(script.bodies) == 1


def two_of_three(body: dict[str, Any]) -> dict[str, Any]:
    return plugin_answer(table_rows(TeacherRequest(REQUEST.token_ids, 2, 0, ()), 5))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "can't be read: KeyError"),
        ([], "can't be read: TypeError"),
        ({"results": []}, "can't be read: ValueError"),
        (lambda body: plugin_answer(table_rows(REQUEST, 5), actual_logprobs="*"), "can't be read"),
        (lambda body: plugin_answer(table_rows(REQUEST, 5), num_scored=4), "can't be read: ValueError"),
        (two_of_three, r"got=2, expected=3"),
        (lambda body: plugin_answer(table_rows(REQUEST, 4)), r"got=4, expected=5"),
        (
            lambda body: plugin_answer(table_rows(REQUEST, 5), actual_logprobs=b64(np.full(3, np.nan), "<f4")),
            "3 actual logprobs are not finite",
        ),
    ],
)
def test_plugin_rows_that_do_not_fit_are_refused(answer: Any, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        score(Script(answer))


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    answer = completions(body)
    answer["choices"][0]["prompt_logprobs"].pop()
    return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, "can't be read: IndexError"),
        ({"choices": [{"prompt_logprobs": None}]}, "can't be read: TypeError"),
        ({"choices": [{"prompt_token_ids": [1, 2], "prompt_logprobs": []}]}, "read 2 ids, which are not the 10"),
        (shortened, r"rows=9, token_ids=10"),
        ({"choices": [{"prompt_logprobs": [None] + [{"1": {"logprob": -1.0, "rank": 1}}] * 9}]}, "KeyError"),
    ],
)
def test_completions_that_do_not_fit_are_refused(answer: Any, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        score(Script(answer), "/v1/completions")


def test_requests_under_way_are_bounded() -> None:
    under_way, pairs = [0, 0], asyncio.Barrier(2)

    async def slow(request: web.Request) -> web.Response:
        under_way[0] += 1
        under_way[1] = max(under_way)
        await pairs.wait()
        await asyncio.sleep(0.02)  # Were more allowed, they would come now.
        under_way[0] -= 1
        return web.json_response(plugin(await request.json()))

    async def run() -> None:
        async with served({"/v1/opd/score": slow}) as url:
            teacher = PluginClient(JsonClient(url), INFO, max_concurrent=2)
            await asyncio.gather(*(teacher.score(REQUEST, 5) for _ in range(6)))
            await teacher.close()

    asyncio.run(run())
    assert under_way[1] == 2
