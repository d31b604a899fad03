r"""The judge of whole rollouts: Recording -> windows -> answers -> votes on each turn (I/O in `TrajectoryJudge`).

    turns 1 .. n -> one question, or several windows if it is too long -> `prm_votes` answers to each
    answer: \boxed{3}[HINT_START]..[HINT_END] \boxed{7}[HINT_START]..[HINT_END], or \boxed{-1} alone
    votes on turn 3: positive from each answer that names it, negative from the other readable ones

A turn's hint is accepted by the same quorum as with `judge.scope: turn`. An answer that violates the protocol abstains;
its `TrajectoryVoteKind` says how. No part of it is used.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import ServerError, ServerUnreachableError
from agentic_opd.core.text import cut_middle
from agentic_opd.core.types import JudgeTokens, Recording, TrajectoryVote, TrajectoryVoteKind, TurnOutcome, Vote
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import ConversationTurn, TurnContext, WholeRollout, whole_rollout
from agentic_opd.distill.hints import (
    JudgedBy,
    Judgement,
    NoHint,
    Questions,
    accepted_hints,
    filled,
)
from agentic_opd.distill.judge import refuses_length
from agentic_opd.distill.protocol import Word, boxed_number, boxed_turn, hint_between_marks, words
from agentic_opd.distill.reasoning import answers
from agentic_opd.wire.group import JudgedTrajectory, JudgedWindow

# ---------------------------------------------------------------------------------------------------------- the windows

CHARS_PER_TOKEN = 3
"""Lower estimate of the characters per token of the judge."""
UNKNOWN_CONTEXT_CHARS = 48_000
"""Characters of a question to a judge whose context is not known."""
LEAST_QUESTION_CHARS = 2000
_PROMPT_CHARS = 2500
"""Characters for the system prompt and the chat template."""
_OUTLINE_CHARS = 120
"""Maximum length of a turn's line in an outline."""
_LEAST_CHARS = 40
"""No text of a question is cut to less."""
_CUT_LINE_CHARS = 40
"""Length of the line in place of the cut text."""


@dataclass(frozen=True, slots=True)
class Window:
    """A question about a rollout, and the numbers of the turns that it shows in full, counted from 1."""

    question: str
    turns: range
    context_turns: range = range(0)
    """Numbers of the context turns that it shows in full, which are labelled C1, C2, ..."""


def question_chars(config: DistillConfig, context: int | None) -> int:
    """Return the maximum length of a question to a judge with a context of so many tokens; None: it is not known."""
    if config.judge.max_question_chars is not None:
        return config.judge.max_question_chars
    if context is None:
        return UNKNOWN_CONTEXT_CHARS
    return max(LEAST_QUESTION_CHARS, (context - config.judge.max_tokens) * CHARS_PER_TOKEN - _PROMPT_CHARS)


def windows_of(rollout: WholeRollout, questions: Questions, max_chars: int) -> list[Window]:
    """Return the questions about a rollout, in order, of about `max_chars` characters at most.

    Each turn to learn from is shown in full in one of them. If there are several, a turn that is longer than its window
    is cut in the middle, and so are a task and a verdict that take more than a quarter and an eighth of it.
    """
    turns = _shown_turns(rollout.turns)
    frame = _QuestionFrame(questions, rollout.task_text, rollout.verdict or "None is known.")
    question = frame.question([frame.sections(turn) for turn in turns])
    if len(question) <= max_chars:
        return [_window(question, turns)]
    frame = replace(frame, task=_cut(frame.task, max_chars // 4), verdict=_cut(frame.verdict, max_chars // 8))
    lines = frame.outline_lines(turns, max_chars // 4)
    outline_chars = sum(len(line) + 1 for line in lines)
    cut_share = min(1.0, max_chars / 2 / outline_chars)

    def outlined(start: int, end: int) -> list[str]:
        text = "\n".join(lines[start:end])
        return [frame.outline(turns[start:end], _cut(text, int(len(text) * cut_share)))] if text else []

    headings = len(frame.question([frame.outline(turns[:1], ""), frame.outline(turns[-1:], "")]))
    room = max(_LEAST_CHARS, max_chars - headings - round(outline_chars * cut_share))
    windows: list[Window] = []
    for start, end, sections in _grouped(turns, frame, room):
        question = frame.question([*outlined(0, start), *sections, *outlined(end, len(turns))])
        windows.append(_window(question, turns[start:end]))
    return [window for window in windows if window.turns]


def _cut(text: str, max_chars: int) -> str:
    """Return `text` cut in the middle to `max_chars` characters, including the line about the missing text."""
    return text if len(text) <= max_chars else cut_middle(text, max(0, max_chars - _CUT_LINE_CHARS))


class _Section(NamedTuple):
    """A section of a question."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class _ShownTurn:
    """A turn of the rollout, or with `is_context` an assistant message that is context, counted from 1."""

    number: int
    is_context: bool
    parts: tuple[_Section, ...]
    """Its text, the results of its calls, and the user's reply."""

    @property
    def title(self) -> str:
        return self.parts[0].title

    def outline(self, max_chars: int) -> str:
        """Return the turn in one line, with the beginning of its text and the end of what answered it."""
        text, *answered = self.parts
        head = " ".join(text.text[: 2 * max_chars].split())
        tail = " ".join(answered[-1].text[-2 * max_chars :].split()) if answered else ""
        head_chars = max_chars - min(len(tail), max_chars // 3)
        return f"{self.title}: {head[:head_chars]}" + (f" -> {tail[-(max_chars // 3) :]}" if tail else "")


def _shown_turns(turns: Sequence[ConversationTurn]) -> list[_ShownTurn]:
    shown_turns: list[_ShownTurn] = []
    num_context = 0
    for turn in turns:
        num_context += turn.turn_index is None
        number = num_context if turn.turn_index is None else turn.turn_index + 1
        title = f"Turn C{number}" if turn.turn_index is None else f"Turn {number}"
        answered = (_Section(f"{title}: tool result", turn.tool), _Section(f"{title}: user reply", turn.user))
        parts = (_Section(title, turn.text), *(part for part in answered if part.text.strip()))
        shown_turns.append(_ShownTurn(number, turn.turn_index is None, parts))
    return shown_turns


@dataclass(frozen=True, slots=True)
class _QuestionFrame:
    """What all questions about a rollout share; `task` and `verdict` are not yet protected."""

    questions: Questions
    task: str
    verdict: str

    def question(self, sections: Sequence[str]) -> str:
        fields = {
            "mark": self.questions.mark(self.task),
            "task": self.questions.as_data(self.task),
            "turns": "\n\n".join(sections),
            "verdict": self.questions.as_data(self.verdict),
        }
        return filled(self.questions.trajectory_template, fields)

    def sections(self, turn: _ShownTurn, max_chars: int | None = None) -> str:
        """Return a turn's sections; with `max_chars` each text is cut in the middle to that length."""
        parts = (
            _Section(part.title, part.text if max_chars is None else cut_middle(part.text, max_chars))
            for part in turn.parts
        )
        return "\n\n".join(map(self._section, parts))

    def outline_lines(self, turns: Sequence[_ShownTurn], max_chars: int) -> list[str]:
        """Return each turn in one line, of about `max_chars` characters in all, unless that is too little."""
        line_chars = max_chars // len(turns) - len("Turn C100:  -> \n")
        return [turn.outline(min(_OUTLINE_CHARS, max(_LEAST_CHARS // 2, line_chars))) for turn in turns]

    def outline(self, turns: Sequence[_ShownTurn], text: str) -> str:
        """Return the section with the outline of consecutive turns."""
        first, last = turns[0].title, turns[-1].title.removeprefix("Turn ")
        title = first if len(turns) == 1 else f"{first} to {last}"
        return self._section(_Section(f"{title}, outline", text))

    def _section(self, part: _Section) -> str:
        return f"## {part.title} [{self.questions.mark(self.task)}]\n{self.questions.as_data(part.text)}"


def _grouped(turns: Sequence[_ShownTurn], frame: _QuestionFrame, room: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yield runs `[start, end)` of turns whose sections take at most `room` characters, and these sections."""
    start, size, group = 0, 0, list[str]()
    for index, turn in enumerate(turns):
        sections, max_chars = frame.sections(turn), room
        while len(sections) > room and max_chars > _LEAST_CHARS:
            max_chars = max(_LEAST_CHARS, max_chars * 3 // 4)
            sections = frame.sections(turn, max_chars)
        if group and size + len(sections) > room:
            yield start, index, group
            start, size, group = index, 0, []
        group.append(sections)
        size += len(sections) + len("\n\n")
    yield start, len(turns), group


def _window(question: str, turns: Sequence[_ShownTurn]) -> Window:
    """Return a window that shows `turns` in full."""
    learned, context = ([turn.number for turn in turns if turn.is_context is flag] for flag in (False, True))
    spans = [range(numbers[0], numbers[-1] + 1) if numbers else range(0) for numbers in (learned, context)]
    return Window(question, *spans)


# ------------------------------------------------------------------------------------------------------------ the votes


class NamedTurn(NamedTuple):
    """A turn that an answer names: its number, its hint, and the part of the answer about it."""

    number: int
    hint: str
    text: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer about a window, and the turns to learn from that it names; none unless its vote is readable."""

    vote: TrajectoryVote
    named: tuple[NamedTurn, ...] = ()

    def vote_on(self, number: int) -> Vote:
        """Return the answer as a vote on one turn of the window."""
        named = next((turn for turn in self.named if turn.number == number), None)
        if named is not None:
            return Vote(1, named.hint, named.text)
        return Vote(-1 if self.vote.kind.is_readable else None, None, "")


class _ProtocolError(Exception):
    """An answer violates the protocol."""

    def __init__(self, kind: TrajectoryVoteKind) -> None:
        super().__init__(kind)
        self.kind = kind


def parse_answer(text: str, window: Window, max_turns: int) -> ParsedAnswer:
    r"""Parse an answer about a window.

    Reasoning is dropped (`reasoning.answers`). For each turn at fault there is a box with its number and one hint
    after it, or `\boxed{-1}` is the only box and there is no hint. Boxes in a hint are part of the hint; a box may be
    repeated. A shorter reading of the text is used only if it has all hints of the whole one: no turn is dropped.
    """
    kind = TrajectoryVoteKind.UNREADABLE
    hints: int | None = None
    for reading in answers(text):
        num_hints = sum(word.kind == "start" for word in words(reading))
        if hints is None:
            hints = num_hints
        elif num_hints < hints:
            break
        try:
            named, has_context = _named_turns(reading, window, max_turns)
        except _ProtocolError as error:
            kind = error.kind if kind is TrajectoryVoteKind.UNREADABLE else kind
            continue
        kind = TrajectoryVoteKind.NAMED if named else TrajectoryVoteKind.NONE
        vote = TrajectoryVote(
            TrajectoryVoteKind.CONTEXT_TURN if has_context else kind, tuple(turn.number for turn in named), text
        )
        return ParsedAnswer(vote, tuple(named))
    return ParsedAnswer(TrajectoryVote(kind, (), text))


class _MarkedHint(NamedTuple):
    """A hint with the boxes since the hint before it, and the text since then; after the last hint there is none."""

    boxes: list[str]
    hint: str | None
    text: str


def _marked_hints(answer: str) -> Iterator[_MarkedHint]:
    """Yield the hints of an answer in order, and then the boxes after the last one."""
    start: Word | None = None
    part_start, boxes = 0, list[str]()
    for word in words(answer):
        if (word.kind == "start" and start is not None) or (word.kind == "end" and start is None):
            raise _ProtocolError(TrajectoryVoteKind.UNREADABLE)
        if word.kind == "start":
            start = word
        elif word.kind == "end" and start is not None:
            hint = hint_between_marks(answer[start.end : word.start], start.markup)
            yield _MarkedHint(boxes, hint or "", answer[part_start : word.end].strip())
            start, part_start, boxes = None, word.end, []
        elif start is None:
            boxes.append(_label(word.content))
    if start is not None:
        raise _ProtocolError(TrajectoryVoteKind.UNREADABLE)
    yield _MarkedHint(boxes, None, "")


def _named_turns(answer: str, window: Window, max_turns: int) -> tuple[list[NamedTurn], bool]:
    """Return the turns that an answer names, and whether it names context turns too.

    Raises:
        _ProtocolError: the answer violates the protocol.
    """
    *hints, rest = _marked_hints(answer)
    by_label: dict[str, _MarkedHint] = {}
    for marked in hints:
        label = _label_of_hint(marked.boxes)
        if label in by_label:
            raise _ProtocolError(TrajectoryVoteKind.REPEATED_TURN)
        if not marked.hint:
            raise _ProtocolError(TrajectoryVoteKind.TURN_WITHOUT_HINT)
        by_label[label] = marked
    without_hint = {*rest.boxes} - by_label.keys()
    if not by_label and without_hint == {"-1"}:
        return [], False
    if "-1" in without_hint or not (by_label or without_hint):
        raise _ProtocolError(TrajectoryVoteKind.UNREADABLE)
    if without_hint:
        raise _ProtocolError(TrajectoryVoteKind.TURN_WITHOUT_HINT)
    numbers = {int(label): marked for label, marked in by_label.items() if not label.startswith("c")}
    context_numbers = {int(label.removeprefix("c")) for label in by_label if label.startswith("c")}
    if numbers.keys() - {*window.turns} or context_numbers - {*window.context_turns}:
        raise _ProtocolError(TrajectoryVoteKind.UNKNOWN_TURN)
    if len(by_label) > max_turns:
        is_every = len(numbers) == len(window.turns)
        raise _ProtocolError(TrajectoryVoteKind.EVERY_TURN if is_every else TrajectoryVoteKind.TOO_MANY_TURNS)
    named = [NamedTurn(number, marked.hint or "", marked.text) for number, marked in numbers.items()]
    return named, bool(context_numbers)


def _label(content: str | None) -> str:
    """Return what a box names: `3`, `c1`, or `-1` for no turn."""
    label = "-1" if boxed_number(content) == -1 else boxed_turn(content)
    if label is None:
        raise _ProtocolError(TrajectoryVoteKind.UNREADABLE)
    return label


def _label_of_hint(boxes: Sequence[str]) -> str:
    """Return the label in the boxes between a hint and the one before it."""
    labels = {*boxes}
    if not labels or labels == {"-1"}:
        raise _ProtocolError(TrajectoryVoteKind.HINT_WITHOUT_TURN)
    if len(labels) > 1:
        has_none = "-1" in labels
        raise _ProtocolError(TrajectoryVoteKind.UNREADABLE if has_none else TrajectoryVoteKind.TURN_WITHOUT_HINT)
    return labels.pop()


# -------------------------------------------------------------------------------------------------------------- asking


class _AnsweredWindow(NamedTuple):
    """A window with the answers, or with the error of the judge."""

    window: Window
    answers: tuple[ParsedAnswer, ...] = ()
    seconds: float | None = None
    tokens: JudgeTokens | None = None
    error: ServerError | None = None


class TrajectoryJudge:
    """Asks the judge about a whole rollout, at most once for all of its turns (`judge.scope: trajectory`)."""

    def __init__(self, recording: Recording, judge: JudgedBy, config: DistillConfig) -> None:
        """Begin without a question; the first turn that needs a judgement asks it."""
        self._recording, self._judge, self._config = recording, judge, config
        self._lock = asyncio.Lock()
        self._answered_windows: list[_AnsweredWindow] = []

    async def judge_turn(self, context: TurnContext) -> tuple[Judgement, tuple[str, ...] | NoHint]:
        """See `TurnJudge`; the judgement has only the votes that name the turn."""
        async with self._lock:
            if not self._answered_windows:
                self._answered_windows = await self._ask()
        number = context.pair.turn_index + 1
        answered_window = next(window for window in self._answered_windows if number in window.window.turns)
        votes = [answer.vote_on(number) for answer in answered_window.answers]
        judgement = Judgement(votes=tuple(vote for vote in votes if vote.decision == 1))
        if answered_window.error is not None:
            return judgement, NoHint(TurnOutcome.JUDGE_ERROR, str(answered_window.error))
        if not judgement.votes:
            return judgement, accepted_hints(votes, context, self._config)
        return judgement, await asyncio.to_thread(accepted_hints, votes, context, self._config)

    @property
    def judged(self) -> JudgedTrajectory | None:
        """The questions and answers for the record; None if the judge was not asked."""
        if not self._answered_windows:
            return None
        return JudgedTrajectory(
            tuple(
                JudgedWindow(
                    first=answered.window.turns.start,
                    last=answered.window.turns.stop - 1,
                    question=answered.window.question,
                    votes=tuple(answer.vote for answer in answered.answers),
                    judge_tokens=answered.tokens,
                )
                for answered in self._answered_windows
            )
        )

    @property
    def seconds(self) -> tuple[float, ...]:
        """Time for the answers to each window, without waiting for a free slot."""
        return tuple(window.seconds for window in self._answered_windows if window.seconds is not None)

    async def _ask(self) -> list[_AnsweredWindow]:
        """Ask about each window; if the judge refuses one as too long, ask about windows of half the length."""
        rollout = whole_rollout(self._recording, self._config)
        max_chars = question_chars(self._config, self._judge.context)
        dropped_tokens = list[JudgeTokens | None]()
        while True:
            windows = await asyncio.to_thread(windows_of, rollout, self._judge.questions, max_chars)
            answered_windows = await gather_all(map(self._ask_about, windows))
            is_too_long = any(window.error is not None and refuses_length(window.error) for window in answered_windows)
            if not is_too_long or max_chars <= LEAST_QUESTION_CHARS:
                first, *rest = answered_windows
                return [first._replace(tokens=JudgeTokens.total([*dropped_tokens, first.tokens])), *rest]
            dropped_tokens += [window.tokens for window in answered_windows if window.error is None]
            longest = max(len(window.question) for window in windows)
            max_chars = max(LEAST_QUESTION_CHARS, min(max_chars, longest) // 2)

    async def _ask_about(self, window: Window) -> _AnsweredWindow:
        config, judge = self._config, self._judge
        messages = judge.questions.trajectory_messages(window.question, config.judge.max_turns)
        try:
            reply = await judge.client.ask(messages, config.prm_votes)
        except ServerError as error:
            if isinstance(error, ServerUnreachableError) and judge.is_policy:
                raise
            return _AnsweredWindow(window, error=error)
        parsed = tuple(parse_answer(text, window, config.judge.max_turns) for text in reply.texts)
        return _AnsweredWindow(window, parsed, reply.latency_s, reply.tokens)
