"""A server's model and caps: how to ask for them, and how to check them against the settings (I/O)."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from agentic_opd.core.errors import ServerMismatchError, ServerRequestError
from agentic_opd.core.http import JsonClient, ModelT, read_answer


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A vLLM server's model and caps. Caps that only the plugin reports are None without it."""

    model: str
    max_model_len: int
    has_plugin: bool
    max_logprobs: int | None = None
    """-1 means no limit."""
    vocab_size: int | None = None
    weight_version: int | None = None
    plugin_version: str | None = None
    vllm_version: str | None = None
    score_route: int = 1
    """Version of the plugin's `/v1/opd/score` route; see `serving/score.py`."""
    generate_route: int = 1
    """Version of the plugin's `/generate` route; see `serving/generate.py`."""
    max_adapters: int = 0
    """Maximum number of LoRA adapters kept at a time; 0 if the server takes none."""
    max_lora_rank: int = 0
    weight_transfer: str | None = None
    """Backend by which the server receives weights over a process group; None if it does not."""
    workers: int = 1
    """The server's ranks in such a process group."""
    dtype: str | None = None
    """Precision of the computation by torch's name, such as `bfloat16`."""
    tied_embeddings: bool = False
    """The output head shares the embedding matrix and receives no separate weights."""


class _PluginCaps(BaseModel):
    """Fields that every version of the plugin reports."""

    max_logprobs: int
    vocab_size: int
    weight_version: int


class _Models(BaseModel):
    data: list[Any] = Field(min_length=1)


class _ServedModel(BaseModel):
    id: str
    max_model_len: int


class _LoadedModel(BaseModel):
    root: str


class _Tokens(BaseModel):
    tokens: list[int]


class _Text(BaseModel):
    prompt: str


async def fetch_info(http: JsonClient) -> ServerInfo:
    """Ask the plugin, or vLLM's model list if there is no plugin.

    Raises:
        ServerUnreachableError: no server answers.
        ServerRequestError: the key is refused (401, 403).
        ServerMismatchError: the server that answers is not a vLLM server.
    """
    try:
        answer = await http.get("/v1/opd/info")
    except ServerRequestError as error:
        if error.status != 404:
            raise
        card = await _first_listed(
            http, _ServedModel, "does not answer as vLLM does: start it with scripts/serve_vllm MODEL"
        )
        return ServerInfo(card.id, card.max_model_len, has_plugin=False)
    url = f"{http.base_url}/v1/opd/info"
    what = "the plugin of this version (restart the server with scripts/serve_vllm MODEL)"
    read_answer(_PluginCaps, answer, url, what)
    return read_answer(ServerInfo, {**answer, "has_plugin": True}, url, what)


async def fetch_model_path(http: JsonClient) -> str:
    """Return the model as given to the server: a hub name, or a folder.

    Raises:
        ServerRequestError: the key is refused (401, 403).
        ServerMismatchError: the server does not report it.
    """
    problem = "does not say which model it serves: name it in openai.model_name"
    return (await _first_listed(http, _LoadedModel, problem)).root


async def _first_listed(http: JsonClient, entry: type[ModelT], problem: str) -> ModelT:
    """Return the first entry of the server's model list."""
    try:
        models = read_answer(_Models, await http.get("/v1/models"), http.base_url, "a list of models")
        return read_answer(entry, models.data[0], http.base_url, "vLLM's entry for a model")
    except (ServerRequestError, ServerMismatchError) as error:
        if isinstance(error, ServerRequestError) and error.status in (401, 403):
            raise
        raise ServerMismatchError(f"{http.base_url} {problem} ({error})") from error


async def ask_token_ids(http: JsonClient, body: dict[str, Any]) -> list[int]:
    """Return the server's token ids for a prompt or for messages.

    Raises:
        ServerRequestError: the server refuses the prompt or the messages.
        ServerMismatchError: the response is not a list of ids.
    """
    answer = await http.post("/tokenize", body)
    return read_answer(_Tokens, answer, f"{http.base_url}/tokenize", "vLLM's tokenizer").tokens


async def ask_text(http: JsonClient, model: str, token_ids: Sequence[int]) -> str:
    """Return the server's decoding of the ids.

    Raises:
        ServerRequestError: the server refuses the ids.
        ServerMismatchError: the response is not a text.
    """
    answer = await http.post("/detokenize", {"model": model, "tokens": list(token_ids)})
    return read_answer(_Text, answer, f"{http.base_url}/detokenize", "vLLM's tokenizer").prompt


async def check_tokenizer(http: JsonClient, info: ServerInfo, tokenizer: Any) -> None:
    """Refuse a server whose tokenizer maps a probe text with all added tokens to other ids than `tokenizer`.

    Raises:
        ServerMismatchError: the ids differ (the message holds both), or the server does not return ids.
    """
    added = "".join(token.content for token in tokenizer.added_tokens_decoder.values())
    probe = f"def f(x):\n    return x * 2  # é, 数, 🙂{added}"
    ours = list(tokenizer.encode(probe, add_special_tokens=False))
    theirs = await ask_token_ids(http, {"model": info.model, "prompt": probe, "add_special_tokens": False})
    if theirs != ours:
        raise ServerMismatchError(
            f"the tokenizer does not fit {http.base_url} (model {info.model!r}): a probe text is {ours[:12]}... here "
            f"and {theirs[:12]}... there. Set env.tokenizer_name to the model that is served."
        )


def check_caps(url: str, info: ServerInfo, *, context: int = 0, vocab_size: int = 0, top_k: int | None = None) -> None:
    """Refuse a server whose context, vocabulary or logprobs cap is too small; one message lists every problem.

    Args:
        url: The server, for the message.
        info: The server's caps.
        context: Tokens that a request may hold.
        vocab_size: Size of the local tokenizer's vocabulary.
        top_k: Logprobs to be requested at each position; None if no logprobs are.

    Raises:
        ServerMismatchError: a cap is too small; the message says how to restart the server, or what to set.
    """
    wrong: list[str] = []
    if info.max_model_len < context:
        wrong.append(
            f"its context holds {info.max_model_len} tokens, but env.max_token_length is {context}: restart it with "
            f"--max-model-len {context} or more, or lower env.max_token_length"
        )
    if info.vocab_size is not None and info.vocab_size < vocab_size:
        wrong.append(
            f"its vocabulary has {info.vocab_size} tokens, the tokenizer {vocab_size}: set env.tokenizer_name to the "
            "model that is served"
        )
    if top_k is not None and info.max_logprobs is not None and 0 <= info.max_logprobs < top_k:
        wrong.append(
            f"it returns at most {info.max_logprobs} logprobs, but {top_k} are asked for (env.distill_topk, or twice "
            f"that with env.control): restart it with --max-logprobs {top_k} or more, or lower env.distill_topk"
        )
    if wrong:
        raise ServerMismatchError(f"{url} (model {info.model!r}) does not fit: " + "; ".join(wrong) + ".")
