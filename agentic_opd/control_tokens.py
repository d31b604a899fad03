"""The tokens that structure a conversation, and texts that spell them without becoming them."""

from collections.abc import Collection
from typing import Any


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


def without_control_tokens(spellings: Collection[str], text: str) -> str:
    """`text` with a space behind the first character of each control token that it spells out."""
    while found := next((spelling for spelling in spellings if spelling in text), None):
        text = text.replace(found, f"{found[0]} {found[1:]}")
    return text
