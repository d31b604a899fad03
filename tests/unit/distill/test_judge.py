import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from aiohttp import web
from pydantic import SecretStr

from agentic_opd.core import http
from agentic_opd.core.errors import ServerMismatchError, ServerRequestError, ServerUnreachableError
from agentic_opd.core.types import JudgeTokens, Message
from agentic_opd.distill import pace
from agentic_opd.distill.config import JudgeConfig
from agentic_opd.distill.hints import parse_vote
from agentic_opd.distill.judge import OpenAIJudge

from .fakes import HINT, NEGATIVE, POSITIVE, Refused, Script, served

T = TypeVar("T")
CHAT: list[Message] = [{"role": "system", "content": "judge"}, {"role": "user", "content": "turn"}]
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BACKOFF_S", (0.01, 0.02))
    monkeypatch.setattr(pace, "_BACKOFF_S", (0.01, 0.02))


def completion(*texts: str | None) -> dict[str, Any]:
    choices = [
        {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        for i, text in enumerate(texts)
    ]
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices}


def obedient(body: dict[str, Any]) -> dict[str, Any]:
    return completion(*[POSITIVE] * body.get("n", 1))


def with_judge(script: Script, use: Callable[[OpenAIJudge], Awaitable[T]], retry_s: float = 60.0, **settings: Any) -> T:
    async def run() -> T:
        async with served({"/v1/chat/completions": script, "/v1/models": script}) as url:
            judge = OpenAIJudge(f"{url}/v1", "m", SecretStr(KEY), JudgeConfig(**settings), retry_s)
            try:
                return await use(judge)
            finally:
                await judge.close()

    return asyncio.run(run())


def votes(script: Script, num_votes: int = 3, **options: Any) -> list[int | None]:
    async def ask(judge: OpenAIJudge) -> list[int | None]:
        reply = await judge.ask(CHAT, num_votes)
        assert reply.latency_s > 0
        return [parse_vote(text).decision for text in reply.texts]

    return with_judge(script, ask, **options)


def test_all_votes_are_asked_for_at_once() -> None:
    script = Script(completion(POSITIVE, NEGATIVE, "hm"))
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    options = {"temperature": 0.3, "max_tokens": 77, "extra_body": body}
    assert votes(script, **options) == [1, -1, None]
    assert script.bodies == [
        {
            "model": "m",
            "messages": CHAT,
            "n": 3,
            "temperature": 0.3,
            "max_tokens": 77,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    assert script.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_an_endpoint_that_ignores_n_is_asked_for_the_rest_one_by_one() -> None:
    script = Script(completion(POSITIVE), completion(NEGATIVE), completion(POSITIVE))
    assert sorted(votes(script), key=str) == [-1, 1, 1]
    assert [body.get("n") for body in script.bodies] == [3, None, None]


def tokens(script: Script, **options: Any) -> JudgeTokens | None:
    async def ask(judge: OpenAIJudge) -> JudgeTokens | None:
        return (await judge.ask(CHAT, 3)).tokens

    return with_judge(script, ask, **options)


def used(read: Any, sampled: Any, *texts: str) -> dict[str, Any]:
    usage = {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": 1}
    return {**completion(*texts), "usage": usage}


def test_the_tokens_of_a_question_are_those_of_all_its_requests() -> None:
    """With all votes in one request the prompt is read once."""
    assert tokens(Script(used(90, 21, POSITIVE, NEGATIVE, POSITIVE))) == JudgeTokens(90, 21)
    apart = Script(used(90, 7, POSITIVE), used(90, 6, NEGATIVE), used(90, 8, POSITIVE))
    assert tokens(apart) == JudgeTokens(270, 21)
    refusing_n = Script(lambda body: 400 if "n" in body else used(90, 7, POSITIVE))
    assert tokens(refusing_n) == JudgeTokens(270, 21)


@pytest.mark.parametrize("usage", [None, {}, [], {"prompt_tokens": 9}, {"prompt_tokens": 0, "completion_tokens": 0}])
def test_tokens_that_an_endpoint_does_not_count_are_unknown(usage: Any) -> None:
    assert tokens(Script({**completion(*[POSITIVE] * 3), "usage": usage})) is None
    one = Script(used(90, 7, POSITIVE), {**completion(POSITIVE), "usage": usage}, used(90, 7, POSITIVE))
    assert tokens(one) is None, "a sum that lacks one of three requests is no sum"


@pytest.mark.parametrize("count", [True, 7.5, -7, "7", 2**63])
def test_a_count_that_is_no_number_of_tokens_is_unknown(count: Any) -> None:
    assert tokens(Script(used(90, count, *[POSITIVE] * 3))) is None
    assert tokens(Script(used(count, 7, *[POSITIVE] * 3))) is None


def test_an_endpoint_that_refuses_n_is_not_asked_for_it_again() -> None:
    script = Script(lambda body: 400 if "n" in body else completion(POSITIVE))

    async def ask_twice(judge: OpenAIJudge) -> int:
        return len((await judge.ask(CHAT, 3)).texts) + len((await judge.ask(CHAT, 3)).texts)

    assert with_judge(script, ask_twice) == 6
    assert [body.get("n") for body in script.bodies] == [3, *[None] * 6]


def test_more_choices_than_asked_for_are_cut_and_missing_ones_abstain() -> None:
    assert votes(Script(completion(*[POSITIVE] * 5))) == [1, 1, 1]
    assert votes(Script(completion()), num_votes=2) == [None, None]
    assert votes(Script(completion(None)), num_votes=1) == [None]


@pytest.mark.parametrize("trouble", [500, 503, 429, "hang up", "<html>not JSON"])
def test_passing_trouble_is_retried(trouble: Any) -> None:
    script = Script(trouble, trouble, obedient)
    assert votes(script) == [1, 1, 1]
    assert len(script.bodies) == 3


@pytest.mark.parametrize("status", [401, 403, 404, 413])
def test_refusals_are_not_retried(status: int) -> None:
    script = Script(status)
    with pytest.raises(ServerRequestError, match=f"refused the request.*{status}") as caught:
        votes(script)
    assert caught.value.status == status
    assert len(script.bodies) == 1


def test_a_request_that_is_refused_in_every_form_fails_with_the_reason() -> None:
    """With n and without; and as nothing says why, and nothing was answered before, with fewer parameters."""
    script = Script(400)
    with pytest.raises(ServerRequestError, match="status 400"):
        votes(script)
    sent = [[name for name in body if name not in ("model", "messages")] for body in script.bodies]
    assert sent == [
        ["max_tokens", "n", "temperature"],
        ["max_tokens", "temperature"],
        ["max_completion_tokens", "temperature"],
        ["max_tokens"],
        ["max_completion_tokens"],
        [],
    ]


def refusing(*names: str, said: str = "Unsupported parameter: '{}' is not supported with this model.") -> Any:
    """An endpoint that refuses a request with one of these parameters, and says which."""

    def answer(body: dict[str, Any]) -> Any:
        name = next((name for name in names if name in body), None)
        if name is None:
            return obedient(body)
        return Refused({"error": {"message": said.format(name), "type": "invalid_request_error"}})

    return answer


UNSUPPORTED = "Unsupported parameter: '{}' is not supported with this model. Use 'max_completion_tokens' instead."
DEFAULT_ONLY = "Unsupported value: '{}' does not support 0.7 with this model. Only the default (1) value is supported."


@pytest.mark.parametrize(
    ("names", "said", "taken"),
    [
        (["max_tokens"], UNSUPPORTED, {"max_completion_tokens": 512, "temperature": 0.7}),
        (["temperature"], DEFAULT_ONLY, {"max_tokens": 512}),
        (["max_tokens", "temperature"], "{}: Extra inputs are not permitted", {"max_completion_tokens": 512}),
        (["max_tokens", "max_completion_tokens"], "Unknown name '{}'", {"temperature": 0.7}),
        (["max_tokens"], "refused", {"max_completion_tokens": 512, "temperature": 0.7}),
        (["temperature"], "refused", {"max_tokens": 512}),
    ],
)
def test_what_the_endpoint_takes_is_found_out_once(
    names: list[str], said: str, taken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(refusing(*names, said=said))

    async def ask_twice(judge: OpenAIJudge) -> int:
        await judge.ask(CHAT, 3)
        found_out = len(script.bodies)
        assert len((await judge.ask(CHAT, 3)).texts) == 3
        assert len(script.bodies) == found_out + 1
        return found_out

    assert with_judge(script, ask_twice) <= 6
    assert script.bodies[-1] == {"model": "m", "messages": CHAT, "n": 3, **taken}
    assert caplog.text.count("refuses parameters") == 1


def test_requests_that_are_under_way_together_find_it_out_together() -> None:
    script = Script(refusing("max_tokens"))

    async def ask_many(judge: OpenAIJudge) -> list[int]:
        return [len(reply.texts) for reply in await asyncio.gather(*(judge.ask(CHAT, 2) for _ in range(4)))]

    assert with_judge(script, ask_many) == [2] * 4


def test_a_prompt_that_is_too_long_costs_the_limit_nothing() -> None:
    """vLLM names max_tokens too where prompt and answer are more than the context holds."""
    said = "'max_tokens' or 'max_completion_tokens' is too large: 512. This model's maximum context length is 1024."
    too_long = Refused({"error": {"message": said, "param": "max_tokens", "code": 400}})
    script = Script(obedient, too_long, too_long, obedient)

    async def ask(judge: OpenAIJudge) -> None:
        await judge.ask(CHAT, 3)
        with pytest.raises(ServerRequestError, match="is too large"):
            await judge.ask(CHAT, 3)
        await judge.ask(CHAT, 1)

    with_judge(script, ask)
    assert len(script.bodies) == 4
    assert all(body["max_tokens"] == 512 for body in script.bodies)


PROVIDER = {"message": "Provider returned error", "code": 502}


@pytest.mark.parametrize(
    "body",
    [
        {"error": PROVIDER},
        {"error": {"message": "slow down", "code": "429"}},
        {"error": {"message": "slow down", "type": "rate_limit_exceeded"}},
        {"object": "error", "message": "engine is gone", "code": 500},
        {**completion(""), "choices": [{"index": 0, "finish_reason": "error", "message": {}, "error": PROVIDER}]},
    ],
)
def test_an_error_in_an_answer_of_200_is_retried_if_its_code_says_so(body: dict[str, Any]) -> None:
    script = Script(body, body, obedient)
    assert votes(script) == [1, 1, 1]
    assert len(script.bodies) == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": f"no credits for {KEY}", "code": 402}, 402),
        ({"message": f"{KEY} may not", "code": "permission_denied", "status": 403}, 403),
    ],
)
def test_an_error_in_an_answer_of_200_is_that_error(error: dict[str, Any], status: int) -> None:
    script = Script({"error": error})
    with pytest.raises(ServerRequestError, match="HTTP 200 with an error") as caught:
        votes(script)
    assert (caught.value.status, len(script.bodies)) == (status, 1)
    assert error["message"].replace(KEY, "***") in str(caught.value)


def test_a_parameter_may_be_refused_in_an_answer_of_200() -> None:
    said = {"error": {"message": "Unsupported parameter: 'max_tokens'", "code": "unsupported_parameter"}}
    script = Script(lambda body: said if "max_tokens" in body else obedient(body))
    assert votes(script) == [1, 1, 1]
    assert [body.get("max_completion_tokens") for body in script.bodies] == [None, 512]


def test_something_else_than_a_chat_completion_is_a_mismatch() -> None:
    with pytest.raises(ServerMismatchError, match="something other than a chat completion"):
        votes(Script({"hello": 1}))


class Clock:
    """The time of all windows: it passes only when `after` answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: self.now))

    def after(self, seconds: float, answer: Any) -> Callable[[Any], Any]:
        def respond(body: Any) -> Any:
            self.now += seconds
            return answer(body) if callable(answer) else answer

        return respond


def test_lasting_trouble_ends_with_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(Clock(monkeypatch).after(1.0, 500))
    message = r"judge 'm' at http://127.0.0.1:\d+/v1 gave no usable answer for 2.5 s"
    with pytest.raises(ServerUnreachableError, match=message):
        votes(script, retry_s=2.5)
    assert len(script.bodies) == 4, "at 1, 2 and 3 s, and at 4 s, which is 3 s after the first failure"


def test_an_outage_is_waited_for_once_and_not_by_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(Clock(monkeypatch).after(1.0, 500))

    async def ask_again(judge: OpenAIJudge) -> int:
        with pytest.raises(ServerUnreachableError):
            await judge.ask(CHAT, 1)
        before = len(script.bodies)
        with pytest.raises(ServerUnreachableError):
            await judge.ask(CHAT, 1)
        return len(script.bodies) - before

    assert with_judge(script, ask_again, retry_s=2.5) == 1


def test_after_an_outage_a_success_gives_the_whole_window_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(500, obedient, Clock(monkeypatch).after(100.0, 500), obedient)

    async def ask_twice(judge: OpenAIJudge) -> list[Any]:
        return [parse_vote((await judge.ask(CHAT, 1)).texts[0]).hint for _ in range(2)]

    assert with_judge(script, ask_twice, retry_s=2.5) == [HINT, HINT]


def test_nobody_there() -> None:
    async def ask() -> None:
        judge = OpenAIJudge("http://127.0.0.1:9/v1", "m", None, JudgeConfig(), 0.1)
        try:
            await judge.ask(CHAT, 1)
        finally:
            await judge.close()

    with pytest.raises(ServerUnreachableError, match=r"http://127\.0\.0\.1:9/v1"):
        asyncio.run(ask())


def test_requests_under_way_are_bounded() -> None:
    under_way, pairs = [0, 0], asyncio.Barrier(2)

    class Slow(Script):
        async def __call__(self, request: Any) -> Any:
            under_way[0] += 1
            under_way[1] = max(under_way)
            await pairs.wait()
            await asyncio.sleep(0.02)  # Were more allowed, they would come now.
            under_way[0] -= 1
            return await super().__call__(request)

    async def ask_many(judge: OpenAIJudge) -> None:
        await asyncio.gather(*(judge.ask(CHAT, 1) for _ in range(8)))

    with_judge(Slow(obedient), ask_many, max_concurrent=2)
    assert under_way[1] == 2


def test_the_key_is_in_no_error_and_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    class Echo(Script):
        async def __call__(self, request: Any) -> Any:
            return web.json_response({"error": {"message": f"bad key {KEY}"}}, status=401)

    with pytest.raises(ServerRequestError) as caught:
        votes(Echo())
    assert KEY not in str(caught.value)
    assert "bad key ***" in str(caught.value)
    assert KEY not in caplog.text


def test_no_key_from_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    script = Script(obedient)

    async def run() -> None:
        async with served({"/v1/chat/completions": script}) as url:
            judge = OpenAIJudge(f"{url}/v1", "m", None, JudgeConfig())
            await judge.ask(CHAT, 1)
            await judge.close()

    asyncio.run(run())
    assert KEY not in script.headers[0]["Authorization"]


@pytest.mark.parametrize(
    ("listed", "context"),
    [
        ([{"id": "m", "max_model_len": 4096}], 4096),
        ([{"id": "m", "context_length": 8192}], 8192),
        ([{"id": "m", "max_model_len": None, "parent": "base"}, {"id": "base", "max_model_len": 2048}], 2048),
        ([{"id": "m", "parent": "gone"}], None),
        ([{"id": "m", "parent": "m"}], None),
        ([{"id": "m", "max_model_len": True}], None),
    ],
    ids=["vllm", "openrouter", "adapter", "parent not listed", "its own parent", "no number"],
)
def test_the_context_is_read_from_the_list_of_models(listed: list[Any], context: int | None) -> None:
    async def read(judge: OpenAIJudge) -> int | None:
        await judge.check()
        return judge.context

    assert with_judge(Script({"object": "list", "data": listed}), read) == context


def test_check_finds_a_wrong_key_and_forgives_a_missing_route() -> None:
    with_judge(Script({"object": "list", "data": []}), lambda judge: judge.check())
    with_judge(Script(404), lambda judge: judge.check())
    with pytest.raises(
        ServerRequestError, match=r"401.*An API key was sent.* does not accept it: check openai\.api_key"
    ):
        with_judge(Script(401), lambda judge: judge.check())
    with pytest.raises(ServerRequestError, match=r"check env\.judge\.api_key"):
        with_judge(Script(401), lambda judge: judge.check(), base_url="http://judge/v1")


@pytest.mark.parametrize(
    ("models", "answer", "refusal"),
    [
        ([{"id": "m", "object": "model"}], Script(500), None),
        ([{"id": "other", "object": "model"}], Script(obedient), None),  # An endpoint need not list its aliases.
        ([], Script(404), None),
        (
            [{"id": "large", "object": "model"}, {"id": "small", "object": "model"}],
            Script(404),
            r"serves 'large', 'small', and env\.judge\.model_name is 'm': name what is served",
        ),
    ],
)
def test_check_finds_a_model_that_the_endpoint_does_not_have(
    models: list[Any], answer: Script, refusal: str | None
) -> None:
    async def run() -> None:
        listed = Script({"object": "list", "data": models})
        async with served({"/v1/models": listed, "/v1/chat/completions": answer}) as url:
            judge = OpenAIJudge(f"{url}/v1", "m", None, JudgeConfig(base_url=f"{url}/v1"), 0.0)
            try:
                await judge.check()
            finally:
                await judge.close()

    if refusal is None:
        asyncio.run(run())
    else:
        with pytest.raises(ServerMismatchError, match=refusal):
            asyncio.run(run())


@pytest.mark.parametrize(
    ("entry", "context"),
    [
        ({"id": "m", "max_model_len": 4096}, 4096),
        ({"id": "m", "context_length": 131_072}, 131_072),
        ({"id": "other", "max_model_len": 4096}, None),
        ({"id": "m", "max_model_len": "long"}, None),
        ({"id": "m", "max_model_len": True}, None),
        ("m", None),
    ],
)
def test_the_context_is_the_one_that_the_endpoint_lists(entry: Any, context: int | None) -> None:
    async def read(judge: OpenAIJudge) -> int | None:
        await judge.check()
        return judge.context

    listed = {"object": "list", "data": [entry]}
    script = Script(lambda body: listed if body is None else completion("Hello"))
    assert with_judge(script, read) == context


def test_a_judge_that_is_not_there_is_named_with_its_setting() -> None:
    async def ask(**settings: Any) -> None:
        judge = OpenAIJudge("http://127.0.0.1:9/v1", "m", None, JudgeConfig(**settings), 0.0)
        try:
            await judge.check()
        finally:
            await judge.close()

    with pytest.raises(ServerUnreachableError, match=r"Does it run at this address \(env\.judge\.base_url\)"):
        asyncio.run(ask(base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(ServerUnreachableError, match=r"Does it run at this address \(openai\.base_url\)"):
        asyncio.run(ask())


def test_half_a_surrogate_pair_in_an_answer_is_replaced() -> None:
    """In a hint, and beside it."""
    halves = [f"\\boxed{{1}} \udc80\n[HINT_START]{HINT} \ud83d[HINT_END]", POSITIVE]

    async def ask(judge: OpenAIJudge) -> list[str | None]:
        reply = await judge.ask(CHAT, 2)
        assert "".join(reply.texts).encode()
        return [parse_vote(text).hint for text in reply.texts]

    assert with_judge(Script(completion(*halves)), ask) == [f"{HINT} \ufffd", HINT]


@pytest.mark.parametrize(("variable", "is_read"), [("http_proxy", True), ("NETRC", True), (None, False)])
def test_the_environment_is_looked_up_only_where_it_has_a_proxy_or_a_netrc_file(
    variable: str | None, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.touch()
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ftp_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable is not None:
        monkeypatch.setenv(variable, str(netrc) if variable == "NETRC" else "http://127.0.0.1:9")

    async def trust() -> bool:
        judge = OpenAIJudge("http://judge/v1", "m", SecretStr(KEY), JudgeConfig(), 1.0)
        try:
            return judge._open().trust_env
        finally:
            await judge.close()

    assert asyncio.run(trust()) is is_read
