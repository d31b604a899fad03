"""Grades and answers before and after the training -> corrections with intervals, guards, and the verdict. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from agentic_opd.core.intervals import Estimate, mean_of_tasks, paired_difference
from agentic_opd.learn.config import GuardConfig

Verdict = Literal["adapter", "refused"]
_WORDS = 4
"""Words of a sequence that may repeat."""
CORRECTED_BELOW = 0.5
"""Grade, from 0 to 1, below which an answer is one that the judge would correct: more votes against it than for it."""


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Counts of a sampled answer."""

    is_calling: bool
    """Whether it calls a tool, parsed or not."""
    calls_parse: bool
    """Whether it calls, and all calls parse and name a tool that the log declares or has called."""
    repetition: float
    """Share of its sequences of four words that repeat an earlier one."""
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """The figures of a held-out turn's answers before and after the training, and what the log has there."""

    is_called_in_log: bool
    has_tools: bool
    """Whether the log declares tools, or has called some up to this turn."""
    before: AnswerFigures
    after: AnswerFigures

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "AnswerPair":
        """Read the pair of a turn that `run` wrote."""
        before, after = (AnswerFigures(**figures) for figures in row["figures"])
        return cls(row["is_called_in_log"], row["has_tools"], before, after)


@dataclass(frozen=True, slots=True)
class GradedPair:
    """The judge's grades, from 0 to 1, of a held-out turn's answers before and after the training."""

    session: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Corrections:
    """Shares of answers that the judge would correct, of `count` pairs; the sampling unit is the session."""

    before: Estimate
    after: Estimate
    difference: Estimate
    count: int

    def to_json(self) -> dict[str, list[float]]:
        """Return the lists of result.json."""
        shares = {"before": [*self.before, self.count], "after": [*self.after, self.count]}
        return {**shares, "difference": [*self.difference]}


@dataclass(frozen=True, slots=True)
class Guard:
    """A figure without a judge, before and after; None if nothing gives it."""

    before: float | None
    after: float | None
    bound: float
    fell: bool


@dataclass(frozen=True, slots=True)
class LearnResult:
    """The result of a run: `result.json`."""

    verdict: Verdict
    reason: str
    turns: Mapping[str, int]
    hints: Mapping[str, int]
    costs: Mapping[str, Any]
    corrections: Mapping[str, list[float]] | None = None
    guards: Mapping[str, Guard] = field(default_factory=dict[str, Guard])

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        names = ("verdict", "reason", "corrections", "guards", "turns", "hints", "costs")
        data = asdict(self)
        return {name: data[name] for name in names}


def repeated_share(text: str) -> float:
    """Return the share of sequences of four words that repeat an earlier one; 0 for fewer than four words."""
    words = text.split()
    sequences = [tuple(words[start : start + _WORDS]) for start in range(len(words) - _WORDS + 1)]
    return 1 - len({*sequences}) / len(sequences) if sequences else 0.0


def corrections_of(pairs: Iterable[GradedPair]) -> Corrections:
    """Compare the shares of corrected answers; each session counts once, with the mean of its answers."""
    sessions = defaultdict[str, list[tuple[bool, bool]]](list)
    for pair in pairs:
        sessions[pair.session].append((pair.before < CORRECTED_BELOW, pair.after < CORRECTED_BELOW))
    before, after = ([fmean(pair[arm] for pair in session) for session in sessions.values()] for arm in (0, 1))
    count = sum(map(len, sessions.values()))
    return Corrections(mean_of_tasks(before), mean_of_tasks(after), paired_difference(before, after), count)


def guards_of(
    pairs: Sequence[AnswerPair], logprobs: tuple[float, float] | None, config: GuardConfig
) -> dict[str, Guard]:
    """Compute the guards; `logprobs` are those (nats a token) of the answers without a hint, before and after."""
    calling = [pair for pair in pairs if pair.is_called_in_log]
    talking = [pair for pair in pairs if not pair.is_called_in_log and pair.has_tools]
    parse = _means([(float(pair.before.calls_parse), float(pair.after.calls_parse)) for pair in calling])
    over = _means([(float(pair.before.is_calling), float(pair.after.is_calling)) for pair in talking])
    repetition = _means([(pair.before.repetition, pair.after.repetition) for pair in pairs])
    length = _means([(pair.before.tokens, pair.after.tokens) for pair in pairs])
    return {
        "logprob": _guard(logprobs, config.logprob, is_rise_bad=False),
        "calls_parse": _guard(parse, config.calls_parse, is_rise_bad=False),
        "over_calling": _guard(over, config.over_calling, is_rise_bad=True),
        "repetition": _guard(repetition, config.repetition, is_rise_bad=True),
        "length": _length_guard(length, config.length),
    }


def verdict_of(corrections: Corrections, guards: Mapping[str, Guard]) -> tuple[Verdict, str]:
    """Return the verdict and its reason in a sentence."""
    value, low, high = corrections.difference
    change = f"the share of corrected answers changes by {value:+.3f} ({low:+.3f} to {high:+.3f})"
    if high >= 0:
        return "refused", f"{change} on held-out sessions, which does not exclude that it is as high or higher"
    fallen = [
        f"{name} from {guard.before:.3f} to {guard.after:.3f} (bound {guard.bound:g})"
        for name, guard in guards.items()
        if guard.fell
    ]
    if fallen:
        return "refused", f"{change}, but figures without a judge fell: {'; '.join(fallen)}"
    missing = [name for name, guard in guards.items() if guard.before is None]
    unmeasured = f" ({', '.join(missing)}: no answer to measure)" if missing else ""
    return "adapter", f"{change} on held-out sessions, and no figure without a judge fell{unmeasured}"


def _means(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    return (fmean(before for before, _ in pairs), fmean(after for _, after in pairs)) if pairs else None


def _guard(figures: tuple[float, float] | None, bound: float, *, is_rise_bad: bool) -> Guard:
    if figures is None:
        return Guard(None, None, bound, fell=False)
    before, after = figures
    # A figure that is NaN is not within its bound.
    is_within = (after - before if is_rise_bad else before - after) <= bound
    return Guard(before, after, bound, fell=not is_within)


def _length_guard(figures: tuple[float, float] | None, factor: float) -> Guard:
    if figures is None:
        return Guard(None, None, factor, fell=False)
    before, after = figures
    return Guard(before, after, factor, fell=not before / factor <= after <= before * factor)
