"""What a protocol of the gateway provides: a reader of requests, and a writer of answers. Pure."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from agentic_opd.gateway.body import SamplingFields, ignored
from agentic_opd.gateway.choice import Finished, Piece
from agentic_opd.gateway.client import Client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.exchange import Begun
from agentic_opd.gateway.request import Request
from agentic_opd.plugin.sampling import SampledToken

Event = Begun | Piece | Finished

Value = TypeVar("Value")
_WITHOUT_EFFECT = "without effect"
WithoutEffect = Annotated[Value | None, _WITHOUT_EFFECT]
"""Type of a field that changes nothing about the answer here."""


class CommonBody(SamplingFields):
    """Fields that the protocols share."""

    model: str | None = None
    """Any name is served."""
    stream: bool | None = None
    metadata: WithoutEffect[Any] = None
    prompt_cache_key: WithoutEffect[Any] = None

    def log_without_effect(self, protocol: str) -> None:
        """Name the fields without effect in the log.

        Raises:
            ClientError: 400, an unknown field would change what is sampled.
        """
        fields = type(self).model_fields
        idle = [name for name in self.model_fields_set & fields.keys() if _WITHOUT_EFFECT in fields[name].metadata]
        ignored(protocol, [*(name for name in idle if getattr(self, name) is not None), *self.unknown_fields()])


class WireProtocol(ABC):
    """A protocol: one path, the reader of its bodies, and the writers of its answers and errors."""

    path: ClassVar[str]
    count_path: ClassVar[str | None] = None
    """Path that counts a prompt's tokens without sampling; None: the protocol has no such route."""
    reply: "ClassVar[type[Reply]]"
    history_field: ClassVar[str] = "messages"
    """Field of a body with the conversation, to which a client appends each answer."""
    conversation_fields: ClassVar[tuple[str, ...]]
    """Fields of a body that hold the messages, the tools, or the name of a session."""

    @abstractmethod
    def read(self, body: object, client: Client, *, counts: bool = False) -> Request:
        """Validate a body; raises ClientError (400) with the invalid field. `counts`: its prompt is only counted."""

    def conversation(self, body: Mapping[str, Any], client: Client) -> Request:
        """Read the conversation of a request for another model; the fields that say how to answer are left out.

        Raises:
            ClientError: 400, the conversation can't be read.
        """
        return self.read({name: body[name] for name in self.conversation_fields if name in body}, client, counts=True)

    def counted(self, input_tokens: int) -> dict[str, Any]:
        """Return the body of the answer of `count_path`."""
        return {"input_tokens": input_tokens}

    def error(self, error: ClientError) -> dict[str, Any]:
        """Return the body of an error, by default in OpenAI's format."""
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


@dataclass(slots=True)
class Reply(ABC):
    """The state of one answer while it is sampled. Each event is given to `take`, then to `events` in a stream."""

    request: Request
    model: str
    decode: Callable[[Sequence[int]], str]
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    session_id: str = ""
    finished: dict[int, Finished] = field(default_factory=dict[int, Finished])
    tokens: dict[int, list[SampledToken]] = field(default_factory=dict[int, list[SampledToken]])
    """The sampled tokens of each choice."""

    def take(self, event: Event) -> None:
        if isinstance(event, Begun):
            self.prompt_ids, self.session_id = event.prompt_ids, event.session_id
            self.prompt_tokens = len(event.prompt_ids)
            return
        piece = event.rest if isinstance(event, Finished) else event
        self.tokens.setdefault(piece.index, []).extend(piece.tokens)
        if isinstance(event, Finished):
            self.finished[event.index] = event
            self.completion_tokens += len(event.completion.token_ids)

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""

    @abstractmethod
    def events(self, event: Event) -> Iterator[str]:
        """Yield the server-sent events for an event of the answer."""

    @abstractmethod
    def closing(self) -> str:
        """Return the end of a stream whose choices are all finished."""

    @abstractmethod
    def failed(self, error: ClientError) -> str:
        """Return the end of a stream that breaks off."""

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token with its logprob, as OpenAI's protocols write it."""
        text = self.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def logprobs(self, tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        """Return the logprobs of sampled tokens, as OpenAI's protocols write them."""
        count = self.request.sampling.top_logprobs or 0
        return [
            {
                **self.entry(token.token_id, token.logprob),
                "top_logprobs": [self.entry(*likely) for likely in token.top[:count]],
            }
            for token in tokens
        ]


def new_id(prefix: str) -> str:
    """Return a new id of an answer or of a part of one."""
    return f"{prefix}{uuid.uuid4().hex}"


def sse(data: dict[str, Any], name: str | None = None) -> str:
    """Return a server-sent event. It is ASCII only, because some clients treat U+2028 as a line end."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"


STREAM_END = "data: [DONE]\n\n"
"""The last event of OpenAI's chat streams."""
