"""What the demo policy can do, measured: acting, heeding hints, judging. Sampling is handed in, tools are real.

In: a function that samples completions of prompts. Out: rates by task, as a table.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from agentic_opd.core.types import HindsightPair, StepScore, StopReason, Task, Vote
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import hindsight_pairs
from agentic_opd.distill.hints import parse_step_vote, parse_vote
from agentic_opd.distill.insertion import hint_place, insert_hint
from agentic_opd.rollout.conversation import Conversation
from agentic_opd.rollout.loop import AgentLoop, first_messages
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from demo_policy.episodes import RememberingSession, completion_of
from demo_policy.script import Rates, Step, plan_episode
from demo_policy.transcripts import UNLIMITED, Author, Placement, hints_of, step_score
from demo_policy.variants import Fault, load_variants

Sampler = Callable[[Sequence[Sequence[int]], int, float], list[list[int]]]
"""Prompts, most tokens, temperature -> completions, each with its stop token."""


def faulty(rates: Rates) -> Rates:
    """A fault at once, and then the last turn."""
    return replace(
        rates,
        visible_fault=0.8,
        hidden_fault=0.2,
        repair=0.0,
        read_first=0.0,
        stumble_first=0.0,
        write_alone=0.0,
    )


_MAX_TURNS = 6
_MAX_TOKENS = 320


@dataclass(slots=True)
class Rate:
    """Hits out of tries."""

    hits: int = 0
    tries: int = 0

    def add(self, hit: bool) -> None:
        """Count one try."""
        self.hits += hit
        self.tries += 1

    def __str__(self) -> str:
        return f"{self.hits / self.tries:4.0%}" if self.tries else "   -"


@dataclass(slots=True)
class Scores:
    """Rates by what was measured, then by task."""

    rates: defaultdict[str, defaultdict[str, Rate]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Rate))
    )

    def add(self, column: str, task: Task, hit: bool) -> None:
        """Count one try of `task` in `column`."""
        self.rates[column][task.entry_point or ""].add(hit)

    def total(self, column: str) -> Rate:
        """The rate over all tasks."""
        rates = self.rates[column].values()
        return Rate(sum(rate.hits for rate in rates), sum(rate.tries for rate in rates))

    def table(self) -> str:
        """One line for each thing measured: the rate over all tasks, the tries, then each task's rate."""
        names = [task.entry_point or "" for task in builtin_tasks()]
        lines = [f"{'':32}{'all':>6} {'n':>5}  " + " ".join(f"{name[:8]:>8}" for name in names)]
        for column, rates in self.rates.items():
            total = self.total(column)
            cells = " ".join(f"{rates[name]!s:>8}" for name in names)
            lines.append(f"{column:32}{total!s:>6} {total.tries:>5}  {cells}")
        return "\n".join(lines)


class Examiner:
    """Measures one policy; results add up in `scores`."""

    def __init__(self, author: Author, sample: Sampler, seed: int = 0) -> None:
        self.author, self.world = author, author.world
        self.sample = sample
        self.rng = Random(seed)
        self.scores = Scores()

    def examine(self, episodes: int) -> Scores:
        """Run everything with `episodes` episodes a task."""
        for examples in (True, False):
            self.act(episodes, examples=examples)
            self.heed_first(episodes, foreign=False, examples=examples)
            self.heed_first(episodes, foreign=True, examples=examples)
        self.heed_next(episodes, "end", foreign=False)
        self.heed_next(episodes, "last_user", foreign=False)
        self.heed_next(episodes, "end", foreign=True)
        for examples in (True, False):
            self.judge(episodes, examples=examples)
        return self.scores

    def act(self, episodes: int, *, examples: bool) -> None:
        """Whole episodes without a hint, at temperature 1."""
        kind = "" if examples else ", no examples"
        tasks = [task for task in self.author.tasks[examples] for _ in range(episodes)]
        config = UNLIMITED.model_copy(update={"max_turns": _MAX_TURNS})
        sessions = [RememberingSession(self.world, task) for task in tasks]
        loops = [
            AgentLoop(
                session.task, Conversation(self.author.chat, first_messages(self.world, session.task)), session, config
            )
            for session in sessions
        ]
        first: dict[int, bool] = {}
        stops: dict[int, StopReason | None] = {}
        while active := [i for i in range(len(tasks)) if stops.get(i) is None]:
            sampled = self._sample([loops[i].conversation.prompt() for i in active], 1.0)
            for i, ids in zip(active, sampled, strict=True):
                stops[i] = asyncio.run(loops[i].take(completion_of(ids)))
                if i not in first and sessions[i].solution is not None:
                    first[i] = self.world.passes(tasks[i], sessions[i].solution)
        for i, (task, session) in enumerate(zip(tasks, sessions, strict=True)):
            self.scores.add(f"first attempt passes{kind}", task, first.get(i, False))
            self.scores.add(f"episode passes{kind}", task, self.world.passes(task, session.solution))
            variants = load_variants()[task.entry_point or ""]
            is_known = session.solution in (*variants.correct, *(fault.solution for fault in variants.faults))
            self.scores.add(f"solution is a known variant{kind}", task, is_known)
            self.scores.add(f"episode finished{kind}", task, stops[i] is StopReason.FINISHED)

    def heed_first(self, episodes: int, *, foreign: bool, examples: bool) -> None:
        """The first turn, with a hint appended to the task (both placements are one there)."""
        prompts: list[list[int]] = []
        tasks = [task for task in self.author.tasks[examples] for _ in range(episodes)]
        for task in tasks:
            prompt = self.author.chat.first_prompt(first_messages(self.world, task))
            hint = self.author.hint_ids(self._hint(task, None, foreign=foreign), as_message=False)
            ids, user_end = prompt.token_ids, prompt.last_user_end
            prompts.append([*ids[:user_end], *hint, *ids[user_end:]])
        column = f"first turn, {'foreign' if foreign else 'its'} hint{'' if examples else ', no examples'}"
        for task, prompt, ids in zip(tasks, prompts, self._sample(prompts, 1.0), strict=True):
            self.scores.add(column, task, self._writes_correct(task, None, prompt, ids))

    def heed_next(self, episodes: int, placement: Placement, *, foreign: bool) -> None:
        """The turn after a faulty solution, with the fault's hint; ends in a correct solution or not."""
        rows: list[tuple[Task, str, list[int]]] = []
        for task in (task for task in self.author.tasks[True] for _ in range(episodes)):
            steps = plan_episode(load_variants()[task.entry_point or ""], self.rng, faulty(self.author.rates))
            episode = self.author.play(task, steps, self.rng)
            (trace,) = episode.traces
            turn, before = trace.turns[-1], steps[-1].before
            insert_at, as_message = hint_place(trace, turn, placement)
            hint = self.author.hint_ids(self._hint(task, before.fault, foreign=foreign), as_message=as_message)
            request = insert_hint(trace, turn, insert_at, hint)
            rows.append((task, before.solution or "", list(request.token_ids[: -request.num_scored])))
        column = f"next turn, {'foreign' if foreign else 'its'} hint, {placement}"
        for (task, solution, prompt), ids in zip(rows, self._sample([row[2] for row in rows], 1.0), strict=True):
            self.scores.add(column, task, self._writes_correct(task, solution, prompt, ids))

    def judge(self, episodes: int, *, examples: bool) -> None:
        """Both answers on turns of scripted episodes, at temperature 0.7."""
        rows: list[tuple[Task, Step, HindsightPair]] = []
        prompts: list[list[int]] = []
        questions = self.author.questions(self.rng)
        for task in (task for task in self.author.tasks[examples] for _ in range(episodes)):
            variants = load_variants()[task.entry_point or ""]
            steps = plan_episode(variants, self.rng, self.author.rates, examples=examples)
            pairs = hindsight_pairs(self.author.play(task, steps, self.rng).recording, DistillConfig())
            step, pair = self.rng.choice([row for row in zip(steps, pairs, strict=True) if row[1].evidence])
            question = questions.question(pair)
            rows.append((task, step, pair))
            prompts += [
                self.author.judge_prompt(questions.hint_messages(question)),
                self.author.judge_prompt(questions.step_messages(question)),
            ]
        answers = [self.author.chat.tokenizer.decode(ids[:-1]) for ids in self._sample(prompts, 0.7)]
        for (task, step, pair), first, second in zip(rows, answers[::2], answers[1::2], strict=True):
            self._mark(
                task, step, pair, parse_vote(first), parse_step_vote(second), "" if examples else ", no examples"
            )

    def _mark(
        self, task: Task, step: Step, pair: HindsightPair, vote: Vote, score: StepScore | None, kind: str
    ) -> None:
        hints = hints_of(step, pair)
        self.scores.add(f"judge: vote can be read{kind}", task, vote.decision is not None)
        self.scores.add(f"judge: decision is right{kind}", task, vote.decision == (1 if hints else -1))
        if hints and step.kind not in ("stumble", "final"):
            task_hints = [hint for fault in load_variants()[task.entry_point or ""].faults for hint in fault.hints]
            self.scores.add(f"judge: hint of this task{kind}", task, vote.hint in task_hints)
            self.scores.add(f"judge: hint of this fault{kind}", task, vote.hint in hints)
        self.scores.add(f"judge: step score is right{kind}", task, score == step_score(step, pair))
        if "verdict" in pair.kinds:
            self.scores.add(f"judge: step score, verdict{kind}", task, score == step_score(step, pair))

    def _hint(self, task: Task, fault: Fault | None, *, foreign: bool) -> str:
        variants = load_variants()
        if foreign:
            return self.author.empty_hint(variants[task.entry_point or ""], self.rng)
        return self.rng.choice((fault or self.rng.choice(variants[task.entry_point or ""].faults)).hints)

    def _writes_correct(self, task: Task, solution: str | None, prompt: list[int], ids: list[int]) -> bool:
        session = RememberingSession(self.world, task, solution)
        turn = self.author.chat.parse(prompt, ids, 0)
        for call in turn.tool_calls:
            asyncio.run(session.run_tool(call))
        asyncio.run(session.user_reply([turn.message]))
        return self.world.passes(task, session.solution)

    def _sample(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[list[int]]:
        return self.sample(prompts, _MAX_TOKENS, temperature)
