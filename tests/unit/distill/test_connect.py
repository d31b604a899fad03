import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from renderers import Qwen3RendererConfig, create_renderer

from agentic_opd import __version__
from agentic_opd.core import http
from agentic_opd.core.attachments.files import ImageFolder
from agentic_opd.core.errors import ConfigError, ServerMismatchError, ServerRequestError, ServerUnreachableError
from agentic_opd.core.types import Task
from agentic_opd.distill.config import DistillConfig, JudgeConfig, TeacherConfig, TeacherServer
from agentic_opd.distill.connect import PolicyEndpoint, connect
from agentic_opd.distill.distiller import Distiller
from agentic_opd.distill.servers import DistillServers
from tests.support.settings import with_settings

from .conftest import make_qwen_tokenizer
from .fakes import Handler, Script, served

TOKENIZER = make_qwen_tokenizer()
INFO = {
    "model": "demo",
    "plugin_version": __version__,
    "logprobs_mode": "raw_logprobs",
    "vllm_version": "0.32.0",
    "max_model_len": 4096,
    "max_logprobs": 64,
    "vocab_size": 512,
    "weight_version": 0,
}
MODELS = {"object": "list", "data": [{"id": "demo", "object": "model", "max_model_len": 4096}]}


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BACKOFF_S", (0.01, 0.02))


def tokens(body: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": TOKENIZER.encode(body["prompt"], add_special_tokens=False)}


def server(**changes: Any) -> dict[str, Handler]:
    """A vLLM server with the plugin; `changes` replace fields of its info."""
    return {
        "/v1/opd/info": Script({**INFO, **changes}),
        "/v1/models": Script(MODELS),
        "/tokenize": Script(tokens),
        "/v1/completions": Script({"choices": []}),
    }


def plain_server() -> dict[str, Handler]:
    handlers = server()
    del handlers["/v1/opd/info"]
    return handlers


def connected(
    policy: dict[str, Handler], teacher_server: dict[str, Handler] | None = None, **settings: Any
) -> DistillServers:
    """Connect, close again, and return what was made."""

    async def run() -> DistillServers:
        async with served(policy) as url, served(teacher_server or {}) as teacher_url:
            address = {"base_url": f"{teacher_url}/v1"} if teacher_server else {}
            config = with_settings(DistillConfig(), {**settings, "teacher": address | settings.get("teacher", {})})
            renderer = create_renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=False))
            endpoint = PolicyEndpoint(url, "demo", SecretStr("policy-key"))
            deps = await connect(config, endpoint, renderer, TOKENIZER, max_token_length=2048, retry_s=0.2)
            await deps.close()
            return deps

    return asyncio.run(run())


def keys_sent(handlers: dict[str, Handler]) -> set[str | None]:
    scripts = [script for script in handlers.values() if isinstance(script, Script)]
    return {headers.get("Authorization") for script in scripts for headers in script.headers}


def test_the_policy_server_judges_and_teaches_by_default() -> None:
    policy = server()
    deps = connected(policy)
    assert deps.teacher.info.has_plugin
    assert (deps.judge.is_policy, deps.teacher_is_policy) == (True, True)
    assert (deps.teacher.info.model, deps.teacher.info.vocab_size) == ("demo", 512)
    assert keys_sent(policy) == {"Bearer policy-key"}


def test_without_the_plugin_it_falls_back_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    policy = plain_server()
    deps = connected(policy, distill_topk=7)
    assert not deps.teacher.info.has_plugin
    assert [record.message for record in caplog.records if "many times slower" in record.message]
    assert len(caplog.records) == 1
    probe = policy["/v1/completions"]
    assert isinstance(probe, Script)
    assert probe.bodies[0]["prompt_logprobs"] == 7


def test_a_plain_server_that_refuses_so_many_logprobs_does_not_fit() -> None:
    policy = plain_server()
    policy["/v1/completions"] = Script(400)
    with pytest.raises(ServerMismatchError, match="scripts/serve_vllm demo --max-logprobs 50"):
        connected(policy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_logprobs": 20}, "--max-logprobs 50"),
        ({"max_model_len": 1024}, "--max-model-len 2048"),
        ({"vocab_size": 100}, "vocabulary has 100 tokens"),
    ],
)
def test_a_server_that_does_not_fit_says_what_to_change(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerMismatchError, match=message):
        connected(server(**changes))


def test_a_control_needs_twice_as_many_logprobs() -> None:
    assert connected(server(max_logprobs=50)).teacher_is_policy
    with pytest.raises(ServerMismatchError, match=r"100 are asked for .* restart it with --max-logprobs 100"):
        connected(server(max_logprobs=99), hint={"control": "other"})
    assert connected(server(max_logprobs=100), hint={"control": "other"}).teacher_is_policy
    assert connected(server(max_logprobs=1), hint={"control": "other"}, distill_topk=1).teacher_is_policy
    plain = plain_server()
    connected(plain, hint={"control": "neutral"}, distill_topk=7)
    probe = plain["/v1/completions"]
    assert isinstance(probe, Script)
    assert probe.bodies[0]["prompt_logprobs"] == 14


def test_each_kind_of_task_has_its_teacher_and_the_others_the_usual_one() -> None:
    policy, math, files = server(), server(model="mathematician"), ImageFolder(Path("groups.images"))

    async def run() -> tuple[DistillServers, DistillServers, DistillServers]:
        async with served(policy) as url, served(math) as math_url:
            config = DistillConfig(
                teacher=TeacherConfig(by_kind={"math": TeacherServer(base_url=math_url, api_key=SecretStr("math-key"))})
            )
            renderer = create_renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=False))
            endpoint = PolicyEndpoint(url, "demo", SecretStr("policy-key"), files)
            deps = await connect(config, endpoint, renderer, TOKENIZER, max_token_length=2048, retry_s=0.2)
            await deps.close()
            of_math, *others = (deps.of(kind) for kind in ("math", "poetry", None))
            return of_math, others[0], others[1]

    of_math, of_poetry, of_none = asyncio.run(run())
    assert (of_math.teacher.info.model, of_math.teacher_is_policy) == ("mathematician", False)
    assert of_math.judge.is_policy
    assert of_poetry is of_none
    assert (of_none.teacher.info.model, of_none.teacher_is_policy) == ("demo", True)
    assert of_math.teacher.attached.files is of_none.teacher.attached.files is files
    assert (keys_sent(policy), keys_sent(math)) == ({"Bearer policy-key"}, {"Bearer math-key"})


@pytest.mark.parametrize("changes", [{"vocab_size": 100}, {"max_logprobs": 20}])
def test_every_kinds_teacher_must_fit(changes: dict[str, Any]) -> None:
    async def run() -> None:
        async with served(server()) as url, served(server(**changes)) as other:
            config = DistillConfig(teacher=TeacherConfig(by_kind={"math": TeacherServer(base_url=other)}))
            renderer = create_renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=False))
            await connect(config, PolicyEndpoint(url, "demo"), renderer, TOKENIZER, max_token_length=2048, retry_s=0.2)

    with pytest.raises(ServerMismatchError, match="does not fit"):
        asyncio.run(run())


def test_a_teacher_that_no_task_would_have_is_refused() -> None:
    config = DistillConfig(teacher=TeacherConfig(by_kind={"math": TeacherServer(base_url="http://127.0.0.1:1/v1")}))
    distiller = Distiller(config, max_token_length=64, retry_s=0.0)

    def connect_for(*tasks: Task) -> None:
        policy = PolicyEndpoint("http://127.0.0.1:1/v1", "demo")
        renderer = create_renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=False))
        asyncio.run(distiller.connect(policy, renderer, TOKENIZER, tasks=tasks))

    with pytest.raises(ServerUnreachableError):
        connect_for(Task("a", kind="math"), Task("b"))
    with pytest.raises(ConfigError, match="names 'math', but the tasks' kinds are: 'maths', 'sql'"):
        connect_for(Task("a", kind="sql"), Task("b", kind="maths"), Task("c"))
    with pytest.raises(ConfigError, match="none has a kind"):
        connect_for()


def test_unlimited_logprobs_fit() -> None:
    assert connected(server(max_logprobs=-1)).teacher_is_policy


def test_a_separate_teacher_needs_the_policys_tokens() -> None:
    teacher = server(model="big", vocab_size=600)
    policy = server()
    deps = connected(policy, teacher, teacher={"api_key": SecretStr("teacher-key")})
    assert (deps.judge.is_policy, deps.teacher_is_policy) == (True, False)
    assert (keys_sent(policy), keys_sent(teacher)) == ({"Bearer policy-key"}, {"Bearer teacher-key"})
    assert deps.teacher.info.model == "big"
    assert deps.teacher.info.vocab_size == 512, "ids beyond the policy's vocabulary are no good to it"
    teacher["/tokenize"] = Script({"tokens": [1, 2, 3]})
    with pytest.raises(ServerMismatchError, match="tokenizer does not fit"):
        connected(server(), teacher)


def test_an_added_token_that_differs_is_found() -> None:
    def other(body: dict[str, Any]) -> dict[str, Any]:
        text = body["prompt"].replace("</think>", "")
        return {"tokens": TOKENIZER.encode(text, add_special_tokens=False)}

    teacher = {**server(), "/tokenize": Script(other)}
    with pytest.raises(ServerMismatchError, match="tokenizer does not fit"):
        connected(server(), teacher)


def test_a_teacher_that_does_not_serve_the_model_asked_for() -> None:
    with pytest.raises(ServerMismatchError, match=r"serves 'demo', and env.teacher.model_name is 'big'"):
        connected(server(), server(), teacher={"model_name": "big"})


def test_a_separate_judge_gets_its_own_key() -> None:
    judge = Script(MODELS)

    async def run() -> DistillServers:
        async with served(server()) as url, served({"/v1/models": judge}) as judge_url:
            config = DistillConfig(
                judge=JudgeConfig(base_url=f"{judge_url}/v1", model_name="demo", api_key=SecretStr("judge-key"))
            )
            renderer = create_renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=False))
            endpoint = PolicyEndpoint(url, "demo", SecretStr("policy-key"))
            deps = await connect(config, endpoint, renderer, TOKENIZER, max_token_length=2048, retry_s=0.2)
            await deps.close()
            return deps

    assert not asyncio.run(run()).judge.is_policy
    assert judge.headers[0]["Authorization"] == "Bearer judge-key"


def test_a_refused_key_is_found_at_the_start() -> None:
    with pytest.raises(ServerRequestError, match="HTTP 401"):
        connected({**server(), "/v1/opd/info": Script(401)})
    with pytest.raises(ServerRequestError, match="401"):
        connected({**server(), "/v1/models": Script(401)})


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ServerUnreachableError, match="gave no usable answer"):
        connected({**server(), "/v1/opd/info": Script(503)})
