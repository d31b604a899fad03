"""An untied copy of a checkpoint whose embeddings are tied, and where the command serves it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentic_opd.serving.cpu.untie import CannotUntieError, untied, untied_copy
from agentic_opd.serving.launch import parse_args
from tests.support.tiny_model import save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def head_of(folder: Path) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The copy as transformers reads it: embeddings, head, and whether they are one matrix."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return (
        model.model.embed_tokens.weight,
        model.lm_head.weight,
        model.lm_head.weight is model.model.embed_tokens.weight,
    )


def change_config(folder: Path, **changes: Any) -> None:
    said = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in said.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def test_the_copy_has_a_head_of_its_own_that_is_the_same(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    copy = untied_copy(model, tmp_path / "root")
    assert copy == tmp_path / "root" / "tiny-untied"
    embeddings, head, is_one = head_of(copy)
    assert torch.equal(head, embeddings)
    assert torch.equal(embeddings, head_of(model)[0])
    assert not is_one
    assert head.dtype == torch.bfloat16
    assert {file.name for file in model.iterdir()} - {"model.safetensors"} <= {file.name for file in copy.iterdir()}
    assert head_of(model)[2], "the model itself stays tied"
    assert untied_copy(copy, tmp_path / "root") is None


def test_a_copy_is_made_again_only_where_its_model_has_changed(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    copy = untied_copy(model, tmp_path)
    assert copy is not None
    made = (copy / "config.json").stat().st_ino
    assert untied_copy(model, tmp_path) == copy
    assert (copy / "config.json").stat().st_ino == made
    (model / "model.safetensors").unlink()
    weights = load_file(copy / "model-00001-of-00002.safetensors")
    save_file({name: value * 2 for name, value in weights.items()}, model / "model.safetensors", {"format": "pt"})
    assert untied_copy(model, tmp_path) == copy
    embeddings, head, _ = head_of(copy)
    assert torch.equal(head, embeddings)
    assert torch.equal(head, head_of(model)[0])


def test_shards_an_index_and_links_of_a_hub_cache(tmp_path: Path) -> None:
    """As the hub's cache has it: each file is a link to a blob. A file that the index does not name is no part."""
    blobs, model = save_tiny_model(tmp_path / "blobs"), tmp_path / "snapshot"
    weights = load_file(blobs / "model.safetensors")
    (blobs / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, blobs / file, {"format": "pt"})
    save_file({"left.over": weights[names[0]]}, blobs / "consolidated.safetensors")
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (blobs / "model.safetensors.index.json").write_text(json.dumps(index))
    (blobs / "pytorch_model.bin").write_bytes(b"x")
    model.mkdir()
    for file in blobs.iterdir():
        (model / file.name).symlink_to(file)
    copy = untied_copy(model, tmp_path)
    assert copy is not None
    embeddings, head, _ = head_of(copy)
    assert torch.equal(head, embeddings)
    assert torch.equal(embeddings, weights["model.embed_tokens.weight"])
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & {file.name for file in copy.iterdir()}


@pytest.mark.parametrize(("has_head", "said", "is_tied"), [(False, None, True), (True, None, True), (True, True, True)])
def test_what_the_configuration_does_not_say_the_weights_show(
    has_head: bool, said: bool | None, is_tied: bool, tmp_path: Path
) -> None:
    """A family whose default is tied (Gemma's) does not say so; a checkpoint of one may hold the head a second time."""
    model = save_tiny_model(tmp_path / "tiny", tied=not has_head)
    change_config(model, tie_word_embeddings=said)
    copy = untied_copy(model, tmp_path)
    assert copy is not None
    assert json.loads((copy / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_untied_model_is_not_copied(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", tied=False)
    assert untied_copy(model, tmp_path) is None
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save_file(
        weights | {"lm_head.weight": weights["lm_head.weight"] * 2}, model / "model.safetensors", {"format": "pt"}
    )
    change_config(model, tie_word_embeddings=None)
    assert untied_copy(model, tmp_path) is None


def test_families_that_vllm_always_ties_and_other_files_are_left(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    change_config(model, model_type="gemma2")
    with pytest.raises(CannotUntieError, match="every gemma2 model"):
        untied_copy(model, tmp_path)
    change_config(model, model_type="llama")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(CannotUntieError, match="no safetensors"):
        untied_copy(model, tmp_path)


def test_the_command_serves_the_copy_by_the_models_own_name_and_says_so_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, root = save_tiny_model(tmp_path / "tiny"), tmp_path / "root"
    root.mkdir()
    capsys.readouterr()
    args = untied(parse_args([str(model), "--weights-root", str(root)]))
    assert (args.model, args.served_model_name) == (str(root / "tiny-untied"), str(model))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "an untied copy is served" in said
    named = untied(parse_args([str(model), "--weights-root", str(root), "--served-model-name", "policy"]))
    assert named.served_model_name == "policy"
    plain = parse_args([str(save_tiny_model(tmp_path / "plain", tied=False)), "--weights-root", str(root)])
    capsys.readouterr()
    assert untied(plain) is plain
    assert capsys.readouterr().err == ""


def test_where_the_copy_can_not_be_written_the_model_is_served_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    args = parse_args([str(model), "--weight-transfer", "gloo"])
    assert untied(args) is args
    assert str(tmp_path / "file") in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert untied(args).model == str(tmp_path / "cache" / "agentic_opd" / "tiny-untied")
