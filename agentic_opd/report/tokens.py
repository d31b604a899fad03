"""Token ids -> the text that each stands for, so that it can be shown. Pure, but for `load_tokenizer`.

A token of a byte-level vocabulary may be part of a character. Such bytes are written as `⟨e2 80⟩` where the token is
shown by itself, and put together where a text is made of several.
"""

import codecs
import re
from collections.abc import Iterable
from typing import Any

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.text import control_tokens

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MIN_ALPHABET = 240
"""A vocabulary that holds so many of the 256 letters that stand for bytes is a byte-level one; some leave out bytes
that UTF-8 never uses."""


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by its hub name or folder; nothing but the tokenizer is loaded, and no code that comes with it.

    Raises:
        ConfigError: it can't be loaded.
    """
    from transformers import AutoTokenizer  # takes seconds, and `--help` needs none of it

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the tokenizer {name!r} can't be loaded ({type(error).__name__}: {reason})") from error


class TokenTexts:
    """Looks up what tokens stand for; without a tokenizer their ids are all there is."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes | None] = {}
        vocab = {} if tokenizer is None else tokenizer.get_vocab()
        self._is_byte_level = sum(letter in vocab for letter in _BYTES) >= _MIN_ALPHABET
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {token_id: str(token.content) for token_id, token in added.items()}
        self._ids = frozenset(vocab.values())
        self.control = () if tokenizer is None else tuple(control_tokens(tokenizer).values())
        """How the tokens that structure a conversation are written."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is more to show than ids."""
        return self._tokenizer is not None

    def shown(self, token_id: int) -> str:
        """The token's text; bytes that are not a whole character as `⟨e2 80⟩`, an unknown token as its id, `⟨12⟩`."""
        data = self._bytes(token_id)
        return f"⟨{token_id}⟩" if data is None else _with_bytes(data)

    def joined(self, token_ids: Iterable[int]) -> str:
        """The text of several tokens in a row."""
        parts = ((token_id, self._bytes(token_id)) for token_id in token_ids)
        return _with_bytes(b"".join(f"⟨{token_id}⟩".encode() if data is None else data for token_id, data in parts))

    def _bytes(self, token_id: int) -> bytes | None:
        if token_id not in self._known:
            self._known[token_id] = self._looked_up(token_id)
        return self._known[token_id]

    def _looked_up(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return self._added[token_id].encode(errors="replace")
        if self._tokenizer is None or token_id not in self._ids:
            return None
        piece: str = self._tokenizer.convert_ids_to_tokens(token_id)
        if self._is_byte_level and all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace("▁", " ").encode(errors="replace")


def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in a byte-level vocabulary (GPT-2's): printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


def _with_bytes(data: bytes) -> str:
    return data.decode(errors=_HEX)


def _as_hex(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)  # it is only ever asked to decode
    return f"⟨{error.object[error.start : error.end].hex(' ')}⟩", error.end


_HEX = "agentic_opd.hex"
codecs.register_error(_HEX, _as_hex)
