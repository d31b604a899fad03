"""What a server says of itself, and whether that fits the settings (I/O)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from agentic_opd.core.errors import ServerMismatchError, ServerRequestError
from agentic_opd.core.http import JsonClient, ModelT, read_answer


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A vLLM server's model and caps. Without the plugin, the caps that only it tells are None."""

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
    """What the plugin's `/v1/opd/score` understands; see `serving/score.py`."""
    generate_route: int = 1
    """What the plugin's `/generate` understands; see `serving/generate.py`."""
    max_adapters: int = 0
    """LoRA adapters that it keeps at a time; 0: it takes none."""
    max_lora_rank: int = 0
    weight_transfer: str | None = None
    """The backend by which it takes weights over a process group; None: it does not."""
    workers: int = 1
    """Its ends in such a group."""
    dtype: str | None = None
    """What it computes in, by torch's name: `bfloat16`."""
    tied_embeddings: bool = False
    """Its output head is its embedding matrix, and takes no weights of its own."""


class _PluginInfo(BaseModel):
    model: str
    max_model_len: int
    max_logprobs: int
    vocab_size: int
    weight_version: int
    plugin_version: str | None = None
    vllm_version: str | None = None
    score_route: int = 1
    generate_route: int = 1
    max_adapters: int = 0
    max_lora_rank: int = 0
    weight_transfer: str | None = None
    workers: int = 1
    dtype: str | None = None
    tied_embeddings: bool = False


class _Models(BaseModel):
    data: list[Any] = Field(min_length=1)


class _Served(BaseModel):
    id: str
    max_model_len: int


class _Loaded(BaseModel):
    root: str


class _Tokens(BaseModel):
    tokens: list[int]


class _Text(BaseModel):
    prompt: str


async def fetch_server_info(client: JsonClient) -> ServerInfo:
    """Ask the plugin, or vLLM's own model list if there is no plugin.

    Raises:
        ServerUnreachableError: nobody answers.
        ServerRequestError: the key is refused (401, 403).
        ServerMismatchError: something answers, but it is not a vLLM server.
    """
    try:
        answer = await client.get("/v1/opd/info")
    except ServerRequestError as error:
        if error.status != 404:
            raise
        card = await _listed_model(
            client, _Served, "does not answer as vLLM does: start it with scripts/serve_vllm MODEL"
        )
        return ServerInfo(card.id, card.max_model_len, has_plugin=False)
    what = "the plugin of this version (restart the server with scripts/serve_vllm MODEL)"
    info = read_answer(_PluginInfo, answer, f"{client.base_url}/v1/opd/info", what)
    return ServerInfo(has_plugin=True, **info.model_dump())


async def fetch_model_path(client: JsonClient) -> str:
    """The model as the server was told to load it: a hub name, or a folder.

    Raises:
        ServerRequestError: the key is refused (401, 403).
        ServerMismatchError: the server does not say.
    """
    problem = "does not say which model it serves: name it in openai.model_name"
    return (await _listed_model(client, _Loaded, problem)).root


async def _listed_model(client: JsonClient, entry: type[ModelT], problem: str) -> ModelT:
    """The first entry of the server's model list."""
    try:
        models = read_answer(_Models, await client.get("/v1/models"), client.base_url, "a list of models")
        return read_answer(entry, models.data[0], client.base_url, "vLLM's entry for a model")
    except (ServerRequestError, ServerMismatchError) as error:
        if isinstance(error, ServerRequestError) and error.status in (401, 403):
            raise
        raise ServerMismatchError(f"{client.base_url} {problem} ({error})") from error


async def ask_token_ids(client: JsonClient, body: dict[str, Any]) -> list[int]:
    """The ids that the server makes of a prompt or of messages.

    Raises:
        ServerRequestError: the server refuses them.
        ServerMismatchError: it answers something else than ids.
    """
    answer = await client.post("/tokenize", body)
    return read_answer(_Tokens, answer, f"{client.base_url}/tokenize", "vLLM's tokenizer").tokens


async def ask_text(client: JsonClient, model: str, token_ids: Sequence[int]) -> str:
    """The text that the server reads the ids as.

    Raises:
        ServerRequestError: the server refuses them.
        ServerMismatchError: it answers something else than a text.
    """
    answer = await client.post("/detokenize", {"model": model, "tokens": list(token_ids)})
    return read_answer(_Text, answer, f"{client.base_url}/detokenize", "vLLM's tokenizer").prompt


async def check_tokenizer(
    client: JsonClient, info: ServerInfo, encode: Callable[[str], Sequence[int]], special: str
) -> None:
    """Refuse a server whose tokenizer maps a probe text to other ids than ours.

    Raises:
        ServerMismatchError: the ids differ, and the message holds both; or the server does not say its ids.
    """
    probe = f"def f(x):\n    return x * 2  # é, 数, 🙂{special}"
    body = {"model": info.model, "prompt": probe, "add_special_tokens": False}
    theirs = await ask_token_ids(client, body)
    ours = encode(probe)
    if theirs != list(ours):
        raise ServerMismatchError(
            f"the tokenizer does not fit {client.base_url} (model {info.model!r}): a probe text is "
            f"{list(ours)[:12]}... here and {theirs[:12]}... there. Set env.tokenizer_name to the model that is served."
        )


def check_caps(base_url: str, info: ServerInfo, *, context: int, vocab_size: int, top_k: int | None) -> None:
    """Refuse a server whose context, vocabulary or logprobs cap is too small; all that is wrong is said at once.

    Args:
        base_url: The server, for the message.
        info: What it said.
        context: Tokens that a request may hold.
        vocab_size: Tokens that our tokenizer knows.
        top_k: Logprobs that will be asked for at each position; None if no logprobs are.

    Raises:
        ServerMismatchError: with what to restart the server, or what to set.
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
        raise ServerMismatchError(f"{base_url} (model {info.model!r}) does not fit: " + "; ".join(wrong) + ".")
