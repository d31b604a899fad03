"""The sampler: render a request as the continuation of a session, sample its choices, and store each finished turn.

The caller provides the function that stores turns: the gateway writes a journal, an agent program's run keeps them for
one episode.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from renderers import Renderer

from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.errors import ConfigError, RendererError, ServerMismatchError, ServerRequestError
from agentic_opd.gateway.choice import Choice, Finished, Piece
from agentic_opd.gateway.errors import ClientError, as_refusal
from agentic_opd.gateway.grammar import CallForm, answer_or_calls, answer_schema, call_form, call_grammar
from agentic_opd.gateway.images import image_digests
from agentic_opd.gateway.request import Asked, ignored, prompt_key
from agentic_opd.gateway.sessions import OpenSession, Place
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import Follows, Path, RecordedTurn, recorded, trace_of
from agentic_opd.plugin.client import PluginClient
from agentic_opd.rollout.chat_format import ChatFormat, ImageTokens, ParsedTurn
from agentic_opd.rollout.conversation import Conversation
from agentic_opd.rollout.renderer import with_template_options

logger = logging.getLogger(__name__)

CONTEXT_FULL = "context_length_exceeded"
"""Error code of a request whose prompt leaves no room for an answer."""
_RENDERED_AT_ONCE = 2**14
"""Largest request (characters) that is rendered on the event loop, which takes a few milliseconds."""
_MOST_CHARS = 16
"""Upper bound of the mean number of characters per token in a prompt, far above that of natural text or code.

A request that would not fit into the context even at this density is refused before it is rendered.
"""
_MOST_TOGETHER = 8
"""Maximum tokens per event for a streaming client.

The number used is half the number of open streams, so up to three streams receive every token separately. Forwarding
single tokens of many streams would take CPU time from the engine.
"""
_UNSEEN_TOGETHER = 128
"""Tokens per event for a client that does not stream: few events, but frequent enough to keep the connection active."""
_CHATS_KEPT = 64
"""Number of tool sets whose `ChatFormat` is cached."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The first event of an answer: its session and its prompt."""

    session_id: str
    prompt_ids: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


Answer = AsyncGenerator[Begun | Piece | Finished]
"""`Begun`, then pieces of the choices as they are sampled; the last event of a choice is its `Finished`."""

Keep = Callable[[OpenSession, RecordedTurn], Awaitable[None]]
"""Function that stores a finished turn. It is called before the turn's `Finished`, even if the client disconnects."""


class Sampler:
    """The path from a request to stored turns: rendering, sampling, storing."""

    def __init__(
        self, renderer: Renderer, tokenizer: Any, telemetry: Telemetry, keep: Keep, first_turn_id: int = 1
    ) -> None:
        """Start without turns; ids count from `first_turn_id`."""
        self._telemetry, self._keep = telemetry, keep
        self._chats = _ChatFormats(renderer, tokenizer)
        self._aside = ThreadPoolExecutor(1, "rendering")
        self._chats_aside: _ChatFormats | None = None
        self._turn_ids = itertools.count(first_turn_id)
        self._streams = 0
        """Number of open answers to streaming clients."""

    def close(self) -> None:
        """Stop the rendering thread without waiting for requests that it still renders."""
        self._aside.shutdown(wait=False, cancel_futures=True)

    def check_size(self, asked: Asked, context: int) -> None:
        """Refuse a request that certainly exceeds the context, before any expensive work.

        Raises:
            ClientError: 400, the request is too long.
        """
        earlier = asked.earlier_reasoning
        size = asked.size + (earlier if earlier and self._keeps_reasoning else 0)
        if (tokens := max(asked.parts, size // _MOST_CHARS)) >= context:
            raise _too_long(asked, f"at least {tokens}", context)

    def settled(self, asked: Asked) -> Asked:
        """Return the request with the template options that change this model's prompts."""
        template = self._chats.effective(asked.template)
        return replace(asked, template=template, prompt_key=prompt_key(asked.tools, template))

    async def count(self, asked: Asked, context: int, images: ImageTokens | None = None) -> int:
        """Return the number of tokens of a request's prompt, rendered from its first message."""
        asked = self.settled(asked)
        self.check_size(asked, context)
        conversation, _ = await self.prompted(Place(None, (), asked.messages), asked, images)
        return len(conversation.prompt())

    @cached_property
    def _keeps_reasoning(self) -> bool:
        """Whether prompts include reasoning from before the last user message, as a field or in the content."""
        chat, user = self._chats.base, {"role": "user", "content": "u"}
        turn = {"role": "assistant", "content": "a"}
        by_itself = [{**turn, "reasoning_content": text} for text in ("r", "another")]
        inline = [{**turn, "content": f"<think>{text}</think>a"} for text in ("r", "another")]
        try:
            pairs = [[chat.first_prompt([user, one, user]) for one in ones] for ones in (by_itself, inline)]
        except RendererError:
            return True
        return any(first != second for first, second in pairs)

    async def prompted(
        self, place: Place, asked: Asked, images: ImageTokens | None = None
    ) -> tuple[Conversation, Path | tuple[()]]:
        """Return the conversation with the request's prompt, and the turns that it continues.

        `images` are the pictures of the conversation.

        If the template rewrites earlier messages, the whole prompt is rendered anew and continues no turn. A long
        request is rendered on a thread with a separate tokenizer, because tokenizers are not thread-safe.

        Raises:
            ClientError: 400, the messages can't be rendered.
        """
        if images is None and image_digests(asked):
            raise ClientError(400, f"{asked.at}: pictures are not read here", asked.at, "no_images")
        chat = self._chats.of(asked).with_images(images)
        if asked.size + asked.earlier_reasoning <= _RENDERED_AT_ONCE:
            return self._prompted(chat, place, asked)
        conversation, path = await asyncio.get_running_loop().run_in_executor(
            self._aside, self._prompted_aside, place, asked, images
        )
        conversation.chat = chat
        return conversation, path

    def _prompted_aside(
        self, place: Place, asked: Asked, images: ImageTokens | None
    ) -> tuple[Conversation, Path | tuple[()]]:
        self._chats_aside = self._chats_aside or self._chats.copy()
        return self._prompted(self._chats_aside.of(asked).with_images(images), place, asked)

    def _prompted(self, chat: ChatFormat, place: Place, asked: Asked) -> tuple[Conversation, Path | tuple[()]]:
        if place.path:
            conversation = Conversation.restored(chat, trace_of(place.path))
            conversation.answer(place.new)
            try:
                conversation.prompt()
            except RendererError:  # Not logged: its text may quote the messages.
                logger.warning("the chat template rewrites earlier messages: a conversation goes on as a branch")
            else:
                return conversation, place.path
        conversation = Conversation(chat, asked.messages)
        try:
            conversation.prompt()
        except RendererError as error:
            raise ClientError(400, f"the messages can't be written as a prompt: {error}", asked.at) from error
        return conversation, ()

    async def sampled(
        self,
        asked: Asked,
        session: OpenSession,
        server: PluginClient,
        conversation: Conversation,
        path: Path | tuple[()],
        *,
        context: int,
        follows: Follows | None = None,
    ) -> Answer:
        """Sample the answer to a prompt.

        Raises:
            ClientError: 400 or 413, the prompt leaves no room for an answer, or vLLM refuses a parameter.
            OutputError, ServerError: a turn could not be stored, or not be sampled.
        """
        prompt_ids = list(conversation.prompt())
        room = context - len(prompt_ids)
        if room < 1:
            raise _too_long(asked, str(len(prompt_ids)), context)
        keeps_stop = bool(asked.sampling.get("include_stop_str_in_output"))
        choices = [
            Choice(i, conversation.chat, prompt_ids, len(conversation.messages), keeps_stop) for i in range(asked.n)
        ]
        open_choices = set(range(asked.n))
        params = self._parameters(asked, conversation)
        yield Begun(session.session_id, tuple(prompt_ids))
        self._telemetry.tokens.labels("prompt").inc(len(prompt_ids))
        self._streams += asked.stream
        interval = min(_MOST_TOGETHER, max(1, self._streams // 2)) if asked.stream else _UNSEEN_TOGETHER
        try:
            deltas = server.sample(
                prompt_ids,
                n=asked.n,
                max_tokens=min(room, asked.max_tokens or room),
                top_logprobs=asked.top_logprobs or 0,
                params=params,
                interval=interval,
                weight_version=conversation.turns[-1].weight_version if conversation.turns else None,
                images=conversation.images,
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    if delta.index not in open_choices:
                        raise ServerMismatchError(
                            f"{server.url} went on with choice {delta.index}, which it had not begun"
                        )
                    piece = choices[delta.index].take(delta, asked.stop)
                    if piece is not None:
                        yield piece
                    if delta.finish_reason is not None:
                        open_choices.remove(delta.index)
                        finished = choices[delta.index].finish(delta)
                        # The turn is stored even if the client disconnects meanwhile.
                        await to_its_end(self._record(asked, session, conversation.fork(), path, finished, follows))
                        yield finished
        except ServerRequestError as error:
            raise as_refusal(error) from error
        finally:
            self._streams -= asked.stream
        if open_choices:
            raise ServerMismatchError(f"{server.url} ended its stream before {len(open_choices)} of its choices")

    def _parameters(self, asked: Asked, conversation: Conversation) -> dict[str, Any]:
        """Return vLLM's parameters: the request's, the stop tokens, and a grammar of calls if the client wants one.

        A schema beside tools leaves both open, as at OpenAI: an answer by the schema, or calls. For a model whose calls
        have no grammar, and for a grammar of another kind, it is one of the whole answer.
        """
        params = {**asked.sampling}
        params["stop_token_ids"] = [*conversation.chat.stop_token_ids, *asked.sampling.get("stop_token_ids", ())]
        grammar = params.get("structured_outputs")
        is_forced = asked.choice.kind in ("required", "named")
        if asked.tools and grammar is None and (is_forced or not asked.choice.is_parallel):
            params["structured_outputs"] = {
                "structural_tag": call_grammar(self._chats.call_form, asked.tools, asked.choice)
            }
        elif asked.tools and is_forced:
            raise ClientError(400, "tool_choice: it excludes a grammar for the whole answer", "tool_choice")
        elif asked.tools and (schema := answer_schema(grammar)) is not None and (form := self._chats.call_form):
            tag = answer_or_calls(form, asked.tools, asked.choice, schema)
            params["structured_outputs"] = {"structural_tag": tag}
        if asked.stop:
            params["stop"] = list(asked.stop)
        return params

    async def _record(
        self,
        asked: Asked,
        session: OpenSession,
        conversation: Conversation,
        path: Path | tuple[()],
        finished: Finished,
        follows: Follows | None,
    ) -> None:
        """Add a finished choice to its conversation, and store it as a turn."""
        conversation.add(finished.completion, ParsedTurn(finished.message, ()))
        turn = recorded(
            conversation,
            path,
            next(self._turn_ids),
            finished.completion,
            finished.message,
            asked=asked,
            follows=follows,
        )
        await self._keep(session, turn)
        self._telemetry.turns.labels(turn.turn_type).inc()
        self._telemetry.tokens.labels("completion").inc(len(turn.completion.token_ids))
        if finished.rewrote:
            self._telemetry.unlike.inc()


def _too_long(asked: Asked, length: str, context: int) -> ClientError:
    """Return the error in vLLM's words, by which agents know that they must shorten the conversation."""
    said = (
        f"This model's maximum context length is {context} tokens. However, your prompt contains {length} input "
        "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    )
    return ClientError(400, said, asked.at, CONTEXT_FULL)


class _ChatFormats:
    """Cache of `ChatFormat` objects for the tools and template options used last."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._by_key = OrderedDict[bytes, ChatFormat]()

    @cached_property
    def base(self) -> ChatFormat:
        """The chat without tools and options."""
        return ChatFormat(self._renderer, self._tokenizer, ())

    @cached_property
    def call_form(self) -> CallForm | None:
        return call_form(self.base)

    def copy(self) -> "_ChatFormats":
        """Return an empty cache with copies of the renderer and the tokenizer."""
        return _ChatFormats(*deepcopy((self._renderer, self._tokenizer)))

    def effective(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that change this model's prompts; see `with_template_options`."""
        try:
            chosen = with_template_options(self._renderer, self._tokenizer, options)[1]
            ignored("chat template", options.keys() - chosen.keys())
            return chosen
        except ConfigError as error:
            raise ClientError(400, str(error), "chat_template_kwargs") from error

    def of(self, asked: Asked) -> ChatFormat:
        """Return the chat of a request's tools and template options."""
        key = asked.prompt_key
        chat = self._by_key.pop(key, None)
        if chat is None:
            renderer = with_template_options(self._renderer, self._tokenizer, asked.template)[0]
            chat = ChatFormat(renderer, self._tokenizer, asked.tools)
        self._by_key[key] = chat
        while len(self._by_key) > _CHATS_KEPT:
            self._by_key.popitem(last=False)
        return chat
