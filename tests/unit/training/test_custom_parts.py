"""Parts of the loss from a user's file: a training step with one, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentic_opd.core.errors import ConfigError
from agentic_opd.training.config import LossConfig, TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.losses import LossPartError, combined_loss, loss_part
from agentic_opd.training.schedule import LossWeights
from agentic_opd.training.sources import GroupFiles
from agentic_opd.training.step import train_step

from .test_objectives import STUDENT, inputs
from .test_sources import config_of, named, write
from .test_step import gradient, make_batch, make_groups, make_policy

HEAD = """
import torch
from agentic_opd.training.losses import hint_gaps, loss_part, surrogate
@loss_part("scored")
"""
GAPS = """def gaps(inputs, config, mask_BT):
    return surrogate(inputs, config, hint_gaps(inputs, config), mask_BT)
"""


def part(folder: Path, source: str, name: str = "gaps") -> str:
    """The setting's name of a part in a file with this source."""
    file = folder / "parts.py"
    file.write_text(source)
    return f"{file}:{name}"


def test_a_training_step_with_a_part_of_a_file_is_one_with_the_same_part_of_the_package(tmp_path: Path) -> None:
    """The step changes the weights, and the part's value is a metric of its name."""
    batch, custom = make_batch(make_groups()), {part(tmp_path, HEAD + GAPS): 2.0}
    expected, metrics = gradient(batch, loss=LossConfig(token_advantage=2.0))
    computed, custom_metrics = gradient(batch, loss=LossConfig(custom=custom))
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(computed, expected)
    assert custom_metrics.pop("loss/gaps") == pytest.approx(metrics.pop("loss/token_advantage"))
    assert custom_metrics == pytest.approx(metrics)
    policy = make_policy()
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    config = TrainerConfig(model="tiny", loss=LossConfig(custom=custom))
    train_step(policy, torch.optim.AdamW(policy.parameters()), batch, config, DistContext("cpu"))
    assert any(not torch.equal(now, then) for now, then in zip(policy.parameters(), before, strict=True))


def test_a_part_of_a_file_has_a_schedule_by_its_name(tmp_path: Path) -> None:
    name = part(tmp_path, HEAD + GAPS)
    loss = LossConfig(custom={name: 2.0}, schedules={name: {"decay_steps": 2}})
    assert [LossWeights(loss).at_step(step).custom[name] for step in range(3)] == [2.0, 1.0, 0.0]
    assert loss.weight_of(name) == 2.0


def test_values_outside_of_the_mask_do_not_count(tmp_path: Path) -> None:
    """The part returns 7 everywhere; two of the three sampled positions are scored."""
    name = part(tmp_path, HEAD + "def gaps(inputs, config, mask_BT): return 7 + 0 * inputs.student_BT")
    assert float(combined_loss(inputs(STUDENT), LossConfig(custom={name: 1.0}))[0]) == pytest.approx(14 / 3)


def test_a_loss_of_a_part_that_reads_rows_alone_needs_a_group_with_rows(tmp_path: Path) -> None:
    plain = {name: value for name, value in named("a").items() if not name.startswith("distill")}
    plain = {**plain, "group_overrides": {"item_id": "a"}, "overrides": [{}] * len(plain["tokens"])}
    path = write(tmp_path / "groups.jsonl", [plain])
    with pytest.raises(ConfigError, match="no group has distillation arrays"):
        GroupFiles(config_of(path, loss={"custom": {part(tmp_path, HEAD + GAPS): 1.0}}))


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("", "none.py:gaps", "loss.custom: there is no file 'none.py'"),
        ("", "gaps", "'gaps' does not name a function: expected FILE.py:FUNCTION or package.module:FUNCTION"),
        ("", "no.such.module:gaps", "no.such.module can't be imported: ModuleNotFoundError"),
        ("1 / 0", "", r"parts.py can't be imported: ZeroDivisionError: .*parts.py:1\)"),
        ("x = 1", "", "parts.py:gaps is no part of the loss: define a function of this name with the decorator"),
        (GAPS, "", "parts.py:gaps is no part of the loss"),
        (HEAD + "def gaps(inputs): return 0", "", r"gaps\(inputs\): too many .*expected \(inputs, config, mask_BT\)"),
        (HEAD.replace("scored", "all") + GAPS, "", r"loss_part\('all'\): expected one of 'scored', 'outcome'"),
    ],
)
def test_a_part_that_can_not_be_loaded_is_refused(tmp_path: Path, source: str, name: str, message: str) -> None:
    custom = {name or part(tmp_path, source): 1.0}
    with pytest.raises(ConfigError, match=message):
        combined_loss(inputs(STUDENT), LossConfig(custom=custom))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1.0", r"gaps returned float, expected a tensor \[B, T\] = \[1, 4\]"),
        ("return inputs.student_BTK", r"returned torch.float64 \[1, 4, 2\], expected floating point .* = \[1, 4\]"),
        ("return inputs.student_BT.sum()", r"returned torch.float64 \[\], expected floating point"),
        ("return mask_BT", r"returned torch.bool \[1, 4\], expected floating point"),
        ("return inputs.student_BT / 0", "returned -inf for sequence 0, position 1, expected a finite number"),
        ("return inputs.student_BT * torch.nan", "returned nan for sequence 0, position 1"),
        ("return inputs.old_BT", "returned values without a gradient: compute them from student_BT"),
        ("return inputs.students", r"gaps raised AttributeError: .*students.*parts.py:5\)"),
    ],
)
def test_wrong_values_of_a_part_are_an_error_with_its_name(tmp_path: Path, body: str, message: str) -> None:
    custom = {part(tmp_path, f"{HEAD}def gaps(inputs, config, mask_BT): {body}"): 1.0}
    leaf = STUDENT.clone().requires_grad_()
    with pytest.raises(LossPartError, match=message):
        combined_loss(inputs(leaf), LossConfig(custom=custom))


def test_where_the_policy_is_not_finite_the_update_is_skipped_and_the_part_is_not_blamed(tmp_path: Path) -> None:
    batch, policy = make_batch(make_groups()), make_policy()
    next(policy.parameters()).data.fill_(torch.nan)
    config = TrainerConfig(model="tiny", loss=LossConfig(custom={part(tmp_path, HEAD + GAPS): 1.0}))
    metrics = train_step(policy, torch.optim.AdamW(policy.parameters()), batch, config, DistContext("cpu"))
    assert metrics["skipped_updates"] == 1.0


def test_a_part_names_where_it_applies() -> None:
    def values(inputs: Any, config: Any, mask_BT: Any) -> Any:
        return inputs.student_BT

    assert loss_part("routed")(values) == ("values", "routed", values)
