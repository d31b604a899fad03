"""Answers of a foreign model: the bytes of a response -> what the client's next request says that it was. Pure.

    stream: events -> body         whole: bytes -> body         body -> one `ForeignAnswer` a choice

The events of a stream are put together to the body of an answer that is not streamed. Events, fields and kinds of parts
that are unknown here are left out.
"""

import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from agentic_opd.core.media import media_word
from agentic_opd.core.text import read_json

Body = dict[str, Any]
LARGEST_BODY = 64 * 2**20
"""Most bytes of a request or an answer that are read for the journal. Larger ones are passed on, and not recorded."""


TOO_LARGE = f"it is larger than {LARGEST_BODY} bytes"


class UnreadableError(Exception):
    """An answer can't be recorded, for a `reason` without any text of the conversation; `detail` names a field."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class ForeignAnswer:
    """One choice of an answer."""

    items: Sequence[Any]
    """The answer as the client's next request holds it: messages or items of its protocol."""
    finish_reason: str
    """In the upstream's word; empty if the answer broke off."""
    is_whole: bool
    """Whether the model ended the answer itself."""
    answer_id: str
    model: str
    usage: Mapping[str, int]
    """Tokens of the prompt and the answer: `input`, `output`."""


def read_answers(path: str, data: bytes) -> list[ForeignAnswer]:
    """Read the answers in the body of a response: JSON, or a stream of events.

    Args:
        path: The protocol's path, such as `/v1/messages`.
        data: The body, without a content encoding.

    Raises:
        UnreadableError: the body is not of this protocol.
    """
    assembled, split = _READERS[path]
    try:
        body = read_json(data) if data.lstrip().startswith(b"{") else assembled(_events(data))
        return [*split(body)]
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UnreadableError("it is incomplete, or not in the format of its protocol") from error


# -------------------------------------------------------------------------------------------------------------- streams


_LINE_END = re.compile(rb"\r\n|\n|\r")


def _events(stream: bytes) -> Iterator[Body]:
    """Yield the JSON objects among the server-sent events of a stream; an event that broke off is left out."""
    data: list[bytes] = []
    for line in _LINE_END.split(stream):
        if line.startswith(b"data:"):
            data.append(line[5:])
        elif not line and data:
            text = b"\n".join(data).strip()
            data = []
            if text.startswith(b"{"):
                yield read_json(text)


class _Texts:
    """Texts that grow by pieces, each named by its position in a body."""

    def __init__(self) -> None:
        self._pieces = defaultdict[tuple[Any, ...], list[str]](list)

    def add(self, piece: Any, *position: Any) -> None:
        if isinstance(piece, str) and piece:
            self._pieces[position].append(piece)

    def of(self, *position: Any) -> str:
        return "".join(self._pieces.get(position, ()))


_CHAT_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")
_CALL_TEXTS = {"function": "arguments", "custom": "input"}
"""Kind of a call -> the field that grows."""


class _ChatChoice:
    """One choice of a stream of chat completions."""

    def __init__(self) -> None:
        self._texts = _Texts()
        self._calls: dict[int, Body] = {}
        self._finish_reason: str | None = None

    def add(self, choice: Body) -> None:
        delta = choice.get("delta") or {}
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        for name in _CHAT_TEXTS:
            self._texts.add(delta.get(name), name)
        legacy = delta.get("function_call")
        for piece in delta.get("tool_calls") or ([{"index": 0, "function": legacy}] if legacy else ()):
            # A server that sends no index sends whole calls.
            self._add_call(piece, piece["index"] if isinstance(piece.get("index"), int) else len(self._calls))

    def _add_call(self, piece: Body, index: int) -> None:
        call = self._calls.setdefault(index, {})
        call |= {name: piece[name] for name in ("id", "type") if piece.get(name)}
        for kind, text_name in _CALL_TEXTS.items():
            if called := piece.get(kind):
                call[kind] = {**call.get(kind, {}), **({"name": called["name"]} if called.get("name") else {})}
                self._texts.add(called.get(text_name), index, text_name)

    def body(self) -> Body:
        """Return the choice of an answer that is not streamed."""
        message: Body = {name: self._texts.of(name) or None for name in _CHAT_TEXTS}
        calls: list[Body] = []
        for index, call in sorted(self._calls.items()):
            grown = {
                kind: {**call[kind], text: self._texts.of(index, text)}
                for kind, text in _CALL_TEXTS.items()
                if kind in call
            }
            calls.append({**call, **grown})
        return {"message": {**message, "tool_calls": calls or None}, "finish_reason": self._finish_reason}


def _chat_body(events: Iterator[Body]) -> Body:
    body: Body = {}
    choices = defaultdict[int, _ChatChoice](_ChatChoice)
    for event in events:
        body |= {name: event[name] for name in ("id", "model", "usage") if event.get(name)}
        for choice in event.get("choices") or ():
            choices[choice.get("index") or 0].add(choice)
    return {**body, "choices": [choice.body() for _, choice in sorted(choices.items())]}


_BLOCK_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def _messages_body(events: Iterator[Body]) -> Body:
    body: Body = {}
    blocks: dict[int, Body] = {}
    texts = _Texts()
    for event in events:
        kind = event.get("type")
        if kind == "message_start":
            body = {**event["message"]}
        elif kind == "content_block_start":
            blocks[event["index"]] = {**event["content_block"]}
        elif kind == "content_block_delta" and event["delta"].get("type") in _BLOCK_DELTAS:
            name = _BLOCK_DELTAS[event["delta"]["type"]]
            texts.add(event["delta"].get(name), event["index"], name)
        elif kind == "message_delta":
            body |= {"stop_reason": event["delta"].get("stop_reason")}
            body["usage"] = {**(body.get("usage") or {}), **(event.get("usage") or {})}
    body["content"] = [
        block for index, begun in sorted(blocks.items()) if (block := _block(begun, index, texts)) is not None
    ]
    return body


def _block(begun: Body, index: int, texts: _Texts) -> Body | None:
    """Return a block with its deltas; None for a call whose arguments broke off."""
    grown = {name: f"{begun[name]}{texts.of(index, name)}" for name in ("text", "thinking") if name in begun}
    arguments = texts.of(index, "partial_json")
    if not arguments:
        return {**begun, **grown}
    try:
        return {**begun, "input": read_json(arguments)}
    except ValueError:
        return None


_ITEM_DELTAS = {
    "response.output_text.delta": ("content", "output_text"),
    "response.refusal.delta": ("content", "refusal"),
    "response.reasoning_text.delta": ("content", "reasoning_text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_text"),
}
"""Type of an event -> the item's list of parts and the part's type."""


def _responses_body(events: Iterator[Body]) -> Body:
    body: Body = {}
    started_items: dict[int, Body] = {}
    finished_items: dict[int, Body] = {}
    texts = _Texts()
    for event in events:
        kind, index = event.get("type"), event.get("output_index")
        if isinstance(event.get("response"), Mapping):
            body |= {name: value for name, value in event["response"].items() if value is not None}
        elif kind == "response.output_item.added":
            started_items[event["output_index"]] = event["item"]
        elif kind == "response.output_item.done":
            finished_items[event["output_index"]] = event["item"]
        elif kind in _ITEM_DELTAS:
            texts.add(event.get("delta"), index, *_ITEM_DELTAS[kind])
    broken = {
        index: _broken_item(item, index, texts) for index, item in started_items.items() if index not in finished_items
    }
    items = [item for _, item in sorted((broken | finished_items).items()) if item is not None]
    # Some servers leave the items out of the last event.
    return {**body, "output": body.get("output") or items}


def _broken_item(item: Body, index: int, texts: _Texts) -> Body | None:
    """Return an item that broke off, with the parts that arrived; None for a call."""
    if item.get("type") not in ("message", "reasoning"):
        return None
    parts = defaultdict[str, list[Body]](list)
    for name, kind in _ITEM_DELTAS.values():
        if text := texts.of(index, name, kind):
            parts[name].append({"type": kind, "refusal" if kind == "refusal" else "text": text})
    return {**item, **parts}


# --------------------------------------------------------------------------------------------------------------- bodies

_CUT_CHAT = ("", "length", "content_filter", "error")
_CUT_MESSAGES = ("", "max_tokens", "pause_turn", "refusal", "model_context_window_exceeded")
"""Reasons of an end that the model did not choose."""


def _chat_answers(body: Body) -> Iterator[ForeignAnswer]:
    for choice in body["choices"]:
        reason = choice.get("finish_reason") or ""
        message = {**choice["message"], "role": "assistant"}
        usage = _usage(body, "prompt_tokens", "completion_tokens")
        yield ForeignAnswer([message], reason, reason not in _CUT_CHAT, *_names(body), usage)


def _messages_answers(body: Body) -> Iterator[ForeignAnswer]:
    reason = body.get("stop_reason") or ""
    items = [{"role": "assistant", "content": body["content"]}]
    usage = _usage(body, "input_tokens", "output_tokens")
    yield ForeignAnswer(items, reason, reason not in _CUT_MESSAGES, *_names(body), usage)


def _responses_answers(body: Body) -> Iterator[ForeignAnswer]:
    status = body.get("status") or ""
    details = body.get("incomplete_details") or {}
    reason = "" if status in ("in_progress", "queued") else details.get("reason") or status
    usage = _usage(body, "input_tokens", "output_tokens")
    yield ForeignAnswer(body["output"], reason, status == "completed", *_names(body), usage)


def _names(body: Body) -> tuple[str, str]:
    """Return the id and the model of an answer."""
    return str(body.get("id") or ""), str(body.get("model") or "")


def _usage(body: Body, *names: str) -> dict[str, int]:
    usage = body.get("usage") or {}
    named = zip(("input", "output"), names, strict=True)
    return {name: usage[field_name] for name, field_name in named if isinstance(usage.get(field_name), int)}


_READERS: dict[str, tuple[Callable[[Iterator[Body]], Body], Callable[[Body], Iterator[ForeignAnswer]]]] = {
    "/v1/chat/completions": (_chat_body, _chat_answers),
    "/v1/messages": (_messages_body, _messages_answers),
    "/v1/responses": (_responses_body, _responses_answers),
}


# ------------------------------------------------------------------------------------------------------------- requests

_TEXT_SOURCES = ("text", "content")
"""Types of the source of a document that is text."""


def without_media(history: Any, kinds: list[str]) -> Any:
    """Return the messages or items of a request with texts in place of pictures, sounds and files.

    The types of what was replaced are appended to `kinds`, in order.
    """
    if isinstance(history, list):
        return [without_media(part, kinds) for part in cast(list[Any], history)]
    if not isinstance(history, dict):
        return history
    part = cast(Body, history)
    kind, source = part.get("type"), part.get("source")
    is_text = isinstance(source, Mapping) and cast(Body, source).get("type") in _TEXT_SOURCES
    if (word := media_word(kind)) is not None and not is_text:
        kinds.append(cast(str, kind))
        return {"type": "text", "text": word}
    parts = {
        name: without_media(part[name], kinds) for name in ("content", "output") if isinstance(part.get(name), list)
    }
    return {**part, **parts} if parts else part


# ------------------------------------------------------------------------------------------------------------ encodings


_LIBRARIES = {"br": "brotli", "zstd": "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"}


def _unzip(data: bytes, window: int = 47) -> bytes:
    """Return the beginning of what zlib or gzip wrote (window 47), or raw deflate (-15)."""
    return zlib.decompressobj(window).decompress(data, LARGEST_BODY + 1)


def _inflate(data: bytes) -> bytes:
    try:
        return _unzip(data)
    except zlib.error:  # Some servers leave zlib's header out.
        return _unzip(data, -15)


def _brotli(data: bytes) -> bytes:
    return import_module(_LIBRARIES["br"]).Decompressor().process(data, output_buffer_limit=LARGEST_BODY + 1)


def _zstd(data: bytes) -> bytes:
    return import_module(_LIBRARIES["zstd"]).ZstdDecompressor().decompress(data, LARGEST_BODY + 1)


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # Its parent package is missing.
        return False


_DECODERS = {"gzip": _unzip, "x-gzip": _unzip, "deflate": _inflate, "br": _brotli, "zstd": _zstd}
ENCODINGS = frozenset(name for name in _DECODERS if name not in _LIBRARIES or _is_installed(_LIBRARIES[name]))
"""Content encodings that can be read here; the extra `gateway` holds the libraries of all of them."""


def decoded(data: bytes, encoding: str) -> bytes:
    """Return a body without its content encodings, the last of which was applied last.

    An encoded stream that broke off is decoded as far as it goes.

    Raises:
        UnreadableError: an encoding is unknown or broken, or the body is too large.
    """
    for name in reversed([part.strip().lower() for part in encoding.split(",")]):
        if name in ("", "identity"):
            continue
        if name not in ENCODINGS:
            raise UnreadableError("its content encoding can't be read here")
        try:
            data = _DECODERS[name](data)
        except Exception as error:  # Each library has its own error types.
            raise UnreadableError(f"its content encoding {name} is broken") from error
        if len(data) > LARGEST_BODY:
            raise UnreadableError(TOO_LARGE)
    return data
