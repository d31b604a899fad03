"""Episodes -> the train/ metrics of a logging step. Pure.

name                          unit    what
train/percent_correct         share   episodes whose hidden tests all passed
train/reward                  [0, 1]  mean score
train/reward_correctness      [0, 1]  mean of that part, unweighted; likewise _efficiency and _tool_usage
train/turns                   turns   mean assistant turns of an episode
train/tool_calls              calls   mean of an episode
train/tool_errors_count       calls   tool calls that failed, in all
train/stop/<reason>           share   episodes that ended so
"""

from collections.abc import Sequence
from statistics import fmean

from agentic_opd.types import Episode, StopReason


def train_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The metrics of verified and rewarded episodes; empty where there are none."""
    scored = [(e, e.reward, e.verification) for e in episodes if e.reward is not None and e.verification is not None]
    if not scored:
        return {}
    metrics = {
        "train/percent_correct": fmean(v.passed == v.total for _, _, v in scored),
        "train/reward": fmean(r.total for _, r, _ in scored),
        "train/reward_correctness": fmean(r.correctness for _, r, _ in scored),
        "train/reward_efficiency": fmean(r.efficiency for _, r, _ in scored),
        "train/reward_tool_usage": fmean(r.tool_usage for _, r, _ in scored),
        "train/turns": fmean(len(e.turns) for e, _, _ in scored),
        "train/tool_calls": fmean(e.tool_calls for e, _, _ in scored),
        "train/tool_errors_count": float(sum(e.tool_errors for e, _, _ in scored)),
    }
    for reason in StopReason:
        metrics[f"train/stop/{reason.value}"] = fmean(e.stop_reason is reason for e, _, _ in scored)
    return metrics
