"""What a server says of itself, and whether it fits."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentic_opd import __version__
from agentic_opd.core.errors import ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import ServerInfo, check_model, fetch_info, fetch_model_path
from tests.unit.distill.fakes import Script, served


def asked(route: str, answer: Any, use: Callable[[JsonClient], Any]) -> Any:
    """What `use` makes of a server that gives this one answer."""

    async def run() -> Any:
        async with served({route: answer if callable(answer) else Script(answer)}) as url:
            client = JsonClient(url, "key", retry_s=0.0)
            try:
                return await use(client)
            finally:
                await client.close()

    return asyncio.run(run())


TOKENIZER = SimpleNamespace(
    encode=lambda text, add_special_tokens: [1, 2], added_tokens_decoder={9: SimpleNamespace(content="<|im_end|>")}
)


def plain(http: JsonClient) -> PluginClient:
    return PluginClient(http, ServerInfo("m", 64, has_plugin=False))


PLUGIN = {
    **{"model": "m", "max_model_len": 64, "max_logprobs": 20, "vocab_size": 99, "weight_version": 3},
    "plugin_version": __version__,
    "logprobs_mode": "raw_logprobs",
}
ODD = [None, [], '"x"', [3], {}, {"data": []}, {"data": [3]}, {"data": [{"id": "m", "max_model_len": None}]}]


def test_the_plugin_says_everything_and_the_model_list_a_little() -> None:
    assert asked("/v1/opd/info", {**PLUGIN, "new": 1}, fetch_info) == ServerInfo(
        **{"model": "m", "max_model_len": 64, "max_logprobs": 20, "vocab_size": 99, "weight_version": 3},
        **{"has_plugin": True, "plugin_version": __version__, "logprobs_mode": "raw_logprobs"},
    )
    card = {"data": [{"id": "m", "root": "org/m", "max_model_len": 64}]}
    assert asked("/v1/models", card, fetch_info) == ServerInfo("m", 64, has_plugin=False)
    assert asked("/v1/models", card, fetch_model_path) == "org/m"


def test_a_plugin_of_another_version_is_refused_with_both_versions_and_what_to_do() -> None:
    with pytest.raises(ServerMismatchError, match=f"has plugin 0.0.9, and this is agentic_opd {__version__}: install"):
        asked("/v1/opd/info", {**PLUGIN, "plugin_version": "0.0.9"}, fetch_info)


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits"])
def test_a_server_that_returns_other_logprobs_than_the_models_is_refused(mode: str) -> None:
    with pytest.raises(ServerMismatchError, match=f"returns {mode}, .* restart it without --logprobs-mode"):
        asked("/v1/opd/info", {**PLUGIN, "logprobs_mode": mode}, fetch_info)


@pytest.mark.parametrize("answer", [*ODD, {**PLUGIN, "logprobs_mode": None}, {**PLUGIN, "vocab_size": None}])
def test_an_odd_answer_of_the_plugin_is_a_mismatch(answer: Any) -> None:
    with pytest.raises(ServerMismatchError, match="/v1/opd/info is not the plugin of this version"):
        asked("/v1/opd/info", answer, fetch_info)


@pytest.mark.parametrize("answer", [*ODD, 404])
def test_an_odd_model_list_is_a_mismatch(answer: Any) -> None:
    with pytest.raises(ServerMismatchError, match="does not answer as vLLM does"):
        asked("/v1/models", answer, fetch_info)
    with pytest.raises(ServerMismatchError, match="does not say which model it serves"):
        asked("/v1/models", answer, fetch_model_path)


@pytest.mark.parametrize("answer", [None, [], '"x"', {}, {"tokens": None}, {"tokens": ["a"]}, {"tokens": [1, 9]}])
def test_a_tokenizer_that_is_another_or_says_no_ids_is_a_mismatch(answer: Any) -> None:
    with pytest.raises(ServerMismatchError, match="tokeniz"):
        asked("/tokenize", answer, lambda http: plain(http).check_tokenizer(TOKENIZER))
    script = Script({"tokens": [1, 2]})
    asked("/tokenize", script, lambda http: plain(http).check_tokenizer(TOKENIZER))
    assert script.bodies[0]["prompt"].endswith("<|im_end|>"), "added tokens are compared too"


@pytest.mark.parametrize("answer", [None, [], {}, {"prompt": None}, {"prompt": [1]}])
def test_a_text_of_ids_that_is_none_is_a_mismatch(answer: Any) -> None:
    with pytest.raises(ServerMismatchError, match="/detokenize is not vLLM's tokenizer"):
        asked("/detokenize", answer, lambda http: plain(http).text([1, 2]))
    assert asked("/detokenize", {"prompt": "ab"}, lambda http: plain(http).text((1, 2))) == "ab"


SERVED = {"data": [{"id": "m", "root": "scripts/demo_policy/policy", "max_model_len": 64}, {"id": "adapter"}, 3]}


@pytest.mark.parametrize(
    "name", ["m", "adapter", "scripts/demo_policy/policy", f"{Path.cwd()}/scripts/demo_policy/policy"]
)
def test_a_model_is_named_as_it_is_served_or_by_its_checkpoint(name: str) -> None:
    info = ServerInfo("m", 64, has_plugin=True)
    asked("/v1/models", SERVED, lambda http: check_model(http, info, name, "openai.model_name"))


@pytest.mark.parametrize("models", [SERVED, 404])
def test_a_model_that_is_not_served_is_refused_with_those_that_are(models: Any) -> None:
    info = ServerInfo("m", 64, has_plugin=True)
    with pytest.raises(
        ServerMismatchError, match=r"serves 'm'.*, and openai.model_name is 'other': name what is served"
    ):
        asked("/v1/models", models, lambda http: check_model(http, info, "other", "openai.model_name"))
