"""Runs that learn nothing or the opposite: turns of groups -> one warning with cause and advice. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from statistics import fmean

from agentic_opd.core.types import TurnOutcome
from agentic_opd.distill.config import DistillConfig
from agentic_opd.wire.group import TurnRecord

QUIET_GROUPS, QUIET_TURNS = 8, 48
"""Numbers of consecutive groups without a scored row, and of their turns, that trigger the warning together; with a
working judge and policy, some turn of so many gets a hint. A group may be one short conversation without a mistake."""

ADVICE = {
    TurnOutcome.NO_NEXT_STATE: "nothing answers the turns: no tool result, no user, no verdict. Does the policy call "
    "tools at all, and is env.renderer.name the model's own, so that its calls are read? (`agentic-opd doctor` checks "
    "that)",
    TurnOutcome.VOTE_FAILED: "the judge finds nothing to say about the turns. Where the policy solves nearly every "
    "task that is as it should be: take harder tasks. Otherwise take a stronger judge (env.judge.base_url), or "
    "accept a hint from one vote (env.hint.vote_rule any)",
    TurnOutcome.JUDGE_ERROR: "the judge fails, or its votes can't be read. `agentic-opd doctor` shows what it answers; "
    "a reasoning model needs a larger env.judge.max_tokens, or thinking switched off in env.judge.extra_body",
    TurnOutcome.LEAKED: "the hints repeat hidden test code, and are dropped. Another judge (env.judge.base_url) may "
    "keep to its instruction; tests that are also in the task's text do not count as hidden",
    TurnOutcome.TOO_LONG: "turn and hint do not fit the teacher's context. Restart its server with a larger "
    "--max-model-len, or lower env.max_token_length",
    TurnOutcome.NOT_JUDGED: "no rollout failed, and env.judge.when is failed: take harder tasks",
    TurnOutcome.SCORING_ERROR: "the teacher gives no usable rows. `agentic-opd doctor` asks it for some; policy and "
    "teacher must have the same vocabulary",
    TurnOutcome.REFUTED: "the policy passes less often with the hints. Take a stronger judge (env.judge.base_url)",
    TurnOutcome.UNPROVEN: "replays do not show that the hints help. Take a stronger judge (env.judge.base_url), or "
    "more continuations (env.hint.proof.pairs, env.hint.proof.rollouts)",
}
"""Advice for the most frequent outcome."""
ABANDONED = (
    " Earlier groups had scored tokens: if train/percent_correct has fallen since then, the policy now avoids what the "
    "hinted turns did in right turns too. Hold the turns without a hint with the trainer's loss.start_kl."
)
"""More advice if earlier turns had hints: a policy that no longer acts makes no mistakes either."""


class InactivityWatch:
    """Returns a warning when the latest groups and turns had no scored row, once until a row is scored again."""

    def __init__(self, quiet_groups: int = QUIET_GROUPS, quiet_turns: int = QUIET_TURNS) -> None:
        self._quiet_groups, self._quiet_turns = quiet_groups, quiet_turns
        self._groups = deque[list[TurnRecord]]()
        self._was_said = self._has_scored = False

    def saw(self, records: Sequence[TurnRecord]) -> str | None:
        """Record the turns of one group, and return a warning if one is due."""
        if any(record.outcome is TurnOutcome.SCORED for record in records):
            self._groups.clear()
            self._was_said, self._has_scored = False, True
            return None
        if not records:
            return None
        self._groups.append(list(records))
        num_turns = sum(map(len, self._groups))
        while len(self._groups) > self._quiet_groups and num_turns - len(self._groups[0]) >= self._quiet_turns:
            num_turns -= len(self._groups.popleft())
        is_quiet = len(self._groups) >= self._quiet_groups and num_turns >= self._quiet_turns
        return self._warning() if is_quiet else None

    def at_end(self) -> str | None:
        """Return the warning for a run without any scored row, unless `saw` has returned it."""
        return None if self._has_scored else self._warning()

    def _warning(self) -> str | None:
        records = [record for group in self._groups for record in group]
        if self._was_said or not records:
            return None
        self._was_said = True
        counts = Counter(record.outcome for record in records).most_common()
        outcomes = ", ".join(f"{outcome.value} {count}" for outcome, count in counts)
        likely = counts[0][0]
        errors = Counter(record.error for record in records if record.outcome is likely and record.error)
        example = f" (for example: {errors.most_common(1)[0][0][:300]})" if errors else ""
        return (
            f"DISTILLATION IS INACTIVE: no token was scored in the last {len(self._groups)} group(s), so there is "
            f"nothing to learn from hints. Their turns ended so: {outcomes}. Most likely {ADVICE[likely]}{example}."
            f"{ABANDONED if self._has_scored and likely is TurnOutcome.VOTE_FAILED else ''}"
        )


REVERSED_TURNS = 24
"""Number of step scores of turns with a hint, and of turns without one, that a warning about them needs."""
LATEST = 1000
"""Number of latest step scores of each kind that are compared."""
REVERSED_BY = 0.5
"""Difference of their means, of at most 2, from which step scores count as reversed."""


class StepScoreWatch:
    """Returns a warning, once, when turns with a hint have better step scores than turns without one.

    One judge gives both. A hint says what the turn should have done, so its turn should not score better. A judge that
    does not understand the second question and answers the first one again (1: there is a hint) does just that, and
    `step_reward` and `combined` then reward mistakes.
    """

    def __init__(self) -> None:
        self._hinted, self._unhinted = deque[int](maxlen=LATEST), deque[int](maxlen=LATEST)
        self._was_said = False

    def saw(self, records: Sequence[TurnRecord]) -> str | None:
        """Record the turns of one group, and return the warning if it is due."""
        if self._was_said:
            return None
        for record in records:
            if record.step_score is not None:
                (self._unhinted if record.hint is None else self._hinted).append(record.step_score)
        if min(len(self._hinted), len(self._unhinted)) < REVERSED_TURNS:
            return None
        hinted, unhinted = fmean(self._hinted), fmean(self._unhinted)
        self._was_said = hinted - unhinted > REVERSED_BY
        if not self._was_said:
            return None
        return (
            f"STEP SCORES ARE REVERSED: turns with a hint score {hinted:+.2f} on average, turns without one "
            f"{unhinted:+.2f}. The judge probably answers the first question again (1: there is a hint), so "
            "loss.step_reward and loss.combined would reward mistakes. Use another judge (env.judge.base_url), word "
            "the question for this one (env.judge.step_prompt), or set env.judge.step_votes to 0."
        )


REPETITION_TURNS = 64
"""Number of latest turns whose repetition is compared with `MOST_REPETITION`."""
MOST_REPETITION = 0.1
"""Share of repeated 10-grams from which the mean over turns is a warning: Gopher's filter of documents (Rae et al.,
2021, table A1) drops a text of which more than 10% of the characters are in repeated 10-grams."""


class RepetitionWatch:
    """Returns a warning, once, when the latest turns repeat themselves, as a policy does that comes apart."""

    def __init__(self) -> None:
        self._shares = deque[float](maxlen=REPETITION_TURNS)
        self._was_said = False

    def saw(self, shares: Iterable[float]) -> str | None:
        """Record the turns' shares of repeated 10-grams, and return the warning if it is due."""
        self._shares += shares
        if self._was_said or len(self._shares) < REPETITION_TURNS or fmean(self._shares) <= MOST_REPETITION:
            return None
        self._was_said = True
        return (
            f"THE POLICY REPEATS ITSELF: in the last {REPETITION_TURNS} turns, {fmean(self._shares):.0%} of the "
            f"10-grams occurred earlier in their turn; above {MOST_REPETITION:.0%} a text is degenerate. If it did not "
            "at the start, go back to an earlier checkpoint, with a lower lr, or hold the policy with loss.start_kl."
        )


def live_teacher(config: DistillConfig) -> str | None:
    """Return a warning if the teacher has the newest weights of a policy that is being trained."""
    if not config.opd_enabled or config.teacher.weights != "live" or config.teacher.base_url is not None:
        return None
    return (
        "the teacher is the policy with its newest weights; in two long experiments the pass rate then fell to 0%. Set "
        "env.teacher.base_url to a server with fixed weights or with the trainer's moving average (teacher_urls), or "
        "train adapters with env.teacher.weights frozen or ema"
    )
