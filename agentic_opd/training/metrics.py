"""Units and meanings of the reference trainer's metrics, which step.py, push.py and trainer.py compute; the alarm."""

import logging
from collections.abc import Mapping

from agentic_opd.core.metric import Metric
from agentic_opd.training.config import MOST_SKIPPED_STEPS, PARTS

logger = logging.getLogger(__name__)


class CollapseAlarm:
    """Warns once when entropy or row_mass falls below a share of its value at the run's first step, or entropy rises to
    its inverse: a policy that comes apart writes unlikely tokens.
    """

    def __init__(self, share: float) -> None:
        """Compare with `share`; 0: never warn. A resumed run compares with its own first step."""
        self._share = share
        self._first: dict[str, float] = {}
        self._has_warned = False

    def check(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metric `collapse` of a step; empty if the step has neither of the two."""
        gauges = {name: metrics[name] for name in ("entropy", "row_mass") if name in metrics}
        first = {name: self._first.setdefault(name, value) for name, value in gauges.items()}
        changed = [name for name, value in gauges.items() if value < self._share * first[name]]
        if 0 < first.get("entropy", 0) < self._share * gauges.get("entropy", 0):
            changed.append("entropy")
        if changed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the policy collapses: %s. Go back to an earlier checkpoint, with a lower lr, or a teacher with fixed "
                "weights or the moving average (ema_decay)",
                "; ".join(f"{name} is {gauges[name]:.3g} and was {first[name]:.3g}" for name in changed),
            )
        return {"collapse": float(bool(changed))} if gauges else {}


TRAINER_METRICS = (
    Metric("loss", "none", "combined loss: weighted sum of its parts, mean over the updates of the first pass"),
    *(
        Metric(f"loss/{part}", "none", f"unweighted part `loss.{part}`, if it has a weight: mean over sampled tokens")
        for part in (*PARTS, "start_kl")
    ),
    Metric("loss_last", "none", "combined loss of the last pass over the batch"),
    Metric("grad_norm", "none", "gradient norm before clipping, mean over the updates of the first pass"),
    Metric("grad_norm_last", "none", "gradient norm before clipping, mean over the updates of the last pass"),
    Metric(
        "skipped_updates",
        "updates",
        "updates of all passes that were skipped because the loss or gradient norm was not finite: they change "
        "no weights and enter no mean. "
        f"After {MOST_SKIPPED_STEPS} consecutive steps without any other update the run fails",
    ),
    Metric(
        "gap_mean", "nats", "teacher's logprob of the sampled token with the hint - without it, mean over scored tokens"
    ),
    Metric(
        "contrast_mean",
        "nats",
        "teacher's logprob of the sampled token with the hint - with the control hint, "
        "mean over scored tokens, if `loss.contrast` is on",
    ),
    Metric(
        "logprob_drift",
        "nats",
        "mean absolute difference between the logprob (at temperature 1) of a sampled token now and when it was "
        "sampled, over the tokens that the first pass computed: staleness of the batch, or, with fresh weights and one "
        "update, the difference between engine and trainer",
    ),
    Metric(
        "entropy",
        "nats",
        "mean of -logprob over the sampled tokens, when sampled: the policy's entropy, if sampled at temperature 1",
    ),
    Metric("turn_length", "tokens", "mean number of sampled tokens in a turn"),
    Metric("row_mass", "share", "policy's probability of a teacher's row, mean over the rows of the first pass"),
    Metric("row_overlap", "share", "sum of min(policy, target) over a row and its tail, mean likewise"),
    Metric(
        "kl_to_start",
        "nats",
        "KL(policy that sampled || policy at the start) at the sampling temperature, with start_kl or `measure_start`",
    ),
    Metric(
        "collapse",
        "none",
        "1 if entropy or row_mass is below `collapse_share` of its first value, or entropy above its inverse, else 0",
    ),
    Metric("pass_rate", "share", "verified rollouts that pass all checks, which `loss.schedules` may wait for"),
    *(Metric(f"weight/{part}", "none", f"weight of `loss.{part}`, if scheduled") for part in (*PARTS, "start_kl")),
    Metric("sampled_tokens", "tokens", "tokens of the batch that the policy sampled"),
    Metric(
        "unknown_temperature_tokens",
        "tokens",
        "sampled tokens of groups without a temperature, which counts as 1; only if there are any",
    ),
    Metric(
        "greedy_tokens",
        "tokens",
        "tokens sampled at temperature 0, which the divergences count as sampled at 1; only if there are any",
    ),
    Metric(
        "truncated_tokens",
        "tokens",
        "tokens sampled under top_p, top_k or another parameter that changes the distribution, which their ratios do "
        "not know; only if there are any",
    ),
    Metric("scored_tokens", "tokens", "sampled tokens with a row of the teacher"),
    Metric(
        "computed_tokens",
        "tokens",
        "positions that the model computed in the first pass, without padding; common prefixes count once",
    ),
    Metric("score_mean", "score", "mean of the batch's scores"),
    Metric("groups", "groups", "groups in the batch"),
    Metric(
        "duplicates", "groups", "groups left out since the start, because they were received twice or are in two files"
    ),
    Metric("too_long", "groups", "groups of the files that are left out: a sequence is longer than `max_token_len`"),
    Metric(
        "left_out",
        "groups",
        "a learner's groups that were read and are not in its weights: too long, unreadable, or rolled back",
    ),
    Metric(
        "lost_batches",
        "batches",
        "batches that the API counts but whose response never arrived, since the start; each is a step without an "
        "update",
    ),
    Metric("staleness", "steps", "mean number of trainer steps by which the weights that sampled the batch are behind"),
    Metric("lr", "none", "learning rate of the step"),
    Metric("brake_score", "score", "mean score of the held-out tasks by the pushed weights (`brake.command`)"),
    Metric(
        "brake_fall",
        "standard errors",
        "largest fall of that score below a kept version's, over the same tasks; from `brake.bound` on, the weights "
        "are rolled back",
    ),
    Metric("brake_s", "s", "duration of the evaluation, for which the trainer waits"),
    Metric("rolled_back", "none", "1 in the line of the version that a roll-back pushed"),
    Metric("step_s", "s", "duration of all updates of the step"),
    Metric("push_s", "s", "duration of writing the weights, loading them into every server, and the probe"),
    Metric(
        "push_bytes", "bytes", "size of the weights that every server read: the adapters alone, or the whole checkpoint"
    ),
    Metric(
        "push_difference",
        "nats",
        "largest difference at the push between a server's logprobs and the trainer's, with the weights as sent: "
        "noise of the server's precision",
    ),
    Metric(
        "push_difference_rms",
        "nats",
        "root mean square of the differences at the push between a server's logprobs and the trainer's",
    ),
    Metric(
        "push_rounded_share",
        "share",
        "share of the difference between the trainer's and the servers' weights before the push that remains after "
        "it, because rounding to the servers' precision removed it: 0 in float32",
    ),
)
