"""Weights of the scored turns of a trajectory: literal numbers, the losses that they enter, and what is refused.

    rollout  sequence  turn    votes    for a hint  by votes  gaps         mean |gap|  by gap
    a        0         [1, 3)  + + - -  2           2/3       1, -3        2           2
             0         [4, 5)  -        not scored: no weight
             1         [1, 2)  + + + +  4           4/3       -0.5         0.5         0.5
             1         [3, 5)  + + +    3           1         0.25, -0.75  0.5         0.5
    b        2         [1, 2)  + + + -  3           1         0            0           1, as all of b are 0

Of turns that were judged as one trajectory, the votes that did not name a turn are not in its record, as here.

All student logprobs are -2, so that the sums can be done by hand.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.types import IGNORED, DistillArrays, TurnOutcome, Vote
from agentic_opd.training import LossConfig, collate, opd_loss
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.losses import LossInputs, combined_loss
from agentic_opd.training.turn_weights import trajectory_weights
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord

HINT = "Use the tool first."
VOTES = {"+": Vote(1, HINT, "+"), "-": Vote(-1, None, "-")}
STUDENT = -2.0
NAMES = ["first", "second", "third"]


def turn(start: int, end: int, votes: str, *, scored: bool = True) -> TurnRecord:
    cast = tuple(VOTES[vote] for vote in votes)
    if not scored:
        return TurnRecord((start, end), TurnOutcome.VOTE_FAILED, "tool", cast)
    return TurnRecord((start, end), TurnOutcome.SCORED, "tool", cast, HINT, (6,), 1)


def rollout(name: str, length: int, gaps: dict[int, float], *turns: TurnRecord) -> ScoredRollout:
    tokens = tuple(range(1, length + 1))
    sampled = {position for record in turns for position in range(*record.span)}
    return ScoredRollout(
        tokens_T=tokens,
        masks_T=tuple(token if p in sampled else IGNORED for p, token in enumerate(tokens)),
        logprobs_T=tuple(STUDENT if p in sampled else 1.0 for p in range(length)),
        score=0.5,
        rows=DistillArrays(
            [[tokens[p], 7] if p in gaps else [] for p in range(length)],
            [[STUDENT + gaps[p], -9.0] if p in gaps else [] for p in range(length)],
        ),
        turns=turns,
        session_id=name,
    )


GROUP = ScoredGroup(
    (
        rollout("a", 5, {1: 1.0, 2: -3.0}, turn(1, 3, "++--"), turn(4, 5, "-", scored=False)),
        rollout("a", 5, {1: -0.5, 3: 0.25, 4: -0.75}, turn(1, 2, "++++"), turn(3, 5, "+++")),
        rollout("b", 2, {1: 0.0}, turn(1, 2, "+++-")),
    )
)
BY_VOTES = [{(1, 3): 2 / 3}, {(1, 2): 4 / 3, (3, 5): 1.0}, {(1, 2): 1.0}]
BY_GAP = [{(1, 3): 2.0}, {(1, 2): 0.5, (3, 5): 0.5}, {(1, 2): 1.0}]


@pytest.mark.parametrize(("source", "expected"), [("votes", BY_VOTES), ("gap", BY_GAP)])
def test_the_weights_of_a_rollouts_scored_turns_have_a_mean_of_1(source: Any, expected: Any) -> None:
    weights = trajectory_weights(GROUP, source, NAMES)
    assert [of_sequence.keys() for of_sequence in weights] == [of_sequence.keys() for of_sequence in expected]
    for of_sequence, numbers in zip(weights, expected, strict=True):
        assert of_sequence == pytest.approx(numbers)


def test_the_gap_is_measured_from_the_turns_own_baseline() -> None:
    changed = replace(GROUP.rollouts[1].turns[0], baseline_logprobs=(-5.5,))  # type: ignore[index]
    second = replace(GROUP.rollouts[1], turns=(changed, GROUP.rollouts[1].turns[1]))  # type: ignore[index]
    weights = trajectory_weights(replace(GROUP, rollouts=(GROUP.rollouts[0], second)), "gap", NAMES[:2])
    assert weights[1] == pytest.approx({(1, 2): 3 / (5.5 / 3), (3, 5): 0.5 / (5.5 / 3)}), "means 2, 3 and 0.5"


def test_a_batch_has_each_turns_weight_at_its_scored_positions() -> None:
    assert make_batch([GROUP]).turn_weights_BT is None
    weights_BT = make_batch([GROUP], turn_weight_source="gap").turn_weights_BT
    assert weights_BT is not None
    assert weights_BT.tolist() == [[1, 2, 2, 1, 1], [1, 0.5, 1, 0.5, 0.5], [1, 1, 1, 1, 1]]


def inputs_of(batch: TrainBatch) -> LossInputs:
    """Of a student that has not moved, whose rows are those that it was sampled with."""
    student_BT = batch.old_BT.clone().requires_grad_()
    others_BT = torch.full_like(student_BT, -9.0)
    return LossInputs(
        student_BT=student_BT,
        student_BTK=torch.stack((student_BT, others_BT), -1),
        old_BT=batch.old_BT,
        hinted_BT=batch.hinted_BT,
        baseline_BT=batch.baseline_BT,
        teacher_BTK=batch.teacher_BTK,
        entries_BTK=batch.entries_BTK,
        sampled_BT=batch.sampled_BT,
        advantages_B=torch.ones(3),
        step_scores_BT=batch.step_scores_BT,
        start_BT=batch.start_BT,
        turn_weights_BT=batch.turn_weights_BT,
    )


def part_of(part: str, source: str | None, **settings: Any) -> float:
    weighed = {} if source is None else {"turn_weights": "trajectory", "turn_weight_source": source}
    config = LossConfig(**{part: 1.0}, **weighed, **settings)
    batch = make_batch([GROUP], turn_weight_source=config.weighs_turns_by)
    return combined_loss(inputs_of(batch), config)[1][part]


def test_the_surrogate_of_a_turns_tokens_has_its_weight() -> None:
    """Seven tokens were sampled; the ratio is 1, so a token's value is minus its gap."""
    assert part_of("token_advantage", None) == pytest.approx(-(1 - 3 - 0.5 + 0.25 - 0.75) / 7)
    by_votes = 2 / 3 * (1 - 3) + 4 / 3 * -0.5 + 1 * (0.25 - 0.75)
    assert part_of("token_advantage", "votes") == pytest.approx(-by_votes / 7)
    by_gap = 2 * (1 - 3) + 0.5 * -0.5 + 0.5 * (0.25 - 0.75)
    assert part_of("token_advantage", "gap") == pytest.approx(-by_gap / 7)


def test_a_divergence_of_a_turns_tokens_has_its_weight() -> None:
    def kl(gap: float) -> float:
        p, q, other = math.exp(STUDENT + gap), math.exp(STUDENT), math.exp(-9.0)
        return p * gap + (1 - p - other) * math.log((1 - p - other) / (1 - q - other))

    by_gap = 2 * (kl(1) + kl(-3)) + 0.5 * (kl(-0.5) + kl(0.25) + kl(-0.75))
    assert part_of("forward_kl", "gap") == pytest.approx(by_gap / 7, rel=1e-4)


def test_rewards_have_no_weight_and_the_gap_beside_them_has() -> None:
    assert part_of("grpo", "gap", route_by_turn=False) == part_of("grpo", None, route_by_turn=False) == -1
    by_gap = 7 * 1 + 2 * (1 - 3) + 0.5 * -0.5 + 0.5 * (0.25 - 0.75)
    assert part_of("combined", "gap") == pytest.approx(-by_gap / 7)


def test_another_trainer_gets_the_weights_from_its_collator() -> None:
    """The logits are those of four equal tokens, so a logprob is -log 4, as it was when the tokens were sampled."""
    uniform = -math.log(4)
    first = replace(GROUP.rollouts[0], tokens_T=(1, 2, 3, 1, 2), masks_T=(-100, 2, 3, -100, 2))
    first = replace(first, logprobs_T=(1.0, uniform, uniform, 1.0, uniform))
    rows = DistillArrays([[], [2, 1], [3, 1], [], []], [[], [uniform + 0.5, -9.0], [uniform - 1.5, -9.0], [], []])
    second = replace(
        first, rows=DistillArrays([[], [2, 1], [3, 1], [], []], [[], [uniform, -9.0], [uniform - 1, -9.0], [], []])
    )
    group = ScoredGroup((replace(first, rows=rows), second))
    config = LossConfig(token_advantage=1.0, turn_weights="trajectory", turn_weight_source="gap")
    batch = collate([group.to_wire()], config)
    # Means of |gap|: 1 and 0.5, whose mean is 0.75.
    value = float(opd_loss(torch.zeros(2, 5, 4), batch, config))
    assert value == pytest.approx(-(4 / 3 * (0.5 - 1.5) + 2 / 3 * (0 - 1)) / 6)
    plain = float(opd_loss(torch.zeros(2, 5, 4), batch, LossConfig(token_advantage=1.0)))
    assert plain == pytest.approx(-((0.5 - 1.5) + (0 - 1)) / 6)
    with pytest.raises(ConfigError, match="made without weights"):
        opd_loss(torch.zeros(2, 5, 4), collate([group.to_wire()]), config)


def test_weights_that_cannot_be_computed_are_refused_with_what_to_set() -> None:
    voteless = replace(GROUP.rollouts[2], turns=(turn(1, 2, ""),))
    with pytest.raises(ConfigError, match=r"third, position 1: .* the judge did not vote .* Set it to gap"):
        trajectory_weights(replace(GROUP, rollouts=(*GROUP.rollouts[:2], voteless)), "votes", NAMES)
    without = replace(GROUP.rollouts[2], turns=None)
    with pytest.raises(ConfigError, match=r"third: .* there are no records of turns"):
        trajectory_weights(replace(GROUP, rollouts=(*GROUP.rollouts[:2], without)), "gap", NAMES)
    undistilled = replace(GROUP.rollouts[2], turns=None, rows=None)
    assert trajectory_weights(replace(GROUP, rollouts=(undistilled,)), "votes", NAMES[:1]) == [{}]
    with pytest.raises(ConfigError, match="group 0, sequence 2, position 1"):
        make_batch([replace(GROUP, rollouts=(*GROUP.rollouts[:2], voteless))], turn_weight_source="votes")
