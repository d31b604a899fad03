"""Other trainers get from our collator and loss what our own trainer computes."""

import copy
import json
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_policy import POLICY_DIR
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.core.errors import AlignmentError, ConfigError, WireError
from agentic_opd.training import LossConfig, collate, compute_loss, opd_loss
from agentic_opd.training.batch import make_batch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.policy import TrainedPolicy
from agentic_opd.training.step import train_step
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.packed import packed as as_text
from tests.unit.wire import sample
from tests.unit.wire.sample import SCORED
from tests.unit.wire.test_checks import ANY_JSON, PLACES, WHOLE, change

from .test_step import make_groups, make_model

ROOT = Path(__file__).parents[3]

CONFIGS = {
    "default": LossConfig(),
    "reward and hint": LossConfig(forward_kl=1.0, grpo=0.5, combined=0.5, route_by_turn=False),
    "by turn": LossConfig(combined=1.0, mean="turn"),
}


def eight_groups() -> list[dict[str, Any]]:
    """Groups of sequences of different lengths: a mean of micro-batches' means is not the mean."""
    pairs = [make_groups() for _ in range(4)]
    groups = [group for pair in pairs for group in pair]
    for number, group in enumerate(groups):
        for name in ("tokens", "masks", "inference_logprobs", "distill_token_ids", "distill_logprobs"):
            group[name] = [row[: len(row) - (number % 3 == 2)] for row in group[name]]
    for name in ("distill_token_ids", "distill_logprobs"):
        groups[0][name][1] = [[] for _ in groups[0][name][1]]
    return groups


def ours(model: Any, groups: list[dict[str, Any]], config: LossConfig, optimizer: torch.optim.Optimizer) -> float:
    batch = make_batch([ScoredGroup.from_wire(group) for group in groups])
    settings = TrainerConfig(model="tiny", loss=config)
    return train_step(TrainedPolicy(model), optimizer, batch, settings, DistContext("cpu"))["loss"]


SETTINGS: dict[str, Any] = {
    **{"per_device_train_batch_size": 2, "num_train_epochs": 1, "use_cpu": True, "learning_rate": 1e-3},
    **{"lr_scheduler_type": "constant", "adam_beta2": 0.98, "max_grad_norm": 1.0, "remove_unused_columns": False},
    **{"logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
    "train_sampling_strategy": "sequential",
}


def arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(output_dir=str(folder), **{**SETTINGS, **changes})


def trainer_class(config: LossConfig) -> Any:
    from transformers import Trainer

    class OPDTrainer(Trainer):
        loss_config = config

    OPDTrainer.compute_loss = compute_loss
    return OPDTrainer


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_an_epoch_of_transformers_trainer_is_an_epoch_of_ours(name: str, accumulated: int, tmp_path: Path) -> None:
    """Losses of each update and weights after the last, with one and with two micro-batches an update."""
    config, groups = CONFIGS[name], eight_groups()
    model = make_model()
    trainer = trainer_class(config)(
        model,
        arguments(tmp_path, gradient_accumulation_steps=accumulated),
        train_dataset=groups,
        data_collator=lambda rows: collate(rows, config),
    )
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    own = make_model()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    size = 2 * accumulated
    expected = [ours(own, groups[i : i + size], config, optimizer) for i in range(0, 8, size)]
    assert theirs == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(expected)
    for trained, one in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(trained, one, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_does_not_count_over_the_update_is_refused(tmp_path: Path) -> None:
    trainer = trainer_class(LossConfig())(
        make_model(),
        arguments(tmp_path, gradient_accumulation_steps=2),
        train_dataset=eight_groups(),
        data_collator=collate,
    )
    trainer.model_accepts_loss_kwargs = False
    with pytest.raises(ConfigError, match="does not count the tokens of a whole update"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_labels_of_another_mean_are_refused(tmp_path: Path) -> None:
    trainer = trainer_class(CONFIGS["by turn"])(
        make_model(), arguments(tmp_path), train_dataset=eight_groups(), data_collator=collate
    )
    with pytest.raises(ConfigError, match=r"the labels count \d+, expected 4: collate\(groups, loss_config\)"):
        trainer.train()


def quietly(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(
            **{name: value for name, value in batch.items() if name not in ("opd", "labels")}, use_cache=False
        ).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_and_padded_batches_have_the_same_loss_and_gradient(name: str) -> None:
    config, gradients, losses = CONFIGS[name], [], []
    for packed in (False, True):
        model, batch = make_model(), collate(eight_groups(), config, packed=packed)
        loss = opd_loss(quietly(model, batch), batch, config)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] == pytest.approx(
        ours(model, eight_groups(), config, torch.optim.SGD(model.parameters())), abs=1e-6
    )
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_micro_batches_add_up_with_the_count_of_the_whole_update() -> None:
    model, groups = make_model(), eight_groups()
    whole = collate(groups)
    count = (whole["labels"] != -100).sum()
    parts = [collate(groups[:3]), collate(groups[3:])]
    with torch.no_grad():
        losses = [float(opd_loss(quietly(model, part), part, sampled_count=count)) for part in parts]
        assert sum(losses) == pytest.approx(float(opd_loss(quietly(model, whole), whole)), abs=1e-6)
        alone = [float(opd_loss(quietly(model, part), part)) for part in parts]
    assert abs(sum(alone) / 2 - sum(losses)) > 1e-4, "without the count it is another loss"


def test_what_a_setting_needs_and_lacks_is_named() -> None:
    model, batch = make_model(), collate(eight_groups())
    logits = quietly(model, batch)
    for settings, said in (
        ({"contrast": True}, r"collate\(groups, config\)"),
        ({"start_kl": 1.0}, "need start_logits"),
        ({"skip_special_tokens": True}, "lack special_BT"),
    ):
        with pytest.raises(ConfigError, match=said):
            opd_loss(logits, batch, LossConfig(**settings))  # type: ignore[arg-type]
    with pytest.raises(AlignmentError, match=r"expected \[16, \d+\] padded or \[1, \d+\] packed"):
        opd_loss(logits[:2], batch)
    with pytest.raises(AlignmentError, match=r"the batch has the token id \d+, but the logits are of 5 tokens"):
        opd_loss(logits[..., :5], batch)


@pytest.mark.parametrize("broken", [float("nan"), float("-inf"), None, True])
def test_a_group_whose_numbers_are_none_is_refused(broken: Any) -> None:
    for name in ("inference_logprobs", "distill_logprobs"):
        group = make_groups()[0]
        group[name][0][-1] = [-1.0, broken] if name == "distill_logprobs" else broken
        with pytest.raises(WireError, match=rf"group 0 of the batch, sequence 0.*{name}"):
            collate([group])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"distill_logprobs": [[[], [], [], [-0.1, -0.1], [-0.2, -2.5], [], [], []]] * 2}, "probabilities sum to 1.80"),
        ({"group_overrides": {"rollout_scores": [0.0, 1.0]}}, "lack the score of a sequence"),
        ({"group_overrides": {"rollout_scores": [0.5], "turn_scores": [[0.5], [1.5]]}}, "turn 1, .1.5., lack its 0.5"),
        ({"group_overrides": {"turn_scores": [[0.5]]}}, r"sequence 0: .* turn_scores of turn 1, \[\], lack its 0.5"),
        ({"group_overrides": {"turn_scores": [[True]]}}, "turn_scores .*expected a list of lists of finite numbers"),
        ({"group_overrides": None}, "group_overrides: None, expected an object"),
        ({"overrides": [{"opd": {"turns": [SCORED]}}] * 2}, "position 6: sampled, but in no turn's span"),
    ],
)
def test_what_validate_refuses_is_refused_in_the_same_words(changes: dict[str, Any], said: str) -> None:
    bad = {**sample.group(), **changes}
    (first, *_) = GroupChecker().read(bad).problems
    with pytest.raises((AlignmentError, WireError), match=said) as refused:
        collate([sample.group(), bad])
    assert str(refused.value) == first.message_for("group 1 of the batch")


@given(st.lists(st.tuples(st.sampled_from(PLACES), ANY_JSON), max_size=3))
def test_the_collator_refuses_what_validate_refuses_and_nothing_more(changes: list[tuple[Any, Any]]) -> None:
    bad = copy.deepcopy(WHOLE)
    for place, value in changes:
        with suppress(LookupError, TypeError):  # An earlier change removed the place.
            change(*place, to=value)(bad)
    expected = next((one.message_for("group 0 of the batch") for one in GroupChecker().read(bad).problems), None)
    refused = None
    try:
        collate([bad])
    except (AlignmentError, WireError) as error:
        refused = str(error)
    assert refused == expected


def test_rows_as_text_are_read() -> None:
    group = make_groups()[0]
    batch, expected = collate([as_text(group)]), collate([group])
    assert expected["opd"]["entries_BTK"].any()
    assert all(torch.equal(batch["opd"][name], one) for name, one in expected["opd"].items())


def test_special_tokens_add_nothing() -> None:
    """Token 20 begins most answers; left out, its logits have no gradient from its row."""
    config = LossConfig(skip_special_tokens=True)
    batch = collate(eight_groups(), config, special_ids=[20])
    logits = quietly(make_model(), batch).detach().requires_grad_()
    opd_loss(logits, batch, config).backward()
    assert logits.grad is not None
    touched = torch.cat((torch.zeros_like(batch["labels"][:, :1]), (logits.grad != 0).any(-1)[:, :-1].long()), 1) > 0
    assert torch.equal(touched, batch["opd"]["entries_BTK"].any(-1) & (batch["input_ids"] != 20))


PAGE = (ROOT / "docs" / "trainers.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_pages_program_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model and groups of this test's, at the places that the page names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_model().save_pretrained(tmp_path / "scripts/demo_policy/policy")
    (tmp_path / "runs/demo").mkdir(parents=True)
    lines = [json.dumps(group) for group in eight_groups()]
    (tmp_path / "runs/demo/groups.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    program, loop, _, _, _, advantages = BLOCKS
    names: dict[str, Any] = {}
    exec(program, names)
    assert (tmp_path / "runs/transformers/final/model.safetensors").exists()
    names["opd_loss"] = opd_loss
    exec(loop, names)
    assert float(names["loss"].detach()) > 0
    exec(advantages, names)
    assert names["advantages"].shape == names["batch"].tokens_BT.shape
    for group in names["groups"]:
        group["scores"] = [0.5] * len(group["tokens"])
        group["group_overrides"].pop("rollout_scores", None)
    exec(advantages, names)
    assert names["gaps"].any(), "the hints say something"
    assert torch.equal(names["advantages"], names["gaps"])


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_of_trl_is_an_epoch_of_ours(tmp_path: Path) -> None:
    trl = pytest.importorskip(
        "trl", reason="TRL is not a dependency: pip install --target FOLDER trl, PYTHONPATH=FOLDER"
    )
    from datasets import Dataset
    from transformers import AutoTokenizer

    class OPDTrainer(trl.SFTTrainer):
        pass

    OPDTrainer.compute_loss = compute_loss
    settings = {**SETTINGS, "gradient_accumulation_steps": 2, "gradient_checkpointing": False, "bf16": False}
    groups = eight_groups()
    trainer = OPDTrainer(
        make_model(),
        trl.SFTConfig(output_dir=str(tmp_path), dataset_kwargs={"skip_prepare_dataset": True}, **settings),
        train_dataset=Dataset.from_dict({"group": [json.dumps(group) for group in groups]}),
        data_collator=lambda rows: collate([json.loads(row["group"]) for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(POLICY_DIR),
    )
    trainer.train()
    theirs = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    own = make_model()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    expected = [ours(own, groups[i : i + 4], LossConfig(), optimizer) for i in (0, 4)]
    assert theirs == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_pages_grpo_trainer_has_the_gap_of_each_token_as_its_advantage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of the page as it stands. One of the two questions gets no hint, so nothing is learned from it."""
    pytest.importorskip("trl", reason="TRL is not a dependency: pip install --target FOLDER trl, PYTHONPATH=FOLDER")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(POLICY_DIR)
    names: dict[str, Any] = {"Dataset": Dataset, "model": model}
    names["tokenizer"] = AutoTokenizer.from_pretrained(POLICY_DIR)
    (block,) = (block for block in BLOCKS if "GRPOTrainer" in block)
    classes, run = block.split("\nquestions = ")
    exec(classes, names)
    outputs: list[dict[str, Any]] = []
    trainer_class, hint_of = names["GapTrainer"], names["hint_of"]
    names["hint_of"] = lambda row, text: hint_of(row, text) if row["answer"] == "7" else ""

    class Recorded(trainer_class):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            outputs.append({"rows": inputs, "weights": [one.detach().clone() for one in model.parameters()], **output})
            return output

    names["GapTrainer"] = Recorded
    exec(f"questions = {run}", names)
    assert outputs
    first = outputs[0]
    assert first["advantages"].shape == first["completion_ids"].shape
    now = [one.detach().clone() for one in model.parameters()]
    assert any(not torch.equal(old, new) for old, new in zip(first["weights"], now, strict=True))
    with torch.no_grad():
        for one, old in zip(model.parameters(), first["weights"], strict=True):
            one.copy_(old)
    model.eval()
    tokenizer = names["tokenizer"]
    for i, row in enumerate(first["rows"]):
        ids = first["completion_ids"][i][first["completion_mask"][i].bool()].tolist()
        readings = []
        for hint in (names["hint_of"](row, tokenizer.decode(ids, skip_special_tokens=True)), ""):
            prompt = tokenizer(hint + row["prompt"], add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                rows = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            readings.append(rows[range(len(ids)), ids])
        expected = (readings[0] - readings[1]).clamp(-5, 5)
        assert expected.any() == (row["answer"] == "7")
        assert torch.allclose(first["advantages"][i][: len(ids)], expected, atol=1e-4)
        assert not first["advantages"][i][len(ids) :].any()
