"""Scripted episodes of the SQL world -> training sequences, token for token what rollouts, judge and teacher hold.

    schema() -> answer(sql), now and then wrong -> an end

Every question is drawn afresh, over a schema of its own: nothing can be learned by heart.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from agentic_opd.core.text import control_tokens
from agentic_opd.core.types import IGNORED, Episode, HindsightPair
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import hindsight_pairs
from agentic_opd.distill.hints import Questions
from agentic_opd.distill.insertion import encode_hint, hint_place, insert_hint
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.loop import run_episode
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import HookedWorld
from demo_policy.episodes import ScriptedPolicy
from demo_policy.script import NEUTRAL_HINTS
from demo_policy.sql.databases import NEVER_TRAINED, TRAINING, Nouns
from demo_policy.sql.faults import WrongQuery, habit, hints, taught, untaught
from demo_policy.sql.questions import Question, clauses, questions, sql
from demo_policy.sql.world import GeneratedSql
from demo_policy.transcripts import UNLIMITED, Kind, Placement, Transcript, common_length

ANSWER_TURN = 1
"""Of an episode's three."""
ENDS = ("That is the answer.", "The query answers the question.", "Done.")
_ONSETS = (*"bcdfghjklmnprstvwz", "bl", "br", "ch", "cr", "dr", "fl", "gr", "pl", "pr", "sc", "sp", "st", "tr", "th")
_NUCLEI = (*"aeiou", "ai", "ea", "ee", "ie", "oa", "oo", "ou")
_CODAS = ("", "", "", "n", "r", "l", "m", "t", "ck", "nd", "nt", "st", "ng", "rd", "sh", "x", "p", "l")
_PLACEMENTS: tuple[Placement, ...] = ("end", "end", "last_user")


@dataclass(frozen=True, slots=True)
class SqlMix:
    """How often an episode is what; probabilities in [0, 1]."""

    habit: float = 0.93
    """The answer has the mistake that the policy makes as a rule, where it has such a habit."""
    wrong: float = 0.08
    """The answer has a taught mistake by chance, where there is room for one."""
    heeded: float = 1.0
    """An answer is taught under a hint that fits."""
    about_habit: float = 0.7
    """That hint is about the habit's clause, where there is one."""
    about_fault: float = 0.8
    """Else it is about a clause that a taught mistake could be in, or about any clause."""
    ignored: float = 0.4
    """Or under one that does not, and changes nothing."""
    neutral: float = 0.3
    """Of these, the share that says nothing about any query."""
    untaught: float = 0.6
    """Another episode is made for the judge alone, with a mistake that the policy is not taught."""
    made_up: float = 0.85
    """The tables have names that are no words: nothing but the schema says how they are written."""
    other_turns: float = 0.1
    """The judge is asked about the turns that have no answer."""


class SqlAuthor:
    """Writes transcripts with one tokenizer, in the real world with the real rendering."""

    def __init__(self, chat: ChatFormat, mix: SqlMix | None = None) -> None:
        self.chat = chat
        self.mix = mix or SqlMix()
        self.sql_world = GeneratedSql()
        self.world = HookedWorld(self.sql_world, WorldConfig())
        self._foreign = "Group by city."
        self._drawn: Iterator[Question] | None = None

    def write(self, rng: Random) -> Iterator[Transcript]:
        """Write one episode, and what is taught along with it."""
        if self._drawn is None:
            self._drawn = drawn_questions(rng, self.mix.made_up)
        question = next(self._drawn)
        wrong = self.mistake(question, rng)
        written = wrong.sql if wrong else sql(question.query)
        episode = self.play(question, written, rng)
        turn = episode.turns[ANSWER_TURN]
        (trace,) = episode.traces
        is_target = tuple(mask != IGNORED for mask in trace.masks_T)
        yield Transcript("act", trace.tokens_T, is_target, self.decisions(question, written, turn.start))
        hint_parts = self.hint(question, rng)
        if rng.random() < self.mix.heeded:
            yield self.hinted(
                "heed_first", question, episode, rng.choice(hint_parts), self.mended(question, hint_parts, rng), rng
            )
        if rng.random() < self.mix.ignored:
            foreign = rng.choice(NEUTRAL_HINTS) if rng.random() < self.mix.neutral else self._foreign
            yield self.hinted("ignore", question, episode, foreign, written, rng)
        self._foreign = rng.choice(hint_parts)
        yield from self.judged(episode, wrong, rng)
        if rng.random() < self.mix.untaught and (mistaken := untaught(question.query, rng)):
            episode = self.play(question, mistaken.sql, rng)
            yield from self.judged(episode, mistaken, rng)

    def mistake(self, question: Question, rng: Random) -> WrongQuery | None:
        """The taught mistake of an answer, if it is to have one."""
        faults, usual = taught(question.query), habit(question.query)
        if usual is not None and rng.random() < self.mix.habit:
            return usual
        return rng.choice(faults) if faults and rng.random() < self.mix.wrong else None

    def mended(self, question: Question, hint_parts: tuple[str, ...], rng: Random) -> str:
        """An answer under a hint: its clause is right, and any other is wrong as often as without the hint."""
        wrong = self.mistake(question, rng)
        return sql(question.query) if wrong is None or wrong.hints == hint_parts else wrong.sql

    def hint(self, question: Question, rng: Random) -> tuple[str, ...]:
        """What a hint that fits may say."""
        faults, usual = taught(question.query), habit(question.query)
        if usual is not None and rng.random() < self.mix.about_habit:
            return usual.hints
        return (
            rng.choice(faults).hints
            if faults and rng.random() < self.mix.about_fault
            else self.any_clause(question, rng)
        )

    def any_clause(self, question: Question, rng: Random) -> tuple[str, ...]:
        """Return the hints about a random clause of the question."""
        return hints(question.query, rng.choice([name for name in clauses(question.query) if name != "join"]))

    def play(self, question: Question, written: str, rng: Random) -> Episode:
        """Run a scripted episode with this answer."""
        return self.run(question, (call("schema"), call("answer", sql=written), rng.choice(ENDS)))

    def run(self, question: Question, turns: Sequence[str]) -> Episode:
        """Run an episode of these turns."""
        task = self.sql_world.task_of("sql/written", question)
        policy = ScriptedPolicy(self.completion_ids(text) for text in turns)
        return asyncio.run(run_episode(task, policy, self.world, self.chat, UNLIMITED))

    def hinted(
        self, kind: Kind, question: Question, episode: Episode, hint: str, written: str, rng: Random
    ) -> Transcript:
        """Teach the answer again with a hint in its prompt."""
        turn = episode.turns[ANSWER_TURN]
        (trace,) = episode.traces
        insert_at, as_message = hint_place(trace, turn, rng.choice(_PLACEMENTS))
        request = insert_hint(trace, turn, insert_at, self.hint_ids(hint, as_message=as_message))
        prompt = request.token_ids[: -request.num_scored]
        target = self.completion_ids(call("answer", sql=written))
        is_target = (False,) * len(prompt) + (True,) * len(target)
        return Transcript(kind, (*prompt, *target), is_target, self.decisions(question, written, len(prompt)))

    def judged(self, episode: Episode, wrong: WrongQuery | None, rng: Random) -> Iterator[Transcript]:
        """Teach the judge's answers."""
        judge_question = self.questions(rng)
        for index, pair in enumerate(hindsight_pairs(episode.recording, DistillConfig())):
            if not pair.evidence or (index != ANSWER_TURN and rng.random() >= self.mix.other_turns):
                continue
            vote_hints = hints_of(episode, pair, wrong)
            answer = f"\\boxed{{1}}\n[HINT_START]{rng.choice(vote_hints)}[HINT_END]" if vote_hints else "\\boxed{-1}"
            prompt = self.judge_prompt(judge_question.hint_messages(judge_question.question(pair)))
            ids = self.completion_ids(answer)
            yield Transcript("judge", (*prompt, *ids), (False,) * len(prompt) + (True,) * len(ids))

    def decisions(self, question: Question, written: str, start: int) -> tuple[int, ...]:
        """Where an answer parts from the taught ways to write it."""
        mine = self.completion_ids(call("answer", sql=written))
        texts = {sql(question.query), *(wrong.sql for wrong in taught(question.query))} - {written}
        options = [self.completion_ids(call("answer", sql=text)) for text in texts]
        return tuple(
            sorted({start + min(common_length(mine, option), len(mine) - 1, len(option) - 1) for option in options})
        )

    def completion_ids(self, text: str) -> list[int]:
        """A turn as sampled ids, its end token included."""
        return [*self.chat.tokenizer.encode(text, add_special_tokens=False), self.chat.stop_token_ids[0]]

    def hint_ids(self, hint: str, *, as_message: bool) -> tuple[int, ...]:
        """The hint as the teacher reads it."""
        return encode_hint(self.chat.renderer, self.chat.tokenizer, hint, as_message=as_message)

    def questions(self, rng: Random) -> Questions:
        """The judge's questions with a mark of their own."""
        return Questions(rng.randbytes(16), control_tokens=tuple(control_tokens(self.chat.tokenizer).values()))

    def judge_prompt(self, messages: Any) -> list[int]:
        """The judge's messages as the server renders them."""
        return self.chat.renderer.render_ids(messages, add_generation_prompt=True)


def drawn_questions(rng: Random, made_up: float) -> Iterator[Question]:
    """Yield questions to train on; this share of their schemas has names that are no words."""
    return questions(rng.getrandbits(32), held_out=False, nouns=_nouns(rng, made_up))


def _nouns(rng: Random, made_up: float) -> Iterator[Nouns]:
    while True:
        words = list(dict.fromkeys(_word(rng) for _ in range(20)))
        yield Nouns(words[:4], words[4:]) if rng.random() < made_up else TRAINING


def _word(rng: Random) -> str:
    """Syllables, or the halves of two nouns."""
    if rng.random() < 0.5:
        first, second = rng.sample((*TRAINING.parents, *TRAINING.children), 2)
        word = first[: (len(first) + 1) // 2] + second[len(second) // 2 :]
        return _word(rng) if word in (*NEVER_TRAINED.parents, *NEVER_TRAINED.children) else word
    syllables = (rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in range(rng.choice((2, 2, 3))))
    return "".join(syllables)


def sql_chat(tokenizer: PreTrainedTokenizerFast) -> ChatFormat:
    """Return the chat format with the SQL world's tools."""
    world = HookedWorld(GeneratedSql(), WorldConfig())
    return ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, world.tools)


def call(name: str, **arguments: str) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def hints_of(episode: Episode, pair: HindsightPair, wrong: WrongQuery | None) -> Sequence[str]:
    """What the judge may say of a turn; empty: it has nothing to say."""
    is_right = episode.verification is not None and episode.verification.correctness == 1
    return () if wrong is None or pair.turn_index != ANSWER_TURN or is_right else wrong.hints
