"""Choose the renderer of a model's conversations, and check at start-up that it preserves sampled turns.

In: a tokenizer and the settings. Out: a renderer of the package `renderers`, for `chat_format.ChatFormat`.
"""

import asyncio
import json
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from renderers import (
    CustomRendererConfig,
    DefaultRendererConfig,
    ParsedResponse,
    Renderer,
    config_from_name,
    create_renderer,
)
from renderers.base import MODEL_RENDERER_MAP
from renderers.parsers import TOOL_PARSERS

from agentic_opd.core.errors import ConfigError, RendererError, RewrittenError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.text import control_tokens
from agentic_opd.core.types import Message, shared_length
from agentic_opd.plugin.info import fetch_model_path
from agentic_opd.rollout.chat_format import ChatFormat, Prompt
from agentic_opd.rollout.config import RendererConfig
from agentic_opd.rollout.template import TemplateRenderer
from agentic_opd.rollout.tool_formats import FORMATS, OF_RENDERERS, WRITTEN

logger = logging.getLogger(__name__)


@contextmanager
def explained_tokenizer_errors(name: str) -> Generator[None]:
    """Convert errors of loading the tokenizer `name` to a ConfigError that says what to do.

    A name that is not a folder is logged, because an unreachable hub is retried for a minute.
    """
    if not Path(name).is_dir():
        logger.info("the tokenizer %r is no folder here: it is loaded from the hub or its cache", name)
    try:
        yield
    except Exception as error:  # A broken file of a tokenizer may raise any exception.
        reason = str(error).strip().partition("\n")[0].rstrip(" .:")
        raise ConfigError(
            f"the tokenizer {name!r} can't be loaded ({type(error).__name__}: {reason}). Set env.tokenizer_name to the "
            f"policy's model, as a hub name or a folder; a relative folder is looked for in {str(Path.cwd())!r}."
        ) from error


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder or the hub.

    Raises:
        ConfigError: it can't be loaded.
    """
    from transformers import AutoTokenizer  # The import takes seconds, and validating settings does not need it.

    load: Any = AutoTokenizer.from_pretrained
    with explained_tokenizer_errors(name):
        return load(name)


async def load_policy_tokenizer(names: Iterable[str], http: JsonClient) -> Any:
    """Load the tokenizer of the first name that is set; without one, that of the server's model.

    Raises:
        ConfigError: it can't be loaded.
        ServerError: the server does not name its model.
    """
    name = next((name for name in names if name not in ("", "none", "default")), None)
    return await asyncio.to_thread(load_tokenizer, name or await fetch_model_path(http))


def load_renderer(
    tokenizer: Any,
    name: str,
    options: Mapping[str, Any],
    *,
    tool_format: Literal["template", "text", "prompt"] = "template",
    stop_tokens: Sequence[str] = (),
) -> Renderer:
    """Create the renderer `name` for `tokenizer`; it extends prompts after user messages too.

    `ChatFormat.next_prompt` detects whether the model family drops earlier reasoning after user messages; the option
    `thinking_retention` decides it instead, if set.

    Args, as the settings of `RendererConfig`:
        tokenizer: The policy's.
        name: `renderer`.
        options: `renderer.options`.
        tool_format: How tools are described to the model.
        stop_tokens: Tokens that end a turn; empty: those of the model's own files.

    Raises:
        ConfigError: a name or an option is unknown, or no parser for tool calls is known. The message lists the names.
    """
    problem = f"renderer {name!r} with options {dict(options)!r}"
    stop_ids = _token_ids(tokenizer, stop_tokens)
    try:
        config = _config(tokenizer, name, options, tool_format)
        if isinstance(config, DefaultRendererConfig):
            return _template_renderer(tokenizer, config, tool_format, stop_ids or _stop_ids_of_files(tokenizer))
        if tool_format != "template":
            raise ConfigError(f"{problem}: renderer.tool_format {tool_format} needs renderer.name: default")
        renderer = _of_family(tokenizer, config)
    except ConfigError:
        raise
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors())
        raise ConfigError(f"{problem}: {wrong}") from error
    except Exception as error:  # A custom class may raise any exception.
        raise ConfigError(f"{problem}: {error}") from error
    stopping: Any = StoppingAt(renderer, stop_ids)
    return stopping if stop_ids else renderer


def _of_family(tokenizer: Any, config: Any) -> Any:
    """Create a model family's renderer, which keeps earlier reasoning unless its options decide that."""
    make: Any = create_renderer
    renderer = make(WithoutUnknown(tokenizer), config)
    if getattr(renderer.config, "thinking_retention", "all") is None:
        renderer.effective_thinking_retention = "all"
    return renderer


def configured_renderer(tokenizer: Any, config: RendererConfig) -> Renderer:
    """Create the renderer of the settings; see `load_renderer`."""
    return load_renderer(
        tokenizer,
        config.name,
        config.options,
        tool_format=config.tool_format,
        stop_tokens=config.stop_tokens,
    )


def _config(tokenizer: Any, name: str, options: Mapping[str, Any], tool_format: str) -> Any:
    if name == "auto":
        family = MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""))
        name = family if family and tool_format == "template" else "default"
    if ":" in name:
        return CustomRendererConfig(import_path=name, **options)
    if name == "custom":
        return CustomRendererConfig(**options)
    default = config_from_name(name)
    return type(default)(**options)


def _template_renderer(
    tokenizer: Any, config: DefaultRendererConfig, tool_format: str, stop_token_ids: Sequence[int]
) -> TemplateRenderer:
    """Return a renderer of the tokenizer's chat template, with a parser for tool calls."""
    name = config.tool_parser or (None if tool_format == "template" else "hermes")
    if tool_format != "template" and name not in WRITTEN:
        raise ConfigError(
            f"renderer.tool_format {tool_format} writes tool calls as {', '.join(WRITTEN)}; "
            f"renderer.options.tool_parser is "
            f"{name!r}"
        )
    names = ", ".join(sorted({*FORMATS, *OF_RENDERERS, *TOOL_PARSERS}))
    if name is None:
        raise ConfigError(
            f"no renderer is known for tokenizer {getattr(tokenizer, 'name_or_path', '?')!r}, so tool calls could not "
            "be read. Name the model family in `renderer.name` (for example qwen3). Or use its chat template, and name "
            "what reads its tool calls: renderer.name: default with renderer.options: {tool_parser: ...}, which is "
            f"one of {names}. If the chat template knows no tools, set renderer.tool_format: text."
        )
    if name not in FORMATS and name not in OF_RENDERERS and name not in TOOL_PARSERS:
        raise ConfigError(f"renderer.options.tool_parser is {name!r}, expected one of {names}")
    tool_parser = None if name in FORMATS else OF_RENDERERS.get(name, name)
    return TemplateRenderer(
        WithoutUnknown(tokenizer),
        config.model_copy(update={"tool_parser": tool_parser}),
        FORMATS.get(name),
        WRITTEN[name] if tool_format != "template" else None,
        call_format=name,
        lists_tools=tool_format != "prompt",
        stop_token_ids=stop_token_ids,
    )


def _token_ids(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """Return the ids of the tokens; raise ConfigError if one is not in the vocabulary."""
    vocabulary = tokenizer.get_vocab() if tokens else {}
    if unknown := [token for token in tokens if token not in vocabulary]:
        special = ", ".join(control_tokens(tokenizer).values())
        raise ConfigError(
            f"renderer.stop_tokens: {unknown[0]!r} is not a token of the tokenizer. Its special tokens: {special}"
        )
    return [vocabulary[token] for token in tokens]


def _stop_ids_of_files(tokenizer: Any) -> list[int]:
    """Return the `eos_token_id`s of the model's generation_config.json and of the tokenizer."""
    from transformers import GenerationConfig  # Takes seconds to import, and is not needed to report wrong settings.

    name = getattr(tokenizer, "name_or_path", "")
    try:
        eos: Any = GenerationConfig.from_pretrained(name).eos_token_id if name else None
    except (OSError, ValueError):  # The folder or repository has no such file.
        eos = None
    ids = eos if isinstance(eos, list) else [eos]
    return [token_id for token_id in (*ids, tokenizer.eos_token_id) if token_id is not None]


def with_template_options(
    renderer: Renderer, tokenizer: Any, options: Mapping[str, Any]
) -> tuple[Renderer, dict[str, Any]]:
    """Return the renderer with a request's options of the chat template, and those of them that change its prompts.

    An option that the model's chat template does not read changes nothing.

    Raises:
        ConfigError: the template reads an option, and the renderer can't set it, or not to this value.
    """
    if not options:
        return renderer, {}
    config: Any = getattr(renderer, "config", None)
    kind = type(config)
    is_open = getattr(kind, "_allow_opaque_template_kwargs", False)
    fields: frozenset[str] = getattr(kind, "_template_fields", frozenset())
    template = json.dumps(getattr(tokenizer, "chat_template", None) or "")
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        if name in fields or (is_open and name in template):
            if value != getattr(config, name, None):
                chosen[name] = value
        elif name in template:
            raise ConfigError(f"chat_template_kwargs.{name}: the renderer {kind.__name__} has no such option")
    if not chosen:
        return renderer, {}
    try:
        changed = kind(**{**config.model_dump(exclude_unset=True), **chosen})
    except ValueError as error:
        raise ConfigError(f"chat_template_kwargs {', '.join(chosen)}: the renderer takes no such value") from error
    inner = renderer.inner if isinstance(renderer, StoppingAt) else renderer
    if isinstance(inner, TemplateRenderer):
        changed_renderer: Any = copy(inner)
        changed_renderer.config = changed
    else:
        changed_renderer = _of_family(tokenizer, changed)
    stopping: Any = StoppingAt(changed_renderer, renderer.get_stop_token_ids())
    return (stopping if isinstance(renderer, StoppingAt) else changed_renderer), chosen


_SHORT_CHARS, _SHORT_TEXTS = 48, 64
"""Longest text whose encoding `WithoutUnknown` caches, and the number of such texts."""


class WithoutUnknown:
    """A tokenizer without an unknown token, because the renderers treat every token with that id as missing.

    In GPT-2-style tokenizers, such as SmolLM2's, `<|endoftext|>` is also the unknown token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.unk_token_id = None
        self._short: dict[object, Any] = {}

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the ids of a text. The ids of short texts are cached, because renderers encode few headers often."""
        if len(text) > _SHORT_CHARS:
            return self._tokenizer.encode(text, **options)
        return list(self._cached("encode", text, options))

    def _cached(self, method: str, text: str, options: Mapping[str, Any]) -> Any:
        key = (method, text, *sorted(options.items()))
        if key not in self._short:
            while len(self._short) >= _SHORT_TEXTS:
                self._short.pop(next(iter(self._short)))
            self._short[key] = getattr(self._tokenizer, method)(text, **options)
        return self._short[key]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return ids; None for a text that is not a token."""
        if isinstance(tokens, str):
            return self._vocabulary.get(tokens)
        return [self._vocabulary.get(token) for token in tokens]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Return the encoding of texts, cached as in `encode`: a renderer asks with "a" whether there are offsets."""
        if len(texts) == 1 and isinstance(texts[0], str) and len(texts[0]) <= _SHORT_CHARS:
            return copy(self._cached("__call__", texts[0], options))
        return self._tokenizer(*texts, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)


class StoppingAt:
    """A renderer with other stop tokens than its family's."""

    def __init__(self, renderer: Renderer, stop_token_ids: list[int]) -> None:
        self.inner, self._stop_token_ids = renderer, stop_token_ids

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stop_token_ids)

    def parse_response(self, token_ids: list[int], **kwargs: Any) -> ParsedResponse:
        """Parse a turn; remove its last token first if that is a stop token unknown to the family."""
        foreign = {*self._stop_token_ids} - {*self.inner.get_stop_token_ids()}
        ends = token_ids[-1:] and token_ids[-1] in foreign
        return self.inner.parse_response(token_ids[:-1] if ends else token_ids, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


_CALL = {"command": "ls"}


def check_round_trip(chat: ChatFormat) -> None:
    """Render, parse and extend a small conversation, to find errors at start-up instead of in every rollout.

    Raises:
        RendererError: a tool call is not parsed back from its tokens, or its answer can't be rendered.
    """
    if not chat.tools:
        return
    name = chat.tools[0]["function"]["name"]
    before: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": json.dumps(_CALL)}}
    plain: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt, written = chat.first_prompt(before), ""
    # Some families open reasoning in the prompt, so a call without reasoning is not a turn of theirs; of those, some
    # templates write no reasoning.
    thought = chat.tokenizer.encode("I look.\n</think>\n\n", add_special_tokens=False)
    for turn, thought_ids in ((plain, []), ({**plain, "reasoning_content": "I look."}, []), (plain, thought)):
        completion = _completion(chat, prompt, [*before, turn])
        completion = [*thought_ids, *completion] if completion else []
        parsed = chat.parse([*prompt.token_ids], completion, 0) if completion else None
        if parsed is not None and [c.arguments for c in parsed.tool_calls] == [_CALL]:
            break
        written = written or chat.text(completion)
    else:
        raise _unread(chat, name, written)
    answer: Message = {"role": "tool", "tool_call_id": "call00000", "name": name, "content": "ok"}
    known_ids = [*prompt.token_ids, *completion]
    try:
        chat.next_prompt(known_ids, len(prompt.token_ids), prompt.last_user_end, [*before, turn], [answer])
    except RewrittenError as error:
        logger.warning("every turn after a tool result becomes a sequence of its own: %s", error)
        chat.first_prompt([*before, turn, answer])


def _unread(chat: ChatFormat, name: str, written: str) -> RendererError:
    """Return the error for a written call to `name` that can't be parsed back, with what to do."""
    if name not in written:
        return RendererError(
            f"the chat template writes no tool calls: of one to {name} it makes {written!r}. "
            f"Set renderer.tool_format: text, "
            f"which writes them as {' or '.join(WRITTEN)} (renderer.options.tool_parser), or name the model's own "
            "renderer in `renderer.name`"
        )
    return RendererError(
        f"renderer {type(chat.renderer).__name__} does not read back the tool call it wrote, {written!r}. Name the "
        "model's own renderer in `renderer.name`, or what reads this format in renderer.options.tool_parser: "
        f"{', '.join([*FORMATS, *OF_RENDERERS, *TOOL_PARSERS])}"
    )


def _completion(chat: ChatFormat, prompt: Prompt, messages: Sequence[Message]) -> list[int]:
    """Return the ids of the last message as the renderer writes it, after the prefix shared with its prompt."""
    all_ids = chat.renderer.render_ids(list(messages), tools=chat.tools)  # type: ignore[arg-type]
    completion = all_ids[shared_length(prompt.token_ids, all_ids) :]
    closes = [i for i, token in enumerate(completion) if token in chat.stop_token_ids]
    # In some families the next message's role closes a turn.
    return completion[: closes[-1] + 1] if closes else completion
