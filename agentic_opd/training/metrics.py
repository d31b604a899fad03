"""Units and meanings of the reference trainer's metrics, which step.py, push.py and trainer.py compute."""

from agentic_opd.core.metric import Metric
from agentic_opd.training.config import MOST_SKIPPED_STEPS, PARTS

TRAINER_METRICS = (
    Metric("loss", "none", "combined loss: the weighted sum of its parts, mean over the updates of the first pass"),
    *(
        Metric(
            f"loss/{part}", "none", f"the part `loss.{part}` by itself, if it has a weight: mean over sampled tokens"
        )
        for part in (*PARTS, "start_kl")
    ),
    Metric("loss_last", "none", "combined loss of the last pass over the batch"),
    Metric("grad_norm", "none", "norm of the gradient before it is clipped, mean over the updates of the first pass"),
    Metric("grad_norm_last", "none", "the same of the last pass"),
    Metric(
        "skipped_updates",
        "updates",
        "of all passes, those whose loss or gradient norm was not finite: they change nothing, and are in no mean. "
        f"After {MOST_SKIPPED_STEPS} steps in a row without any other update the run ends",
    ),
    Metric("gap_mean", "nats", "teacher with the hint - without it, at the sampled token, mean over scored tokens"),
    Metric(
        "contrast_mean", "nats", "teacher with the hint - with the control hint, likewise, if `loss.contrast` is on"
    ),
    Metric(
        "logprob_drift",
        "nats",
        "size of (logprob now - when sampled), mean over sampled tokens, as far as they were computed, in the first "
        "pass: how stale the batch is, and with fresh weights and one update how far engine and trainer differ",
    ),
    Metric("sampled_tokens", "tokens", "sampled by the policy in this batch"),
    Metric("scored_tokens", "tokens", "of these, those with a row of the teacher"),
    Metric(
        "computed_tokens",
        "tokens",
        "positions that the model was run on in the first pass, without padding; common beginnings count once",
    ),
    Metric("score_mean", "score", "mean of the batch's scores"),
    Metric("groups", "groups", "in this batch"),
    Metric("duplicates", "groups", "that came twice and were left out, since the start"),
    Metric(
        "lost_batches",
        "batches",
        "that the API counts but whose answer never came, since the start: each is a step without an update",
    ),
    Metric("staleness", "steps", "how many of the trainer's steps the weights that sampled the batch are behind, mean"),
    Metric("lr", "none", "learning rate of the step"),
    Metric("step_s", "s", "all updates of the step"),
    Metric("push_s", "s", "writing the weights, loading them into every server, and the probe"),
    Metric("push_bytes", "bytes", "weights that every server read: adapters alone, or the whole checkpoint"),
    Metric(
        "push_difference",
        "nats",
        "largest difference between a server's logprobs and the trainer's own then, with the weights as they were "
        "sent: noise of the precision that the server computes in",
    ),
    Metric("push_difference_rms", "nats", "root mean square of these differences"),
    Metric(
        "push_rounded_share",
        "share",
        "of what the trainer has and the servers had not before the push, what they still have not, because rounding "
        "to their precision took it away: 0 in float32",
    ),
)
