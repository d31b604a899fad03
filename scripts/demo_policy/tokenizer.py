"""The demo policy's tokenizer: a byte-level BPE with Qwen3's control tokens, trained on the transcripts' own text.

In: texts. Out: a tokenizer that transformers and vLLM load, whose chat template writes what
`Qwen3Renderer(enable_thinking=False)` writes.
"""

import re
from collections.abc import Collection, Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1536

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_BRACKETED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special, as in Qwen3: decoding keeps them."""

_NO_WORD = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKEN = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_NO_WORD}"

CHAT_TEMPLATE = r"""
{%- set has_system = messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if has_system -%}{{- messages[0].content -}}{%- endif -%}
    {%- if has_system -%}{{- '\n\n' -}}{%- endif -%}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- elif has_system -%}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and loop.first -%}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- if not loop.first or message.content -%}{{- '\n' -}}{%- endif -%}
            {%- set function = call.function or call -%}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
            {%- if function.arguments is string -%}{{- function.arguments -}}
            {%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' -}}{%- endif -%}
""".strip()  # noqa: E501 - the template's lines are the prompt's lines


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = VOCAB_SIZE, words: Collection[str] = ()
) -> PreTrainedTokenizerFast:
    """Train the BPE on `texts`; every byte has a token, so any text comes back exactly.

    Args:
        texts: What is written with it.
        vocab_size: Tokens at most.
        words: If there are any, all other words are spelled letter by letter. A name that nobody has read before has
            the same tokens then wherever it stands: after a space, a dot, or as the beginning of a longer one.
    """
    bpe = Tokenizer(models.BPE())
    alternatives = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    pattern = rf"(?: |(?<!\p{{L}}))(?:{alternatives})(?!\p{{L}})|\p{{L}}|{_NO_WORD}" if words else _PRE_TOKEN
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in (PAD, IM_START, IM_END)]
    added += [AddedToken(token, special=False, normalized=False) for token in _BRACKETED]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
    )
