"""A server's model and caps, as the server reports them (I/O)."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from agentic_opd import __version__
from agentic_opd.core.attachments.requests import placeholder_of
from agentic_opd.core.errors import ServerMismatchError, ServerRequestError
from agentic_opd.core.http import JsonClient, ModelT, read_answer

RAW_LOGPROBS = "raw_logprobs"
"""vLLM's `--logprobs-mode` of logprobs before temperature, penalties and truncation; the default."""


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
    max_adapters: int = 0
    """Maximum number of LoRA adapters kept at a time; 0 if the server takes none."""
    max_lora_rank: int = 0
    learners: dict[str, int] = Field(default_factory=dict[str, int])
    """The newest version of each learner that has an adapter there."""
    weight_transfer: str | None = None
    """Backend by which the server receives weights over a process group; None if it does not."""
    workers: int = 1
    """The server's ranks in such a process group."""
    logprobs_mode: str | None = None
    """Which logprobs it returns, by vLLM's name; only `RAW_LOGPROBS` are accepted."""
    dtype: str | None = None
    """Precision of the computation by torch's name, such as `bfloat16`."""
    named_ids: bool = False
    """The server scores sequences at ids of other sequences' rows (`Reading.ids_of`), which need not be likely ones."""
    tied_embeddings: bool = False
    """The output head shares the embedding matrix and receives no separate weights."""
    broken_weights: str | None = None
    """Why the server computes nothing until whole weights are loaded; None if its weights are whole."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the server computes on."""
    placeholder: str | None = None
    """Placeholder text of an attachment in a prompt; None: the model reads text only."""


class _PluginCaps(BaseModel):
    """Fields that the plugin reports in addition to a model list's."""

    plugin_version: str
    max_logprobs: int
    vocab_size: int
    weight_version: int
    logprobs_mode: str


class _Models(BaseModel):
    data: list[Any] = Field(min_length=1)


class _ServedModel(BaseModel):
    id: str
    max_model_len: int


class _LoadedModel(BaseModel):
    root: str


async def fetch_info(http: JsonClient) -> ServerInfo:
    """Ask the plugin, or vLLM's model list if there is no plugin.

    Raises:
        ServerUnreachableError: no server answers.
        ServerRequestError: the key is refused (401, 403).
        ServerMismatchError: the server that answers is not a vLLM server, its plugin is of another version, or it
            returns other logprobs than the model's.
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
    source = "the plugin of this version (restart the server with scripts/serve_vllm MODEL)"
    caps = read_answer(_PluginCaps, answer, url, source)
    plugin_version = caps.plugin_version
    if plugin_version != __version__:
        raise ServerMismatchError(
            f"{http.base_url} has plugin {plugin_version}, and this is agentic_opd {__version__}: install one version "
            "in both environments, and restart the server with scripts/serve_vllm MODEL"
        )
    if caps.logprobs_mode != RAW_LOGPROBS:
        raise ServerMismatchError(
            f"{http.base_url} returns {caps.logprobs_mode}, and the gaps and groups need {RAW_LOGPROBS}, those of the "
            "model before temperature and top_p: restart it without --logprobs-mode"
        )
    return read_answer(ServerInfo, {**answer, "has_plugin": True, "placeholder": placeholder_of(answer)}, url, source)


async def check_model(http: JsonClient, info: ServerInfo, name: str, setting: str) -> None:
    """Check that the server serves the model that a setting names, by its served name or its checkpoint.

    Raises:
        ServerMismatchError: it serves others; the message names them and the setting.
    """
    served = [info.model]
    if name not in served:
        with suppress(ServerRequestError, ServerMismatchError):  # Such a server is known by its own name only.
            models = read_answer(_Models, await http.get("/v1/models"), http.base_url, "a list of models")
            entries = [entry for entry in models.data if isinstance(entry, dict)]
            served += [str(entry[key]) for entry in entries for key in ("id", "root") if entry.get(key)]
    if any(names_the_same(name, served_name) for served_name in served):
        return
    names = ", ".join(map(repr, dict.fromkeys(served)))
    raise ServerMismatchError(
        f"{http.base_url} serves {names}, and {setting} is {name!r}: name what is served. A tokenizer of another "
        "name belongs in tokenizer_name."
    )


def names_the_same(name: str, served: str) -> bool:
    """Return whether two names are equal, or paths of one folder."""
    return name == served or Path(name).absolute() == Path(served).absolute()


async def fetch_model_path(http: JsonClient) -> str:
    """Return the model as given to the server: a hub name, or a folder.

    Raises:
        ServerRequestError: the key is refused (401, 403).
        ServerMismatchError: the server does not report it.
    """
    problem = "does not say which model it serves: name it in openai.model_name"
    return (await _first_listed(http, _LoadedModel, problem)).root


async def _first_listed(http: JsonClient, entry: type[ModelT], problem: str) -> ModelT:
    try:
        models = read_answer(_Models, await http.get("/v1/models"), http.base_url, "a list of models")
        return read_answer(entry, models.data[0], http.base_url, "vLLM's entry for a model")
    except (ServerRequestError, ServerMismatchError) as error:
        if isinstance(error, ServerRequestError) and error.status in (401, 403):
            raise
        raise ServerMismatchError(f"{http.base_url} {problem} ({error})") from error
