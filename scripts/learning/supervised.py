"""The supervised start of --world multiturn and babyai: a policy that imitated right episodes of the training tasks.

    task with right calls -> the environment's own episode of a policy that writes them -> group -> trainer -> weights

Each right call is a turn, and each turn of the user ends with one word; a game ends by itself. The right calls of a
game are those of a bot (babyai_bot.py). The episode is played as every other; those that the verdict does not call
right are left out. The trainer learns the sampled tokens (loss_parts.imitation).

Half of the function calls follow a wrong call and its error, because a policy that is trained on right calls alone
stops after an error. In games the bot makes mistakes, because a policy that has seen none repeats a step that changes
nothing. The tokens of mistakes are context and are not learned. Some steps of games follow a hint, which says what the
world would have said of another action: a policy that has never read a hint does not read those of its teacher.
"""

import asyncio
import json
import random
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.processes import end_of
from agentic_opd.core.text import text_lines
from agentic_opd.core.types import IGNORED, Completion, Episode, Task
from agentic_opd.distill.insertion import HintEncoder, hint_place
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.loop import run_episode
from agentic_opd.rollout.renderer import configured_renderer, load_tokenizer
from agentic_opd.wire.files import JsonLines
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from agentic_opd.worlds.choose import make_world
from agentic_opd_environments.babyai.world import LevelSeed
from agentic_opd_environments.calls import Function
from agentic_opd_environments.conversations import ConversationCase, PythonCall
from agentic_opd_environments.functions import FunctionCase

CLOSING = "Done."
"""What ends a turn of the user."""
AT_ONCE = 4
START_BATCH = 8
WARMUP_STEPS = 8
PARTS_FILE = Path(__file__).with_name("loss_parts.py")
MISTAKES = 0.5
"""Share of function calls that follow a wrong call."""
GAME_MISTAKES = 0.25
"""Share of a game's steps that are mistakes."""
GAME_HINTS = 0.5
"""Share of the right steps with a hint, among those where some action would change nothing."""
VERBS = ("get", "find", "list", "show", "open", "check", "set", "make", "create", "run", "read", "add", "fetch", "do")
"""A wrong function name has another one of these."""


class SupervisedError(Exception):
    """The trainer of the supervised start ended badly."""


class Start(NamedTuple):
    """How long the supervised start is."""

    episodes: int
    """Right episodes of training tasks, of conversations the shortest ones."""
    epochs: int
    lr: float
    questions: int = 0
    """Questions of one turn beside them, of `Subject.start_questions`."""


class WrittenTurn(NamedTuple):
    """One turn of a right episode."""

    message: dict[str, Any]
    is_mistake: bool = False
    """Whether it is a wrong call, which the next one corrects."""
    hint: str | None = None
    """A hint that its prompt ends with."""


@dataclass(slots=True)
class RightCalls:
    """A policy that makes a task's right calls, one a turn."""

    chat: ChatFormat
    turns: Iterator[WrittenTurn]
    written: list[WrittenTurn] = field(default_factory=list[WrittenTurn])
    """The turns so far."""

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        """Return the next turn."""
        turn = next(self.turns)
        self.written.append(turn)
        ids = self.chat.written([{"role": "user", "content": "-"}, turn.message])
        return Completion(ids, (0.0,) * len(ids))


def right_turns(data: ConversationCase | FunctionCase | LevelSeed, draws: random.Random) -> list[WrittenTurn]:
    """Return the agent's turns in a right conversation, of a question's answer, or of the bot's game, with mistakes."""
    if isinstance(data, LevelSeed):
        from learning.babyai_bot import bot_steps

        steps = bot_steps(data.level, data.seed, None, GAME_MISTAKES, GAME_HINTS, draws)
        turns = [calling("act", {"action": step.action}, is_mistake=step.is_mistake) for step in steps]
        return [turn._replace(hint=step.hint) for turn, step in zip(turns, steps, strict=True)]
    return [turn for calls in right_calls(data) for turn in (*with_mistakes(calls, data.functions, draws), _CLOSED)]


def right_calls(data: ConversationCase | FunctionCase) -> list[list[tuple[str, dict[str, Any]]]]:
    """Return the right calls after each message of the user; of several allowed values the first."""
    if isinstance(data, ConversationCase):
        return [[(call.name, named_arguments(call, data)) for call in calls] for calls in data.right_calls]
    answers = [pair for answer in data.answers for pair in answer.items()]
    return [
        [(name, {key: values[0] for key, values in allowed.items() if values[0] != ""}) for name, allowed in answers]
    ]


def with_mistakes(
    calls: Sequence[tuple[str, dict[str, Any]]], functions: Mapping[str, Function], draws: random.Random
) -> Iterator[WrittenTurn]:
    """Yield a turn for each call, before some of them one with a mistake."""
    for name, arguments in calls:
        if draws.random() < MISTAKES:
            yield calling(*mistaken(name, arguments, functions, draws), is_mistake=True)
        yield calling(name, arguments)


def mistaken(
    name: str, arguments: Mapping[str, Any], functions: Mapping[str, Function], draws: random.Random
) -> tuple[str, dict[str, Any]]:
    """Return the call with another function name, another parameter name, a parameter more, or a required one less.

    A parameter more is what a start without such mistakes made and repeated in four of five calls.
    """
    parameters = {*functions[name]["parameters"]["properties"]}
    required = [key for key in functions[name]["parameters"].get("required") or () if key in arguments]
    all_parameters = {key for function in functions.values() for key in function["parameters"]["properties"]}
    foreign_parameters = sorted(all_parameters - parameters) or [f"{name}_value"]
    kinds = {"function": 3, "parameter": 3 if arguments else 0, "more": 3, "missing": 1 if required else 0}
    match draws.choices([*kinds], [*kinds.values()])[0]:
        case "function":
            words = name.split("_")[1:] or [name]
            names = ["_".join((verb, *words)) for verb in VERBS]
            return draws.choice([wrong_name for wrong_name in names if wrong_name not in functions]), {**arguments}
        case "parameter":
            renamed, wrong_key = draws.choice([*arguments]), draws.choice(foreign_parameters)
            return name, {wrong_key if key == renamed else key: value for key, value in arguments.items()}
        case "more":
            more = {draws.choice(foreign_parameters): draws.choice([*arguments.values()] or [1])}
            return name, draws.choice(({**more, **arguments}, {**arguments, **more}))
        case _:
            left_out = draws.choice(required)
            return name, {key: value for key, value in arguments.items() if key != left_out}


def named_arguments(call: PythonCall, case: ConversationCase) -> dict[str, Any]:
    """Return a call's arguments by name, those by position in the document's order."""
    names = case.functions[call.name]["parameters"]["properties"]
    return {**dict(zip(names, call.positional, strict=False)), **call.named}


def calling(name: str, arguments: Mapping[str, Any], *, is_mistake: bool = False) -> WrittenTurn:
    """Return a turn that makes one call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call_0_0", "type": "function", "function": function}
    return WrittenTurn({"role": "assistant", "content": "", "tool_calls": [call]}, is_mistake)


_CLOSED = WrittenTurn({"role": "assistant", "content": CLOSING})


def to_learn(episode: Episode, written: Sequence[WrittenTurn], hints: HintEncoder) -> ScoredRollout:
    """Return a right episode as a rollout: the tokens of mistakes are context, and hints stand before their turns."""
    (trace,) = episode.traces
    tokens, masks, logprobs = [*trace.tokens_T], [*trace.masks_T], [*trace.logprobs_T]
    for turn, (_, is_mistake, hint) in reversed([*zip(trace.turns, written, strict=True)]):
        if is_mistake:
            span, length = slice(turn.start, turn.end), turn.end - turn.start
            masks[span], logprobs[span] = [IGNORED] * length, [1.0] * length
        if hint is not None:
            place = hint_place(trace, turn, "end")
            ids = hints.encode(hint, as_message=place.as_message)
            at = slice(place.insert_at, place.insert_at)
            tokens[at], masks[at], logprobs[at] = ids, [IGNORED] * len(ids), [1.0] * len(ids)
    rollout = ScoredRollout.of(episode, trace, include_messages=True)
    return replace(rollout, tokens_T=tokens, masks_T=masks, logprobs_T=logprobs)


def imitated(train: Sequence[Task], held_out: Sequence[Task], start: Start) -> list[Task]:
    """Return the tasks of the start, the same ones in each run: the shortest conversations and questions, or any games.

    A question with a function of a held-out task's name is left out, unless training tasks have it too.
    """
    draws = random.Random(0)
    if isinstance(train[0].data, LevelSeed):
        return draws.sample(train, min(start.episodes, len(train)))
    conversations = [task for task in train if isinstance(task.data, ConversationCase)]
    held_back = function_names(held_out) - function_names(conversations)
    questions = [
        task for task in train if isinstance(task.data, FunctionCase) and not function_names([task]) & held_back
    ]
    return [
        *shortest(conversations, start.episodes),
        *draws.sample(questions, min(start.questions, len(questions))),
    ]


def function_names(tasks: Iterable[Task]) -> set[str]:
    """Return the names of the functions of all tasks, without a prefix such as `math.`."""
    return {name.rpartition(".")[2] for task in tasks for name in task.data.functions}


def shortest(tasks: Iterable[Task], count: int) -> list[Task]:
    """Return the `count` tasks with the fewest right calls, of equal ones those with the shorter first prompts."""
    return sorted(tasks, key=lambda task: (sum(map(len, task.data.right_calls)), len(task.prompt)))[:count]


def with_questions(world: Mapping[str, Any], names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the world's settings with files of questions from BFCL's folder, of which none is held out."""
    if not names:
        return {**world}
    questions = [*world["questions"], *(str(folder / name) for name in names)]
    answers = [*world["answers"], *(str(folder / "possible_answer" / name) for name in names)]
    return {**world, "questions": questions, "answers": answers, "held_out": 0.0}


async def write_right_episodes(config: AgenticOPDEnvConfig, model: Path, path: Path, start: Start) -> tuple[int, int]:
    """Play training tasks (see `imitated`), and write a group for each that is right to `path`, in random order.

    Returns:
        How many are right, and how many were played.

    Raises:
        OPDError: the world or its sandbox does not work.
    """
    world, tokenizer = make_world(config), load_tokenizer(str(model))
    renderer = configured_renderer(tokenizer, config.renderer)
    chat, hints = ChatFormat(renderer, tokenizer, world.tools), HintEncoder(renderer, tokenizer)
    tasks = imitated(*await world.train_and_eval_tasks(), start)
    random.Random(1).shuffle(tasks)
    slots = asyncio.Semaphore(AT_ONCE)

    async def played(task: Task) -> tuple[Episode, list[WrittenTurn]]:
        async with slots:
            turns = right_turns(task.data, random.Random(task.task_id))
            policy = RightCalls(chat.with_tools(task.tools), iter(turns))
            return await run_episode(task, policy, world, chat, config), policy.written

    episodes = await gather_all(map(played, tasks))
    fresh, right = path.with_suffix(".new"), 0
    file = JsonLines(fresh)
    for episode, written in episodes:
        if episode.verification is None or not episode.verification.all_passed:
            continue
        rollout = to_learn(episode, written, hints)
        file.write(ScoredGroup((rollout,), item_id=episode.task.task_id, task_id=episode.task.task_id).to_wire())
        right += 1
    file.close()
    fresh.replace(path)
    return right, len(episodes)


async def supervised_start(config: AgenticOPDEnvConfig, model: Path, folder: Path, start: Start) -> Path:
    """Return the folder of a policy that imitated right episodes; an interrupted training continues.

    The checkpoints of a finished training are removed: with the optimizer's state they take twelve bytes a parameter.

    Raises:
        SupervisedError: the trainer ended badly; the message holds the end of its log.
    """
    final, groups = folder / "final", folder / "groups.jsonl"
    if final.exists():
        return final
    if not groups.exists():
        right, total = await write_right_episodes(config, model, groups, start)
        print(f"supervised start: {right} of {total} episodes are right with their right calls", file=sys.stderr)
    has_checkpoints = (folder / "checkpoints").exists()
    steps = len(text_lines(groups.read_text())) * start.epochs // START_BATCH
    settings = {
        **{"model": model, "output_dir": folder, "groups": f"[{groups}]", "groups_epochs": start.epochs},
        **{"batch_size": START_BATCH, "epochs_per_batch": 1, "minibatches": 1, "lr": start.lr},
        "warmup_steps": min(WARMUP_STEPS, steps // 4),
        **{"micro_tokens": 2048, "precision": "bf16", "save_every": 10, "resume": str(has_checkpoints).lower()},
        "loss": json.dumps({"custom": {f"{PARTS_FILE}:imitation": 1.0}, "temperature": 1.0}),
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    with (folder / "trainer.log").open("ab") as log:
        command = [sys.executable, "-m", "agentic_opd.training", *flags]
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            raise
    if code != 0:
        raise SupervisedError(f"the supervised start ended with code {code}:\n{end_of(folder / 'trainer.log')}")
    shutil.rmtree(folder / "checkpoints")
    return final
