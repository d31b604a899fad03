"""Conversations with pictures from a real vLLM and a real gateway to a trained and pushed model."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from bench.local_server import local_server
from safetensors.torch import load_file

from agentic_opd.core.attachments.files import ImageFolder, digest_of
from agentic_opd.core.precision import Noise
from agentic_opd.training.batch import make_batch
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.policy import load_policy
from agentic_opd.training.push import Probe, PushMismatchError, WeightPusher
from agentic_opd.training.step import read_start
from agentic_opd.training.trainer import open_trainer
from agentic_opd.wire.group import ScoredGroup
from tests.support.environment import read_lines
from tests.support.gateway import Served, served
from tests.support.pictures import png
from tests.support.places import ROOT
from tests.support.training import make_config
from tests.support.vision_model import picture_ids, save_vision_model

from .test_images import SQUARE, WIDE, picture, said

pytestmark = [pytest.mark.vllm, pytest.mark.all, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

OTHER = png(64, 32, shade=120)
"""A picture of the size of `WIDE`, so that its tokens are the same."""
WORLD = DistContext("cpu")


class Recorded(NamedTuple):
    """A model that vLLM serves, and the file of the groups that it sampled."""

    model: Path
    url: str
    weights: Path
    file: Path


def converse(gateway: Served, session: str, *contents: Any) -> None:
    messages: list[Any] = []
    for content in contents:
        messages.append({"role": "user", "content": content})
        options = {"max_tokens": 12, "temperature": 1, "extra_body": {"seed": 5}}
        answer = gateway.chat(*messages, session=session, **options).choices[0].message
        messages.append({"role": "assistant", "content": answer.content})
    gateway.end(session, reward=0.5, feedback="Say its colour.")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """Pictures in two turns and two in a turn, a text that spells the placeholder, and a conversation without any."""
    root = tmp_path_factory.mktemp("recorded")
    model, weights = save_vision_model(root / "model"), root / "weights"
    weights.mkdir()
    launcher = (str(ROOT / "scripts" / "serve_vllm"),)
    options = ("--weights-root", str(weights), "--max-lora-rank", "8")
    flags = ("--openai.model_name", str(model), "--env.hint.source", "feedback", "--env.distill_topk", "20")
    with (
        local_server(model, *options, log=root / "vllm.log", launcher=launcher, cwd=ROOT) as server,
        served(server.base_url, root, *flags) as gateway,
    ):
        turns = ([picture(WIDE), said("\nWhat is it?")], [said("Before "), picture(SQUARE), said(" and behind.")])
        converse(gateway, "turns", *turns, "Look: <image>")
        converse(gateway, "both", [picture(SQUARE), said(" or "), picture(WIDE)], "Which?")
        converse(gateway, "none", "What is it?", "Look.")
        yield Recorded(model, server.base_url, weights, root / "groups.jsonl")


def test_the_trainer_computes_the_logprobs_that_vllm_sampled_with(recorded: Recorded) -> None:
    groups = [ScoredGroup.from_wire(line) for line in read_lines(recorded.file)]
    assert [len(group.rollouts[0].attachments) for group in groups] == [2, 2, 0]
    config = make_config(model=str(recorded.model), groups=[recorded.file], micro_tokens=4096)
    policy, batch = load_policy(config, WORLD), make_batch(groups)
    difference_BT = (read_start(policy, batch, config, WORLD).start_BT - batch.old_BT).abs()
    assert int(batch.sampled_BT.sum()) > 60
    assert float(difference_BT.max()) < 1e-4
    ImageFolder.beside(recorded.file).add(OTHER)
    assert picture_ids(recorded.model, OTHER) == picture_ids(recorded.model, WIDE)
    changed = tuple(
        tuple(replace(image, digest=digest_of(OTHER)) if image.digest == digest_of(WIDE) else image for image in images)
        for images in batch.images_B or ()
    )
    moved_BT = read_start(policy, replace(batch, images_B=changed), config, WORLD).start_BT - batch.old_BT
    assert float(moved_BT[:2].abs().amax(1).min()) > 0.05
    assert float(moved_BT[2].abs().max()) < 1e-4


def test_a_probe_compares_pictures_and_a_placeholder_that_is_none(recorded: Recorded) -> None:
    """What a push would notice: the server reads another picture than the trainer."""
    config = make_config(model=str(recorded.model), groups=[recorded.file], vllm_urls=[recorded.url])
    policy = load_policy(config, WORLD)
    placed = Probe.of(make_batch([ScoredGroup.from_wire(read_lines(recorded.file)[0])]))
    placeholder = picture_ids(recorded.model, SQUARE)[2]
    probe = Probe((*placed.token_ids[: placed.images[1].end], placeholder, 400, placeholder, 401), placed.images)
    ImageFolder.beside(recorded.file).add(OTHER)
    other = tuple(replace(image, digest=digest_of(OTHER)) for image in probe.images[:1])

    async def compare() -> Noise:
        pusher = WeightPusher(config, WORLD)
        try:
            noise = await pusher.compare(probe.own_logprobs(policy, "cpu"), probe)
            wrong = replace(probe, images=(*other, *probe.images[1:])).own_logprobs(policy, "cpu")
            with pytest.raises(PushMismatchError, match="does not compute what the trainer does"):
                await pusher.compare(wrong, probe)
            return noise
        finally:
            await pusher.close()

    assert asyncio.run(compare()).largest < 1e-4


@pytest.mark.parametrize("lora_rank", [4, None], ids=["adapters", "whole"])
def test_a_run_on_the_file_moves_the_loss_and_its_pushes_are_proved(
    recorded: Recorded, tmp_path: Path, lora_rank: int | None
) -> None:
    file = shutil.copy(recorded.file, tmp_path)
    shutil.copytree(ImageFolder.beside(recorded.file).path, tmp_path / "groups.images")
    config = make_config(
        model=str(recorded.model),
        groups=[Path(file)],
        vllm_urls=[recorded.url],
        weights_dir=recorded.weights,
        output_dir=tmp_path / "train",
        lora_rank=lora_rank,
        lr=1e-2 if lora_rank else 1e-3,
        lr_schedule="constant",
        groups_epochs=3,
        epochs_per_batch=2,
        minibatches=1,
        loss={"forward_kl": 1.0},
    )
    asyncio.run(open_trainer(config).run())
    rows = read_lines(tmp_path / "train" / "metrics.jsonl")
    assert [row["groups"] for row in rows] == [3, 3, 3]
    assert rows[0]["logprob_drift"] < 0.2
    assert rows[-1]["loss_last"] < rows[0]["loss"]
    assert all(row["push_difference"] < 1e-3 for row in rows)
    final = json.loads((tmp_path / "train" / "final" / "config.json").read_text())
    assert final["model_type"] == json.loads((recorded.model / "config.json").read_text())["model_type"]
    before, after = (load_file(folder / "model.safetensors") for folder in (recorded.model, tmp_path / "train/final"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("q_proj" in name for name in moved)
    assert not any("vision" in name or "connector" in name for name in moved)
