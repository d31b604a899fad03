"""TurnContext -> Hint or NoHint: the judge's votes, the sources that need no judge, and the leak filter (I/O).

judge: question -> answers -> votes -> quorum --.
feedback, reference, sibling -------------------+-> the first text without data of hidden tests -> Hint

With `hint.selection: overlap` a Hint has all accepted texts without such data, and the scores decide.
"""

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Literal, NamedTuple

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import AlignmentError, ServerError, ServerUnreachableError
from agentic_opd.core.names import HintSource
from agentic_opd.core.text import FOREIGN_CONTROL_TOKENS, cut_middle, without_control_tokens
from agentic_opd.core.types import Evidence, HindsightPair, Message, Recording, StepScore, TurnOutcome, Vote
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import TurnContext, author_turns, changing_calls
from agentic_opd.distill.judge import OpenAIJudge
from agentic_opd.distill.leaks import leaks
from agentic_opd.distill.prompts import JUDGE_QUESTION, JUDGE_STEP_PROMPT, JUDGE_SYSTEM_PROMPT, PLACEHOLDER
from agentic_opd.distill.reasoning import answers

MIN_HINT_CHARS = 10
"""A hint must have more characters than this (OpenClaw-RL's bound)."""

_EVIDENCE_NAMES = {"tool": "Next state: tool result", "user": "Next state: user reply", "verdict": "Verdict"}
_LINE_BREAK, _MARGIN = r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", r"[\s>*+\-\u200b-\u200f\u2060\ufeff]"
_HEADING = re.compile(
    rf"(?P<start>(?<!{_MARGIN})(?:\A|(?={_MARGIN}*?{_LINE_BREAK})){_MARGIN}*+[#\uff03\ufe5f])"
    r"(?=[#\uff03\ufe5f]+[\s\u200b-\u200f\u2060\ufeff]*(?:Task|Turn|Next\s+state|Later|Verdict|End)\b)",
    re.IGNORECASE,
)
"""Matches the first `#` of text that could pass for a heading of the question, after any line break and with any number
of signs and spaces. It begins where these begin, since a search from each of them would take quadratic time."""
_PROTOCOL = ("\\boxed", "[HINT_START]", "[HINT_END]")
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_MARKED = re.compile(r"([*_`#]{0,6}) ?\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)
"""Matches a hint with its marks, and Markdown before them."""
_Decision = Literal[1, -1]
_DECISIONS: dict[str, _Decision] = {"1": 1, "+1": 1, "-1": -1, "\N{MINUS SIGN}1": -1}
_STEP_SCORES: dict[str, StepScore] = {"1": 1, "+1": 1, "0": 0, "-1": -1, "\N{MINUS SIGN}1": -1}


# ---------------------------------------------------------------------------------------------------------- the results


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judge's votes on a turn; without a question if it was not asked, without votes if it failed."""

    question: str | None = None
    votes: tuple[Vote, ...] = ()
    step_votes: tuple[StepScore | None, ...] = ()
    seconds: float | None = None
    """Time for the votes, without waiting for a free slot."""

    @property
    def step_score(self) -> StepScore | None:
        """The most frequent readable vote on the second question; 0 on a tie, None if no vote is readable."""
        counts = Counter[StepScore](vote for vote in self.step_votes if vote is not None)
        leading: list[StepScore] = [score for score in counts if counts[score] == max(counts.values())]
        if not leading:
            return None
        return leading[0] if len(leading) == 1 else 0


class AcceptedHint(NamedTuple):
    """An accepted hint and the name of its turn's task or conversation."""

    task_id: str
    text: str

    @property
    def words(self) -> str:
        """The text in lower case with single spaces; hints are equal if this is equal."""
        return " ".join(self.text.lower().split())


@dataclass(frozen=True, slots=True)
class Hint:
    accepted: AcceptedHint
    read: AcceptedHint | None
    """The hint that the teacher reads: `accepted`, or the settings' replacement; None: it reads no hint."""
    source: HintSource
    judgement: Judgement = Judgement()
    """The judge's votes, also if the hint is of another source."""
    others: tuple[AcceptedHint, ...] = ()
    """The turn's other accepted hints, which the teacher reads too (`hint.selection: overlap`)."""

    @property
    def text(self) -> str:
        return (self.read or self.accepted).text


@dataclass(frozen=True, slots=True)
class NoHint:
    outcome: TurnOutcome
    why: str | None = None
    judgement: Judgement = Judgement()


# ------------------------------------------------------------------------------------------------------------- the pool


class HintPool:
    """The latest accepted hints by task; a draw picks a task uniformly, then one of its hints uniformly."""

    KEPT_HINTS = 64
    """Number of distinct hints kept per task, the latest ones."""
    KEPT_TASKS = 512
    """Number of tasks whose hints are kept, those with the latest hints."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = Random(seed)
        self._by_task: OrderedDict[str, OrderedDict[str, AcceptedHint]] = OrderedDict()

    def add(self, hint: AcceptedHint) -> None:
        """Add a hint; a known hint becomes the latest."""
        hints = self._by_task.setdefault(hint.task_id, OrderedDict())
        self._by_task.move_to_end(hint.task_id)
        hints[hint.words] = hint
        hints.move_to_end(hint.words)
        if len(hints) > self.KEPT_HINTS:
            hints.popitem(last=False)
        if len(self._by_task) > self.KEPT_TASKS:
            self._by_task.popitem(last=False)

    def of_other_task(self, *known: AcceptedHint) -> AcceptedHint | None:
        """Draw a hint that shares neither task nor text with any `known` hint; None if there is no such hint."""
        tasks = {hint.task_id for hint in known}
        return self._drawn(self._fitting(task, known) for task in self._by_task if task not in tasks)

    def of_same_task(self, task_id: str, *known: AcceptedHint) -> AcceptedHint | None:
        """Draw a hint of the task that shares its text with no `known` hint; None if there is no such hint."""
        return self._drawn([self._fitting(task_id, known)])

    def _fitting(self, task_id: str, known: tuple[AcceptedHint, ...]) -> list[AcceptedHint]:
        texts = {hint.words for hint in known}
        return [hint for words, hint in self._by_task.get(task_id, {}).items() if words not in texts]

    def _drawn(self, hints_by_task: Iterable[list[AcceptedHint]]) -> AcceptedHint | None:
        fitting = [hints for hints in hints_by_task if hints]
        return self._rng.choice(self._rng.choice(fitting)) if fitting else None


# --------------------------------------------------------------------------------------------------------- the question


@dataclass(frozen=True, slots=True)
class Questions:
    """Builds the judge's messages, and protects them against injection by the text to be judged.

    `secret` belongs to the run. The mark in a question's headings is derived from it and the task, so no agent, program
    or user can write the mark. `control_tokens` are spellings of the judge tokenizer's control tokens; those of common
    model families are always broken.
    """

    secret: bytes
    system_prompt: str = JUDGE_SYSTEM_PROMPT
    step_prompt: str = JUDGE_STEP_PROMPT
    template: str = JUDGE_QUESTION
    control_tokens: Collection[str] = ()

    def question(self, pair: HindsightPair) -> str:
        """Return the question about `pair`.

        Raises:
            AlignmentError: the pair has no evidence.
        """
        if not pair.evidence:
            raise AlignmentError(f"nothing came after turn {pair.turn_index}, so there is nothing to judge it by")
        mark = blake2b(pair.task_text.encode(errors="replace"), key=self.secret, digest_size=4).hexdigest()
        evidence = "\n\n".join(f"## {_title(one)} [{mark}]\n{self._as_data(one.text)}" for one in pair.evidence)
        fields = {
            "mark": mark,
            "task": self._as_data(pair.task_text),
            "turn": self._as_data(pair.turn_text),
            "evidence": evidence,
        }
        return PLACEHOLDER.sub(lambda found: fields.get(found[1], found[0]), self.template)

    def hint_messages(self, question: str) -> list[Message]:
        """Return the messages that ask for a vote and a hint."""
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": question}]

    def step_messages(self, question: str) -> list[Message]:
        """Return the messages that ask whether the turn did what was wanted."""
        return [{"role": "system", "content": self.step_prompt}, {"role": "user", "content": question}]

    def _as_data(self, text: str) -> str:
        """Return `text` with a space inserted into each string that could end its section or answer the question."""
        spellings = (*_PROTOCOL, *FOREIGN_CONTROL_TOKENS, *self.control_tokens)
        return _HEADING.sub(r"\g<start> ", without_control_tokens(spellings, text))


def _title(evidence: Evidence) -> str:
    if evidence.later_turn is not None:
        return f"Later: result of turn {evidence.later_turn + 1}"
    return _EVIDENCE_NAMES[evidence.kind]


@dataclass(frozen=True, slots=True)
class JudgedBy:
    """The judge and its questions; if it is the policy's server, a run stops while it is unreachable."""

    client: OpenAIJudge
    questions: Questions
    is_policy: bool


# ------------------------------------------------------------------------------------------------------------- the step


async def find_hint(context: TurnContext, judge: JudgedBy, config: DistillConfig, pool: HintPool) -> Hint | NoHint:
    """Return the hint of the first source that has one, and add all its accepted hints to `pool`."""
    if not context.pair.evidence:
        return NoHint(TurnOutcome.NO_NEXT_STATE)
    judgement = Judgement()
    failed: list[NoHint] = []
    for source in config.hint.sources:
        if source == "judge":
            judgement, found = await _judge_hint(context, judge, config)
        else:
            found = await _given_hint(context, source, config)
        if isinstance(found, NoHint):
            failed.append(found)
            continue
        accepted, *others = (AcceptedHint(context.recording.name, text) for text in found)
        for one in (accepted, *others):
            pool.add(one)
        return _as_read(accepted, tuple(others), source, config, pool, judgement)
    gravest = min(failed, key=lambda one: _GRAVEST.index(one.outcome))
    return NoHint(gravest.outcome, gravest.why, judgement)


_GRAVEST = (TurnOutcome.JUDGE_ERROR, TurnOutcome.LEAKED, TurnOutcome.VOTE_FAILED)
"""If all sources fail, the first of these outcomes is recorded, so that a failing judge stays visible."""


def _as_read(
    accepted: AcceptedHint,
    others: tuple[AcceptedHint, ...],
    source: HintSource,
    config: DistillConfig,
    pool: HintPool,
    judgement: Judgement,
) -> Hint | NoHint:
    """Return the hint, with the settings' replacement for what the teacher reads."""
    if config.hint.replacement is None:
        return Hint(accepted, accepted, source, judgement, others)
    if config.hint.replacement == "none":
        return Hint(accepted, None, "none", judgement)
    other = pool.of_other_task(accepted)
    if other is None:
        why = "hint_source other_task: no other task has an accepted hint yet"
        return NoHint(TurnOutcome.VOTE_FAILED, why, judgement)
    return Hint(accepted, other, "other_task", judgement)


# ---------------------------------------------------------------------------------------------- sources without a judge


FEEDBACK = "If you answer as you are about to, this is what comes of it:"
REFERENCE = "This is a right solution of the task:"
SIBLING = "Another attempt at this task, which passed in the end, did this, in this order:"


class Hints(NamedTuple):
    """Hints of a source, each preceded by `intro`; the first one that leaks no hidden test is used."""

    intro: str
    texts: Sequence[str]


def feedback(context: TurnContext, config: DistillConfig) -> Hints | str:
    """Return the turn's evidence verbatim (SDPO)."""
    return Hints(FEEDBACK, ["\n\n".join(one.text for one in context.pair.evidence)])


def reference(context: TurnContext, config: DistillConfig) -> Hints | str:
    """Return the task's reference solution (OPSD)."""
    task = context.recording.task
    solution = ((task and task.reference_solution) or "").strip()
    return Hints(REFERENCE, [solution]) if solution else "the task has no reference solution"


def sibling(context: TurnContext, config: DistillConfig) -> Hints | str:
    """Return how sibling rollouts that passed made the judged result; only for turns that made the failed result.

    A text holds all calls of a sibling that changed the judged result, because it is unknown which of them mattered.
    The shortest text comes first.
    """
    if _passed(context.recording):
        return "this rollout passed itself"
    if context.pair.turn_index not in author_turns(context.recording):
        return "the turn did not make what failed"
    passed = ("\n\n".join(changing_calls(one)) for one in context.siblings if _passed(one))
    texts = sorted((text for text in passed if text), key=len)
    if not texts:
        return "no other rollout of the group passed"
    return Hints(SIBLING, [cut_middle(text, config.hint_max_next_state_chars) for text in texts])


def _passed(recording: Recording) -> bool:
    return recording.verification is not None and recording.verification.all_passed


SOURCES: dict[str, Callable[[TurnContext, DistillConfig], Hints | str]] = {
    "feedback": feedback,
    "reference": reference,
    "sibling": sibling,
}
"""Sources by their name in `hint_source`; they return the reason if they have no hint for a turn."""


async def _given_hint(context: TurnContext, source: HintSource, config: DistillConfig) -> tuple[str, ...] | NoHint:
    found = SOURCES[source](context, config)
    if isinstance(found, str):
        return NoHint(TurnOutcome.VOTE_FAILED, f"hint_source {source}: {found}")
    clean = await asyncio.to_thread(_clean, found.texts, context, 1)
    return tuple(f"{found.intro}\n{text}" for text in clean) or NoHint(TurnOutcome.LEAKED)


def _clean(texts: Iterable[str], context: TurnContext, most: int) -> list[str]:
    """Return the first `most` texts without hidden tests' data; those may be megabytes, so call it in a thread."""
    hidden_tests = context.recording.task.hidden_tests if context.recording.task else None
    if hidden_tests is None:
        return list(islice(texts, most))
    return list(islice((text for text in texts if not leaks(text, hidden_tests, context.public_text)), most))


# ------------------------------------------------------------------------------------------------------------ the votes


async def _judge_hint(
    context: TurnContext, judge: JudgedBy, config: DistillConfig
) -> tuple[Judgement, tuple[str, ...] | NoHint]:
    question = judge.questions.question(context.pair)
    asked = [judge.client.ask(judge.questions.hint_messages(question), config.prm_votes)]
    if config.judge.step_votes:
        asked.append(judge.client.ask(judge.questions.step_messages(question), config.judge.step_votes))
    try:
        hints, *steps = await gather_all(asked)
    except ServerError as error:
        if isinstance(error, ServerUnreachableError) and judge.is_policy:
            raise
        return Judgement(question), NoHint(TurnOutcome.JUDGE_ERROR, str(error))
    votes = tuple(parse_vote(text) for text in hints.texts)
    step_votes = tuple[StepScore | None, ...](parse_step_vote(text) for step in steps for text in step.texts)
    judgement = Judgement(question, votes, step_votes, hints.latency_s)
    return judgement, await asyncio.to_thread(accepted_hints, votes, context, config)


def accepted_hints(votes: Sequence[Vote], context: TurnContext, config: DistillConfig) -> tuple[str, ...] | NoHint:
    """Return the hint that the votes accept, or with `hint.selection: overlap` all distinct ones, the longest first.

    Missing votes and abstentions count against a majority of `prm_votes`. A vote with a leaking hint counts as
    positive, because the judge found a mistake, but its hint can't be chosen. Of equally long hints the first is.
    """
    if all(vote.decision is None for vote in votes):
        return NoHint(TurnOutcome.JUDGE_ERROR, "no vote could be read")
    hints = [vote.hint for vote in votes if vote.hint is not None]
    if len(hints) < (config.prm_votes // 2 + 1 if config.hint.vote_rule == "majority" else 1):
        return NoHint(TurnOutcome.VOTE_FAILED)
    hints.sort(key=len, reverse=config.hint.selection != "shortest")
    distinct: dict[str, str] = {}
    for hint in _clean(hints, context, len(hints) if config.hint.selection == "overlap" else 1):
        distinct.setdefault(AcceptedHint(context.recording.name, hint).words, hint)
    return tuple(distinct.values()) or NoHint(TurnOutcome.LEAKED)


def parse_vote(text: str) -> Vote:
    r"""Parse one answer of the judge; an answer that violates the protocol abstains (decision None).

    Reasoning is dropped (`reasoning.answers`). Every `\boxed{...}` in the rest, outside the hint, must contain the
    same 1 or -1: a hint may say where an answer belongs. Decision 1 requires exactly one `[HINT_START]...[HINT_END]`
    with more than `MIN_HINT_CHARS` characters.
    """
    votes = (_vote(answer, text) for answer in answers(text))
    return next((vote for vote in votes if vote.decision is not None), Vote(None, None, text))


def _vote(answer: str, text: str) -> Vote:
    """Return the vote in an answer without reasoning; `text` is the whole text."""
    before, end, behind = answer.rpartition("[HINT_END]")
    # Each start in the first part has an end: searches for an end that is missing would take quadratic time.
    boxed = _only_box(_MARKED.sub("", before + end) + behind)
    decision = None if boxed is None else _DECISIONS.get(boxed)
    if decision != 1:
        return Vote(decision, None, text)
    hint = _only_hint(answer)
    return Vote(None, None, text) if hint is None else Vote(1, hint, text)


def parse_step_vote(text: str) -> StepScore | None:
    """Parse one answer to the second question: 1, 0 or -1 in a box; None if it is unreadable."""
    for answer in answers(text):
        score = _STEP_SCORES.get(_only_box(answer) or "")
        if score is not None:
            return score
    return None


def _only_box(answer: str) -> str | None:
    """Return the common content of all boxes of an answer; None if they differ, or one is unclosed or nested."""
    boxes = _BOX.findall(answer)
    held = {box.strip() for box in boxes}
    if answer.count("\\boxed") != len(boxes) or len(held) != 1:
        return None
    return held.pop()


def _only_hint(answer: str) -> str | None:
    if answer.count("[HINT_START]") != 1 or answer.count("[HINT_END]") != 1:
        return None
    if (found := _MARKED.search(answer)) is None:
        return None
    # Judges also write **[HINT_START]** ... **[HINT_END]**.
    hint = found[2].strip().removeprefix(found[1]).removesuffix(found[1]).strip()
    return hint if len(hint) > MIN_HINT_CHARS else None
