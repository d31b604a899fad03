"""What a server says of itself, and whether that fits the settings (I/O)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentic_opd.core.errors import ServerMismatchError, ServerRequestError
from agentic_opd.core.http import JsonClient


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A vLLM server's model and caps. Without the plugin the caps that only it tells are None."""

    model: str
    max_model_len: int
    has_plugin: bool
    max_logprobs: int | None = None
    """-1 means no limit."""
    vocab_size: int | None = None
    weight_version: int | None = None
    plugin_version: str | None = None
    vllm_version: str | None = None


async def fetch_server_info(client: JsonClient) -> ServerInfo:
    """Ask the plugin, or vLLM's own model list where there is no plugin.

    Raises:
        ServerUnreachableError: nobody answers.
        ServerMismatchError: something answers, but it is no vLLM server.
    """
    try:
        info = await client.get("/v1/opd/info")
    except ServerRequestError as error:
        if error.status != 404:
            raise
        return await _info_without_plugin(client)
    try:
        return ServerInfo(
            model=str(info["model"]),
            max_model_len=int(info["max_model_len"]),
            has_plugin=True,
            max_logprobs=int(info["max_logprobs"]),
            vocab_size=int(info["vocab_size"]),
            weight_version=int(info["weight_version"]),
            plugin_version=info.get("plugin_version"),
            vllm_version=info.get("vllm_version"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerMismatchError(
            f"{client.base_url}/v1/opd/info answered {str(info)[:200]!r}, which is not what the plugin of this version "
            "says. Restart the server with scripts/serve_vllm MODEL."
        ) from error


async def fetch_model_path(client: JsonClient) -> str:
    """The model as the server was told to load it: a hub name, or a folder.

    Raises:
        ServerMismatchError: the server does not say.
    """
    try:
        return str((await client.get("/v1/models"))["data"][0]["root"])
    except (ServerRequestError, KeyError, IndexError, TypeError) as error:
        raise ServerMismatchError(
            f"{client.base_url} does not say which model it serves ({error!r}); name it in openai.model_name"
        ) from error


async def _info_without_plugin(client: JsonClient) -> ServerInfo:
    try:
        card = (await client.get("/v1/models"))["data"][0]
        return ServerInfo(model=card["id"], max_model_len=card["max_model_len"], has_plugin=False)
    except (ServerRequestError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, ServerRequestError) and error.status in (401, 403):
            raise
        raise ServerMismatchError(
            f"{client.base_url} answers, but not as a vLLM server does ({error!r}). Start one with "
            "scripts/serve_vllm MODEL."
        ) from error


async def check_tokenizer(
    client: JsonClient, info: ServerInfo, encode: Callable[[str], Sequence[int]], special: str
) -> None:
    """Refuse a server whose tokenizer maps a probe text to other ids than ours.

    Raises:
        ServerMismatchError: the ids differ; the message holds both.
    """
    probe = f"def f(x):\n    return x * 2  # é, 数, 🙂{special}"
    body = {"model": info.model, "prompt": probe, "add_special_tokens": False}
    theirs = (await client.post("/tokenize", body))["tokens"]
    ours = encode(probe)
    if list(theirs) != list(ours):
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
        top_k: Logprobs that will be asked for at each position; None where none are.

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
            f"it returns at most {info.max_logprobs} logprobs, but env.distill_topk is {top_k}: restart it with "
            f"--max-logprobs {top_k} or more, or lower env.distill_topk"
        )
    if wrong:
        raise ServerMismatchError(f"{base_url} (model {info.model!r}) does not fit: " + "; ".join(wrong) + ".")
