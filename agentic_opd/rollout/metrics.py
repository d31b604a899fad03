"""Episodes -> the train/ metrics of a logging step. Pure.

`TRAIN_METRICS` describes each metric. A metric without data is left out instead of set to 0.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev

from agentic_opd.core.metric import Metric, percentiles
from agentic_opd.core.types import Episode, NoVerdict, StopReason

_STOPS = {
    StopReason.FINISHED: "because the model called no further tool, or the program of agent.command finished",
    StopReason.MAX_TURNS: "after max_turns turns",
    StopReason.CONTEXT_FULL: "because max_token_length left no room for another turn",
    StopReason.RENDER_ERROR: "because the renderer failed on a turn or on the prompt after it; the log has the cause",
    StopReason.AGENT_FAILED: "because the program of agent.command exited with a code other than 0, or was stopped "
    "for its use of memory, disk or output",
    StopReason.AGENT_TIMEOUT: "because the program of agent.command exceeded agent.timeout_s",
    StopReason.SANDBOX_DIED: "because their sandbox died, while a fresh one works; the log has the cause. "
    "Their reward is 0",
}

_CAUSES = {
    NoVerdict.NOT_RUN: "a command of the tests could not run (exit code 126 or 127)",
    NoVerdict.TIMEOUT: "the tests exceeded their time limit",
    NoVerdict.MEMORY: "the tests exceeded the memory",
    NoVerdict.DISK: "the tests exceeded the disk space",
    NoVerdict.OUTPUT: "the tests printed too much",
    NoVerdict.KILLED: "a signal ended the tests",
    NoVerdict.CONTAINER_ENDED: "the container was ended during the tests, for its use of memory or disk space",
    NoVerdict.UNHEALTHY: "the health check of the container failed before the tests",
    NoVerdict.NO_REWARD: "the tests, which write a reward, wrote none",
    NoVerdict.UNREADABLE_REWARD: "the reward that the tests wrote is no finite number",
}

EPISODE_METRICS = (
    Metric("train/percent_correct", "share", "episodes whose hidden tests all passed"),
    Metric("train/reward", "in [0, 1]", "mean score: weighted sum of the three parts"),
    Metric("train/reward_correctness", "in [0, 1]", "mean share of hidden checks that passed, unweighted"),
    Metric(
        "train/reward_efficiency",
        "in [0, 1]",
        "mean efficiency part (share of turns saved, times correctness), unweighted",
    ),
    Metric(
        "train/reward_tool_usage",
        "in [0, 1]",
        "mean tool usage part (share of turns without a broken tool call, times correctness), unweighted",
    ),
    Metric(
        "train/in_process",
        "share",
        "episodes whose hidden tests ran in the solution's process, where cheating is easier",
    ),
    Metric("train/turns", "turns", "mean number of assistant turns per episode"),
    Metric("train/tool_calls", "calls", "mean number of tool calls per episode"),
    Metric("train/tool_errors_count", "calls", "total number of tool calls that returned an error"),
    Metric("train/completion_lengths", "tokens", "mean number of sampled tokens per episode"),
    Metric("train/completion_lengths_std", "tokens", "population standard deviation of sampled tokens per episode"),
    Metric("train/completion_lengths_min", "tokens", "minimum number of sampled tokens in an episode"),
    Metric("train/completion_lengths_max", "tokens", "maximum number of sampled tokens in an episode"),
    Metric(
        "train/left_out_tokens",
        "tokens",
        "mean number of tokens per episode that the program of agent.command sampled in sequences other than the "
        "episode's",
    ),
    *(Metric(f"train/stop/{stop.value}", "share", f"episodes that ended {text}") for stop, text in _STOPS.items()),
    Metric(
        "train/no_verdict",
        "episodes",
        "number of episodes that are left out, of all other metrics too, because their tests gave no verdict",
    ),
    *(
        Metric(f"train/no_verdict/{cause.value}", "episodes", f"of these, those because {text}")
        for cause, text in _CAUSES.items()
    ),
)

TRAIN_METRICS = (
    Metric("train/episodes", "episodes", "number of episodes that the step's metrics cover"),
    *EPISODE_METRICS,
    *(
        Metric(f"train/sample_s_p{q}", "seconds", f"time to sample one turn, {q}th percentile of the latest requests")
        for q in (50, 95)
    ),
    *(
        Metric(f"train/loop_lag_s_p{q}", "seconds", f"delay of the event loop, {q}th percentile of the last 20 s")
        for q in (50, 95, 99)
    ),
    Metric("train/loop_lag_s_max", "seconds", "maximum delay of the event loop in the last 20 s"),
    Metric(
        "train/rollouts",
        "table",
        "W&B only: rollouts with their task, score, hints and text; those with hints come first",
    ),
)


def train_metrics(
    episodes: Sequence[Episode], sample_s: Sequence[float] = (), lag_s: Sequence[float] = ()
) -> dict[str, float]:
    """Return the metrics of verified episodes.

    `sample_s` are the seconds of the latest sampling requests, `lag_s` those of the event loop's delays.
    """
    if not episodes:
        return {}
    of_episodes = episode_metrics(episodes)
    of_run = percentiles("train/sample_s", sample_s) | percentiles("train/loop_lag_s", lag_s, (50, 95, 99))
    if lag_s:
        of_run["train/loop_lag_s_max"] = max(lag_s)
    rewarded = sum(episode.reward is not None for episode in episodes)
    return {"train/episodes": float(rewarded), **of_episodes, **of_run}


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of `EPISODE_METRICS`; only the counts without a verdict if no episode got one."""
    causes = Counter(
        f"train/no_verdict/{cause.value}" for cause in (e.no_verdict for e in episodes) if cause is not None
    )
    no_verdicts = {name: float(count) for name, count in causes.items()}
    if episodes:
        no_verdicts["train/no_verdict"] = float(causes.total())
    scored = [(e, e.reward, e.verification) for e in episodes if e.reward is not None and e.verification is not None]
    if not scored:
        return no_verdicts
    lengths = [sum(turn.end - turn.start for turn in e.turns) for e, _, _ in scored]
    metrics = {
        "train/percent_correct": fmean(v.all_passed for _, _, v in scored),
        "train/reward": fmean(r.total for _, r, _ in scored),
        "train/reward_correctness": fmean(r.correctness for _, r, _ in scored),
        "train/reward_efficiency": fmean(r.efficiency for _, r, _ in scored),
        "train/reward_tool_usage": fmean(r.tool_usage for _, r, _ in scored),
        "train/in_process": fmean(v.in_process for _, _, v in scored),
        "train/turns": fmean(len(e.turns) for e, _, _ in scored),
        "train/tool_calls": fmean(e.tool_calls for e, _, _ in scored),
        "train/tool_errors_count": float(sum(e.tool_errors for e, _, _ in scored)),
        "train/completion_lengths": fmean(lengths),
        "train/completion_lengths_std": pstdev(lengths),
        "train/completion_lengths_min": float(min(lengths)),
        "train/completion_lengths_max": float(max(lengths)),
    }
    programs = [e.program for e, _, _ in scored if e.program is not None]
    if programs:
        metrics["train/left_out_tokens"] = fmean(program.other_tokens for program in programs)
    for reason in _STOPS:  # Episodes with other stop reasons are not kept.
        metrics[f"train/stop/{reason.value}"] = fmean(e.stop_reason is reason for e, _, _ in scored)
    return metrics | no_verdicts
