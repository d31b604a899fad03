"""The reward of an episode: a pure function of its verdict, of how it went, and of the settings."""

from agentic_opd.core.types import Reward, Verification
from agentic_opd.rollout.config import RolloutConfig


def compute_reward(
    verification: Verification, turns_used: int, tool_calls: int, tool_errors: int, config: RolloutConfig
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
        tool_calls: Tool calls of the episode, broken ones included.
        tool_errors: Those of them that came back as an error.
        config: The turns that it might have taken, and what each part counts.
    """
    correctness, max_turns = verification.correctness, config.max_turns
    saved = (max_turns - turns_used) / (max_turns - 1) if max_turns > 1 else 1.0
    efficiency = correctness * min(max(saved, 0.0), 1.0)
    tool_usage = (tool_calls - tool_errors) / tool_calls if tool_calls else 0.0
    total = (
        config.correctness_weight * correctness
        + config.efficiency_weight * efficiency
        + config.tool_usage_weight * tool_usage
    )
    return Reward(correctness, efficiency, tool_usage, total)
