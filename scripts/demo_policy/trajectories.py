"""Scripted episodes -> the question about the whole trajectory, and its right answer: the turns at fault with hints.

tasks of several functions (`projects`)   the turn that wrote the mistake, which the tests show turns later
the usual episodes (`script`)             each attempt that was shown to be wrong, and calls that failed
right ones                                no turn
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from agentic_opd.core.types import Episode, HindsightPair, Message
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import hindsight_pairs, whole_rollout
from agentic_opd.distill.hints import Questions
from agentic_opd.distill.trajectory import UNKNOWN_CONTEXT_CHARS, Window, parse_answer, windows_of
from agentic_opd.rollout.chat_format import ChatFormat
from demo_policy.evaluate import Rate, Sampler
from demo_policy.projects import ProjectRates, ProjectWorld, combinations_of, plan_project, project_task
from demo_policy.script import Rates, Step, plan_episode, plan_nothing
from demo_policy.transcripts import Author, Transcript, hints_of, shows_failure
from demo_policy.variants import load_variants

MOST_TURNS = 3
"""Turns that an answer names at most; the first ones."""
ANSWER_TOKENS = 256
NO_TURN = "\\boxed{-1}"
RATES = (
    "can be read",
    "right episodes: names none",
    "wrong episodes: names all turns at fault and no other",
    "named turns that are at fault",
    "hints of the mistake",
)
"""What is measured of answers; all but the first of those that can be read."""
_CHOICES = re.compile(r"\{-?\d+\}|(?<=\[HINT_END\])\s|(?<=: )(?:right|wrong)\b")
"""Matches the numbers of an answer, the space after a hint, and the `right` or `wrong` of a line of reasoning."""
_FUNCTION = re.compile(r"^def (\w+)\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """An episode, and what the judge should say of it."""

    episode: Episode
    at_fault: Mapping[int, Sequence[str]]
    """Turn -> hints that would have helped, in order."""
    distances: Mapping[int, int]
    """Turn -> number of turns between it and the first result that shows its mistake."""
    reasoning: str = ""
    """What the judge should say before the first box: a line for each turn that it has to judge."""


class TrajectoryAuthor(Protocol):
    """Draws episodes of a world, with the turns that are at fault."""

    chat: ChatFormat

    def questions(self, rng: Random) -> Questions:
        """Return the judge's questions with a mark of their own."""
        ...

    def judge_prompt(self, messages: list[Message]) -> list[int]:
        """Return the judge's messages as the server renders them."""
        ...

    def draw(self, rng: Random, *, held_out: bool) -> JudgedEpisode:
        """Draw an episode; a held-out one has nothing to train on."""
        ...

    def planted(self, rng: Random) -> JudgedEpisode:
        """Draw a held-out episode with mistakes that show one to three turns later."""
        ...


@dataclass(frozen=True, slots=True)
class TrajectoryMix:
    """How often an episode is what; probabilities in [0, 1]."""

    project: float = 0.7
    """A task of several functions; else one of the usual ones."""
    without_examples: float = 0.5
    """The task has no examples: only the verdict shows a mistake."""
    undone: float = 0.04
    """A usual episode ends without a solution."""
    asked_turns: float = 0.2
    """Turns of a task of several functions about which the judge of turns is asked, too."""


class CodingTrajectories(Author):
    """Writes the trajectory judge's transcripts in the coding world."""

    def __init__(self, chat: ChatFormat, world: ProjectWorld, mix: TrajectoryMix | None = None) -> None:
        super().__init__(chat, world, Rates())
        self.trajectory_mix = mix or TrajectoryMix()
        self.combinations = {held_out: combinations_of(held_out=held_out) for held_out in (True, False)}

    def write(self, rng: Random) -> Iterator[Transcript]:
        """Write the question about one episode with its answer, and now and then those about its turns."""
        judged = self.draw(rng, held_out=False)
        yield trajectory_transcript(self, judged, rng)
        if kind_of(judged) != "project":
            return
        questions = self.questions(rng)
        for index, pair in enumerate(hindsight_pairs(judged.episode.recording, DistillConfig())):
            if pair.evidence and rng.random() < self.trajectory_mix.asked_turns:
                hints = judged.at_fault.get(index, ()) if shows_failure(pair) else ()
                answer = f"\\boxed{{1}}\n[HINT_START]{rng.choice(hints)}[HINT_END]" if hints else "\\boxed{-1}"
                yield self.answer("judge", questions.hint_messages(questions.question(pair)), answer)

    def draw(self, rng: Random, *, held_out: bool) -> JudgedEpisode:
        """See `TrajectoryAuthor`; of the usual episodes no task is held out."""
        examples = rng.random() >= self.trajectory_mix.without_examples
        if rng.random() < self.trajectory_mix.project:
            return self.project(rng, ProjectRates(), held_out=held_out, examples=examples)
        task = rng.choice(self.tasks[examples])
        is_undone = rng.random() < self.trajectory_mix.undone
        variants = load_variants()[task.entry_point or ""]
        steps = (
            plan_nothing(examples=examples) if is_undone else plan_episode(variants, rng, self.rates, examples=examples)
        )
        episode = self.play(task, steps, rng)
        hints = at_fault(steps, hindsight_pairs(episode.recording, DistillConfig()))
        return JudgedEpisode(episode, hints, {}, reasoning(steps, hints))

    def planted(self, rng: Random) -> JudgedEpisode:
        """See `TrajectoryAuthor`."""
        rates = ProjectRates(right=0.0)
        while True:
            examples = rng.random() >= self.trajectory_mix.without_examples
            judged = self.project(rng, rates, held_out=True, examples=examples)
            if all(1 <= distance <= 3 for distance in judged.distances.values()):
                return judged

    def project(self, rng: Random, rates: ProjectRates, *, held_out: bool, examples: bool) -> JudgedEpisode:
        """Draw an episode of a task of several functions."""
        names = list(rng.choice(self.combinations[held_out]))
        rng.shuffle(names)
        steps = plan_project([load_variants()[name] for name in names], rng, rates, examples=examples)
        episode = self.play(project_task(names, examples=examples), steps, rng)
        hints = {index: step.hints for index, step in enumerate(steps) if step.hints}
        shown_at = next((index for index, step in enumerate(steps) if step.kind == "run"), len(steps) - 1)
        return JudgedEpisode(episode, hints, {index: shown_at - index for index in hints}, reasoning(steps, hints))


def at_fault(steps: Sequence[Step], pairs: Sequence[HindsightPair]) -> dict[int, Sequence[str]]:
    """Return the turns of a usual episode that are at fault, with their hints.

    An end is at fault only if nothing was written: else the mistake is the turn's that wrote the solution.
    """
    hints = {
        index: hints_of(step, pair)
        for index, (step, pair) in enumerate(zip(steps, pairs, strict=True))
        if pair.evidence and (step.kind != "final" or step.before.solution is None)
    }
    return {index: texts for index, texts in hints.items() if texts}


def reasoning(steps: Sequence[Step], wrong: Collection[int]) -> str:
    """Return a line for each turn that writes a function or is at fault: `- Turn 2 flatten: wrong: return flat`.

    It names the function, says right or wrong, and quotes the line that is wrong.
    """
    lines = list[str]()
    for index, step in enumerate(steps):
        functions = [name for _, arguments in step.calls for name in _FUNCTION.findall("\n".join(arguments.values()))]
        fault = step.after.fault
        if functions or index in wrong:
            quote = f": {fault.bad_line}" if fault is not None else ""
            verdict = f"wrong{quote}" if index in wrong else "right"
            lines.append(f"- {' '.join((f'Turn {index + 1}', *functions))}: {verdict}\n")
    return "".join(lines)


def trajectory_answer(hints: Mapping[int, str], reasoning: str = "") -> str:
    """Return the answer that names these turns, each with its hint, after the reasoning."""
    answers = [f"\\boxed{{{index + 1}}}\n[HINT_START]{hint}[HINT_END]" for index, hint in hints.items()]
    return reasoning + ("\n".join(answers) or NO_TURN)


def trajectory_transcript(author: TrajectoryAuthor, judged: JudgedEpisode, rng: Random) -> Transcript:
    """Teach the right answer to the question about an episode; its numbers, and where it ends, count more."""
    prompt = author.judge_prompt(trajectory_messages(author.questions(rng), judged.episode))
    hints = {index: rng.choice(texts) for index, texts in list(judged.at_fault.items())[:MOST_TURNS]}
    answer = trajectory_answer(hints, judged.reasoning)
    encoded = author.chat.tokenizer(answer, add_special_tokens=False, return_offsets_mapping=True)
    ids = [*encoded["input_ids"], author.chat.stop_token_ids[0]]
    choices = [match.span() for match in _CHOICES.finditer(answer)]
    decisions = [
        len(prompt) + position
        for position, (start, end) in enumerate(encoded["offset_mapping"])
        if any(start < choice_end and choice_start < end for choice_start, choice_end in choices)
    ]
    is_target = (False,) * len(prompt) + (True,) * len(ids)
    return Transcript("judge_trajectory", (*prompt, *ids), is_target, (*decisions, len(prompt) + len(ids) - 1))


def trajectory_messages(questions: Questions, episode: Episode) -> list[Message]:
    """Return the messages that ask about an episode."""
    config = DistillConfig()
    (window,) = windows_of(whole_rollout(episode.recording, config), questions, UNKNOWN_CONTEXT_CHARS)
    return questions.trajectory_messages(window.question, config.judge.max_turns)


def named_turns(answer: str, episode: Episode) -> dict[int, str] | None:
    """Return the turns that an answer names, each with its hint; None if it can't be read."""
    parsed = parse_answer(answer, Window("", range(1, len(episode.turns) + 1)), MOST_TURNS)
    if not parsed.vote.kind.is_readable:
        return None
    return {turn.number - 1: turn.hint for turn in parsed.named}


# --------------------------------------------------------------------------------------------------------- measurement


def examine_trajectories(
    author: TrajectoryAuthor, sample: Sampler, count: int, temperature: float, seed: int = 1_000_000
) -> str:
    """Return rates of the answers about held-out episodes.

    Args:
        author: Draws the episodes.
        sample: Samples completions of prompts.
        count: Episodes.
        temperature: Of the answers.
        seed: Of the episodes; none that was trained on.
    """
    rng = Random(seed)
    episodes = [author.draw(rng, held_out=True) for _ in range(count)]
    questions = author.questions(rng)
    prompts = [author.judge_prompt(trajectory_messages(questions, judged.episode)) for judged in episodes]
    answers = [author.chat.tokenizer.decode(ids[:-1]) for ids in sample(prompts, ANSWER_TOKENS, temperature)]
    rates = {kind: {name: Rate() for name in RATES} for kind in sorted({kind_of(judged) for judged in episodes})}
    for judged, answer in zip(episodes, answers, strict=True):
        measure(judged, answer, rates[kind_of(judged)])
    return "\n".join(
        f"{kind:10}{name:55}{rate} of {rate.tries}" for kind, rows in rates.items() for name, rate in rows.items()
    )


def kind_of(judged: JudgedEpisode) -> str:
    """Return what kind of task an episode has."""
    return judged.episode.task.task_id.partition("/")[0]


def measure(judged: JudgedEpisode, answer: str, rates: Mapping[str, Rate]) -> None:
    """Count what an answer about an episode says."""
    named = named_turns(answer, judged.episode)
    rates["can be read"].add(named is not None)
    if named is None:
        return
    if not judged.at_fault:
        rates["right episodes: names none"].add(not named)
        return
    rates["wrong episodes: names all turns at fault and no other"].add(named.keys() == judged.at_fault.keys())
    for index, hint in named.items():
        rates["named turns that are at fault"].add(index in judged.at_fault)
        if index in judged.at_fault:
            rates["hints of the mistake"].add(hint in judged.at_fault[index])
