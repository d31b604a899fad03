"""Copy a checkpoint with tied embeddings to one with a separate output head, whose weights vLLM can replace on a CPU.

On a CPU vLLM packs the head once, and a reload of tied embeddings keeps the old packed head. The copy computes the same
logprobs. Files are hard-linked if the file system allows it, and the head is copied byte by byte, so that no heavy
import is needed.
"""

import argparse
import json
import os
import shutil
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

HARD_TIED = ("gemma2", "gemma3n", "cohere", "cohere2")
"""Prefixes of `model_type` whose vLLM models always use the embedding matrix as the head."""
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_INDEX = "model.safetensors.index.json"
_ORIGIN = "untied_from.json"
"""Lists the files that the copy was made from; if they have changed, the copy is made again."""


class CannotUntieError(Exception):
    """The embeddings are tied and can't be untied; the message gives the reason."""


class _Tensor(NamedTuple):
    """Location of a tensor's bytes in a safetensors file."""

    file: Path
    dtype: str
    shape: list[int]
    begin: int
    size: int

    def read(self, max_bytes: int | None = None) -> bytes:
        """Return the tensor's first `max_bytes` bytes; None: all of them."""
        with self.file.open("rb") as file:
            file.seek(self.begin)
            return file.read(self.size if max_bytes is None else min(max_bytes, self.size))


def untied(args: argparse.Namespace) -> argparse.Namespace:
    """Replace a model with tied embeddings by its untied copy, served under the original name; print a line about it.

    A model that can't be untied is served unchanged; it accepts adapters only.
    """
    folder = args.weights_root or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentic_opd"
    tied = f"the embeddings of {args.model} are tied, and on a CPU vLLM can't take new weights for such a model"
    try:
        if (copy := untied_copy(_downloaded(args.model), folder)) is None:
            return args
    except CannotUntieError as error:
        print(f"serve_vllm: {tied}, and it can't be untied ({error}): push adapters (--max-lora-rank)", file=sys.stderr)
        return args
    except (OSError, ValueError, KeyError) as error:
        print(f"serve_vllm: can't read whether the embeddings of {args.model} are tied: {error}", file=sys.stderr)
        return args
    print(f"serve_vllm: {tied}: an untied copy is served, {copy}", file=sys.stderr)
    return argparse.Namespace(
        **{**vars(args), "model": str(copy), "served_model_name": args.served_model_name or args.model}
    )


def _downloaded(model: str) -> Path:
    """Return the model's folder, downloaded from the hub if needed."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # vLLM would otherwise download the same files.

    return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]))


def untied_copy(model: Path, folder: Path) -> Path | None:
    """Write the untied copy of a checkpoint below `folder`, unless an up-to-date copy exists.

    Returns:
        The copy's folder; None if the embeddings are not tied.

    Raises:
        CannotUntieError: the embeddings are tied in an unsupported way.
        OSError: a file can't be read or written.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    tensors = _tensors_of(model)
    embeddings = [name for name in tensors if name.endswith("embed_tokens.weight")]
    heads = [name for name in tensors if name.endswith("lm_head.weight")]
    if not _is_tied(config, [tensors[name] for name in embeddings], [tensors[name] for name in heads]):
        return None
    if str(config.get("model_type", "")).startswith(HARD_TIED):
        raise CannotUntieError(f"vLLM ties those of every {config['model_type']} model")
    if len(embeddings) != 1 or len(heads) > 1:
        raise CannotUntieError("the checkpoint has no safetensors with one matrix named embed_tokens.weight")
    target, origin = folder / f"{model.resolve().name}-untied", _origin_of(model)
    if (target / _ORIGIN).is_file() and (target / _ORIGIN).read_text() == origin:
        return target
    fresh = folder / f"{target.name}.{os.getpid()}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _write(model, fresh, config, tensors, tensors[embeddings[0]] if not heads else None)
        (fresh / _ORIGIN).write_text(origin)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _is_tied(config: Mapping[str, Any], embeddings: list[_Tensor], heads: list[_Tensor]) -> bool:
    """Return whether embeddings are tied.

    The configuration decides, or the text model's inside it. If neither has `tie_word_embeddings`, whose default
    depends on the family, the weights decide: no head, or a head that begins with the embedding matrix's bytes.
    """
    inner: object = config.get("text_config")
    configs: list[Any] = [config, *([inner] if isinstance(inner, dict) else [])]
    settings = [part["tie_word_embeddings"] for part in configs if "tie_word_embeddings" in part]
    if settings:
        return any(settings)
    return bool(embeddings) and all(head.read(2**20) == embeddings[0].read(2**20) for head in heads)


def _write(
    model: Path, fresh: Path, config: dict[str, Any], tensors: Mapping[str, _Tensor], embedding: _Tensor | None
) -> None:
    """Link unchanged files; write configuration, index and, if `embedding` is given, the head as a copy of it."""
    files = sorted({tensor.file.name for tensor in tensors.values()})
    # The name model.safetensors is avoided, because transformers would read that file alone, without the index.
    names = {file: f"model-{i:05}-of-{len(files) + 1:05}.safetensors" for i, file in enumerate(files, start=1)}
    written = {name: names[tensor.file.name] for name, tensor in tensors.items()}
    if embedding is not None:
        written["lm_head.weight"] = f"model-{len(files) + 1:05}-of-{len(files) + 1:05}.safetensors"
        _write_tensor(fresh / written["lm_head.weight"], "lm_head.weight", embedding)
    for file in model.iterdir():
        if file.name in names or (file.is_file() and not file.name.endswith((".safetensors", _INDEX, *_OTHER_WEIGHTS))):
            _link(file, fresh / names.get(file.name, file.name))
    (fresh / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": written}, indent=2) + "\n")
    config["tie_word_embeddings"] = False
    if isinstance(config.get("text_config"), dict):
        config["text_config"]["tie_word_embeddings"] = False
    (fresh / "config.json").unlink()
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # The target is on another file system, or hard links are not supported.
        shutil.copyfile(source, target)


def _write_tensor(path: Path, name: str, tensor: _Tensor) -> None:
    """Write a safetensors file with one tensor: the header's length, the header, the tensor's bytes."""
    entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [0, tensor.size]}
    header = json.dumps({"__metadata__": {"format": "pt"}, name: entry}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + tensor.read())


def _tensors_of(model: Path) -> dict[str, _Tensor]:
    """Return the tensors of a checkpoint by name; if there is an index, only those of the files that it lists."""
    files = sorted(model.glob("*.safetensors"))
    if (model / _INDEX).is_file():
        named = set(json.loads((model / _INDEX).read_text())["weight_map"].values())
        files = [file for file in files if file.name in named]
    tensors: dict[str, _Tensor] = {}
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = _Tensor(path, entry["dtype"], entry["shape"], 8 + length + begin, end - begin)
    return tensors


def _origin_of(model: Path) -> str:
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(model.iterdir())}
    return json.dumps({"folder": str(model.resolve()), "files": files}, indent=2) + "\n"
