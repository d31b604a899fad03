"""TurnContext -> Hint or NoHint: the judge's votes, other sources, and the leak filter (I/O).

judge: question -> answers -> votes -> quorum --.
feedback, reference, sibling -------------------+-> the first text without data of hidden tests -> Hint

With `hint.selection: overlap` a Hint has all accepted texts without such data, and the scores decide.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Literal, Protocol

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import AlignmentError, ServerError, ServerUnreachableError
from agentic_opd.core.text import FOREIGN_CONTROL_TOKENS, without_control_tokens
from agentic_opd.core.types import HindsightPair, JudgeTokens, Message, StepScore, TurnOutcome, Vote
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import TurnContext
from agentic_opd.distill.judge import OpenAIJudge
from agentic_opd.distill.leaks import leaks
from agentic_opd.distill.pool import AcceptedHint, HintPool
from agentic_opd.distill.prompts import (
    JUDGE_QUESTION,
    JUDGE_STEP_PROMPT,
    JUDGE_SYSTEM_PROMPT,
    PLACEHOLDER,
    TRAJECTORY_QUESTION,
    TRAJECTORY_SYSTEM_PROMPT,
)
from agentic_opd.distill.protocol import Word, boxed_number, hint_between_marks, without_marks, words
from agentic_opd.distill.reasoning import answers
from agentic_opd.distill.sources import SourceTurn, hints_of, source_name

_EVIDENCE_NAMES = {
    **{"tool": "Next state: tool result", "user": "Next state: user reply"},
    **{"repeated": "Earlier", "verdict": "Verdict"},
}
_LINE_BREAK, _MARGIN = r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", r"[\s>*+\-\u200b-\u200f\u2060\ufeff]"
_HEADING = re.compile(
    rf"(?P<start>(?<!{_MARGIN})(?:\A|(?={_MARGIN}*?{_LINE_BREAK})){_MARGIN}*+[#\uff03\ufe5f])"
    r"(?=[#\uff03\ufe5f]+[\s\u200b-\u200f\u2060\ufeff]*(?:Task|Turn|Next\s+state|Earlier|Later|Verdict|End)\b)",
    re.IGNORECASE,
)
"""Matches the first `#` of text that could pass for a heading of the question, after any line break and with any number
of signs and spaces. It begins where these begin, since a search from each of them would take quadratic time."""
_Decision = Literal[1, -1]
_DECISIONS: dict[int, _Decision] = {1: 1, -1: -1}
_STEP_SCORES: dict[int, StepScore] = {1: 1, 0: 0, -1: -1}


# ---------------------------------------------------------------------------------------------------------- the results


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judge's votes on a turn; without a question if it was not asked about the turn by itself.

    Without votes it failed, or no answer about the trajectory names the turn.
    """

    question: str | None = None
    votes: tuple[Vote, ...] = ()
    step_votes: tuple[StepScore | None, ...] = ()
    seconds: float | None = None
    """Time for the votes, without waiting for a free slot."""
    tokens: JudgeTokens | None = None
    """Tokens of all answers, also to the second question; None if they are not known."""

    @property
    def step_score(self) -> StepScore | None:
        """The most frequent readable vote on the second question; 0 on a tie, None if no vote is readable."""
        counts = Counter[StepScore](vote for vote in self.step_votes if vote is not None)
        leading: list[StepScore] = [score for score in counts if counts[score] == max(counts.values())]
        if not leading:
            return None
        return leading[0] if len(leading) == 1 else 0


@dataclass(frozen=True, slots=True)
class Hint:
    accepted: AcceptedHint
    read: AcceptedHint
    """The hint that the teacher reads: `accepted`, or a user's source's in its place; without a text, none."""
    source: str
    judgement: Judgement = Judgement()
    """The judge's votes, also if the hint is of another source."""
    further: tuple[AcceptedHint, ...] = ()
    """The turn's other accepted hints, which the teacher reads too (`hint.selection: overlap`)."""

    @property
    def text(self) -> str:
        return self.read.text or self.accepted.text


@dataclass(frozen=True, slots=True)
class NoHint:
    outcome: TurnOutcome
    why: str | None = None
    judgement: Judgement = Judgement()


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
    trajectory_prompt: str = TRAJECTORY_SYSTEM_PROMPT
    trajectory_template: str = TRAJECTORY_QUESTION
    control_tokens: Collection[str] = ()

    def question(self, pair: HindsightPair) -> str:
        """Return the question about `pair`.

        Raises:
            AlignmentError: the pair has no evidence.
        """
        if not pair.evidence:
            raise AlignmentError(f"turn {pair.turn_index} has no next state, so it can't be judged")
        mark = self.mark(pair.task_text)
        sections: list[str] = []
        for part in pair.evidence:
            title = _EVIDENCE_NAMES.get(part.kind, "Later")
            if part.later_turn is not None:
                title = f"Later: result of turn {part.later_turn + 1}"
            sections.append(f"## {title} [{mark}]\n{self.as_data(part.text)}")
        fields = {
            "mark": mark,
            "task": self.as_data(pair.task_text),
            "turn": self.as_data(pair.turn_text),
            "evidence": "\n\n".join(sections),
        }
        return filled(self.template, fields)

    def mark(self, task_text: str) -> str:
        """Return the mark of the headings in questions about a task."""
        return blake2b(task_text.encode(errors="replace"), key=self.secret, digest_size=4).hexdigest()

    def hint_messages(self, question: str) -> list[Message]:
        """Return the messages that ask for a vote and a hint."""
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": question}]

    def step_messages(self, question: str) -> list[Message]:
        """Return the messages that ask whether the turn did what the user wanted."""
        return [{"role": "system", "content": self.step_prompt}, {"role": "user", "content": question}]

    def trajectory_messages(self, question: str, max_turns: int) -> list[Message]:
        """Return the messages that ask which turns of a rollout are at fault, at most `max_turns`."""
        system = filled(self.trajectory_prompt, {"max_turns": str(max_turns)})
        return [{"role": "system", "content": system}, {"role": "user", "content": question}]

    def as_data(self, text: str) -> str:
        """Return `text` with a space inserted into each string that could end its section or answer the question."""
        spellings = ("\\boxed", *FOREIGN_CONTROL_TOKENS, *self.control_tokens)
        return _HEADING.sub(r"\g<start> ", without_control_tokens(spellings, without_marks(text)))


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Return a template with its placeholders replaced by `fields`, in one pass; others stay as they are."""
    return PLACEHOLDER.sub(lambda match: fields.get(match[1], match[0]), template)


@dataclass(frozen=True, slots=True)
class JudgedBy:
    """The judge and its questions; if it is the policy's server, a run stops while it is unreachable."""

    client: OpenAIJudge
    questions: Questions
    is_policy: bool
    context: int | None = None
    """Tokens of the judge's context; None: not known."""


# ------------------------------------------------------------------------------------------------------------- the step


class TurnJudge(Protocol):
    """Asks the judge about turns; a test may take its place."""

    async def judge_turn(self, context: TurnContext) -> tuple[Judgement, tuple[str, ...] | NoHint]:
        """Return the votes on a turn, and the accepted hints, the best first, or the reason why there is none.

        Raises:
            ServerUnreachableError: the judge is the policy's server, and is unreachable.
        """
        ...


async def find_hint(context: TurnContext, judge: TurnJudge, config: DistillConfig, pool: HintPool) -> Hint | NoHint:
    """Return the hint of the first source that has one, and add all its accepted hints to `pool`."""
    if not context.pair.evidence:
        return NoHint(TurnOutcome.NO_NEXT_STATE)
    judging = _Judging(context, judge, config, pool)
    failures: list[NoHint] = []
    for source in config.hint.source:
        result = await _hint_of(source, judging)
        if isinstance(result, Hint):
            return result
        failures.append(result)
    gravest = min(failures, key=lambda failure: _GRAVEST.index(failure.outcome))
    return NoHint(gravest.outcome, gravest.why, judging.judgement)


async def _hint_of(source: str, judging: "_Judging") -> Hint | NoHint:
    context, config, pool = judging.context, judging.config, judging.pool
    if source == "judge":
        accepted = await judging.accepted_hints()
        if accepted:
            return Hint(accepted[0], accepted[0], source, judging.judgement, accepted[1:])
        assert judging.failure is not None
        return judging.failure
    result = await hints_of(source, SourceTurn(context, config, pool, judging.accepted_hints))
    if isinstance(result, str):
        reason = f"hint.source {source_name(source)}: {result}"
        return judging.failure or NoHint(TurnOutcome.VOTE_FAILED, reason)
    texts = await asyncio.to_thread(_clean, result.texts, context, 1)
    if not texts:
        return NoHint(TurnOutcome.LEAKED)
    text = f"{result.intro}\n{texts[0]}" if result.intro else texts[0]
    hint = AcceptedHint(result.task_id or context.recording.name, text)
    if judging.accepted:
        return Hint(judging.accepted[0], hint, source_name(source), judging.judgement)
    pool.add(hint)
    return Hint(hint, hint, source_name(source), judging.judgement)


@dataclass(slots=True)
class _Judging:
    """Asks the judge about a turn, at most once."""

    context: TurnContext
    judge: TurnJudge
    config: DistillConfig
    pool: HintPool
    is_asked: bool = False
    judgement: Judgement = Judgement()
    accepted: tuple[AcceptedHint, ...] = ()
    failure: NoHint | None = None

    async def accepted_hints(self) -> tuple[AcceptedHint, ...]:
        """Return the hints that the judge accepts, the best first; if none, `failure` says why."""
        if self.config.judge.when == "failed" and not self.context.failed:
            self.failure = NoHint(TurnOutcome.NOT_JUDGED)
        elif not self.is_asked:
            self.is_asked = True
            self.judgement, result = await self.judge.judge_turn(self.context)
            if isinstance(result, NoHint):
                self.failure = result
            else:
                self.accepted = tuple(AcceptedHint(self.context.recording.name, text) for text in result)
                for hint in self.accepted:
                    self.pool.add(hint)
        return self.accepted


_GRAVEST = (TurnOutcome.JUDGE_ERROR, TurnOutcome.LEAKED, TurnOutcome.NOT_JUDGED, TurnOutcome.VOTE_FAILED)
"""If all sources fail, the first of these outcomes is recorded, so that a failing judge stays visible."""


def _clean(texts: Iterable[str], context: TurnContext, limit: int) -> list[str]:
    """Return the first `limit` texts without hidden tests' data; those may be megabytes, so call it in a thread."""
    hidden_tests = context.recording.task.hidden_tests if context.recording.task else None
    if hidden_tests is None:
        return list(islice(texts, limit))
    return list(islice((text for text in texts if not leaks(text, hidden_tests, context.public_text)), limit))


# ------------------------------------------------------------------------------------------------------------ the votes


@dataclass(frozen=True, slots=True)
class SingleTurnJudge:
    """Asks the judge about each turn by itself (`judge.scope: turn`)."""

    judge: JudgedBy
    config: DistillConfig

    async def judge_turn(self, context: TurnContext) -> tuple[Judgement, tuple[str, ...] | NoHint]:
        """See `TurnJudge`."""
        judge, config = self.judge, self.config
        question = judge.questions.question(context.pair)
        requests = [judge.client.ask(judge.questions.hint_messages(question), config.prm_votes)]
        if config.judge.step_votes:
            requests.append(judge.client.ask(judge.questions.step_messages(question), config.judge.step_votes))
        try:
            hints, *steps = await gather_all(requests)
        except ServerError as error:
            if isinstance(error, ServerUnreachableError) and judge.is_policy:
                raise
            return Judgement(question), NoHint(TurnOutcome.JUDGE_ERROR, str(error))
        votes = tuple(parse_vote(text) for text in hints.texts)
        step_votes = tuple[StepScore | None, ...](parse_step_vote(text) for step in steps for text in step.texts)
        tokens = JudgeTokens.total(reply.tokens for reply in (hints, *steps))
        judgement = Judgement(question, votes, step_votes, hints.latency_s, tokens)
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
    with more than `MIN_HINT_CHARS` characters. `protocol` reads these words in the ways that judges write them.
    """
    votes = (_vote(answer, text) for answer in answers(text))
    return next((vote for vote in votes if vote.decision is not None), Vote(None, None, text))


def _vote(answer: str, text: str) -> Vote:
    """Return the vote in an answer without reasoning; `text` is the whole text."""
    read = [*words(answer)]
    last_end = max((index for index, word in enumerate(read) if word.kind == "end"), default=-1)
    boxes, is_in_hint = list[Word](), False
    for index, word in enumerate(read):
        if word.kind == "box":
            boxes += () if is_in_hint else (word,)
        else:
            is_in_hint = word.kind == "start" and index < last_end
    number = _only_number(boxes)
    decision = None if number is None else _DECISIONS.get(number)
    if decision != 1:
        return Vote(decision, None, text)
    hint = _only_hint(answer, [word for word in read if word.kind != "box"])
    return Vote(None, None, text) if hint is None else Vote(1, hint, text)


def parse_step_vote(text: str) -> StepScore | None:
    """Parse one answer to the second question: 1, 0 or -1 in a box; None if it is unreadable."""
    for answer in answers(text):
        number = _only_number([word for word in words(answer) if word.kind == "box"])
        if number is not None and number in _STEP_SCORES:
            return _STEP_SCORES[number]
    return None


def _only_number(boxes: Sequence[Word]) -> int | None:
    """Return the common number of all boxes of an answer; None if they differ, or one has none."""
    numbers = {boxed_number(box.content) for box in boxes}
    return numbers.pop() if len(numbers) == 1 else None


def _only_hint(answer: str, marks: Sequence[Word]) -> str | None:
    if [mark.kind for mark in marks] != ["start", "end"]:
        return None
    start, end = marks
    return hint_between_marks(answer[start.end : end.start], start.markup)
