"""Episodes -> the train/ metrics of a logging step. Pure.

`TRAIN_METRICS` describes each metric. A metric without data is left out instead of set to 0.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from statistics import fmean, pstdev

from agentic_opd.core.metric import Metric, percentiles
from agentic_opd.core.types import Episode, NoVerdict, StopReason

_STOPS = {
    StopReason.FINISHED: "because the model called no further tool, or the program of agent.command finished",
    StopReason.TERMINATED: "because the environment ended them after a tool call",
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
    NoVerdict.MEMORY: "the tests exceeded the memory limit",
    NoVerdict.DISK: "the tests exceeded the disk limit",
    NoVerdict.OUTPUT: "the tests printed too much",
    NoVerdict.KILLED: "a signal ended the tests",
    NoVerdict.CONTAINER_ENDED: "the container was ended during the tests, for its use of memory or disk space",
    NoVerdict.UNHEALTHY: "the health check of the container failed before the tests",
    NoVerdict.NO_REWARD: "the tests, which write a reward, wrote none",
    NoVerdict.UNREADABLE_REWARD: "the reward that the tests wrote is not a finite number",
}

REPETITION_N = 10
"""Length of the n-grams whose repetition is measured, in tokens: the names and quotes of calls are shorter."""
MOST_K = 8
"""Largest k of train/pass@<k>."""

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
    Metric(
        "train/over_calling",
        "share",
        "episodes with a tool call, of those whose task needs none, such as BFCL's questions of irrelevance. Left out "
        "if there are none",
    ),
    Metric(
        "train/repetition",
        "share",
        f"a turn's {REPETITION_N}-grams of sampled tokens that occurred earlier in the turn, mean over the turns of at "
        f"least {REPETITION_N} tokens. Left out if there are none",
    ),
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
        "number of episodes that are left out of all other metrics because their tests gave no verdict",
    ),
    *(
        Metric(f"train/no_verdict/{cause.value}", "episodes", f"of these, episodes without a verdict because {text}")
        for cause, text in _CAUSES.items()
    ),
)

TRAIN_METRICS = (
    Metric("train/episodes", "episodes", "number of episodes that the step's metrics cover"),
    Metric(
        "train/pass@<k>",
        "share",
        f"tasks that at least one of k rollouts of their group solves, k = 1, 2, 4, {MOST_K}: unbiased estimate, mean "
        "over the groups with k verdicts",
    ),
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
    if needless := [e.tool_calls > 0 for e, _, _ in scored if e.task.needs_no_call]:
        metrics["train/over_calling"] = fmean(needless)
    if repeated := [share for e, _, _ in scored for share in repetitions(e)]:
        metrics["train/repetition"] = fmean(repeated)
    programs = [e.program for e, _, _ in scored if e.program is not None]
    if programs:
        metrics["train/left_out_tokens"] = fmean(program.other_tokens for program in programs)
    for reason in _STOPS:  # Episodes with other stop reasons are not kept.
        metrics[f"train/stop/{reason.value}"] = fmean(e.stop_reason is reason for e, _, _ in scored)
    return metrics | no_verdicts


def repetitions(episode: Episode) -> list[float]:
    """Return `repetition` of each turn of at least `REPETITION_N` tokens."""
    turns = [trace.tokens_T[turn.start : turn.end] for trace in episode.traces for turn in trace.turns]
    return [repetition(tokens) for tokens in turns if len(tokens) >= REPETITION_N]


def repetition(tokens: Sequence[int], n: int = REPETITION_N) -> float:
    """Return the share of a sequence's n-grams that occurred earlier in it: seq-rep-n of Welleck et al. (2020).

    Raises:
        ValueError: there are fewer than n tokens.
    """
    total = len(tokens) - n + 1
    if total < 1:
        raise ValueError(f"repetition: expected at least {n} tokens, got {len(tokens)}")
    return 1.0 - len({tuple(tokens[start : start + n]) for start in range(total)}) / total


def group_metrics(groups: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return train/pass@<k> of groups of rollouts, each as whether its rollouts with a verdict passed."""
    size = min(max(map(len, groups), default=0), MOST_K)
    return {f"train/pass@{k}": fmean(estimates) for k, estimates in passes_at(groups, powers_of_two(size)).items()}


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to `limit`."""
    return [2**exponent for exponent in range(limit.bit_length())]


def passes_at(tasks: Sequence[Sequence[bool]], sizes: Sequence[int]) -> Mapping[int, list[float]]:
    """Return `pass_at_k` of each task with at least k samples, for each k that a task has."""
    estimates = {k: [pass_at_k(len(passed), sum(passed), k) for passed in tasks if len(passed) >= k] for k in sizes}
    return {k: values for k, values in estimates.items() if values}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n samples, c of which passed, include one (Chen et al., 2021, eq. 1).

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k: expected 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - comb(n - c, k) / comb(n, k)
