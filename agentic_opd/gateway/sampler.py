"""Sampling: a request's messages -> the prompt that continues a session -> its answers, choice by choice (I/O)."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from renderers import Renderer

from agentic_opd.core.attachments.files import ImageFolder
from agentic_opd.core.attachments.prompts import AttachmentTokens
from agentic_opd.core.errors import ConfigError, RendererError, ServerMismatchError, ServerRequestError
from agentic_opd.core.types import Message
from agentic_opd.gateway.body import ignored
from agentic_opd.gateway.choice import Choice, Finished, Piece
from agentic_opd.gateway.errors import ClientError, as_refusal
from agentic_opd.gateway.grammar import CallForm, answer_or_calls, answer_schema, call_form, call_grammar
from agentic_opd.gateway.images import image_tokens
from agentic_opd.gateway.journal import SessionRow
from agentic_opd.gateway.request import GRAMMAR, ChatInput, Request, Sampling
from agentic_opd.gateway.sessions import Placed
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import ClientReply, Path, trace_of
from agentic_opd.gateway.under_way import RunningAnswer
from agentic_opd.plugin.client import PluginClient
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.conversation import Conversation
from agentic_opd.rollout.renderer import with_template_options

logger = logging.getLogger(__name__)

CONTEXT_FULL = "context_length_exceeded"
"""Error code of a request whose prompt leaves no room for an answer."""
_RENDERED_AT_ONCE = 2**14
"""Largest request (characters) that is rendered on the event loop, which takes a few milliseconds."""
_MAX_CHARACTERS = 16
"""Upper bound of the mean number of characters per token in a prompt, far above that of natural text or code.

A request that would not fit into the context even at this density is refused before it is rendered.
"""
_MAX_INTERVAL = 8
"""Maximum tokens per event for a streaming client.

The number used is half the number of open streams, so up to three streams receive every token separately. Forwarding
single tokens of many streams would take CPU time from the engine.
"""
_WHOLE_ANSWER_INTERVAL = 128
"""Tokens per event for a client that does not stream: few events, but frequent enough to keep the connection active."""
_MAX_CHAT_FORMATS = 64
"""Number of tool sets whose `ChatFormat` is cached."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """The prompt of a request."""

    conversation: Conversation
    """The conversation up to the prompt, rendered."""
    prompt_ids: tuple[int, ...]
    kept_path: Path | tuple[()]
    """The turns whose tokens begin the prompt; empty: the whole prompt is rendered anew."""
    reply: ClientReply | None
    """The earlier turn that the request answers, and the reply's positions in the conversation's messages."""

    @property
    def is_rewritten(self) -> bool:
        """Whether the prompt replies to a turn whose tokens it does not begin with."""
        return self.reply is not None and not self.kept_path

    def running_answer(self) -> RunningAnswer:
        """Return an answer of which nothing is sampled yet."""
        num_known = self.kept_path[-1].span.message_index + 1 if self.kept_path else 0
        return RunningAnswer(tuple(self.conversation.messages[num_known:]), self.is_rewritten)


class Sampler:
    """The policy's servers, and the prompts that they read."""

    def __init__(
        self,
        servers: Sequence[PluginClient],
        renderer: Renderer,
        tokenizer: Any,
        telemetry: Telemetry,
        images: ImageFolder | None = None,
        learner_of: Callable[[str], str | None] = lambda owner: None,
        else_learner: str | None = None,
    ) -> None:
        """Start without prompts; `images` stores the pictures of requests (None: pictures are refused).

        `learner_of` names the learner of an owner, whose adapter samples; None: the policy of all. The adapter of
        `else_learner` samples for learners without one.
        """
        self.servers = {server.url: server for server in servers}
        self.telemetry = telemetry
        self._learner_of, self._else_learner = learner_of, else_learner
        self._images = images
        self._chat_formats = _ChatFormats(renderer, tokenizer)
        self._thread = ThreadPoolExecutor(1, "rendering")
        self._thread_chat_formats: _ChatFormats | None = None
        self._streams = 0
        """Number of open answers to streaming clients."""

    def server_of(self, session: SessionRow) -> PluginClient:
        """Return the server of a session, with the weights of the session's learner."""
        server, learner = self.servers[session.server], self._learner_of(session.owner)
        return server if learner is None else server.of_learner(learner, self._else_learner)

    def close(self) -> None:
        """Stop the rendering thread without waiting for requests that it still renders."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def effective_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template options that change this model's prompts; see `with_template_options`."""
        return self._chat_formats.effective(options)

    async def prompted(
        self, request: Request, chat: ChatInput, server: PluginClient, context: int, placed: Placed | None = None
    ) -> Prompted:
        """Return the prompt of `chat`, the request's messages; without `placed` it continues no turn.

        If the template rewrites earlier messages, the whole prompt is rendered anew. A long request is rendered on a
        thread with a separate tokenizer, because tokenizers are not thread-safe.

        Raises:
            ClientError: 400, the messages are longer than `context`, or can't be rendered.
            OutputError, ServerError: the disk or the server failed to take a picture.
        """
        self._check_size(request, chat, context)
        images = await image_tokens(request, chat, server, self._images)
        chat_format = self._chat_formats.of(chat).with_attachments(images)
        if chat.size + chat.earlier_reasoning <= _RENDERED_AT_ONCE:
            return _prompted(chat_format, request.field_name, chat.messages, placed)
        prompted = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._prompted_on_thread, request.field_name, chat, images, placed
        )
        prompted.conversation.chat = chat_format
        return prompted

    def _check_size(self, request: Request, chat: ChatInput, context: int) -> None:
        """Refuse, with a ClientError, a request that certainly exceeds the context, before any expensive work."""
        earlier = chat.earlier_reasoning
        size = chat.size + (earlier if earlier and self._keeps_reasoning else 0)
        if (tokens := max(chat.num_parts, size // _MAX_CHARACTERS)) >= context:
            raise _too_long(request, f"at least {tokens}", context)

    @cached_property
    def _keeps_reasoning(self) -> bool:
        """Whether prompts include reasoning from before the last user message, as a field or in the content."""
        chat, user = self._chat_formats.base, {"role": "user", "content": "u"}
        turn = {"role": "assistant", "content": "a"}
        in_field = [{**turn, "reasoning_content": text} for text in ("r", "another")]
        in_content = [{**turn, "content": f"<think>{text}</think>a"} for text in ("r", "another")]
        try:
            pairs = [
                [chat.first_prompt([user, variant, user]) for variant in variants]
                for variants in (in_field, in_content)
            ]
        except RendererError:
            return True
        return any(first != second for first, second in pairs)

    def _prompted_on_thread(
        self, field_name: str, chat: ChatInput, images: AttachmentTokens | None, placed: Placed | None
    ) -> Prompted:
        self._thread_chat_formats = self._thread_chat_formats or self._chat_formats.copy()
        chat_format = self._thread_chat_formats.of(chat).with_attachments(images)
        return _prompted(chat_format, field_name, chat.messages, placed)

    async def sampled(
        self, request: Request, sampling: Sampling, prompted: Prompted, server: PluginClient, context: int
    ) -> AsyncGenerator[Piece | Finished]:
        """Sample the answers to a prompt: yield pieces of the choices, and each choice's `Finished` last.

        Raises:
            ClientError: 400 or 413, the prompt leaves no room for an answer, or vLLM refuses a parameter.
            ServerError: the server failed.
        """
        conversation, prompt_ids = prompted.conversation, list(prompted.prompt_ids)
        room = context - len(prompt_ids)
        if room < 1:
            raise _too_long(request, str(len(prompt_ids)), context)
        parameters = self._parameters(request, sampling, conversation.chat)
        keeps_stop = bool(sampling.parameters.get("include_stop_str_in_output"))
        choices = {
            index: Choice(index, conversation.chat, prompt_ids, len(conversation.messages), keeps_stop)
            for index in range(sampling.n)
        }
        self.telemetry.tokens.labels("prompt").inc(len(prompt_ids))
        is_streamed = request.reply_format.stream
        self._streams += is_streamed
        interval = min(_MAX_INTERVAL, max(1, self._streams // 2)) if is_streamed else _WHOLE_ANSWER_INTERVAL
        try:
            deltas = server.sample(
                prompt_ids,
                n=sampling.n,
                max_tokens=min(room, sampling.max_tokens or room),
                top_logprobs=sampling.top_logprobs or 0,
                params=parameters,
                interval=interval,
                weight_version=conversation.turns[-1].weight_version if conversation.turns else None,
                attachments=conversation.attachments,
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    if delta.index not in choices:
                        raise ServerMismatchError(
                            f"{server.url} continued choice {delta.index}, which it had not begun"
                        )
                    piece = choices[delta.index].take(delta, sampling.stop)
                    if piece is not None:
                        yield piece
                    if delta.finish_reason is not None:
                        yield choices.pop(delta.index).finish(delta)
        except ServerRequestError as error:
            raise as_refusal(error) from error
        finally:
            self._streams -= is_streamed
        if choices:
            raise ServerMismatchError(f"{server.url} ended its stream before {len(choices)} of its choices had ended")

    def _parameters(self, request: Request, sampling: Sampling, chat_format: ChatFormat) -> dict[str, Any]:
        """Return vLLM's parameters: the request's, the stop tokens, and a grammar of calls if the client wants one.

        A schema beside tools leaves both open, as at OpenAI: an answer by the schema, or calls. For a model whose calls
        have no grammar, and for a grammar of another kind, it is one of the whole answer.
        """
        parameters, tools, choice = {**sampling.parameters}, request.chat.tools, request.tool_choice
        parameters["stop_token_ids"] = [*chat_format.stop_token_ids, *parameters.get("stop_token_ids", ())]
        grammar = parameters.get(GRAMMAR)
        if tools and grammar is None and choice.is_constrained:
            parameters[GRAMMAR] = {"structural_tag": call_grammar(self._chat_formats.call_form, tools, choice)}
        elif tools and choice.is_forced:
            raise ClientError(400, "tool_choice can't be combined with a grammar for the whole answer", "tool_choice")
        elif tools and (schema := answer_schema(grammar)) is not None and (form := self._chat_formats.call_form):
            parameters[GRAMMAR] = {"structural_tag": answer_or_calls(form, tools, choice, schema)}
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        return parameters


def _prompted(chat_format: ChatFormat, field_name: str, messages: Sequence[Message], placed: Placed | None) -> Prompted:
    """Render the messages after the turns that they continue, or from the first one on."""
    reply = placed and placed.follows
    if placed is not None and placed.path:
        turn_id, num_new = placed.path[-1].turn_id, len(placed.new_messages)
        conversation = Conversation.restored(chat_format, trace_of(placed.path))
        conversation.answer(placed.new_messages)
        try:
            prompt_ids = tuple(conversation.prompt())
        except RendererError:  # Not logged: its text may quote the messages.
            logger.warning("the chat template rewrites earlier messages: the conversation continues as a branch")
            reply = ClientReply(turn_id, len(messages) - num_new, len(messages))
        else:
            length = len(conversation.messages)
            return Prompted(conversation, prompt_ids, placed.path, ClientReply(turn_id, length - num_new, length))
    conversation = Conversation(chat_format, messages)
    try:
        return Prompted(conversation, tuple(conversation.prompt()), (), reply)
    except RendererError as error:
        raise ClientError(400, f"the messages can't be written as a prompt: {error}", field_name) from error


def _too_long(request: Request, length: str, context: int) -> ClientError:
    """Return the error in vLLM's words, by which agents know that they must shorten the conversation."""
    message = (
        f"This model's maximum context length is {context} tokens. However, your prompt contains {length} input "
        "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    )
    return ClientError(400, message, request.field_name, CONTEXT_FULL)


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
            effective = with_template_options(self._renderer, self._tokenizer, options)[1]
            ignored("chat template", options.keys() - effective.keys())
            return effective
        except ConfigError as error:
            raise ClientError(400, str(error), "chat_template_kwargs") from error

    def of(self, chat: ChatInput) -> ChatFormat:
        """Return the chat format for these tools and effective options."""
        chat_format = self._by_key.pop(chat.prompt_key, None)
        if chat_format is None:
            renderer = with_template_options(self._renderer, self._tokenizer, chat.options)[0]
            chat_format = ChatFormat(renderer, self._tokenizer, chat.tools)
        self._by_key[chat.prompt_key] = chat_format
        while len(self._by_key) > _MAX_CHAT_FORMATS:
            self._by_key.popitem(last=False)
        return chat_format
