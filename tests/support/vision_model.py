"""Random models that see, whose processors run on PIL alone, with the demo policy's tokenizer.

Idefics3 reads a square picture as 33 tokens (four tiles and the whole), one twice as wide as high as 20 (two tiles and
the whole).
"""

import io
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from demo_policy import POLICY_DIR
from numpy.typing import NDArray

TILE, PATCH = 56, 14
IMAGE_TOKEN = "<image>"
TOKENS = (
    *(IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)


def save_vision_model(folder: Path, family: str = "idefics3") -> Path:
    """Write its checkpoint and its processor; `family` is idefics3 or llava, whose pictures are 16 tokens each."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in POLICY_DIR.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    image_token = _add_tokens(folder / "tokenizer.json")
    with warnings.catch_warnings():  # torch's and transformers' own deprecations
        warnings.simplefilter("ignore")
        import torch
        from transformers import (
            CLIPVisionConfig,
            Idefics3Config,
            Idefics3ForConditionalGeneration,
            LlamaConfig,
            LlavaConfig,
            LlavaForConditionalGeneration,
        )

        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 128}
        pixels = {"image_size": TILE, "patch_size": PATCH, "initializer_range": 0.2}
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
        torch.manual_seed(0)
        if family == "llava":
            vision = CLIPVisionConfig(**sizes, **pixels)
            llava = LlavaConfig(
                vision_config=vision, text_config=text, image_token_index=image_token, tie_word_embeddings=False
            )
            LlavaForConditionalGeneration(llava).save_pretrained(folder)
        else:
            config = Idefics3Config(
                vision_config={**sizes, **pixels},
                text_config=text,
                image_token_id=image_token,
                pad_token_id=1527,
                scale_factor=2,
                tie_word_embeddings=False,
            )
            Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    for name, content in _PROCESSORS[family].items():
        (folder / f"{name}_config.json").write_text(json.dumps(content))
    return folder


_COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "idefics3": {
        "preprocessor": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 2 * TILE},
            "max_image_size": {"longest_edge": TILE},
            **_COLOURS,
        },
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": (TILE // PATCH // 2) ** 2},
    },
    "llava": {
        "preprocessor": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": TILE},
            "crop_size": {"height": TILE, "width": TILE},
            **_COLOURS,
        },
        "processor": {
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    },
}


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


def picture_ids(folder: Path, data: bytes) -> list[int]:
    """Return the tokens of a picture in a prompt, as transformers' processor writes them."""
    from PIL import Image
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return processor(text=[IMAGE_TOKEN], images=[image], add_special_tokens=False)["input_ids"][0]


def reading(folder: Path, ids: Sequence[int], pictures: Sequence[tuple[int, bytes]]) -> NDArray[np.float32]:
    """Return transformers' logprobs [T, V] of ids with pictures, each with the index of its first token.

    Pictures' features replace the embeddings of their own tokens, and of no other placeholder.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from PIL import Image
        from transformers import AutoModelForImageTextToText, AutoProcessor

        processor: Any = AutoProcessor.from_pretrained(folder)
        model: Any = AutoModelForImageTextToText.from_pretrained(folder)
        tokens = torch.tensor([list(ids)])
        embedded = model.get_input_embeddings()(tokens).detach()
        for offset, data in pictures:
            opened = Image.open(io.BytesIO(data)).convert("RGB")
            made = processor(text=[IMAGE_TOKEN], images=[opened], add_special_tokens=False, return_tensors="pt")
            own = made.pop("input_ids")[0]
            made.pop("attention_mask")
            with torch.inference_mode():
                features = model.model.get_image_features(**made, return_dict=True).pooler_output
                features = torch.cat(list(features)).flatten(0, -2)
            end = offset + len(own)
            assert tokens[0, offset:end].tolist() == own.tolist()
            at = offset + (own == processor.image_token_id).nonzero()[:, 0]
            embedded[0, at] = features
        with torch.inference_mode():
            hidden = model.get_decoder()(inputs_embeds=embedded, use_cache=False).last_hidden_state
            return model.lm_head(hidden)[0].log_softmax(-1).numpy()
