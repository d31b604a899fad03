"""A random model that sees: Idefics3's shape, whose processor runs on PIL alone, with the demo policy's tokenizer.

A square picture is 33 tokens (four tiles and the whole), one twice as wide as high 20 (two tiles and the whole).
"""

import json
import shutil
import warnings
from pathlib import Path

from demo_policy import POLICY_DIR

TILE, PATCH = 56, 14
IMAGE_TOKEN = "<image>"
TOKENS = (
    *(IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)


def save_vision_model(folder: Path) -> Path:
    """Write its checkpoint and its processor."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in POLICY_DIR.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    image_token = _add_tokens(folder / "tokenizer.json")
    with warnings.catch_warnings():  # torch's and transformers' own deprecations
        warnings.simplefilter("ignore")
        import torch
        from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 128}
        text = LlamaConfig(
            **sizes,
            num_key_value_heads=1,
            vocab_size=1600,
            max_position_embeddings=2048,
            initializer_range=0.2,
            tie_word_embeddings=False,
            pad_token_id=1527,
            eos_token_id=1529,
        )
        config = Idefics3Config(
            vision_config={**sizes, "image_size": TILE, "patch_size": PATCH, "initializer_range": 0.2},
            text_config=text,
            image_token_id=image_token,
            pad_token_id=1527,
            scale_factor=2,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    pictures = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 2 * TILE},
        "max_image_size": {"longest_edge": TILE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    tokens_of_a_tile = (TILE // PATCH // config.scale_factor) ** 2
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": tokens_of_a_tile}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def _add_tokens(path: Path) -> int:
    """Add the tokens of pictures to a tokenizer; returns the id of the one that stands for a part of a picture."""
    tokenizer = json.loads(path.read_text())
    first = 1 + max(token["id"] for token in tokenizer["added_tokens"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": token, **flags, "special": True} for token_id, token in enumerate(TOKENS, first)
    ]
    path.write_text(json.dumps(tokenizer))
    return first
