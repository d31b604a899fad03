"""Token ids -> displayable text. Pure, except `load_tokenizer`.

A token of a byte-level vocabulary may be part of a character. Such bytes are shown as `⟨e2 80⟩` if the token is shown
alone, and are joined if the text consists of several tokens.
"""

import codecs
import re
from collections.abc import Iterable
from typing import Any

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.text import control_tokens

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MIN_ALPHABET = 240
"""Number of the 256 byte letters from which a vocabulary counts as byte-level; some vocabularies omit bytes that UTF-8
never uses."""


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by its hub name or folder, without a model and without code from the hub.

    Raises:
        ConfigError: the tokenizer can't be loaded.
    """
    from transformers import AutoTokenizer  # Takes seconds, and `--help` does not need it.

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the tokenizer {name!r} can't be loaded ({type(error).__name__}: {reason})") from error


class TokenTexts:
    """Looks up the text of tokens; without a tokenizer each token is shown as its id."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._bytes_by_id: dict[int, bytes | None] = {}
        vocab = {} if tokenizer is None else tokenizer.get_vocab()
        self._is_byte_level = sum(letter in vocab for letter in _BYTES) >= _MIN_ALPHABET
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {token_id: str(token.content) for token_id, token in added.items()}
        self._ids = frozenset(vocab.values())
        self.control = () if tokenizer is None else tuple(control_tokens(tokenizer).values())
        """Texts of the control tokens, which structure a conversation."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokens can be shown as text."""
        return self._tokenizer is not None

    def text(self, token_id: int) -> str:
        """Return the token's text; partial characters are shown as bytes, `⟨e2 80⟩`, unknown tokens as ids, `⟨12⟩`."""
        data = self._bytes(token_id)
        return f"⟨{token_id}⟩" if data is None else _with_bytes(data)

    def joined(self, token_ids: Iterable[int]) -> str:
        """Return the text of consecutive tokens, which may share a character; unknown ids as `⟨ID⟩`."""
        parts = ((token_id, self._bytes(token_id)) for token_id in token_ids)
        return _with_bytes(b"".join(f"⟨{token_id}⟩".encode() if data is None else data for token_id, data in parts))

    def _bytes(self, token_id: int) -> bytes | None:
        if token_id not in self._bytes_by_id:
            self._bytes_by_id[token_id] = self._token_bytes(token_id)
        return self._bytes_by_id[token_id]

    def _token_bytes(self, token_id: int) -> bytes | None:
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
    """Return GPT-2's mapping of letters to bytes for byte-level vocabularies; printable ones map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


_BYTES = _byte_letters()


def _with_bytes(data: bytes) -> str:
    return data.decode(errors=_HEX)


def _as_hex(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)  # The handler is registered for decoding only.
    return f"⟨{error.object[error.start : error.end].hex(' ')}⟩", error.end


_HEX = "agentic_opd.hex"
codecs.register_error(_HEX, _as_hex)
