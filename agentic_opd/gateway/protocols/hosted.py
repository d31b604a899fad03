"""What tools of another provider did, as text: parts of a history that its client began elsewhere. Pure.

In: an item or block of any provider, as JSON. Out: readable lines, without ids, signatures, encrypted and binary data.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

LEFT_OUT = "left out of the prompt, because only its provider can read it"

_OPAQUE = re.compile(
    r"type|status|caller|cache_control|signature|fingerprint|citations|(.*_)?ids?|encrypted_.*|"
    r"tools|tool_changes|input_schema"
)
"""Keys whose values say nothing to a model, or offer it tools that it cannot call."""
_STRUCTURE = re.compile(r"([<\[])(?=[/|]?\w*(?:think|tool|arg_))", re.IGNORECASE)
"""Matches the beginning of a tag around reasoning and calls. What a tool wrote must not structure a message."""
_UNNAMED = ("text", "content", "output", "outputs", "results", "input", "action", "operation", "summary")
"""Keys that are not written in front of their values."""
_BROKEN = r"\1 "
_BINARY = re.compile(r"[\w+/=-]{256,}", re.ASCII)
"""Matches binary data, which is written in base64 or as hexadecimal digits."""


def hosted_text(kind: str, item: Mapping[str, Any]) -> str:
    """Return an item of type `kind` as text after a line with its type; empty if it holds nothing readable."""
    text = readable(item)
    return f"[{kind}]\n{text}" if text else ""


def readable(value: Any) -> str:
    """Return the readable texts, numbers and flags of JSON data, one a line."""
    return "\n".join(_lines(value, ""))


def _lines(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not _OPAQUE.fullmatch(key):
                yield from _lines(item, "" if key in _UNNAMED else f"{key}: ")
    elif isinstance(value, list):
        for item in value:
            yield from _lines(item, name)
    elif isinstance(value, str):
        if value and not value.startswith("data:") and not _BINARY.fullmatch(value):
            yield f"{name}{_STRUCTURE.sub(_BROKEN, value)}"
    elif value is not None and value is not False:
        yield f"{name}{value}"
