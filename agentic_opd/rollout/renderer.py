"""Which renderer writes a model's conversations, and the proof at start-up that it keeps what was sampled.

In: a tokenizer and the settings. Out: a `renderers` renderer for `chat.Chat`.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from renderers import AutoRendererConfig, DefaultRenderer, Renderer, config_from_name, create_renderer

from agentic_opd.core.errors import ConfigError, RendererError
from agentic_opd.core.types import Message
from agentic_opd.rollout.chat import Chat


@contextmanager
def explained_tokenizer_errors(name: str) -> Generator[None]:
    """Turn what loading the tokenizer `name` can raise into a ConfigError that says what to do."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer {name!r} can't be loaded ({type(error).__name__}: {error}). Set "
            "env.tokenizer_name to the policy's model, as a hub name or a folder."
        ) from error


def load_renderer(tokenizer: Any, name: str, options: dict[str, Any]) -> Renderer:
    """Make the renderer `name` for `tokenizer`, one that keeps earlier reasoning so that prompts can be extended.

    Raises:
        ConfigError: the name or an option is unknown, or no parser for tool calls is known.
    """
    make: Any = create_renderer
    try:
        renderer: Any = make(tokenizer, type(config_from_name(name) or AutoRendererConfig())(**options))
        resolved = renderer.config
        if not isinstance(renderer, DefaultRenderer) and resolved.thinking_retention is None:
            renderer = make(tokenizer, resolved.model_copy(update={"thinking_retention": "all"}))
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"renderer {name!r} with options {options!r}: {error}") from error
    if isinstance(renderer, DefaultRenderer) and not renderer.supports_tools:
        raise ConfigError(
            f"no renderer is known for tokenizer {getattr(tokenizer, 'name_or_path', '?')!r}, so tool calls could not "
            "be parsed. Name the model family in `renderer` (for example qwen3), or use renderer: default with "
            "renderer_options: {tool_parser: ...}."
        )
    return renderer


def check_round_trip(chat: Chat) -> None:
    """Render, parse and extend a small conversation, to find at start-up what would fail in every rollout.

    Raises:
        RendererError: a tool call does not survive the way to tokens and back, or prompts can't be extended.
    """
    name = chat.tools[0]["function"]["name"]
    before: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    call = {"id": "call_0_0", "type": "function", "function": {"name": name, "arguments": '{"command": "ls"}'}}
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = chat.first_prompt(before)
    whole = chat.renderer.render_ids([*before, turn], tools=chat.tools)  # type: ignore[list-item]
    shared = 0
    while shared < min(len(prompt.token_ids), len(whole)) and prompt.token_ids[shared] == whole[shared]:
        shared += 1
    completion = whole[shared:]
    closes = [i for i, token in enumerate(completion) if token in chat.stop_token_ids]
    if closes:  # Some families close no turn of their own: the next message's role does.
        completion = completion[: closes[-1] + 1]
    parsed = chat.parse([*prompt.token_ids], completion, 0) if completion else None
    if parsed is None or [c.arguments for c in parsed.tool_calls] != [{"command": "ls"}]:
        raise RendererError(
            f"renderer {type(chat.renderer).__name__} does not read back the tool call it wrote; name the model's "
            "own renderer in `renderer`, or another renderer_options.tool_parser"
        )
    answer: Message = {"role": "tool", "tool_call_id": "call_0_0", "name": name, "content": "ok"}
    known = [*prompt.token_ids, *completion]
    chat.next_prompt(known, len(prompt.token_ids), prompt.last_user_end, [*before, turn], [answer])


def reasoning_warning(chat: Chat) -> str | None:
    """What a model that thinks cannot do with this renderer; None if it can do all, or does not think.

    Sampled reasoning stays in every later prompt, so a template that drops it can't be followed further.
    """
    before: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = chat.first_prompt(before)
    if "</think>" in chat.tokenizer.decode(list(prompt.token_ids[prompt.assistant_open :])):
        return None  # Thinking is switched off: the opening holds a block that is empty.
    turn: Message = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    try:
        known = chat.renderer.render_ids([*before, turn], tools=chat.tools)  # type: ignore[list-item]
        reply: Message = {"role": "user", "content": "u"}
        chat.next_prompt(known, len(prompt.token_ids), prompt.last_user_end, [*before, turn], [reply])
    except RendererError:
        return (
            "the chat template drops earlier reasoning when a user speaks. An episode of a model that thinks ends "
            "there (render_error), and so does one with a turn that was cut off: name the model's own renderer in "
            "env.renderer, or switch thinking off in env.renderer_options"
        )
    return None
