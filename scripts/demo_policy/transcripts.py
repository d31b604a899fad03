"""Scripted turns -> training sequences, token for token what rollouts, judge requests and teacher requests hold.

In: tasks, variants and a random generator. Out: `Transcript`s, rows of ids that say which of them the policy writes.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from agentic_opd.core.text import control_tokens
from agentic_opd.core.types import IGNORED, Episode, Evidence, HindsightPair, Message, Task, Trace, Turn
from agentic_opd.distill.config import DistillConfig, EvidenceConfig
from agentic_opd.distill.evidence import hindsight_pairs
from agentic_opd.distill.hints import Questions
from agentic_opd.distill.insertion import encode_hint, hint_place, insert_hint
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.loop import run_episode
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.verifier.verify import SOLUTION_FILE
from demo_policy.episodes import RememberingWorld, ScriptedPolicy
from demo_policy.script import (
    NEUTRAL_HINTS,
    STUMBLE_HINTS,
    Rates,
    State,
    Step,
    plan_episode,
    plan_hinted,
    plan_nothing,
    write_call,
)
from demo_policy.variants import TaskVariants, load_variants

Placement = Literal["end", "last_user"]

_PLACEMENTS: tuple[Placement, Placement] = ("end", "last_user")
_FAILURE = re.compile(r"FAIL (.*): expected (.*), got (.*)")
_COUNT = re.compile(r"Hidden tests: (\d+) of (\d+) passed\.")
_COMPLAINTS = (
    "That is wrong: {call} gives {got}, it should be {expected}.",
    "{call} returns {got} for me. I expected {expected}.",
    "No, {call} must be {expected} and not {got}.",
    "It does not work yet. For {call} I get {got} instead of {expected}.",
)
_VAGUE_COMPLAINTS = ("It fails with an error for me.", "It does not work for me, please look again.")
_COMPLAINT_FORMS = [
    re.compile(re.sub(r"\\{\w+\\}", ".*", re.escape(text))) for text in (*_COMPLAINTS, *_VAGUE_COMPLAINTS)
]
_THANKS = ("Thank you, it works.", "Great, that is what I wanted.", "Thanks!")

UNLIMITED = RolloutConfig(max_turns=1000, max_token_length=1_000_000)
"""A script says itself where an episode ends."""

Kind = Literal["act", "heed_first", "heed_later", "ignore", "judge", "judge_step", "judge_trajectory"]
"""The skills that a transcript may teach."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """One training sequence: its ids, and which of them the policy is to write.

    `kind` names the skill: to act without a hint, to heed a fitting one before anything is written or later, to ignore
    a foreign or empty one, to judge with a hint, to judge whether a turn did what was wanted, to name the turns of a
    trajectory that are at fault.
    """

    kind: Kind
    token_ids: tuple[int, ...]
    is_target: tuple[bool, ...]
    decisions: tuple[int, ...] = ()
    """Positions at which one solution parts from another: few among many, and all that a hint has to change."""


@dataclass(frozen=True, slots=True)
class Mix:
    """How often an episode becomes which transcripts."""

    without_examples: float = 0.4
    """Episodes of tasks without examples."""
    judged_turns: float = 0.6
    """Turns of an episode that are shown to the judge, as a share."""
    judged_steps: float = 0.3
    """Turns of which it is also asked the second question."""
    by_next_state: float = 0.2
    """Episodes whose turns are judged by their next state alone."""
    undone: float = 0.03
    """Episodes after which the judge is shown one that ended without a solution."""
    hinted_first: float = 0.8
    """First turns that are taught again, with two hints, as a share."""
    hinted_faulty: float = 1.0
    """Turns after a faulty solution that are taught again, once with each placement."""
    hinted_other: float = 0.15
    """Other turns that are taught again."""
    foreign_hints: float = 0.25
    """Hints of another task among them, which change nothing."""
    neutral_hints: float = 0.3
    """Of these, the share that says nothing about any task."""


class Author:
    """Writes transcripts with one tokenizer; the tools' results come from `world`."""

    def __init__(
        self, chat: ChatFormat, world: RememberingWorld, rates: Rates | None = None, mix: Mix | None = None
    ) -> None:
        self.chat = chat
        self.world = world
        self.rates = rates or Rates()
        self.mix = mix or Mix()
        self.tasks = {examples: builtin_tasks(with_examples=examples) for examples in (True, False)}
        self._hints: dict[tuple[str, bool], tuple[int, ...]] = {}
        self._partings: dict[str, list[int]] = {}

    def write(self, rng: Random) -> Iterator[Transcript]:
        """Write one episode of a task drawn at random, and what is taught along with it."""
        examples = rng.random() >= self.mix.without_examples
        task = rng.choice(self.tasks[examples])
        variants = load_variants()[task.entry_point or ""]
        steps = plan_episode(variants, rng, self.rates, examples=examples)
        episode = self.play(task, steps, rng)
        (trace,) = episode.traces
        is_target = tuple(mask != IGNORED for mask in trace.masks_T)
        decisions = [
            position
            for turn, step in zip(episode.turns, steps, strict=True)
            for position in self.decisions(step, variants, turn.start)
        ]
        yield Transcript("act", trace.tokens_T, is_target, tuple(decisions))
        for turn, step in zip(episode.turns, steps, strict=True):
            for placement in self._placements(step, rng):
                yield self.heed(trace, turn, step, placement, variants, rng)
        yield from self.judged(episode, steps, rng)
        if rng.random() < self.mix.undone:
            steps = plan_nothing(examples=examples)
            yield from self.judged(self.play(task, steps, rng), steps, rng)

    def play(self, task: Task, steps: Sequence[Step], rng: Random) -> Episode:
        """Run scripted turns through the real rendering, parsing and tools, with what the user says to them."""
        policy = ScriptedPolicy(self.completion_ids(step) for step in steps)
        replies = {index: self.reply(task, step, rng) for index, step in enumerate(steps) if step.reply is not None}

        async def user_reply(_task: Task, messages: Sequence[Message]) -> str | None:
            return replies.get(sum(message["role"] == "assistant" for message in messages) - 1)

        return asyncio.run(run_episode(task, policy, self.world, self.chat, UNLIMITED, user_reply))

    def reply(self, task: Task, step: Step, rng: Random) -> str:
        """What a user says to a closing turn: thanks, or what is wrong with the solution that it leaves."""
        if step.reply == "thanks":
            return rng.choice(_THANKS)
        solution = (step.before.solution or "").encode()
        return complaint(asyncio.run(self.world.verify(task, {SOLUTION_FILE: solution})).report, rng)

    def judged(self, episode: Episode, steps: Sequence[Step], rng: Random) -> Iterator[Transcript]:
        """Teach the judge's answers to some of an episode's turns."""
        config = DistillConfig(
            hindsight=EvidenceConfig(evidence="next_state" if rng.random() < self.mix.by_next_state else "delayed")
        )
        questions = self.questions(rng)
        for pair, step in zip(hindsight_pairs(episode.recording, config), steps, strict=True):
            if not pair.evidence:
                continue
            question = questions.question(pair)
            if rng.random() < self.mix.judged_turns:
                hints = hints_of(step, pair)
                answer = f"\\boxed{{1}}\n[HINT_START]{rng.choice(hints)}[HINT_END]" if hints else "\\boxed{-1}"
                yield self.answer("judge", questions.hint_messages(question), answer)
            if rng.random() < self.mix.judged_steps:
                answer = f"\\boxed{{{step_score(step, pair)}}}"
                yield self.answer("judge_step", questions.step_messages(question), answer)

    def questions(self, rng: Random) -> Questions:
        """The judge's questions with a mark of their own."""
        return Questions(rng.randbytes(16), control_tokens=tuple(control_tokens(self.chat.tokenizer).values()))

    def completion_ids(self, step: Step) -> list[int]:
        """The turn as sampled ids, its end token included."""
        return [*self._encode(self.written(step)), self.chat.stop_token_ids[0]]

    def written(self, step: Step) -> str:
        """The turn as the policy writes it, without its end token."""
        return step.completion()

    def heed(
        self, trace: Trace, turn: Turn, step: Step, placement: Placement, variants: TaskVariants, rng: Random
    ) -> Transcript:
        """Teach a turn again with a hint in its prompt: the turn is changed if the hint fits, else it stays."""
        foreign = rng.random() < self.mix.foreign_hints
        hint, target = (self.empty_hint(variants, rng), step) if foreign else self._hinted(step, variants, rng)
        insert_at, as_message = hint_place(trace, turn, placement)
        request = insert_hint(trace, turn, insert_at, self.hint_ids(hint, as_message=as_message))
        prompt_ids = request.token_ids[: -request.num_scored]
        target_ids = self.completion_ids(target)
        is_target = (False,) * len(prompt_ids) + (True,) * len(target_ids)
        decisions = (len(prompt_ids), *self.decisions(target, variants, len(prompt_ids)))
        heed = "heed_first" if step.before.solution is None else "heed_later"
        return Transcript("ignore" if foreign else heed, (*prompt_ids, *target_ids), is_target, decisions)

    def decisions(self, step: Step, variants: TaskVariants, start: int) -> list[int]:
        """Where the solution that `step` writes parts from any other of the task; its first token lies at `start`."""
        solution = next((args.get("content") for name, args in step.calls if name == "write_file"), None)
        if solution is None:
            return []
        ids, block = self.completion_ids(step), self._block_ids(solution)
        offset = next((i for i in range(len(ids)) if ids[i : i + len(block)] == block), None)
        assert offset is not None, "a call is the same ids wherever it stands"
        if solution not in self._partings:
            solutions = {*variants.correct, *(fault.solution for fault in variants.faults)} - {solution}
            self._partings[solution] = sorted({common_length(block, self._block_ids(variant)) for variant in solutions})
        return [start + offset + parting for parting in self._partings[solution] if parting < len(block)]

    def writing(self, solution: str) -> str:
        """Return the part of a turn that writes `solution`; its ids are the same at each position."""
        return Step(State(), State(), "", (write_call(solution),)).completion()

    def _block_ids(self, solution: str) -> list[int]:
        return self._encode(self.writing(solution))

    def hint_ids(self, hint: str, *, as_message: bool) -> tuple[int, ...]:
        """The hint as the teacher reads it."""
        key = (hint, as_message)
        if key not in self._hints:
            self._hints[key] = encode_hint(self.chat.renderer, self.chat.tokenizer, hint, as_message=as_message)
        return self._hints[key]

    def answer(self, kind: Kind, messages: list[Message], answer: str) -> Transcript:
        """Teach an answer of the judge."""
        prompt_ids = self.judge_prompt(messages)
        answer_ids = [*self._encode(answer), self.chat.stop_token_ids[0]]
        is_target = (False,) * len(prompt_ids) + (True,) * len(answer_ids)
        return Transcript(kind, (*prompt_ids, *answer_ids), is_target)

    def judge_prompt(self, messages: list[Message]) -> list[int]:
        """The judge's messages as the server renders them."""
        return self.chat.renderer.render_ids(messages, add_generation_prompt=True)  # type: ignore[arg-type]

    def _placements(self, step: Step, rng: Random) -> Sequence[Placement]:
        """Where to put a hint when the turn is taught again; empty: it is not."""
        if step.before.solution is None:
            return _PLACEMENTS if rng.random() < self.mix.hinted_first else ()
        if step.before.fault is not None:
            return _PLACEMENTS if rng.random() < self.mix.hinted_faulty else ()
        return (rng.choice(_PLACEMENTS),) if rng.random() < self.mix.hinted_other else ()

    def _hinted(self, step: Step, variants: TaskVariants, rng: Random) -> tuple[str, Step]:
        """A fitting hint for a turn, and the turn that it should lead to."""
        if step.kind == "stumble" and rng.random() < 0.5:
            return rng.choice(step.hints), self._without_stumble(step, variants, rng)
        if step.before.solution is None and rng.random() < 0.1:
            return rng.choice(STUMBLE_HINTS), self._without_stumble(step, variants, rng)
        fault = step.before.fault or (step.after.fault if step.before.solution is None else None)
        if fault is None or rng.random() < 0.2:
            fault = rng.choice(variants.faults)
        return rng.choice(fault.hints), plan_hinted(step, fault)

    def empty_hint(self, variants: TaskVariants, rng: Random) -> str:
        """A hint that changes nothing: one of another task, or one that says nothing."""
        if rng.random() < self.mix.neutral_hints:
            return rng.choice(NEUTRAL_HINTS)
        variants_of_others = [v for v in load_variants().values() if v.entry_point != variants.entry_point]
        return rng.choice(rng.choice(rng.choice(variants_of_others).faults).hints)

    def _without_stumble(self, step: Step, variants: TaskVariants, rng: Random) -> Step:
        """What a hint about tool calls leads to: a first turn that works, with a solution as often wrong as ever."""
        rates = replace(self.rates, stumble_first=0.0)
        return plan_episode(variants, rng, rates, examples=step.before.examples)[0]

    def _encode(self, text: str) -> list[int]:
        return self.chat.tokenizer.encode(text, add_special_tokens=False)


def complaint(report: str, rng: Random) -> str:
    """Return a complaint about a failed check: the call, the actual and the expected result; never a fix.

    Args:
        report: Of the verifier.
        rng: Draws the try and the words.
    """
    failures = [failure.groups() for line in report.split("\n") if (failure := _FAILURE.fullmatch(line))]
    if not failures:
        return rng.choice(_VAGUE_COMPLAINTS)
    call, expected, actual = rng.choice(failures)
    return rng.choice(_COMPLAINTS).format(call=call, expected=expected, got=actual)


def hints_of(step: Step, pair: HindsightPair) -> Sequence[str]:
    """Return the hints that the judge may give about a turn, by its evidence; empty if it may give none."""
    if step.kind in ("read", "run"):
        return ()
    if step.kind == "final":
        is_wrong = step.reply == "complaint" if step.before.solution is not None else "verdict" in pair.kinds
        return step.hints if is_wrong else ()
    return step.hints if step.kind == "stumble" or shows_failure(pair) else ()


def step_score(step: Step, pair: HindsightPair) -> int:
    """Whether what is shown says that the turn did what was wanted: 1, 0 or -1."""
    if step.kind in ("stumble", "read", "run"):
        return {"stumble": -1, "read": 0, "run": 1}[step.kind]
    if shows_failure(pair) or step.reply == "complaint":
        return -1
    is_shown = any("examples passed" in evidence.text for evidence in pair.evidence) or "verdict" in pair.kinds
    return 1 if is_shown or step.reply == "thanks" else 0


def shows_failure(pair: HindsightPair) -> bool:
    """Whether an example or a hidden test failed, or a user complained later."""
    return any(map(_is_failure, pair.evidence))


def _is_failure(evidence: Evidence) -> bool:
    if evidence.kind == "verdict":
        count = _COUNT.match(evidence.text)
        return count is None or count[1] != count[2]
    if evidence.kind == "later" and any(form.search(evidence.text) for form in _COMPLAINT_FORMS):
        return True
    return "FAIL " in evidence.text


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids both start with."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
