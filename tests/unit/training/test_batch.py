"""Groups -> tensors: the worked example of the wire format, padding, and every way to be misaligned."""

from typing import Any

import pytest
import torch

from agentic_opd.core.errors import AlignmentError, ConfigError
from agentic_opd.core.types import TurnOutcome
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.config import LossConfig
from agentic_opd.training.learner import staleness
from agentic_opd.training.losses import LossInputs, combined_loss
from agentic_opd.wire.checks import read_group
from agentic_opd.wire.group import ControlReading, ScoredGroup, TurnRecord


def batch_of(*groups: dict[str, Any]) -> TrainBatch:
    return make_batch([read_group(group) for group in groups])


def make_group(**changes: Any) -> dict[str, Any]:
    """Eight tokens, two turns: 3-4 scored with K = 3, 7 not scored; and a shorter sequence without a row."""
    group: dict[str, Any] = {
        "tokens": [[1, 2, 3, 10, 11, 4, 5, 12], [1, 2, 13]],
        "masks": [[-100, -100, -100, 10, 11, -100, -100, 12], [-100, -100, 13]],
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -0.7, 1.0, 1.0, -0.2], [1.0, 1.0, -0.3]],
        "distill_token_ids": [[[], [], [], [10, 7, 8], [11, 9, 8], [], [], []], [[], [], []]],
        "distill_logprobs": [[[], [], [], [-0.4, -1.5, -2.5], [-3.0, -0.1, -4.0], [], [], []], [[], [], []]],
        "scores": [0.25, 1.0],
    }
    return {**group, **changes}


def test_the_worked_example() -> None:
    batch = batch_of(make_group(), make_group())
    assert batch.tokens_BT.shape == (4, 8)
    assert batch.teacher_BTK.shape == (4, 8, 3)
    assert batch.groups_B.tolist() == [0, 0, 1, 1]
    assert batch.scores_B.tolist() == [0.25, 1.0, 0.25, 1.0]
    assert batch.scored_BT[0].tolist() == [False, False, False, True, True, False, False, False]
    assert not batch.scored_BT[1].any()
    assert batch.entries_BTK[0, 4].tolist() == [True, True, True]
    assert batch.teacher_ids_BTK[0, 3].tolist() == [10, 7, 8]
    assert batch.old_BT[0].tolist() == pytest.approx([0, 0, 0, -0.5, -0.7, 0, 0, -0.2])
    assert batch.attended_BT[1].tolist() == [True] * 3 + [False] * 5
    assert batch.sampled_BT[1].tolist() == [False, False, True] + [False] * 5


def test_without_distillation_nothing_is_scored() -> None:
    group = make_group(distill_token_ids=None)
    del group["distill_logprobs"]
    batch = batch_of(group)
    assert not batch.entries_BTK.any()
    assert batch.teacher_BTK.shape == (2, 8, 1)


def rectangular(**changes: Any) -> dict[str, Any]:
    """The same group with K = 1: one entry everywhere, and the student's own logprob where nothing was scored."""
    ids = [[[1], [2], [3], [10], [11], [4], [5], [12]], [[1], [2], [13]]]
    logprobs = [[[0.0], [0.0], [0.0], [-0.4], [-3.0], [0.0], [0.0], [-0.2]], [[0.0], [0.0], [-0.3]]]
    return make_group(distill_token_ids=ids, distill_logprobs=logprobs, **changes)


HINT: dict[str, Any] = {"next_state_role": "tool", "hint": "Look.", "hint_token_ids": (6,), "insert_at": 2}


def turns(*records: tuple[int, int, str]) -> dict[str, Any]:
    roles: dict[str, Any] = {"scored": HINT, "vote_failed": {"next_state_role": "tool"}}
    made = [
        TurnRecord((start, end), TurnOutcome(outcome), **roles.get(outcome, {"next_state_role": None}))
        for start, end, outcome in records
    ]
    return {"opd": {"turns": [record.to_wire() for record in made]}}


UNSCORED = turns((2, 3, "no_next_state"))


OVERRIDES = [turns((3, 5, "scored"), (7, 8, "vote_failed")), UNSCORED]


def test_in_the_rectangular_form_the_turn_records_tell_what_was_scored() -> None:
    batch, plain = batch_of(rectangular(overrides=OVERRIDES)), batch_of(make_group())
    assert torch.equal(batch.scored_BT, plain.scored_BT)
    assert batch.teacher_BTK[0, 3:5, 0].tolist() == pytest.approx([-0.4, -3.0])
    assert not batch.teacher_BTK[~batch.scored_BT].any()


def test_in_the_rectangular_form_without_records_all_that_was_sampled_counts() -> None:
    for overrides in (None, [{}, {"turns": 1}]):
        batch = batch_of(rectangular(overrides=overrides))
        assert torch.equal(batch.scored_BT, batch.sampled_BT)


def test_in_the_rectangular_form_an_unscored_turn_adds_nothing_and_keeps_its_rl_signal() -> None:
    """Without the records the student, which has moved since, was pulled back to its old self at positions 7 and 2."""
    batch = batch_of(rectangular(overrides=OVERRIDES))
    student = (batch.old_BT - 0.3).requires_grad_()
    inputs = LossInputs(
        student_BT=student,
        student_BTK=student[..., None],
        old_BT=batch.old_BT,
        hinted_BT=batch.hinted_BT,
        baseline_BT=batch.baseline_BT,
        teacher_BTK=batch.teacher_BTK,
        entries_BTK=batch.entries_BTK,
        sampled_BT=batch.sampled_BT,
        advantages_B=torch.ones(2),
        step_scores_BT=batch.step_scores_BT,
        start_BT=batch.start_BT,
    )
    unscored = batch.sampled_BT & ~batch.scored_BT
    distilled, _ = combined_loss(inputs, LossConfig(token_advantage=1.0, forward_kl=1.0, reverse_kl=1.0))
    (grad,) = torch.autograd.grad(distilled, student, retain_graph=True)
    assert (grad[unscored] == 0).all()
    assert (grad[batch.scored_BT] != 0).all()
    routed, _ = combined_loss(inputs, LossConfig(grpo=1.0))
    (grad,) = torch.autograd.grad(routed, student)
    assert torch.equal(grad != 0, unscored)


def with_row(position: int, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    group = make_group()
    group["distill_token_ids"][0][position] = ids
    group["distill_logprobs"][0][position] = logprobs
    return group


FIRST = {
    "masks": [make_group()["masks"][0], [1, -100, -100]],
    "inference_logprobs": [make_group()["inference_logprobs"][0], [-0.3, 1.0, 1.0]],
}


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (with_row(4, [12, 9, 8], [-2.0] * 3), "position 4: row: first id 12, expected the token 11"),
        (with_row(4, [11, 11, 8], [-2.0] * 3), "position 4: row: an id occurs twice"),
        (with_row(4, [11, 9, 8], [-0.5] * 3), "position 4: row: probabilities sum to 1.819592, expected at most 1"),
        (with_row(4, [11, 9, 8], [3.9, -1.0, -2.0]), r"position 4: distill_logprobs\[0\]: 3.9, expected at most"),
        (with_row(4, [11, 9], [-1.0, -1.0]), "position 4: row: expected 3 entries, got 2"),
        (with_row(1, [2, 3, 4], [-2.0] * 3), "position 1: row: written at a position that was not sampled"),
        (
            make_group(overrides=[turns((3, 5, "vote_failed"), (7, 8, "scored")), UNSCORED]),
            "position 3: row: written outside of the scored turns",
        ),
        (make_group(masks=[[0, 0, 0, 1, 1, 0, 0, 1], [0, 0, 1]]), "position 0: mask: expected -100 or the token 1"),
        (
            make_group(inference_logprobs=[[1.0] * 8, [1.0] * 3]),
            "position 3: inference_logprobs: expected at most 0, got 1.0",
        ),
        (
            make_group(group_overrides={"rollout_scores": [0.0, 1.0]}),
            r"group 0: group_overrides: rollout_scores \[0.0, 1.0\] lack the score of a sequence",
        ),
        (make_group(**FIRST), "sequence 1, position 0: mask: the first token is marked as sampled"),
    ],
)
def test_what_is_misaligned_is_named(group: dict[str, Any], said: str) -> None:
    with pytest.raises(AlignmentError, match=f"(?s){said}"):
        make_batch([ScoredGroup.from_wire(group)])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(AlignmentError, match="no sequence"):
        make_batch([])


def distilled(**changes: Any) -> dict[str, Any]:
    """The first turn was read by other weights without a hint, and with a control hint that says nothing of token 7."""
    control = ControlReading("neutral", "Look again.", (5,), ((-0.9, None, -1.1), (-0.8, -0.9, None)))
    made = {"baseline_logprobs": (-0.45, -0.75), "control": control, "step_score": -1, **HINT, **changes}
    records = [
        TurnRecord((3, 5), TurnOutcome.SCORED, **{"step_votes": (-1,), **made}),
        TurnRecord((7, 8), TurnOutcome.VOTE_FAILED, "tool", step_votes=(1,), step_score=1),
    ]
    return make_group(overrides=[{"opd": {"turns": [record.to_wire() for record in records]}}, UNSCORED])


def test_gaps_are_measured_from_a_scored_turns_baseline_and_ratios_from_what_sampled() -> None:
    batch = batch_of(distilled())
    assert batch.old_BT[0].tolist() == pytest.approx([0, 0, 0, -0.5, -0.7, 0, 0, -0.2])
    assert batch.baseline_BT[0].tolist() == pytest.approx([0, 0, 0, -0.45, -0.75, 0, 0, -0.2])
    assert batch.hinted_BT[0].tolist() == pytest.approx([0, 0, 0, -0.4, -3.0, 0, 0, 0])
    assert torch.equal(batch.baseline_BT[1], batch.old_BT[1])
    assert batch.control_BTK is None
    plain = batch_of(make_group())
    assert torch.equal(plain.baseline_BT, plain.old_BT)


def test_each_token_has_the_step_score_of_its_turn() -> None:
    batch = batch_of(distilled())
    assert batch.step_scores_BT[0].tolist() == [0, 0, 0, -1, -1, 0, 0, 1]
    assert not batch.step_scores_BT[1].any()
    assert not batch_of(distilled(step_score=None)).step_scores_BT[0, :7].any()


def test_an_id_that_the_control_says_nothing_about_leaves_its_row() -> None:
    batch = make_batch([read_group(distilled())], contrast=True)
    assert batch.control_BTK is not None
    assert batch.teacher_ids_BTK[0, 3:5].tolist() == [[10, 8, 0], [11, 9, 0]]
    assert batch.entries_BTK[0, 3:5].tolist() == [[True, True, False]] * 2
    torch.testing.assert_close(batch.teacher_BTK[0, 3:5], torch.tensor([[-0.4, -2.5, 0.0], [-3.0, -0.1, 0.0]]))
    torch.testing.assert_close(batch.control_BTK[0, 3:5], torch.tensor([[-0.9, -1.1, 0.0], [-0.8, -0.9, 0.0]]))
    torch.testing.assert_close(batch.control_BT[0], torch.tensor([0, 0, 0, -0.9, -0.8, 0, 0, 0]))
    part = batch.rows([0])
    assert part.control_BTK is not None
    assert part.control_BTK.shape == (1, 8, 3)


LACKING = ControlReading("neutral", "Look again.", (5,), ((None, -1.0, -1.1), (-0.8, -0.9, None)))
NARROW = ControlReading("neutral", "Look again.", (5,), ((-0.9, -1.0), (-0.8, -0.9, None)))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"control": None},
            ConfigError,
            "group 0, sequence 0, position 3: .* not read .*Set env.hint.control .* loss.contrast",
        ),
        ({"control": LACKING}, AlignmentError, "position 3: control: the sampled token has no logprob"),
        ({"control": NARROW}, AlignmentError, "position 3: control: expected 3 entries, those of the row, got 2"),
    ],
)
def test_readings_that_do_not_fit_their_turn_are_named(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make_batch([ScoredGroup.from_wire(distilled(**changes))], contrast=True)


def test_groups_of_other_programs_have_no_control() -> None:
    with pytest.raises(ConfigError, match=r"env\.hint\.control"):
        make_batch([read_group(make_group())], contrast=True)


def test_parts_hold_every_sequence_once_and_little_padding() -> None:
    batch = batch_of(*[make_group()] * 5)
    indices = [*batch.parts(16, is_packed=False)]
    parts = [batch.rows(part) for part in indices]
    assert sum(len(part.tokens_BT) for part in parts) == 10
    assert all(part.tokens_BT.numel() <= 16 for part in parts)
    assert sum(float(part.scores_B.sum()) for part in parts) == pytest.approx(6.25)
    assert sum(int(part.scored_BT.sum()) for part in parts) == int(batch.scored_BT.sum())
    assert sorted(i for part in indices for i in part) == list(range(10))
    assert parts[0].tokens_BT.shape[1] == 3
    assert [len(part) for part in batch.parts(1, is_packed=False)] == [1] * 10


def test_minibatches_hold_every_group_once_and_whole_in_an_order_that_is_told() -> None:
    batch = batch_of(*(make_group() for _ in range(7)))

    def dealt(count: int, seed: int) -> list[list[int]]:
        parts = batch.minibatches(count, torch.Generator().manual_seed(seed))
        return [part.groups_B.tolist() for part in parts]

    parts = dealt(3, seed=1)
    assert [len(part) for part in parts] == [6, 4, 4]
    assert sorted(group for part in parts for group in part) == [group for group in range(7) for _ in range(2)]
    assert all(part.count(group) == 2 for part in parts for group in part)
    assert dealt(3, seed=1) == parts
    assert any(dealt(3, seed=seed) != parts for seed in range(2, 6))
    assert len(dealt(9, seed=1)) == 7
    (whole,) = batch.minibatches(1, torch.Generator().manual_seed(1))
    assert torch.equal(whole.tokens_BT, batch.tokens_BT)
    assert torch.equal(whole.teacher_BTK, batch.teacher_BTK)


def test_staleness_is_the_mean_distance_of_the_known_versions() -> None:
    versions = ({"weight_version": 3}, {"weight_version": 4}, None)
    groups = [read_group(make_group(group_overrides=version)) for version in versions]
    assert staleness(groups, 5) == {"staleness": 1.5}
    assert staleness(groups[2:], 5) == {}
