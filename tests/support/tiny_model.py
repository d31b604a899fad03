"""A random model of the shape that small pretrained ones have: Llama's, in bfloat16, its embeddings tied."""

import shutil
import warnings
from pathlib import Path

from demo_policy import POLICY_DIR


def save_tiny_model(folder: Path, dtype: str = "bfloat16", *, tied: bool = True) -> Path:
    """Write its checkpoint, with the demo policy's tokenizer. Two models that differ in `tied` compute the same."""
    with warnings.catch_warnings():  # torch's and transformers' own deprecations
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
        vocab = AutoConfig.from_pretrained(POLICY_DIR).vocab_size
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(**sizes, **heads, vocab_size=vocab, initializer_range=0.2, tie_word_embeddings=True)
        )
        if not tied:
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    for file in POLICY_DIR.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    return folder
