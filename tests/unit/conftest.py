import atexit
import gc
import logging
import ssl
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

gc.disable()  # What torch and vLLM make while they are imported cost it an eighth of the whole run.
# Each of a hundred OpenAI clients would read the certificates anew, for 30 ms.
ssl.create_default_context = cache(ssl.create_default_context)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Else the bindings of triton and xgrammar report leaks. pytest's own last collections, before that, are quick so.
    atexit.register(gc.unfreeze)
    # pytest adds its handlers to each logger that does not propagate, six times a test, and torch has eighty of them.
    for name in logging.getLogger().manager.loggerDict:
        if name.startswith("torch."):
            logging.getLogger(name).propagate = True


SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def make_tokenizer() -> Any:
    """A byte-level BPE with Qwen3's special tokens and a chat template that only appends."""
    from transformers import PreTrainedTokenizerFast  # It takes a second, and few tests need it.

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    bpe.train_from_iterator(["def f(x):\n    return x\n", "system user assistant tool name arguments"] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIALS,
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
GLM += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
QWEN35 = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


@pytest.fixture
def family_tokenizer() -> Any:
    """A tokenizer of its own that also has the special tokens of GLM and of Qwen3.5, for their renderers."""
    tokenizer = make_tokenizer.__wrapped__()
    tokenizer.add_tokens([*GLM, *QWEN35], special_tokens=True)
    return tokenizer
