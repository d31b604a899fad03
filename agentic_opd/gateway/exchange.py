"""The pipeline of one request, for the gateway and for agent programs (I/O).

Request -> Placed -> Prompted -> Begun, Piece..., Finished -> RecordedTurn
"""

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from agentic_opd.core.concurrency import to_its_end
from agentic_opd.gateway.choice import Finished, Piece
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.journal import SessionRow
from agentic_opd.gateway.request import ChatInput, Request, Sampling
from agentic_opd.gateway.sampler import Prompted, Sampler
from agentic_opd.gateway.sessions import Placed, Sessions, with_answers
from agentic_opd.gateway.turns import Path, RecordedTurn
from agentic_opd.rollout.chat_format import ParsedTurn


@dataclass(frozen=True, slots=True)
class Begun:
    """The first event of an answer: its session and its prompt."""

    session_id: str
    prompt_ids: tuple[int, ...]


Answer = AsyncGenerator[Begun | Piece | Finished]
"""`Begun`, then pieces of the choices as they are sampled; the last event of a choice is its `Finished`."""
Stages = AsyncGenerator[Placed | Prompted | Begun | Piece | Finished]
"""`Placed` and `Prompted`, then the events of an `Answer`."""
Keep = Callable[[SessionRow, RecordedTurn], Awaitable[None]]
"""Function that stores a finished turn. It is called before the turn's `Finished`, even if the client disconnects."""
Recall = Callable[[str, Sequence[str]], Awaitable[Mapping[str, Path]]]
"""Function that returns the paths to an owner's turns of ended sessions, by the ids of their answers, if there are."""


async def recall_nothing(owner: str, answer_ids: Sequence[str]) -> Mapping[str, Path]:
    """Know no turn of an ended session."""
    return {}


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the server of an exchange decides in place of its clients; by default nothing."""

    max_context: int | None = None
    """Maximum tokens of a sequence; None: the policy server's."""
    max_tokens: int | None = None
    """Maximum tokens of an answer."""
    parameters: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Sampling parameters that replace the request's; None: the parameter is left out."""
    session: str | None = None
    """Name of the session of all requests; None: clients name their sessions."""

    def context(self, server_context: int) -> int:
        return server_context if self.max_context is None else min(server_context, self.max_context)

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return a request's sampling within these limits."""
        parameters = {name: value for name, value in sampling.parameters.items() if name not in self.parameters}
        parameters |= {name: value for name, value in self.parameters.items() if value is not None}
        lengths = [length for length in (sampling.max_tokens, self.max_tokens) if length is not None]
        return sampling._replace(parameters=parameters, max_tokens=min(lengths, default=None))


class Exchange:
    """Answers requests by one sampler, as turns of sessions."""

    def __init__(
        self,
        sessions: Sessions,
        sampler: Sampler,
        limits: ServerLimits,
        keep: Keep,
        recall: Recall = recall_nothing,
        first_turn_id: int = 1,
    ) -> None:
        """Record turns with `keep`, with ids that count from `first_turn_id`."""
        self._sessions, self._sampler, self._limits = sessions, sampler, limits
        self._keep, self._recall = keep, recall
        self._turn_ids = itertools.count(first_turn_id)

    @property
    def max_context(self) -> int:
        """Maximum tokens of a sequence: that of the server with the longest context."""
        return self._limits.context(max(server.info.max_model_len for server in self._sampler.servers.values()))

    async def answer(self, request: Request, owner: str) -> Stages:
        """Answer a request: yield each stage, the choices' pieces as they are sampled, each choice's `Finished` last.

        A choice's turn is recorded before its `Finished` is yielded. Closing the generator stops the sampling.

        Raises:
            ClientError: the request can't be answered; the message says why.
            OutputError, ServerError: the disk or the policy's server failed.
        """
        chat, previous_session = await self._chat_input(request, owner)
        session_name = self._limits.session or request.client.session or previous_session
        placed = self._sessions.assign(owner, request.client, chat, session_name)
        session = placed.session
        with session.answering(placed.turn_before):
            yield placed
            server = self._sampler.server_of(session.row)
            context, sampling = self._limits.context(server.info.max_model_len), self._limits.sampling(request.sampling)
            prompted = await self._sampler.prompted(request, placed.chat, server, context, placed)
            if placed.is_rewritten or prompted.is_rewritten:
                self._sampler.telemetry.rewritten.inc()
            yield prompted
            yield Begun(session.session_id, prompted.prompt_ids)
            async with aclosing(self._sampler.sampled(request, sampling, prompted, server, context)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        # The turn is stored even if the client disconnects meanwhile.
                        await to_its_end(self._record(request, sampling, placed, prompted, event))
                    yield event

    async def count(self, request: Request, owner: str) -> int:
        """Return the number of tokens of a request's prompt, rendered from its first message."""
        chat, _ = await self._chat_input(request, owner)
        server = next(iter(self._sampler.servers.values()))
        return len((await self._sampler.prompted(request, chat, server, self.max_context)).prompt_ids)

    async def _chat_input(self, request: Request, owner: str) -> tuple[ChatInput, str | None]:
        """Return the whole conversation, and the id of the open session with the answer that it continues.

        References are replaced by the answers, and template options without effect are left out.

        Raises:
            ClientError: 404, an answer is unknown; 400, an answer is referred to in two places.
        """
        ids = request.answer_ids
        keys = {answer_id: self._sessions.answered(owner, answer_id) for answer_id in ids}
        paths = {answer_id: self._sessions.path(key) for answer_id, key in keys.items() if key is not None}
        previous = keys.get(request.previous or "")
        if len(paths) < len(keys):
            paths, previous = {**paths, **await self._recall(owner, ids)}, None
        if missing := [answer_id for answer_id in ids if answer_id not in paths]:
            raise _unknown_answer(missing[0], request)
        chat = request.chat.with_messages(with_answers(request, paths))
        return chat.with_options(self._sampler.effective_options(chat.options)), previous and previous.session_id

    async def _record(
        self, request: Request, sampling: Sampling, placed: Placed, prompted: Prompted, finished: Finished
    ) -> None:
        """Store a finished choice as a turn of the session."""
        conversation, path = prompted.conversation.fork(), prompted.kept_path
        conversation.add(finished.completion, ParsedTurn(finished.message, ()))
        span = conversation.turns[-1]
        start, num_known = (path[-1].span.end, path[-1].span.message_index + 1) if path else (0, 0)
        turn = RecordedTurn(
            turn_id=next(self._turn_ids),
            parent=path[-1].turn_id if path else None,
            messages=(*conversation.messages[num_known : span.message_index], finished.message),
            prompt_ids=conversation.trace().tokens_T[start : span.start],
            completion=finished.completion,
            span=replace(span, under_grammar=request.has_grammar),
            turn_type=request.client.turn_type,
            tools=tuple(conversation.chat.tools),
            sampling={**sampling.parameters, **({"stop": list(sampling.stop)} if sampling.stop else {})},
            altered=tuple(name for name in request.altered if name not in self._limits.parameters),
            template=placed.chat.options,
            follows=None if path else prompted.reply,
            answer_id=request.reply_format.answer_id,
            num_instructions=0 if path else request.num_instructions,
            images=tuple(image for image in conversation.attachments if start <= image.offset < span.start),
        )
        await self._keep(placed.session.row, turn)
        self._sessions.add(placed.session, turn)
        telemetry = self._sampler.telemetry
        telemetry.turns.labels(turn.turn_type).inc()
        telemetry.tokens.labels("completion").inc(len(turn.completion.token_ids))
        if finished.rewrote:
            telemetry.unlike.inc()


def _unknown_answer(answer_id: str, request: Request) -> ClientError:
    """Return the error of a request that continues an answer which its client did not receive, or refers to it."""
    if answer_id != request.previous:
        name = request.field_name
        return ClientError(404, f"{name}: there is no item of an answer {answer_id[:80]!r}", name)
    message = f"previous_response_id: there is no answer {answer_id[:80]!r}"
    return ClientError(404, message, "previous_response_id", "previous_response_not_found")
