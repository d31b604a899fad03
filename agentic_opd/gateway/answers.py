"""Answers of a foreign model: the bytes of a response -> what the client's next request says that it was. Pure.

    stream: events -> body         whole: bytes -> body         body -> one `ForeignAnswer` a choice

`core.answer_streams` puts the events of a stream together to the body of an answer that is not streamed.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from agentic_opd.core.answer_streams import Body, chat_body, messages_body, responses_body, stream_events
from agentic_opd.core.media import media_word
from agentic_opd.core.text import read_json
from agentic_opd.core.zstd import ZSTD_LIBRARY

LARGEST_BODY = 64 * 2**20
"""Most bytes of a request or an answer that are read for the journal. Larger ones are passed on, and not recorded."""


TOO_LARGE = f"it is larger than {LARGEST_BODY} bytes"


class UnrecordableError(Exception):
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
        UnrecordableError: the body is not of this protocol.
    """
    assembled, split = _READERS[path]
    try:
        body = read_json(data) if data.lstrip().startswith(b"{") else assembled(stream_events(data))
        return [*split(body)]
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UnrecordableError("it is incomplete, or not in the format of its protocol") from error


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


_READERS: dict[str, tuple[Callable[[Iterable[Body]], Body], Callable[[Body], Iterator[ForeignAnswer]]]] = {
    "/v1/chat/completions": (chat_body, _chat_answers),
    "/v1/messages": (messages_body, _messages_answers),
    "/v1/responses": (responses_body, _responses_answers),
}


# ------------------------------------------------------------------------------------------------------------- requests

_TEXT_SOURCES = ("text", "content")
"""Types of the source of a document that is text."""


def without_media(history: Any, kinds: list[str]) -> Any:
    """Return the messages or items of a request with texts in place of pictures, sounds and files.

    The types of the replaced parts are appended to `kinds`, in order.
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


_LIBRARIES = {"br": "brotli", "zstd": ZSTD_LIBRARY}


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
        UnrecordableError: an encoding is unknown or broken, or the body is too large.
    """
    for name in reversed([part.strip().lower() for part in encoding.split(",")]):
        if name in ("", "identity"):
            continue
        if name not in ENCODINGS:
            raise UnrecordableError("its content encoding can't be read here")
        try:
            data = _DECODERS[name](data)
        except Exception as error:  # Each library has its own error types.
            raise UnrecordableError(f"its content encoding {name} is broken") from error
        if len(data) > LARGEST_BODY:
            raise UnrecordableError(TOO_LARGE)
    return data
