"""A request -> sampled turns: the prompt that goes on from a session's turns, its choices, each kept when it is whole.

Whoever keeps sessions (the gateway in a journal, an environment for one episode) hands in how a turn is kept.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from renderers import Renderer

from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.errors import RendererError, ServerMismatchError
from agentic_opd.gateway.choice import Choice, Finished, Piece
from agentic_opd.gateway.errors import RefusedError
from agentic_opd.gateway.policy import SamplingServer
from agentic_opd.gateway.request import Asked, tools_key
from agentic_opd.gateway.sessions import Place, Session
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import Path, RecordedTurn, conversation, recorded
from agentic_opd.rollout.chat import Chat, ParsedTurn
from agentic_opd.rollout.conversation import Conversation

logger = logging.getLogger(__name__)

CONTEXT_FULL = "context_length_exceeded"
"""The code of a request that is refused because its prompt leaves no room for an answer."""
_RENDERED_AT_ONCE = 2**14
"""Characters of a request that is rendered on the event loop, in some milliseconds."""
_MOST_CHARS = 16
"""Characters of a token in the mean of a whole prompt, far more than any tokenizer reaches with the text of people or
programs: what has more for each token of the context is refused before it is rendered."""
_MOST_TOGETHER = 8
"""Tokens that go together to a client that reads along at most. It is half as many as there are streams under way, so
that up to three streams get each token by itself: handing them on takes the processor from the engine."""
_UNSEEN_TOGETHER = 128
"""Tokens that go together to a client that waits for the whole answer; seldom enough, and no connection is idle."""
_CHATS_KEPT = 64
"""Sets of tools whose renderings are kept ready."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The first thing of an answer: its session, and how long its prompt is."""

    session_id: str
    prompt_tokens: int


Answer = AsyncGenerator[Begun | Piece | Finished]
"""`Begun`, then pieces of the choices as they are sampled, each choice's `Finished` last."""

Keep = Callable[[Session, RecordedTurn], Awaitable[None]]
"""Keeps a finished turn; it is called before the turn's `Finished` comes, even if the client goes meanwhile."""


class Sampler:
    """Prompts, samples, and hands on what was sampled."""

    def __init__(
        self, renderer: Renderer, tokenizer: Any, telemetry: Telemetry, keep: Keep, first_turn_id: int = 1
    ) -> None:
        """Prepare; turns are numbered from `first_turn_id` on."""
        self._telemetry, self._keep = telemetry, keep
        self._chats = _Chats(renderer, tokenizer)
        self._aside = ThreadPoolExecutor(1, "rendering")
        self._chats_aside: _Chats | None = None
        self._turn_ids = itertools.count(first_turn_id)
        self._streams = 0
        """Under way, to clients that read along."""

    def close(self) -> None:
        """Wait for nothing that is still being rendered."""
        self._aside.shutdown(wait=False, cancel_futures=True)

    def check_size(self, asked: Asked, context: int) -> None:
        """Refuse a request that is certain not to fit, before anything that takes long is done with it.

        Args:
            asked: The request.
            context: Tokens that a sequence may hold.

        Raises:
            RefusedError: 400, it is too long.
        """
        earlier = asked.earlier_reasoning
        size = asked.size + (earlier if earlier and self._keeps_reasoning else 0)
        if (tokens := max(asked.parts, size // _MOST_CHARS)) >= context:
            raise _too_long(f"{tokens} tokens or more", context)

    @cached_property
    def _keeps_reasoning(self) -> bool:
        """Whether a prompt holds the reasoning of turns before the last user message, by itself or in their content."""
        chat, user = self._chats.of((), tools_key(())), {"role": "user", "content": "u"}
        turn = {"role": "assistant", "content": "a"}
        by_itself = [{**turn, "reasoning_content": text} for text in ("r", "another")]
        inline = [{**turn, "content": f"<think>{text}</think>a"} for text in ("r", "another")]
        try:
            pairs = [[chat.first_prompt([user, one, user]) for one in ones] for ones in (by_itself, inline)]
        except RendererError:
            return True
        return any(first != second for first, second in pairs)

    async def prompted(self, place: Place, asked: Asked) -> tuple[Conversation, Path | tuple[()]]:
        """The conversation with the request's prompt, and the turns that it goes on from.

        A template that rewrites earlier messages can't go on from them: then all is rendered from the beginning. A long
        request is rendered on a thread, with a tokenizer of its own: they can't be used by two at the same time.

        Raises:
            RefusedError: 400, the messages can't be rendered.
        """
        chat = self._chats.of(asked.tools, asked.tools_key)
        if asked.size + asked.earlier_reasoning <= _RENDERED_AT_ONCE:
            return self._prompted(chat, place, asked)
        talk, path = await asyncio.get_running_loop().run_in_executor(self._aside, self._prompted_aside, place, asked)
        talk.chat = chat
        return talk, path

    def _prompted_aside(self, place: Place, asked: Asked) -> tuple[Conversation, Path | tuple[()]]:
        self._chats_aside = self._chats_aside or self._chats.copy()
        return self._prompted(self._chats_aside.of(asked.tools, asked.tools_key), place, asked)

    def _prompted(self, chat: Chat, place: Place, asked: Asked) -> tuple[Conversation, Path | tuple[()]]:
        if place.path:
            talk = conversation(chat, place.path)
            talk.answer(place.new)
            try:
                talk.prompt()
            except RendererError:  # Its text may quote the messages.
                logger.warning("the chat template rewrites earlier messages: a conversation goes on as a branch")
            else:
                return talk, place.path
        talk = Conversation(chat, asked.messages)
        try:
            talk.prompt()
        except RendererError as error:
            raise RefusedError(400, f"the messages can't be written as a prompt: {error}", "messages") from error
        return talk, ()

    async def sampled(
        self,
        asked: Asked,
        session: Session,
        server: SamplingServer,
        talk: Conversation,
        path: Path | tuple[()],
        *,
        context: int,
    ) -> Answer:
        """Sample the answer to a prompt.

        Args:
            asked: The request.
            session: Whose turn it becomes.
            server: Samples it.
            talk: The conversation with its prompt, as `path` from `prompted`.
            path: The turns that it goes on from.
            context: Tokens that a sequence may hold.

        Raises:
            RefusedError: 400, there is no room for an answer, or vLLM refuses a parameter.
            OutputError, ServerError: the turn could not be kept, or not be sampled.
        """
        prompt_ids = list(talk.prompt())
        room = _room(len(prompt_ids), context)
        keeps_stop = bool(asked.sampling.get("include_stop_str_in_output"))
        choices = [Choice(i, talk.chat, prompt_ids, len(talk.messages), keeps_stop) for i in range(asked.n)]
        open_choices = set(range(asked.n))
        yield Begun(session.session_id, len(prompt_ids))
        self._telemetry.tokens.labels("prompt").inc(len(prompt_ids))
        self._streams += asked.stream
        interval = min(_MOST_TOGETHER, max(1, self._streams // 2)) if asked.stream else _UNSEEN_TOGETHER
        try:
            deltas = server.sample(
                prompt_ids,
                n=asked.n,
                max_tokens=min(room, asked.max_tokens or room),
                top_logprobs=asked.top_logprobs or 0,
                params=_parameters(asked, talk, server),
                interval=interval,
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
                        # Though the client goes meanwhile, the turn is finished.
                        await to_its_end(self._record(asked, session, talk.fork(), path, finished))
                        yield finished
        finally:
            self._streams -= asked.stream
        if open_choices:
            raise ServerMismatchError(f"{server.url} ended its stream before {len(open_choices)} of its choices")

    async def _record(
        self, asked: Asked, session: Session, talk: Conversation, path: Path | tuple[()], finished: Finished
    ) -> None:
        """Add a finished choice to its conversation, and have it kept."""
        talk.add(finished.completion, ParsedTurn(finished.message, ()))
        turn = recorded(
            talk,
            path,
            next(self._turn_ids),
            finished.completion,
            finished.message,
            turn_type=asked.turn_type,
            sampling={**asked.sampling, **({"stop": list(asked.stop)} if asked.stop else {})},
            altered=asked.altered,
        )
        await self._keep(session, turn)
        self._telemetry.turns.labels(turn.turn_type).inc()
        self._telemetry.tokens.labels("completion").inc(len(turn.completion.token_ids))
        if finished.rewrote:
            self._telemetry.unlike.inc()


def _room(prompt_tokens: int, context: int) -> int:
    """Tokens that an answer may have.

    Raises:
        RefusedError: 400, there are none.
    """
    if prompt_tokens >= context:
        raise _too_long(f"{prompt_tokens} tokens", context)
    return context - prompt_tokens


def _too_long(length: str, context: int) -> RefusedError:
    said = f"the messages are {length} long; at most {context - 1} are read"
    return RefusedError(400, said, "messages", CONTEXT_FULL)


def _parameters(asked: Asked, talk: Conversation, server: SamplingServer) -> dict[str, Any]:
    """What the server samples with: its own parameters, a turn's ends, the weights that the conversation began with."""
    params = {**asked.sampling}
    params["stop_token_ids"] = [*talk.chat.stop_token_ids, *asked.sampling.get("stop_token_ids", ())]
    if asked.stop:
        params["stop"] = list(asked.stop)
    if server.info.max_adapters and talk.turns and talk.turns[-1].weight_version is not None:
        params["prefer_weight_version"] = talk.turns[-1].weight_version
    return params


class _Chats:
    """A renderer and its tokenizer, ready for the sets of tools that were used last."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._by_tools = OrderedDict[bytes, Chat]()

    def copy(self) -> "_Chats":
        """Another one, which shares nothing with this one."""
        return _Chats(*deepcopy((self._renderer, self._tokenizer)))

    def of(self, tools: Sequence[dict[str, Any]], key: bytes) -> Chat:
        """The chat with these tools, of which `key` is the `tools_key`."""
        chat = self._by_tools.pop(key, None) or Chat(self._renderer, self._tokenizer, tools)
        self._by_tools[key] = chat
        while len(self._by_tools) > _CHATS_KEPT:
            self._by_tools.popitem(last=False)
        return chat
