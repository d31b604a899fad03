"""docs/losses.md: its worked example's numbers follow from the page's own inputs, which are docs/wire_format.md's."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentic_opd.core.types import TurnOutcome
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.config import PARTS, LossConfig
from agentic_opd.training.losses import (
    LossInputs,
    clipped_surrogate,
    combined_loss,
    contrast_target,
    forward_kl,
    group_advantages,
    jensen_shannon,
    reverse_kl,
    start_kl,
    token_advantage,
)
from agentic_opd.wire.group import ControlReading, ScoredGroup, TurnRecord

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "losses.md").read_text()
SPAN = slice(4, 7)
CONTRAST = "contrast at position"
CONFIG = LossConfig(**dict.fromkeys(PARTS, 1.0), route_by_turn=False)


def numbers(cell: str) -> list[float]:
    return [float(text) for text in cell.split(",")]


def row(name: str, below: str) -> list[list[float]]:
    """The cells of the row `name` of the table headed by `below`."""
    table = PAGE.split(f"| {below} |", 1)[1].split("\n\n", 1)[0]
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", table, re.MULTILINE)
    return [numbers(cell) for cell in line.split("|")]


def flat(name: str, below: str) -> list[float]:
    return [value for cell in row(name, below) for value in cell]


def spread(values: list[Any], elsewhere: Any) -> list[Any]:
    return [*[elsewhere] * 4, *values, elsewhere]


def page_batch() -> tuple[TrainBatch, Tensor]:
    """The page's sequence as one of the four of its group, by the real loader; and the student now, [1, 8, 3]."""
    tokens = [10, 11, 12, 13, *map(int, flat("`tokens`", "position")), 14]
    ids = [[int(i) for i in cell] for cell in row("`distill_token_ids`", "position")]
    old = flat("`inference_logprobs`", "position")
    (scores,) = re.findall(r"with the scores ([\d., ]+)\s+and ([\d.]+);", PAGE)
    sequence = {
        "tokens": tokens,
        "masks": [token if 4 <= p < 7 else -100 for p, token in enumerate(tokens)],
        "inference_logprobs": spread(old, 1.0),
        "distill_token_ids": spread(ids, []),
        "distill_logprobs": spread(row("`distill_logprobs`", "position"), []),
    }
    group = {name: [value] * 4 for name, value in sequence.items()}
    now = torch.tensor([spread(row("student now", "position"), [0.0] * 3)])
    group["scores"] = [*numbers(scores[0]), float(scores[1])]
    (step_score,) = re.findall(r"\(`step_score`\) is (-?\d)\.", PAGE)
    control = ControlReading("neutral", "", (), tuple(map(tuple, row("control", CONTRAST))))
    record = TurnRecord((4, 7), TurnOutcome.SCORED, "tool", step_score=int(step_score), control=control)
    group["overrides"] = [{"opd": {"turns": [record.to_wire()]}}] * 4
    return make_batch([ScoredGroup.from_wire(group)], contrast=True), now


def page_inputs() -> LossInputs:
    batch, now = page_batch()
    first = batch.rows([0])
    return LossInputs(
        student_BT=now[..., 0],
        student_BTK=now,
        old_BT=first.old_BT,
        hinted_BT=first.hinted_BT,
        baseline_BT=first.baseline_BT,
        teacher_BTK=first.teacher_BTK,
        entries_BTK=first.entries_BTK,
        sampled_BT=first.sampled_BT,
        advantages_B=group_advantages(batch.scores_B, batch.groups_B)[:1],
        step_scores_BT=first.step_scores_BT,
        start_BT=first.start_BT,
    )


def check(name: str, below: str, values: Tensor) -> None:
    assert values.tolist() == pytest.approx(flat(name, below), abs=5.1e-5), name


def test_the_inputs_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "wire_format.md").read_text()
    lines = dict(re.findall(r"^(tokens|inference_logprobs|distill_\w+) {2,}(.*)$", page, re.MULTILINE))
    for name in ("tokens", "inference_logprobs"):
        assert [float(text) for text in lines[name].split()][SPAN] == flat(f"`{name}`", "position")
    for name in ("distill_token_ids", "distill_logprobs"):
        assert [numbers(cell) for cell in re.findall(r"\[([^\]]+)\]", lines[name])] == row(f"`{name}`", "position")


def test_values_at_each_position() -> None:
    x = page_inputs()
    scored, rows = x.entries_BTK.any(-1), (x.student_BTK, x.teacher_BTK, x.entries_BTK)
    gaps = token_advantage(x.hinted_BT, x.baseline_BT, scored, CONFIG.gap_clip)
    ratio = (x.student_BT - x.old_BT).exp()
    values = {
        "gap: teacher - baseline": gaps,
        "ratio: exp(student now - `inference_logprobs`)": ratio,
        "`token_advantage`": clipped_surrogate(x.student_BT, x.old_BT, gaps, scored),
        "`forward_kl`": forward_kl(*rows),
        "`reverse_kl`": reverse_kl(*rows),
        "`jensen_shannon`": jensen_shannon(*rows),
        "`grpo`": clipped_surrogate(x.student_BT, x.old_BT, x.advantages_B[:, None].expand(1, 8), x.sampled_BT),
        "`step_reward`": clipped_surrogate(x.student_BT, x.old_BT, x.step_scores_BT, x.sampled_BT),
    }
    for name, values_BT in values.items():
        check(name, "value at position", values_BT[0, SPAN])
        if not name.startswith("ratio"):
            assert (values_BT[0, [0, 1, 2, 3, 7]] == 0).all(), name
    assert f"= {float(x.advantages_B[0]):.4f} takes A's place" in PAGE


def test_the_bins_of_position_5_add_up_to_the_divergences() -> None:
    x = page_inputs()
    p, q = (torch.cat((row.exp(), 1 - row.exp().sum()[None])) for row in (x.teacher_BTK[0, 5], x.student_BTK[0, 5]))
    lines = {
        "teacher p": p,
        "student q": q,
        "p (log p - log q)": p * (p.log() - q.log()),
        "q (log q - log p)": q * (q.log() - p.log()),
    }
    for name, values in lines.items():
        check(name, "bin at position 5", values)
    assert float(lines["p (log p - log q)"].sum()) == pytest.approx(
        flat("`forward_kl`", "value at position")[1], abs=1e-4
    )
    assert float(lines["q (log q - log p)"].sum()) == pytest.approx(
        flat("`reverse_kl`", "value at position")[1], abs=1e-4
    )


def page_target() -> tuple[Tensor, TrainBatch]:
    """The contrast's target, and the batch that it is made from."""
    batch, _ = page_batch()
    first = batch.rows([0])
    assert first.control_BTK is not None
    start = torch.tensor([spread(row("policy at the start", CONTRAST), [0.0] * 3)])
    target = contrast_target(start, first.teacher_BTK, first.control_BTK, first.entries_BTK, CONFIG.gap_clip)
    assert torch.equal(target[0, 6], start[0, 6])  # Hint and control say the same there.
    return target, first


def test_contrasted_values_at_each_position() -> None:
    x, (target, batch) = page_inputs(), page_target()
    scored, rows = x.entries_BTK.any(-1), (x.student_BTK, target, x.entries_BTK)
    gaps = token_advantage(batch.hinted_BT, batch.control_BT, scored, CONFIG.gap_clip)
    values = {
        "teacher - control": gaps,
        "`token_advantage`": clipped_surrogate(x.student_BT, x.old_BT, gaps, scored),
        "`forward_kl`": forward_kl(*rows),
        "`reverse_kl`": reverse_kl(*rows),
        "`jensen_shannon`": jensen_shannon(*rows),
    }
    for name, values_BT in values.items():
        check(name, CONTRAST, values_BT[0, SPAN])
        assert (values_BT[0, [0, 1, 2, 3, 7]] == 0).all(), name


def test_the_bins_of_the_contrast_by_plain_arithmetic() -> None:
    def bins(name: str, below: str) -> Tensor:
        listed = torch.tensor(row(name, below)[1], dtype=torch.float64).exp()
        return torch.cat((listed, 1 - listed.sum()[None]))

    start, control = bins("policy at the start", CONTRAST), bins("control", CONTRAST)
    shift = bins("`distill_logprobs`", "position").log() - control.log()
    target = start * shift.exp() / (start * shift.exp()).sum()
    lines = {"policy at the start q0": start, "log p_hint - log p_control": shift, "target p*": target}
    for name, values in lines.items():
        check(name, "bin of the contrast at 5", values)
    torch.testing.assert_close(page_target()[0][0, 5].exp().double(), target[:3], atol=1e-6, rtol=1e-5)


def test_what_holds_the_policy_at_its_start() -> None:
    x, below = page_inputs(), "start at position"
    start = torch.tensor([spread(flat("policy at the start", below), 0.0)])
    contrasted = [cell[0] for cell in row("policy at the start", CONTRAST)]
    assert flat("policy at the start", below) == contrasted
    values_BT = start_kl(x.student_BT, start, x.sampled_BT)
    check("`start_kl`", below, values_BT[0, SPAN])
    assert (values_BT[0, [0, 1, 2, 3, 7]] == 0).all()


def test_the_means() -> None:
    _, parts = combined_loss(page_inputs(), CONFIG)
    for name, value in parts.items():
        written = "`grpo`, without `route_by_turn`" if name == "grpo" else f"`{name}`"
        check(written, "part", torch.tensor([value]))
    _, routed = combined_loss(page_inputs(), LossConfig(grpo=1.0))
    assert routed["grpo"] == 0.0
