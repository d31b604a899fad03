"""What the SQL world's policy can do, measured: with and without hints, on questions of both parts, and as a judge."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random

from demo_policy.script import NEUTRAL_HINTS
from demo_policy.sql.author import ANSWER_TURN, SqlAuthor, hints_of
from demo_policy.sql.faults import kind_of, taught
from agentic_opd.distill.hints import parse_vote
from agentic_opd.distill.rescoring import hint_place, insert_hint
from agentic_opd.distill.turns import hindsight_pairs
from agentic_opd.worlds.sql.questions import Question, questions, sql

Sampler = Callable[[Sequence[Sequence[int]], int, float], list[list[int]]]

_MAX_TOKENS = 160


def examine_sql(author: SqlAuthor, sample: Sampler, count: int, seed: int = 1_000_000) -> str:
    """A table of rates.

    Args:
        author: Renders what the policy reads.
        sample: Samples completions of prompts.
        count: Questions of each part.
        seed: Of the questions; none that was trained on.
    """
    lines = list[str]()
    for held_out in (False, True):
        asked = [*islice(questions(seed, held_out=held_out), count)]
        lines += _examined(author, sample, asked, "held out" if held_out else "training")
    return "\n".join(lines)


def _examined(author: SqlAuthor, sample: Sampler, asked: list[Question], part: str) -> list[str]:
    rng = Random(0)
    plain, hinted, foreign = list[list[int]](), list[list[int]](), list[list[int]]()
    wrongs = [rng.choice(taught(one.query) or [author.any_wrong(one, rng)]) for one in asked]
    for one, wrong, other in zip(asked, wrongs, (*wrongs[1:], wrongs[0]), strict=True):
        _, episode = author.play(one, sql(one.query), rng)
        turn = episode.turns[ANSWER_TURN]
        plain.append([*episode.tokens_T[: turn.start]])
        for prompts, hint in ((hinted, rng.choice(wrong.hints)), (foreign, rng.choice((NEUTRAL_HINTS[0], *other.hints)))):
            insert_at, as_message = hint_place(episode, turn, "end")
            request = insert_hint(episode.tokens_T, turn, insert_at, author.hint_ids(hint, as_message=as_message))
            prompts.append([*request.token_ids[: -request.num_scored]])
    lines = list[str]()
    for name, prompts in (("no hint", plain), ("its hint", hinted), ("another's hint", foreign)):
        answers = [_answer(author, prompt, ids) for prompt, ids in zip(prompts, sample(prompts, _MAX_TOKENS, 1.0), strict=True)]
        is_right = [_is_right(author, one, answer) for one, answer in zip(asked, answers, strict=True)]
        lines.append(f"{part:10} {name:16} {sum(is_right) / len(asked):4.0%} of {len(asked)}")
        if name == "no hint":
            kinds = Counter(
                kind_of(one.query, answer or "") or "own"
                for one, answer, right in zip(asked, answers, is_right, strict=True)
                if not right
            )
            lines.append(f"           errors: {', '.join(f'{kind} {n}' for kind, n in kinds.most_common())}")
            for one, answer, right in islice(
                (row for row in zip(asked, answers, is_right, strict=True) if not row[2] and not kind_of(row[0].query, row[1] or "")), 6
            ):
                lines.append(f"             {one.text}\n               {answer}")
                del right
            lines += _judged(author, sample, asked, answers, rng, part)
    return lines


def _judged(
    author: SqlAuthor, sample: Sampler, asked: list[Question], answers: list[str | None], rng: Random, part: str
) -> list[str]:
    """The judge on the policy's own answers: does its hint name a clause that the answer lacks?"""
    prompts, rows = list[list[int]](), list[tuple[Question, str, bool]]()
    questions_asked = author.questions(rng)
    for one, answer in zip(asked, answers, strict=True):
        if answer is None:
            continue
        _, episode = author.play(one, answer, rng)
        pair = hindsight_pairs(episode, 4000)[ANSWER_TURN]
        prompts.append(author.judge_prompt(questions_asked.hint_messages(questions_asked.question(pair))))
        rows.append((one, answer, episode.verification is not None and episode.verification.correctness == 1))
    votes = [parse_vote(author.chat.tokenizer.decode(ids[:-1])) for ids in sample(prompts, _MAX_TOKENS, 0.7)]
    decided = [vote.decision == (-1 if right else 1) for vote, (_, _, right) in zip(votes, rows, strict=True)]
    hinted = [(one, answer, vote.hint) for vote, (one, answer, right) in zip(votes, rows, strict=True) if vote.hint and not right]
    true = [_is_of(one, hint) for one, _, hint in hinted]
    new = [_is_of(one, hint) and _clause(hint) not in answer for one, answer, hint in hinted]
    return [
        f"{part:10} judge            {sum(decided) / len(rows):4.0%} decisions right of {len(rows)}; of {len(hinted)} hints "
        f"{sum(true) / max(1, len(true)):.0%} are true of the question, {sum(new) / max(1, len(new)):.0%} say what the answer lacked"
    ]


def _is_of(one: Question, hint: str) -> bool:
    return _clause(hint).replace("ORDER BY ", "") in sql(one.query)


def _clause(hint: str) -> str:
    """What a hint of `faults` quotes."""
    for start in ("Select ", "Begin with SELECT ", "Take the rows from ", "It needs FROM ", "Join on ", "The tables meet ON "):
        if hint.startswith(start):
            return hint.removeprefix(start).rstrip(".")
    for start in ("Filter by ", "It needs WHERE ", "Group by ", "It needs GROUP BY ", "Keep groups having "):
        if hint.startswith(start):
            return hint.removeprefix(start).rstrip(".")
    return hint.removeprefix("It needs HAVING ").removeprefix("Order by ").removeprefix("It needs ORDER BY ").rstrip(".")


def _answer(author: SqlAuthor, prompt: list[int], ids: list[int]) -> str | None:
    turn = author.chat.parse(prompt, ids, 0)
    for call in turn.tool_calls:
        if call.name == "answer" and call.arguments and isinstance(call.arguments.get("sql"), str):
            return call.arguments["sql"]
    return None


def _is_right(author: SqlAuthor, one: Question, answer: str | None) -> bool:
    if answer is None:
        return False
    from agentic_opd.worlds.sql.world import Desk

    task = author.sql_world.task_of("sql/examined", one)
    verification = asyncio.run(author.world.verify(task, _left(Desk(one.shown, answer))))
    return verification.correctness == 1


def _left(desk: object) -> object:
    from agentic_opd.worlds.own import Left

    return Left(desk, {})
