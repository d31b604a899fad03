from typing import Any, ClassVar

import pytest
from transformers import PreTrainedTokenizerBase

from agentic_opd.core.errors import ConfigError
from agentic_opd.report.tokens import TokenTexts, load_tokenizer


def test_texts_are_the_tokenizers(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = TokenTexts(tokenizer)
    text = "def f(x):\n\treturn 'é数'  # 👍"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert texts.joined(ids) == text
    assert texts.text(tokenizer.convert_tokens_to_ids("<|im_end|>")) == "<|im_end|>"


def test_a_part_of_a_character_is_shown_as_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    """数 is e6 95 b0, and the test's vocabulary has no token for more than one of them."""
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("数", add_special_tokens=False)
    assert [texts.text(token_id) for token_id in ids] == ["⟨e6⟩", "⟨95⟩", "⟨b0⟩"]
    assert texts.joined(ids[:2]) == "⟨e6 95⟩"
    assert texts.joined([*ids, *ids[1:]]) == "数⟨95⟩⟨b0⟩"


def test_an_id_that_nobody_knows_is_shown_as_such(tokenizer: PreTrainedTokenizerBase) -> None:
    assert TokenTexts(None).text(12) == "⟨12⟩"
    assert TokenTexts(None).joined([12, 13]) == "⟨12⟩⟨13⟩"
    assert not TokenTexts(None).has_tokenizer
    for token_id in (10**6, 2**40, -1):
        assert TokenTexts(tokenizer).text(token_id) == f"⟨{token_id}⟩"


class SentencePieces:
    """A vocabulary as SentencePiece writes it: ▁ for a space, and bytes to fall back on."""

    pieces = ("▁def", "<0xE6>", "<0x95>", "<0xB0>", "Ġ")
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.pieces)}

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.pieces[token_id]


def test_sentence_pieces_and_their_bytes() -> None:
    texts = TokenTexts(SentencePieces())
    assert texts.joined([0, 1, 2, 3]) == " def数"
    assert texts.text(1) == "⟨e6⟩"
    assert texts.text(4) == "Ġ"


def test_a_tokenizer_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="'/nowhere' can't be loaded"):
        load_tokenizer("/nowhere")
