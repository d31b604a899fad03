r"""Text of models, servers, files and people as text of this package, and back. Pure.

In: JSON and text of others, which may hold halves of surrogate pairs, terminal escapes and control tokens. Out: text
that every encoder, tokenizer, database and terminal takes. A line ends at `\n` and nowhere else.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")

_HALF_PAIR = re.compile("[\ud800-\udfff]")
_TERMINAL_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 but tab and newline, DEL, C1, other ends of lines, marks that turn the direction of text, halves of pairs."""
_OTHER_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Ends of lines, by `str.splitlines`, that JSON does not escape."""


def well_formed(text: str) -> str:
    """Return `text` with its surrogate pairs joined, and U+FFFD for each half of one, which no encoding can write."""
    if _HALF_PAIR.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def well_formed_json(value: ValueT) -> ValueT:
    """Return JSON data with `well_formed` keys and texts.

    Raises:
        ValueError, RecursionError: an integer is too long, or the data nested too deeply, to be written as JSON.
    """
    text = json.dumps(value, ensure_ascii=False)
    return value if _HALF_PAIR.search(text) is None else json.loads(well_formed(text))


def read_json(
    data: str | bytes | bytearray,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
) -> Any:
    """Read JSON of a model, a server, a client or a file: the one way in, behind which all text is `well_formed`.

    Args:
        data: One JSON text.
        parse_constant: Reads NaN and the infinities; see `json.loads`.
        parse_float: Reads numbers that are no integers; see `json.loads`.

    Raises:
        ValueError, RecursionError: it is not JSON, or nested too deeply.
    """
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    value = json.loads(well_formed(text), parse_constant=parse_constant, parse_float=parse_float)
    # An escaped half is ASCII until it is read.
    return well_formed_json(value) if "\\ud" in text or "\\uD" in text else value


def json_line(value: Any) -> bytes:
    r"""Return `value` as one line of JSON, which ends at its `\n` for readers that know other ends of lines too.

    Raises:
        ValueError: a number is not finite.
    """
    text = well_formed(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    return _OTHER_LINE_ENDS.sub(_escaped, text).encode() + b"\n"


def text_lines(text: str) -> Sequence[str]:
    r"""Return the lines of `text`, without the `\n` that ends each."""
    return text.removesuffix("\n").split("\n") if text else ()


def printable(text: str) -> str:
    r"""Return `text` of others for a terminal: what would control it is written as `\u001b`, as JSON escapes it."""
    return _TERMINAL_CONTROL.sub(_escaped, text)


def printable_line(text: str) -> str:
    """Return `printable` text that stays on its line and in its column."""
    return printable(text).replace("\n", "\\u000a").replace("\t", "\\u0009")


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def cut_middle(text: str, max_chars: int) -> str:
    """Return `text` with at most `max_chars` of its characters, the middle replaced by a line that counts what is gone.

    Head and tail are kept in equal parts: a traceback's cause stands at its end, a command's context at its start.
    The mark comes on top of `max_chars`.
    """
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    cut = len(text) - max_chars
    return f"{text[:head]}\n[... {cut} characters cut ...]\n{text[len(text) - tail :]}"


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Ids and spelling of the tokens that structure a conversation: special ones, and bracketed added ones.

    Qwen3's `</tool_call>` and `</think>` are added tokens that are not marked special; runs of spaces, which some
    tokenizers add too, are text.
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
"""Spellings of control tokens of the common model families, for text that a model of any family will read."""


def call_arguments(arguments: str | Mapping[str, Any] | None) -> str:
    """A tool call's arguments as a text; `{}` where a client wrote none: nothing, an empty text or JSON's null."""
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def without_control_tokens(spellings: Collection[str], text: str) -> str:
    """`text` with a space behind the first character of each control token that it spells out."""
    while found := next((spelling for spelling in spellings if spelling in text), None):
        text = text.replace(found, f"{found[0]} {found[1:]}")
    return text
