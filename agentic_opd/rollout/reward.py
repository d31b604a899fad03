"""The reward of an episode: a pure function of its verdict, its turns and calls, and the settings."""

from agentic_opd.core.types import Reward, Verification
from agentic_opd.rollout.config import RolloutConfig


def compute_reward(
    verification: Verification, turns_used: int, calls_that_worked: int, broken_turns: int, config: RolloutConfig
) -> Reward:
    """Return the parts of the reward, each in [0, 1], and their weighted sum.

    - correctness: the share of hidden checks that passed.
    - efficiency: correctness times the share of saved turns, (max_turns - turns_used) / (max_turns - 1): 1 after one
      turn, 0 after `max_turns`.
    - tool_usage: correctness times the share of turns without a broken call, (max_turns - broken_turns) / max_turns; 0
      if no call worked. A command that ran and failed (a test that found a bug) counts as working; a call that returned
      `Error:` does not.

    Efficiency and tool_usage are proportional to correctness: an episode that solves nothing earns nothing. Both are
    relative to `max_turns`, so further calls or turns raise neither. `turns_used` are, for a program, all of its
    requests.
    """
    correctness, max_turns = verification.correctness, config.max_turns
    saved = (max_turns - turns_used) / (max_turns - 1) if max_turns > 1 else 1.0
    unbroken = (max_turns - broken_turns) / max_turns if calls_that_worked else 0.0
    efficiency = correctness * min(max(saved, 0.0), 1.0)
    tool_usage = correctness * max(unbroken, 0.0)
    total = (
        config.reward.correctness * correctness
        + config.reward.efficiency * efficiency
        + config.reward.tool_usage * tool_usage
    )
    return Reward(correctness, efficiency, tool_usage, total)
