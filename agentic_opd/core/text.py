"""Text that the parts share: a middle that is cut out, and control tokens spelled so that they stay text. Pure."""

import json
from collections.abc import Collection, Mapping
from typing import Any


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
