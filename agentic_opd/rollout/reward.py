"""The reward of an episode: a pure function of its verdict and how it went."""

from dataclasses import dataclass

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.types import Reward, Verification
from agentic_opd.rollout.config import RolloutConfig


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """What each part counts; none is negative, and they add up to 1, so that the reward stays within [0, 1]."""

    correctness: float = 0.7
    efficiency: float = 0.15
    tool_usage: float = 0.15

    def __post_init__(self) -> None:
        parts = (self.correctness, self.efficiency, self.tool_usage)
        if min(parts) < 0 or abs(sum(parts) - 1.0) > 1e-6:
            raise ConfigError(f"reward weights must be >= 0 and add up to 1, got {parts}")

    @staticmethod
    def from_config(config: RolloutConfig) -> "RewardWeights":
        """The weights that the settings name."""
        return RewardWeights(config.correctness_weight, config.efficiency_weight, config.tool_usage_weight)


def compute_reward(
    verification: Verification,
    turns_used: int,
    max_turns: int,
    tool_calls: int,
    tool_errors: int,
    weights: RewardWeights,
) -> Reward:
    """The parts of the reward, each in [0, 1], and their weighted sum.

    - correctness: the share of hidden checks that passed.
    - efficiency: correctness times the share of turns saved, (max_turns - turns_used) / (max_turns - 1): all of it
      after one turn, none after `max_turns`. It pays in proportion to correctness, because a fast wrong answer
      saves nothing.
    - tool_usage: the share of tool calls that worked, (tool_calls - tool_errors) / tool_calls; 0 without a call. A
      command that ran and failed (a test that found a fault) worked; a call that came back as `Error:` did not.

    Args:
        verification: The hidden tests' verdict.
        turns_used: Assistant turns of the episode.
        max_turns: Assistant turns it might have taken.
        tool_calls: Tool calls of the episode, broken ones included.
        tool_errors: Those of them that came back as an error.
        weights: What each part counts.
    """
    correctness = verification.correctness
    saved = (max_turns - turns_used) / (max_turns - 1) if max_turns > 1 else 1.0
    efficiency = correctness * min(max(saved, 0.0), 1.0)
    tool_usage = (tool_calls - tool_errors) / tool_calls if tool_calls else 0.0
    total = weights.correctness * correctness + weights.efficiency * efficiency + weights.tool_usage * tool_usage
    return Reward(correctness=correctness, efficiency=efficiency, tool_usage=tool_usage, total=total)
