"""What the SQL world's policy can do, measured: with and without hints, on questions of both parts, and as a judge."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random

from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import hindsight_pairs
from agentic_opd.distill.hints import parse_vote
from agentic_opd.distill.insertion import hint_place, insert_hint
from agentic_opd.worlds.custom import Left
from agentic_opd_environments.sql.world import Desk
from demo_policy.script import NEUTRAL_HINTS
from demo_policy.sql.author import ANSWER_TURN, SqlAuthor
from demo_policy.sql.faults import mistake_of, quoted
from demo_policy.sql.questions import Question, questions, sql

Sampler = Callable[[Sequence[Sequence[int]], int, float], list[list[int]]]
"""Prompts, most tokens, temperature -> completions, each with its stop token."""

_MAX_TOKENS = 160
_MISTAKES_SHOWN = 6


def examine_sql(author: SqlAuthor, sample: Sampler, count: int, seed: int = 1_000_000) -> str:
    """Return a table of rates, with some of the mistakes that are not in the training data.

    Args:
        author: Renders what the policy reads.
        sample: Samples completions of prompts.
        count: Questions of each part.
        seed: Of the questions; none that was trained on.
    """
    lines = list[str]()
    for held_out in (False, True):
        exam_questions = [*islice(questions(seed, held_out=held_out), count)]
        lines += [
            f"{'held out' if held_out else 'training':10}{line}"
            for line in _Exam(author, sample, exam_questions).lines()
        ]
    return "\n".join(lines)


class _Exam:
    """Questions, answered with each kind of hint."""

    def __init__(self, author: SqlAuthor, sample: Sampler, exam_questions: Sequence[Question]) -> None:
        self.author, self.sample, self.questions = author, sample, exam_questions
        self.rng = Random(0)

    def lines(self) -> list[str]:
        """What came out."""
        hints = [self.rng.choice(self.author.any_clause(question, self.rng)) for question in self.questions]
        answers, is_right = self.answers([None] * len(hints))
        lines = [self.rate("no hint", is_right), *self.mistakes(answers, is_right)]
        lines += self.mended(answers)
        lines.append(self.rate("any clause's hint", self.answers(hints)[1]))
        lines.append(self.rate("another's hint", self.answers([*hints[1:], hints[0]])[1]))
        lines.append(self.rate("an empty hint", self.answers([NEUTRAL_HINTS[0]] * len(hints))[1]))
        return [*lines, *self.judged(answers, is_right)]

    def rate(self, name: str, hits: Sequence[bool]) -> str:
        return f"{name:18}{sum(hits) / max(1, len(hits)):4.0%} of {len(hits)}"

    def answers(self, hints: Sequence[str | None]) -> tuple[list[str | None], list[bool]]:
        """The answer to each question under its hint, and whether it is right."""
        prompts = [self.prompt(question, hint) for question, hint in zip(self.questions, hints, strict=True)]
        sampled = self.sample(prompts, _MAX_TOKENS, 1.0)
        answers = [self.read(prompt, ids) for prompt, ids in zip(prompts, sampled, strict=True)]
        return answers, [self.is_right(question, text) for question, text in zip(self.questions, answers, strict=True)]

    def prompt(self, question: Question, hint: str | None) -> list[int]:
        episode = self.author.play(question, sql(question.query), self.rng)
        (trace,) = episode.traces
        turn = trace.turns[ANSWER_TURN]
        if hint is None:
            return [*trace.tokens_T[: turn.start]]
        insert_at, as_message = hint_place(trace, turn, "end")
        hint_ids = self.author.hint_ids(hint, as_message=as_message)
        request = insert_hint(trace, turn, insert_at, hint_ids)
        return [*request.token_ids[: -request.num_scored]]

    def read(self, prompt: list[int], ids: list[int]) -> str | None:
        for call in self.author.chat.parse(prompt, ids, 0).tool_calls:
            if call.name == "answer" and call.arguments and isinstance(call.arguments.get("sql"), str):
                return call.arguments["sql"]
        return None

    def is_right(self, question: Question, answer: str | None) -> bool:
        task = self.author.sql_world.task_of("sql/examined", question)
        verified = self.author.world.verify(task, Left(Desk(question.visible, answer), {}))
        return asyncio.run(verified).correctness == 1

    def mistakes(self, answers: Sequence[str | None], is_right: Sequence[bool]) -> list[str]:
        """Return the kinds of the wrong answers, and some that are not in the training data."""
        wrong = [
            (question, text or "")
            for question, text, right in zip(self.questions, answers, is_right, strict=True)
            if not right
        ]
        mistakes = [mistake_of(question.query, text) for question, text in wrong]
        kinds = Counter(mistake.kind if mistake else "of its own" for mistake in mistakes)
        unknown = [row for row, mistake in zip(wrong, mistakes, strict=True) if mistake is None]
        lines = [f"mistakes          {', '.join(f'{kind} {count}' for kind, count in kinds.most_common())}"]
        for question, text in unknown[:_MISTAKES_SHOWN]:
            lines.append(f"  {question.text}\n    {text}")
        return lines

    def mended(self, answers: Sequence[str | None]) -> list[str]:
        """Questions whose answer had a taught mistake, once more: with the hint about it, with another's, with none."""
        attempts = [
            (question, mistake_of(question.query, text or ""))
            for question, text in zip(self.questions, answers, strict=True)
        ]
        hints = [mistake.hints[0] for _, mistake in attempts if mistake]
        exam = _Exam(self.author, self.sample, [question for question, mistake in attempts if mistake])
        if not hints:
            return []
        return [
            self.rate("a mistake again", exam.answers([None] * len(hints))[1]),
            self.rate("with its hint", exam.answers(hints)[1]),
            self.rate("with another's", exam.answers([*hints[1:], hints[0]])[1]),
        ]

    def judged(self, answers: Sequence[str | None], is_right: Sequence[bool]) -> list[str]:
        """The judge on the policy's own answers: does its hint say a clause that the answer lacks?"""
        rows = [row for row in zip(self.questions, answers, is_right, strict=True) if row[1] is not None]
        asking = self.author.questions(self.rng)
        prompts = list[list[int]]()
        for question, text, _ in rows:
            pair = hindsight_pairs(self.author.play(question, text or "", self.rng).recording, DistillConfig())[
                ANSWER_TURN
            ]
            prompts.append(self.author.judge_prompt(asking.hint_messages(asking.question(pair))))
        sampled = self.sample(prompts, _MAX_TOKENS, 0.7)
        votes = [parse_vote(self.author.chat.tokenizer.decode(ids[:-1])) for ids in sampled]
        decided = [vote.decision == (-1 if right else 1) for vote, (_, _, right) in zip(votes, rows, strict=True)]
        quotes = [
            (sql(question.query), text or "", quoted(vote.hint))
            for vote, (question, text, right) in zip(votes, rows, strict=True)
            if vote.hint is not None and not right
        ]
        return [
            self.rate("judge decides", decided),
            self.rate("hint is true", [clause in right for right, _, clause in quotes]),
            self.rate("and is lacking", [clause in right and clause not in text for right, text, clause in quotes]),
        ]
