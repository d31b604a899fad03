"""Shapes of known models, and checkpoints of random weights that have them."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from demo_policy import POLICY_DIR

if TYPE_CHECKING:
    from transformers import Qwen3Config

    from agentic_opd.training.memory import ModelShape

HEAD_WIDTH = 128
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Size(NamedTuple):
    """Widths of a model of Qwen3's family, whose heads are `HEAD_WIDTH` wide."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocab: int = 151_936
    is_tied: bool = True

    @property
    def shape(self) -> "ModelShape":
        """The shape from which memory is computed."""
        from agentic_opd.training.memory import ModelShape

        query, key = self.heads * HEAD_WIDTH, self.key_heads * HEAD_WIDTH
        return ModelShape(self.hidden, self.intermediate, self.layers, query, key, self.vocab, self.is_tied)

    def config(self, layers: int | None = None, vocab: int | None = None) -> "Qwen3Config":
        """Return the settings of transformers, optionally with other numbers of layers and tokens."""
        from transformers import Qwen3Config

        return Qwen3Config(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=HEAD_WIDTH,
            vocab_size=vocab or self.vocab,
            tie_word_embeddings=self.is_tied,
            max_position_embeddings=40_960,
        )


SIZES = {
    "tiny": Size(64, 192, 4, 4, 2, vocab=1_536),
    "0.6B": Size(1024, 3072, 28, 16, 8),
    "1.7B": Size(2048, 6144, 28, 16, 8),
    "4B": Size(2560, 9728, 36, 32, 8),
    "8B": Size(4096, 12288, 36, 32, 8, is_tied=False),
}
"""Qwen3's, and one for CPUs."""


def make_checkpoint(folder: Path, size: Size, device: str = "cpu") -> int:
    """Write random weights in bfloat16, made on the device, with the demo policy's tokenizer; return their number.

    The tokenizer's ids are the first ones of the vocabulary, so that nothing has to be downloaded.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = size.config()
    config.update({"eos_token_id": 1529, "pad_token_id": 1527, "bos_token_id": None})  # Of the demo policy's tokenizer.
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copyfile(POLICY_DIR / name, folder / name)
    return model.num_parameters()
