"""A client's request in the gateway's form, which all protocols share. Pure.

In: the fields that a protocol read from a body. Out: `Request`, which no later step changes, or a `ClientError` that
names the field.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal, NamedTuple

from agentic_opd.core.types import Message
from agentic_opd.gateway.body import FunctionSpec, SamplingFields
from agentic_opd.gateway.client import Client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.rollout.conversation_index import identity

TurnType = Literal["main", "side"]


class ToolChoice(NamedTuple):
    """Which tool calls an answer may or must contain."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    """The tool, for `named`."""
    is_parallel: bool = True
    """Whether an answer may contain several calls."""
    allowed: tuple[str, ...] | None = None
    """The tools that may be called; None: all."""

    @property
    def is_forced(self) -> bool:
        """Whether an answer consists of calls."""
        return self.kind in ("required", "named")

    @property
    def is_constrained(self) -> bool:
        """Whether calls are sampled under a grammar, if there are tools."""
        return self.is_forced or not self.is_parallel or self.allowed is not None

    def allows(self, tool: str) -> bool:
        """Return whether an answer may call this tool."""
        return tool == self.name if self.kind == "named" else self.allowed is None or tool in self.allowed


AUTO = ToolChoice()
"""The policy decides."""


class SentImage(NamedTuple):
    """A picture in a request."""

    digest: str
    data: bytes
    field_name: str


class Sampling(NamedTuple):
    """How the answers to a request are sampled."""

    parameters: Mapping[str, Any]
    """The request's sampling parameters by vLLM's names, without the values below."""
    stop: tuple[str, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    top_logprobs: int | None = None
    """Number of most likely tokens to return at each position; None: no logprobs are requested."""


class ReplyFormat(NamedTuple):
    """How the answer is written."""

    answer_id: str = ""
    """Id of the answer in its protocol."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    echo: Mapping[str, Any] = {}
    """Parts of the request that its protocol's answer repeats."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """The input of the chat template, with digests and sizes."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    options: Mapping[str, Any]
    """Options of the chat template."""
    identities: tuple[bytes, ...]
    """Digests of the messages; see `conversation_index.identity`."""
    prompt_key: bytes
    """Digest of the tools and the options; see `prompt_key`."""
    num_parts: int
    """Number of messages, tool calls and tools. Each of them needs at least one prompt token."""
    size: int
    """Number of characters in all texts of the prompt."""
    earlier_reasoning: int
    """Characters of reasoning before the last user message, not part of `size`: some templates omit it."""

    @classmethod
    def of(
        cls, messages: Sequence[Message], tools: Sequence[dict[str, Any]], options: Mapping[str, Any]
    ) -> "ChatInput":
        calls = sum(len(message.get("tool_calls", ())) for message in messages)
        last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
        return cls(
            messages=tuple(messages),
            tools=tuple(tools),
            options=options,
            identities=tuple(map(identity, messages)),
            prompt_key=prompt_key(tools, options),
            num_parts=len(messages) + len(tools) + calls,
            size=len(json.dumps(tools, sort_keys=True)) + sum(map(_size, messages)) + _reasoning(messages[last_user:]),
            earlier_reasoning=_reasoning(messages[:last_user]),
        )

    def with_messages(self, messages: Sequence[Message]) -> "ChatInput":
        return self if tuple(messages) == self.messages else ChatInput.of(messages, self.tools, self.options)

    def with_options(self, options: Mapping[str, Any]) -> "ChatInput":
        return replace(self, options=options, prompt_key=prompt_key(self.tools, options))

    def image_digests(self) -> list[str]:
        """Return the digests of all pictures in the messages, each once."""
        return list(dict.fromkeys(digest for message in self.messages for digest in message.get("images", ())))


@dataclass(frozen=True, slots=True)
class Request:
    """What a client said. A message may be a reference to an answer, see `REFERENCE`."""

    client: Client
    chat: ChatInput
    sampling: Sampling
    reply_format: ReplyFormat
    tool_choice: ToolChoice = AUTO
    previous: str | None = None
    """Id of the answer whose conversation the messages continue."""
    num_instructions: int = 0
    """Number of first messages that belong to this request and not to the conversation that `previous` continues."""
    images: tuple[SentImage, ...] = ()
    """The pictures in the request, each once; the messages name them by their digests."""
    field_name: str = "messages"
    """Name of the body's field with the conversation."""

    @property
    def answer_ids(self) -> tuple[str, ...]:
        """Ids of the answers that it continues or refers to."""
        references = (message[REFERENCE] for message in self.chat.messages if REFERENCE in message)
        return (*((self.previous,) if self.previous is not None else ()), *references)

    @property
    def altered(self) -> tuple[str, ...]:
        """Names of the parameters that change the sampling distribution."""
        return (*_altering(self.sampling.parameters), *self._constrained_calls())

    @property
    def has_grammar(self) -> bool:
        """Whether the answer is sampled under a grammar."""
        return self.sampling.parameters.get(GRAMMAR) is not None or any(self._constrained_calls())

    def _constrained_calls(self) -> Iterator[str]:
        if self.tool_choice.is_forced or self.tool_choice.allowed is not None:
            yield "tool_choice"
        if self.chat.tools and not self.tool_choice.is_parallel:
            yield "parallel_tool_calls"


def make_request(
    client: Client,
    body: SamplingFields,
    messages: Sequence[Message],
    tools: Sequence[FunctionSpec],
    *,
    field_name: str = "messages",
    parameters: Mapping[str, Any] | None = None,
    choice: ToolChoice = AUTO,
    options: Mapping[str, Any] | None = None,
    n: int = 1,
    max_tokens: int | None = None,
    top_logprobs: int | None = None,
    **rest: Any,
) -> Request:
    """Build the request from what a protocol read; `parameters` are sampling parameters beside those of `body`.

    Raises:
        ClientError: 400, a field contradicts another one, or there is no message.
    """
    # A format is one of texts, and an answer of forced calls has none.
    allowed = {name: value for name, value in (parameters or {}).items() if not (choice.is_forced and name == GRAMMAR)}
    merged = {**body.sampling_parameters(), **allowed}
    stop = tuple(merged.pop("stop", ()))
    if choice.is_forced and not tools:
        raise ClientError(400, f"tool_choice {choice.name or choice.kind!r} needs tools", "tool_choice")
    names = {tool.name for tool in tools}
    for name in (choice.name,) if choice.kind == "named" else choice.allowed or ():
        if name not in names:
            raise ClientError(400, f"tool_choice names {name!r}, which is not in tools", "tool_choice")
    if choice.allowed is not None and names <= {*choice.allowed}:
        choice = choice._replace(allowed=None)
    specs = () if choice.kind == "none" else tuple(tool.in_chat() for tool in tools)
    try:
        chat = ChatInput.of(messages, specs, {**(options or {}), **body.template_options})
    except RecursionError as error:
        raise ClientError(
            400, f"{field_name}: the arguments of a tool call are nested too deeply", field_name
        ) from error
    request = Request(
        client=replace(client, session=client.session or body.session_id),
        chat=chat,
        sampling=Sampling(merged, stop, n, max_tokens, top_logprobs),
        tool_choice=choice,
        field_name=field_name,
        **rest,
    )
    if not (messages or request.answer_ids):
        raise ClientError(400, f"{field_name}: there is no message", field_name)
    return request


def check_choices(n: int | None, client: Client) -> int:
    """Return the number of choices; raises ClientError (400) above the limit."""
    if (n := n or 1) > client.max_choices:
        raise ClientError(400, f"n is {n}, at most {client.max_choices} choices are sampled (env.max_choices)", "n")
    return n


_BILLING = re.compile(
    r"x-anthropic-billing-header:(?:(?:[ \t]*[\w.-]+=[^;\s]*;)+(?:[ \t]*[\w.-]+=[^;\s]*(?=\n|\Z))?|[^\n]*)\s*"
)
"""Line at the beginning of Claude Code's system prompt, with another checksum in every request.

Translating proxies join it with the text that follows.
"""


def without_billing(text: str) -> str:
    """Return a system prompt without Claude Code's billing line, so that the requests of a session begin alike."""
    match = _BILLING.match(text)
    return text[match.end() :] if match else text


GRAMMAR = "structured_outputs"
"""vLLM's parameter of a grammar."""
REFERENCE = "reference"
"""Key of a placeholder message: its value is the id of the answer by which the gateway replaces it."""


def format_of(
    kind: Literal["text", "json_object", "json_schema"], schema: Mapping[str, Any] | None, field_name: str
) -> dict[str, Any]:
    """Return vLLM's parameters for the format of an answer; raises ClientError (400) if a schema is needed."""
    if kind == "text":
        return {}
    if kind == "json_object":
        return {GRAMMAR: {"json_object": True}}
    if not schema:
        raise ClientError(400, f"{field_name}: a JSON schema is needed", field_name)
    return {GRAMMAR: {"json": dict(schema)}}


def prompt_key(tools: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> bytes:
    """Return a digest of the tools, in their order, and the template's options."""
    written = [*tools, {**template}] if template else [*tools]
    return blake2b(json.dumps(written, sort_keys=True).encode(), digest_size=16).digest()


def _size(message: Message) -> int:
    texts = [text for name, text in message.items() if isinstance(text, str) and name != "reasoning_content"]
    calls = [(call["id"], *call["function"].values()) for call in message.get("tool_calls", ())]
    return sum(map(len, chain(texts, *calls))) - _inline_reasoning(message)


def _reasoning(messages: Sequence[Message]) -> int:
    return sum(len(message.get("reasoning_content", "")) + _inline_reasoning(message) for message in messages)


def _inline_reasoning(message: Message) -> int:
    """Count the characters of reasoning in an assistant's content, where some clients send it back."""
    return len("".join(message["content"].rpartition("</think>")[:2])) if message["role"] == "assistant" else 0


_NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": (-1, 0),
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "allowed_token_ids": [],
    "logit_bias": {},
    "structured_outputs": None,
}
"""Parameters that can change the sampling distribution, with the values that leave it unchanged."""


def _altering(sampling: Mapping[str, Any]) -> Iterator[str]:
    for name, neutral in _NEUTRAL.items():
        value = sampling.get(name)
        if value is not None and value != neutral and not (isinstance(neutral, tuple) and value in neutral):
            yield name
    if sampling.get("temperature") == 0:
        yield "temperature"
