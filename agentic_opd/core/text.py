r"""Convert text of models, servers, files and people to well-formed text, and back. Pure.

In: untrusted JSON and text, which may hold unpaired surrogates, terminal escapes and control tokens. Out: text that
every encoder, tokenizer, database and terminal accepts. Lines end at `\n` only.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import msgspec
from pydantic_core import PydanticSerializationError, to_json

ValueT = TypeVar("ValueT")

_HALF_PAIR = re.compile("[\ud800-\udfff]")
_TERMINAL_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 except tab and newline, DEL, C1, other line ends, marks for the direction of text, surrogates."""
_OTHER_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Line ends of `str.splitlines` that JSON does not escape."""


def well_formed(text: str) -> str:
    """Return `text` with surrogate pairs joined, and U+FFFD for each unpaired one, which no encoding can write."""
    if _HALF_PAIR.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def well_formed_json(value: ValueT) -> ValueT:
    """Return JSON data with `well_formed` keys and texts.

    Raises:
        ValueError, RecursionError: an integer is too long, or the data is nested too deeply, to be written as JSON.
    """
    text = json.dumps(value, ensure_ascii=False)
    return value if _HALF_PAIR.search(text) is None else json.loads(well_formed(text))


def read_json(
    data: str | bytes | bytearray,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
) -> Any:
    """Read JSON of a model, a server, a client or a file; all text in the result is `well_formed`.

    All external JSON enters the package through this function. `parse_constant` and `parse_float` are those of
    `json.loads`.

    Raises:
        ValueError, RecursionError: the data is not JSON, or is nested too deeply.
    """
    if parse_constant is None and parse_float is None and not _has_half_pairs(data):
        try:
            return msgspec.json.decode(data)
        except ValueError:  # Not UTF-8, not JSON, or what only Python's reader takes: NaN, a number like 1e999.
            pass
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    value = json.loads(well_formed(text), parse_constant=parse_constant, parse_float=parse_float)
    # An escaped surrogate is ASCII until it is decoded.
    return well_formed_json(value) if "\\ud" in text or "\\uD" in text else value


def _has_half_pairs(data: str | bytes | bytearray) -> bool:
    """Return whether JSON may hold escaped surrogates; others are not UTF-8."""
    if isinstance(data, str):
        return "\\ud" in data or "\\uD" in data
    return b"\\ud" in data or b"\\uD" in data


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and the infinities, which Python's reader takes and JSON does not have (`read_json`)."""
    raise ValueError(f"{name} is not a JSON number")


def json_line(value: Any) -> bytes:
    r"""Return `value` as one line of JSON; its `\n` is the only line end for every reader.

    Raises:
        ValueError: a number is not finite.
    """
    return _in_pieces(value, _json_text) + b"\n"


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_PIECE = 64
"""Number of rows that are encoded at a time."""


def _json_text(value: Any) -> bytes:
    return _OTHER_LINE_ENDS.sub(_escaped, well_formed(_ENCODER.encode(value))).encode()


def _in_pieces(value: Any, encode: Callable[[Any], bytes]) -> bytes:
    """Return the JSON of an object whose entries are encoded one by one, and long lists of lists by `_PIECE` items.

    The encoders hold the interpreter's lock for a whole call. A group has megabytes, for which the event loop would
    wait a tenth of a second, also if the call is made in a thread.
    """
    if type(value) is dict and all(type(key) is str for key in cast(dict[Any, Any], value)):
        entries = cast(dict[str, Any], value).items()
        return b"{" + b",".join(encode(key) + b":" + _list_in_pieces(entry, encode) for key, entry in entries) + b"}"
    return encode(value)


def _list_in_pieces(value: Any, encode: Callable[[Any], bytes], *, is_outer: bool = True) -> bytes:
    if type(value) is not list or not value or type(cast(list[Any], value)[0]) is not list:
        return encode(value)
    items = cast(list[Any], value)
    if is_outer:
        pieces = (_list_in_pieces(item, encode, is_outer=False) for item in items)
    else:
        pieces = (encode(items[start : start + _PIECE])[1:-1] for start in range(0, len(items), _PIECE))
    return b"[" + b",".join(pieces) + b"]"


def request_body(value: Any) -> bytes:
    """Return `value` as JSON of a request that is mostly ids and text, in a tenth of the time of `json.dumps`.

    Raises:
        ValueError: a number is not finite.
    """
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError:  # An unpaired surrogate.
        return json_line(value)
    return json_body(value) if b"null" in body else body  # Numbers that are not finite become null.


def json_body(value: Any) -> bytes:
    """Return `value` as JSON of a request, in a fifth of the time that `json_line` takes.

    Raises:
        ValueError: a number is not finite.
    """
    try:
        body = _in_pieces(value, to_json)
    except PydanticSerializationError:  # An unpaired surrogate.
        return json_line(value)
    return json_line(value) if b"NaN" in body or b"Infinity" in body else body


def text_lines(text: str) -> Sequence[str]:
    r"""Return the lines of `text`, without the `\n` at the end of each."""
    return text.removesuffix("\n").split("\n") if text else ()


def printable(text: str) -> str:
    r"""Return untrusted `text` for a terminal: control characters are escaped as in JSON, such as `\u001b`."""
    return _TERMINAL_CONTROL.sub(_escaped, text)


def printable_line(text: str) -> str:
    """Return `printable` text with newlines and tabs escaped too, for one cell of one line."""
    return printable(text).replace("\n", "\\u000a").replace("\t", "\\u0009")


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def cut_middle(text: str, max_chars: int) -> str:
    """Return at most `max_chars` characters of `text`; a line with the number of cut characters replaces the middle.

    Head and tail are equally long, because a traceback's cause is at its end and a command's context at its start.
    The line in the middle is not counted in `max_chars`.
    """
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    cut = len(text) - max_chars
    return f"{text[:head]}\n[... {cut} characters cut ...]\n{text[len(text) - tail :]}"


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return ids and spellings of the tokens that structure a conversation: special ones, and bracketed added ones.

    Qwen3's `</tool_call>` and `</think>` are added tokens that are not marked special. Runs of spaces, which some
    tokenizers add too, are not control tokens.
    """
    return {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if len(token.content.strip()) > 1 and (token.special or token.content.startswith(("<", "[")))
    }


FOREIGN_CONTROL_TOKENS = (
    *("<|", "<\uff5c"),  # Qwen, Llama 3, Phi, GLM, gpt-oss; DeepSeek
    *("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),  # Llama 2, Mistral
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),  # Mistral
    *("<s>", "</s>", "<bos>", "<eos>", "<pad>", "<unk>"),
    *("<start_of_turn>", "<end_of_turn>"),  # Gemma
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),  # Qwen 3
    *("[gMASK]", "<sop>", "<eop>", "[THINK]", "[/THINK]"),  # GLM, Magistral
    *("<minimax:tool_call>", "</minimax:tool_call>", "]~b]", "[e~["),  # MiniMax
)
"""Spellings of control tokens of the common model families, for text that any model may read."""


def call_arguments(arguments: str | Mapping[str, Any] | None) -> str:
    """Return a tool call's arguments as text; `{}` for None, an empty text or JSON's null."""
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def without_control_tokens(spellings: Collection[str], text: str) -> str:
    """Return `text` with a space after the first character of each control token that it spells out."""
    is_changed = True
    while is_changed:  # A second round only if a spelling holds a space itself.
        is_changed = False
        for spelling in spellings:
            while spelling in text:
                text = text.replace(spelling, f"{spelling[0]} {spelling[1:]}")
                is_changed = True
    return text
