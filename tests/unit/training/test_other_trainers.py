"""What other trainers on Atropos' API make of our groups: docs/closing_the_loop.md, "Other trainers"."""

import json
from typing import Any

import numpy as np
import pytest
from example_trainer.data import pad_data_to_good_offset

from agentic_opd.wire.group import ScoredGroup
from tests.unit.wire.sample import LOGPROBS, MASKS, STUDENT, TOKENS, group, k_1_group


def batch(one: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As `/batch` answers, with a group that our own writer wrote."""
    sent = ScoredGroup.from_wire({**one, **changes}).to_wire()
    return json.loads(json.dumps({"batch": [sent]}))


def test_atropos_example_trainer_sees_the_sampled_tokens_their_logprobs_and_the_scores() -> None:
    """Eight tokens become seven inputs and labels, padded to 64; the distillation rows are not read."""
    tokens, labels, advantages, temperatures, logprobs = pad_data_to_good_offset(batch(group(), scores=[1.0, 0.5]), 2)
    assert tokens[0].shape == labels[0].shape == (2, 64)
    assert tokens[0][0, :7].tolist() == TOKENS[:-1]
    assert labels[0][0, :7].tolist() == MASKS[1:]
    assert (labels[0][:, 7:] == -100).all()
    assert logprobs is not None
    assert logprobs[0][0, :7].tolist() == STUDENT[1:]
    assert advantages[0].flatten().tolist() == pytest.approx([1.0, -1.0])
    assert temperatures[0].flatten().tolist() == [1.0, 1.0], "logprobs are the model's own, whatever the temperature"


def test_it_learns_nothing_from_a_group_of_equal_scores() -> None:
    _, _, advantages, _, _ = pad_data_to_good_offset(batch(group(), scores=[0.5, 0.5]), 2)
    assert advantages[0].flatten().tolist() == [0.0, 0.0]


def as_tinker_atropos(one: dict[str, Any], sequence: int) -> list[float]:
    """The advantages that it trains on: teacher minus student at sampled targets, from arrays that must be [T, 1]."""
    rows, student = np.array(one["distill_logprobs"][sequence]), one["inference_logprobs"][sequence]
    assert rows.shape == np.array(one["distill_token_ids"][sequence]).shape == (len(student), 1)
    return [
        0.0 if of_student == 1.0 else float(teacher) - of_student
        for teacher, of_student in zip(rows[1:, 0], student[1:], strict=True)
    ]


def test_tinker_atropos_learns_from_groups_of_one_entry_a_row_what_the_hints_say_and_nothing_else() -> None:
    (one,) = batch(k_1_group())["batch"]
    gaps = [0.0, 0.0, LOGPROBS[3][0] - STUDENT[3], LOGPROBS[4][0] - STUDENT[4], 0.0, 0.0, 0.0]
    assert as_tinker_atropos(one, 0) == pytest.approx(gaps)
    assert gaps[2] > 0 < gaps[3]


def test_tinker_atropos_cannot_read_groups_of_more() -> None:
    (one,) = batch(group())["batch"]
    with pytest.raises(ValueError, match="inhomogeneous"):
        as_tinker_atropos(one, 0)
