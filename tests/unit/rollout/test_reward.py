import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentic_opd.core.types import Reward, Verification, VerifyOutcome
from agentic_opd.rollout.config import RewardConfig, RolloutConfig
from agentic_opd.rollout.loop import compute_reward


def reward(passed: int, total: int, *, turns: int, max_turns: int = 9, calls: int = 0, broken: int = 0) -> Reward:
    verdict = Verification(VerifyOutcome.RAN, passed, total, "", "")
    return compute_reward(verdict, turns, calls, broken, RolloutConfig(max_turns=max_turns))


def test_the_parts_and_their_sum() -> None:
    got = reward(6, 12, turns=3, max_turns=5, calls=4, broken=1)
    assert (got.correctness, got.efficiency, got.tool_usage) == (0.5, 0.25, 0.4)
    assert got.total == pytest.approx(0.7 * 0.5 + 0.15 * 0.25 + 0.15 * 0.4)


@pytest.mark.parametrize(
    ("got", "efficiency", "tool_usage"),
    [
        (reward(5, 5, turns=1), 1.0, 0.0),
        (reward(5, 5, turns=9, calls=2), 0.0, 1.0),
        (reward(0, 5, turns=1), 0.0, 0.0),
        (reward(5, 5, turns=1, max_turns=1, calls=1, broken=1), 1.0, 0.0),
    ],
    ids=["at once", "at the last turn", "doing nothing", "a single turn"],
)
def test_edges(got: Reward, efficiency: float, tool_usage: float) -> None:
    assert (got.efficiency, got.tool_usage) == (efficiency, tool_usage)


def test_a_task_without_tools_needs_no_call() -> None:
    verdict = Verification(VerifyOutcome.RAN, 5, 5, "", "")
    config = RolloutConfig(max_turns=4)
    assert compute_reward(verdict, 1, 0, 0, config, needs_call=False).total == pytest.approx(1)
    assert compute_reward(verdict, 1, 0, 1, config, needs_call=False).tool_usage == 0.75
    assert compute_reward(verdict, 1, 0, 0, config).tool_usage == 0


@pytest.mark.parametrize(("turns", "calls"), [(1, 0), (2, 1), (2, 40), (8, 8)])
def test_calls_that_solve_nothing_earn_nothing(turns: int, calls: int) -> None:
    assert reward(0, 12, turns=turns, calls=calls).total == 0


@pytest.mark.parametrize("broken", [0, 1, 3])
@pytest.mark.parametrize("passed", [4, 12])
def test_calls_and_turns_that_add_nothing_lift_nothing(passed: int, broken: int) -> None:
    """A right solution after three turns, then with 60 `true` in one of them, then with a turn of `true` after each."""
    honest = reward(passed, 12, turns=3, max_turns=8, calls=3, broken=broken).total
    assert reward(passed, 12, turns=3, max_turns=8, calls=63, broken=broken).total == honest
    longer = [reward(passed, 12, turns=turns, max_turns=8, calls=turns, broken=broken).total for turns in range(3, 9)]
    assert longer == sorted(longer, reverse=True)


@given(st.integers(0, 9), st.integers(1, 8), st.integers(0, 9), st.data())
def test_all_parts_lie_between_0_and_1(passed: int, turns: int, calls: int, data: st.DataObject) -> None:
    got = reward(passed, 9, turns=turns, max_turns=8, calls=calls, broken=data.draw(st.integers(0, calls)))
    for part in (got.correctness, got.efficiency, got.tool_usage, got.total):
        assert 0.0 <= part <= 1.0
    assert max(got.efficiency, got.tool_usage) <= got.correctness


def test_the_weights_are_not_negative_and_add_up_to_1() -> None:
    with pytest.raises(ValidationError, match=r"must add up to 1, got 1\.1"):
        RolloutConfig(reward=RewardConfig(correctness=0.7, efficiency=0.2, tool_usage=0.2))
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        RolloutConfig(reward=RewardConfig(correctness=1.0, efficiency=0.1, tool_usage=-0.1))
