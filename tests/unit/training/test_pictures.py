"""Groups with pictures: the trained model reads them as transformers does, and what can't be read is refused."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from agentic_opd.core.attachments.files import ImageFolder, digest_of
from agentic_opd.core.errors import AlignmentError, ConfigError, PlaceError
from agentic_opd.training import PictureReader, collate, opd_loss
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.learner import load_learner
from agentic_opd.training.policy import TrainedPolicy, load_policy
from agentic_opd.training.push import Probe
from agentic_opd.training.sources import GroupFiles, check_can_read_pictures, open_source
from agentic_opd.training.step import read_start, train_step
from agentic_opd.wire.group import ScoredGroup
from tests.support.pictures import png
from tests.support.training import make_config
from tests.support.vision_model import picture_ids, reading, save_vision_model

from .test_logits_loss import BLOCKS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WIDE, SQUARE, OTHER = png(64, 32), png(40, 40, shade=90), png(64, 32, shade=120)
WORLD = DistContext("cpu")
CLOSE = 1e-4


class Text(NamedTuple):
    """Tokens of a prompt."""

    ids: list[int]


class Sampled(NamedTuple):
    """Tokens of the policy."""

    ids: list[int]


FIRST, SECOND = Sampled([700, 701, 702, 703]), Sampled([800, 801, 802])
TWO_TURNS = (Text([400, 401]), WIDE, Text([402]), FIRST, Text([403]), SQUARE, Text([404, 405]), SECOND)
"""Two pictures in different turns."""
TWO_AT_ONCE = (SQUARE, WIDE, Text([402]), FIRST)
PLAIN = (Text([400, 401, 402, 403, 404]), FIRST, Text([405]), SECOND)


class Vision(NamedTuple):
    """A model that reads pictures, and a folder of them."""

    family: str
    folder: Path
    images: ImageFolder
    placeholder: int

    def sequence(self, *pieces: bytes | Text | Sampled) -> dict[str, Any]:
        """Return the columns of a sequence: the logprobs are those that transformers computes."""
        tokens, masks, placed = list[int](), list[int](), list[tuple[int, bytes]]()
        for piece in pieces:
            ids = picture_ids(self.folder, piece) if isinstance(piece, bytes) else piece.ids
            if isinstance(piece, bytes):
                placed.append((len(tokens), piece))
            tokens += ids
            masks += ids if isinstance(piece, Sampled) else [-100] * len(ids)
        rows = reading(self.folder, tokens, placed)
        logprobs = [1.0 if mask == -100 else float(rows[p - 1, mask]) for p, mask in enumerate(masks)]
        lengths = [len(picture_ids(self.folder, data)) for _, data in placed]
        images = [
            {"digest": digest_of(data), "offset": offset, "length": length}
            for (offset, data), length in zip(placed, lengths, strict=True)
        ]
        return {
            "tokens": tokens,
            "masks": masks,
            "inference_logprobs": logprobs,
            "distill_token_ids": [[] if mask == -100 else [mask, 900] for mask in masks],
            "distill_logprobs": [[] if mask == -100 else [-1.0, -0.5] for mask in masks],
            "overrides": {"opd": {"images": images}} if images else {},
        }

    def group(self, *sequences: Sequence[bytes | Text | Sampled]) -> dict[str, Any]:
        """Return a group of these sequences as a file has it."""
        columns = [self.sequence(*pieces) for pieces in sequences]
        group = {name: [column[name] for column in columns] for name in columns[0]}
        overrides = {"group_overrides": {"opd": {"distill_topk": 2}}}
        return {**group, **overrides, "scores": [float(index) for index in range(len(columns))]}

    def config(self, **changes: Any) -> TrainerConfig:
        return make_config(**{"model": str(self.folder), "image_folders": [self.images.path], **changes})

    def reader(self) -> PictureReader:
        return PictureReader(str(self.folder), [self.images])

    def file(self, folder: Path, *groups: dict[str, Any]) -> Path:
        """Write groups to a file, and the pictures beside it."""
        path = folder / "groups.jsonl"
        path.write_text("".join(json.dumps(group) + "\n" for group in groups))
        shutil.copytree(self.images.path, folder / "groups.images")
        return path


@pytest.fixture(scope="module", params=["idefics3", "llava"])
def vision(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Vision:
    root = tmp_path_factory.mktemp("vision")
    images = ImageFolder(root / "images")
    for data in (WIDE, SQUARE, OTHER):
        images.add(data)
    folder = save_vision_model(root / "model", request.param)
    config = json.loads((folder / "config.json").read_text())
    return Vision(request.param, folder, images, config.get("image_token_id", config.get("image_token_index")))


@pytest.fixture(scope="module")
def mixed(vision: Vision) -> dict[str, Any]:
    """A group with and without pictures."""
    return vision.group(TWO_TURNS, PLAIN, TWO_AT_ONCE, PLAIN[:2])


def batch_of(*groups: dict[str, Any]) -> TrainBatch:
    return make_batch([ScoredGroup.from_wire(group) for group in groups])


def computed(policy: TrainedPolicy, batch: TrainBatch, config: TrainerConfig) -> torch.Tensor:
    """Return the policy's logprobs of the sampled tokens [B, T], through the parts of a step."""
    return read_start(policy, batch, config, WORLD).start_BT


@pytest.mark.parametrize("micro_tokens", [64, 4096])
@pytest.mark.parametrize("pack", [False, True])
def test_logprobs_are_those_of_transformers(
    vision: Vision, mixed: dict[str, Any], micro_tokens: int, pack: bool
) -> None:
    config, batch = vision.config(micro_tokens=micro_tokens, pack=pack), batch_of(mixed)
    policy = load_policy(config, WORLD)
    assert policy.ways.is_packed == pack
    difference = (computed(policy, batch, config) - batch.old_BT).abs()
    assert int(batch.sampled_BT.sum()) == 7 + 7 + 4 + 4
    assert float(difference.max()) < CLOSE


def test_another_picture_changes_the_logprobs(vision: Vision, mixed: dict[str, Any]) -> None:
    config, batch = vision.config(), batch_of(mixed)
    assert batch.images_B is not None
    assert picture_ids(vision.folder, WIDE) == picture_ids(vision.folder, OTHER)
    changed = tuple(
        tuple(replace(image, digest=digest_of(OTHER)) if image.digest == digest_of(WIDE) else image for image in images)
        for images in batch.images_B
    )
    policy = load_policy(config, WORLD)
    difference = (computed(policy, replace(batch, images_B=changed), config) - batch.old_BT).abs()
    assert float(difference[[1, 3]].max()) < CLOSE
    assert all(float(difference[index].max()) > 0.05 for index in (0, 2))


def test_equal_tokens_of_unequal_pictures_share_nothing(vision: Vision) -> None:
    """Two sequences that begin alike are computed once, but not if their pictures differ."""
    prompt = Text([*range(400, 440)])
    config = vision.config(micro_tokens=4096)
    batch = batch_of(vision.group((prompt, WIDE, Text([402]), FIRST), (prompt, OTHER, Text([402]), FIRST)))
    assert torch.equal(batch.tokens_BT[0], batch.tokens_BT[1])
    assert float((batch.old_BT[0] - batch.old_BT[1]).abs().max()) > 0.05
    assert float((computed(load_policy(config, WORLD), batch, config) - batch.old_BT).abs().max()) < CLOSE


def test_a_placeholder_that_is_no_picture_is_read_as_a_token(vision: Vision) -> None:
    """A client wrote one, and the policy sampled one: vLLM reads them as tokens."""
    stray = vision.placeholder
    batch = batch_of(vision.group((Text([400, stray]), WIDE, Text([402, stray]), Sampled([700, stray, 701]))))
    config = vision.config()
    policy = load_policy(config, WORLD)
    assert float((computed(policy, batch, config) - batch.old_BT).abs().max()) < CLOSE
    with pytest.raises(AlignmentError, match=f"sequence 0, position 1: token {stray} is that of pictures"):
        collate([vision.group((Text([400, stray]), WIDE, FIRST))], pictures=vision.reader())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_step_moves_the_loss_and_not_the_vision_tower(
    vision: Vision, mixed: dict[str, Any], lora_rank: int | None, precision: str
) -> None:
    config = vision.config(
        lora_rank=lora_rank,
        loss={"forward_kl": 1.0},
        precision=precision,
        gradient_checkpointing=precision == "bf16",
    )
    learner, batch = load_learner(config, WORLD), batch_of(mixed)
    model = learner.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = []
    for _ in range(4):
        for parameters in learner.optimizer.param_groups:
            parameters["lr"] = 1e-2 if lora_rank else 1e-3
        losses.append(train_step(learner.policy, learner.optimizer, batch, config, WORLD))
    assert losses[0]["logprob_drift"] < (CLOSE if precision == "fp32" else 0.1)
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.05
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved
    assert all(any(part in name for part in ("text_model", "language_model", "lm_head")) for name in moved)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "vision" in name)
    if lora_rank:
        assert all(".lora_" in name for name in moved)
        adapted = {name.partition(".lora_")[0] for name in before if ".lora_" in name}
        assert len(adapted) == 2 * 7
    else:
        assert any("lm_head" in name for name in moved)


def test_other_trainers_get_the_models_arguments(vision: Vision, mixed: dict[str, Any]) -> None:
    config = vision.config(loss={"forward_kl": 1.0}, pack=False)
    policy = load_policy(config, WORLD)
    collated = collate([mixed], config.loss, pictures=vision.reader())
    arguments = {name: value for name, value in collated.items() if name not in ("opd", "labels")}
    shapes = {name: tuple(value.shape) for name, value in arguments.items() if name.startswith("pixel")}
    if vision.family == "idefics3":
        tiles = 3 + 5 + 5 + 3
        assert shapes == {"pixel_values": (1, tiles, 3, 56, 56), "pixel_attention_mask": (1, tiles, 56, 56)}
    else:
        assert shapes == {"pixel_values": (4, 3, 56, 56)}
    loss = opd_loss(policy.model(**arguments, use_cache=False).logits, collated, config.loss)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.0)
    expected = train_step(policy, optimizer, batch_of(mixed), config, WORLD)["loss"]
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)
    packed = collate([mixed], config.loss, pictures=vision.reader(), packed=True)
    assert torch.equal(packed["pixel_values"], collated["pixel_values"])
    with pytest.raises(ConfigError, match="the groups have pictures: collate"):
        collate([mixed], config.loss)
    assert "pixel_values" not in collate([vision.group(PLAIN)])


def test_the_pages_loop_computes_the_loss(
    vision: Vision, mixed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision.file(tmp_path, mixed)
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in BLOCKS if "PictureReader" in block)
    policy = load_policy(vision.config(), WORLD)
    names: dict[str, Any] = {"MODEL": str(vision.folder), "groups": [mixed], "model": policy.model}
    exec(block, {**names, "collate": collate, "opd_loss": opd_loss}, names)
    assert float(names["loss"].detach()) > 0


def test_files_of_groups_are_checked_at_the_start(
    vision: Vision, mixed: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = vision.config(groups=[vision.file(tmp_path, mixed)], image_folders=[], output_dir=tmp_path / "train")
    source, _ = open_source(config, WORLD)
    assert "2 pictures are read as vLLM read them" in caplog.text
    (group,) = asyncio.run(source.batch(0))
    assert len(group.rollouts[0].attachments) == 2
    asyncio.run(source.close())
    with pytest.raises(ConfigError, match="trained by one process, and 2 are running"):
        check_can_read_pictures(config, DistContext("cpu", 0, 2))


def test_a_picture_that_is_missing_or_has_changed_is_named(
    vision: Vision, mixed: dict[str, Any], tmp_path: Path
) -> None:
    path = vision.file(tmp_path, mixed)
    picture = tmp_path / "groups.images" / f"{digest_of(WIDE)}.png"
    config = vision.config(groups=[path], image_folders=[])
    picture.write_bytes(OTHER)
    with pytest.raises(PlaceError, match=r"line 1.*has changed since it was recorded"):
        GroupFiles(config)
    picture.unlink()
    with pytest.raises(PlaceError, match=f"line 1.*there is no picture '{picture.stem}'"):
        GroupFiles(config)
    with pytest.raises(PlaceError, match=f"there is no picture '{picture.stem}'"):
        collate([mixed], pictures=PictureReader.beside(str(vision.folder), path))


def test_a_processor_that_writes_other_ids_is_refused(vision: Vision, mixed: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(vision.folder, folder)
    name, change, written, position = {
        "idefics3": ("preprocessor", {"do_image_splitting": False}, 7, 3),
        "llava": ("processor", {"num_additional_image_tokens": 0}, 15, 17),
    }[vision.family]
    file = folder / f"{name}_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    config = vision.config(model=str(folder), groups=[vision.file(tmp_path, mixed)], image_folders=[])
    says = rf"sequence 0, position {position}: the processor of {vision.family} writes {written} tokens"
    with pytest.raises(AlignmentError, match=f"groups.jsonl', line 1, {says}"):
        GroupFiles(config)
    learner = load_learner(vision.config(model=str(folder)), WORLD)
    with pytest.raises(AlignmentError, match=f"group 0 of the batch, {says}"):
        asyncio.run(learner.train([ScoredGroup.from_wire(mixed)], 0))


@pytest.mark.parametrize("family", ["qwen2_vl", "llama", "pixtral"])
def test_a_family_that_is_not_matched_is_refused_by_name_at_the_start(
    vision: Vision, mixed: dict[str, Any], tmp_path: Path, family: str
) -> None:
    from transformers import LlamaConfig, LlavaConfig, PixtralVisionConfig, Qwen2VLConfig

    pixtral = LlavaConfig(vision_config=PixtralVisionConfig(), text_config=LlamaConfig())
    config: Any = {"qwen2_vl": Qwen2VLConfig(), "llama": LlamaConfig(), "pixtral": pixtral}[family]
    config.save_pretrained(tmp_path / "model")
    says = f"of the family '{family}': pictures are trained with idefics3, llava, smolvlm"
    settings = vision.config(model=str(tmp_path / "model"), groups=[vision.file(tmp_path, mixed)], image_folders=[])
    with pytest.raises(ConfigError, match=says):
        open_source(settings, WORLD)
    with pytest.raises(ConfigError, match=says):  # Before the first batch of the trajectory API.
        open_source(vision.config(model=str(tmp_path / "model")), WORLD)
    if family == "qwen2_vl":
        with pytest.raises(ConfigError, match="its family 'qwen2_vl' is not trained here; of those that read pictures"):
            load_policy(vision.config(model=str(tmp_path / "model")), WORLD)


def test_groups_of_the_api_need_a_folder_of_pictures(vision: Vision, mixed: dict[str, Any]) -> None:
    groups = [ScoredGroup.from_wire(mixed)]
    with pytest.raises(ConfigError, match="name the folder of their files in image_folders"):
        asyncio.run(load_learner(vision.config(image_folders=[]), WORLD).train(groups, 0))
    config = vision.config(epochs_per_batch=2, minibatches=1, loss={"forward_kl": 1.0, "start_kl": 0.1})
    trained = asyncio.run(load_learner(config, WORLD).train(groups, 0))
    assert trained.metrics["logprob_drift"] < 0.1
    assert trained.probe is not None
    assert [image.digest for image in trained.probe.images] == [digest_of(WIDE), digest_of(SQUARE)]


def test_a_probe_ends_outside_of_pictures(monkeypatch: pytest.MonkeyPatch, vision: Vision) -> None:
    batch = batch_of(vision.group((Text([*range(400, 500)]), FIRST), TWO_TURNS))
    first, second = (batch.images_B or ())[1]
    for tokens, end in ((1, first.end + 1), (second.offset + 5, second.offset), (second.end, second.end)):
        monkeypatch.setattr("agentic_opd.training.push._PROBE_TOKENS", tokens)
        probe = Probe.of(batch)
        assert len(probe.token_ids) == end
        assert probe.images == ((first, second) if end > second.offset else (first,))


def test_pictures_behind_the_last_trained_token_are_not_computed(vision: Vision) -> None:
    batch = batch_of(vision.group(TWO_TURNS, PLAIN))
    assert batch.images_B is not None
    first, second = batch.images_B[0]
    shorter = batch.before(torch.tensor([second.offset - 1, 12]))
    assert shorter.images_B == ((first,), ())
    assert batch.before(torch.tensor([0, 12])).images_B is None
    assert batch.rows([1]).images_B is None
    assert [*batch.parts(4096, is_packed=True)] == [[1], [0]]
