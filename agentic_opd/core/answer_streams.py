"""The events of a streamed answer -> its body, as if it had not been streamed. Pure.

Of chat completions, Anthropic's messages and the Responses API. Events, fields and kinds of parts that are unknown here
are left out. A stream of another protocol raises AttributeError, IndexError, KeyError, TypeError or ValueError.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentic_opd.core.text import read_json

Body = dict[str, Any]


_LINE_END = re.compile(rb"\r\n|\n|\r")


def stream_events(stream: bytes) -> Iterator[Body]:
    """Yield the JSON objects among the server-sent events of a stream; an event that broke off is left out.

    Raises:
        ValueError: an event is not JSON.
    """
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


def chat_body(events: Iterable[Body]) -> Body:
    """Return the body of a chat completion."""
    body: Body = {}
    choices = defaultdict[int, _ChatChoice](_ChatChoice)
    for event in events:
        body |= {name: event[name] for name in ("id", "model", "usage") if event.get(name)}
        for choice in event.get("choices") or ():
            choices[choice.get("index") or 0].add(choice)
    return {**body, "choices": [choice.body() for _, choice in sorted(choices.items())]}


_BLOCK_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def messages_body(events: Iterable[Body]) -> Body:
    """Return the body of an answer of Anthropic's messages."""
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


def responses_body(events: Iterable[Body]) -> Body:
    """Return the body of an answer of the Responses API."""
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
