"""Compare verdicts on BFCL's conversations of several user turns with those of BFCL's checker.

All code of BFCL runs in a sandbox (bfcl_worker.py), some hundred conversations a process.
"""

import asyncio
import copy
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_opd.core.types import Task, ToolCall
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.protocol import Limits, Mount
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import HookedWorld
from agentic_opd_environments import api_process
from agentic_opd_environments.conversations import ConversationCase, PythonCall
from agentic_opd_environments.functions import FunctionsWorld

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
KINDS = (
    *("left out", "doubled", "swapped", "other turn", "no call in a turn", "needless", "replaced"),
    *("value", "value", "value", "type", "argument left out", "argument added", "argument renamed", "unknown function"),
)
_A_PROCESS, _PROCESSES, _LIMIT_S = 250, 2, 900.0

Turns = list[list[PythonCall]]
"""The calls of each user turn."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Calls for a conversation, and how they came about."""

    task: Task
    kind: str
    turns: Turns


def conversation_world(site: Path) -> FunctionsWorld:
    """Return the world of BFCL's conversations."""
    data = site / "bfcl_eval/data"
    return FunctionsWorld(
        [str(data / f"BFCL_v4_{category}.json") for category in CATEGORIES],
        [str(data / f"possible_answer/BFCL_v4_{category}.json") for category in CATEGORIES],
        held_out=0.0,
        apis=str(site / "bfcl_eval/eval_checker/multi_turn_eval/func_source_code"),
        documents=str(data / "multi_turn_func_doc"),
    )


def compare_conversations(
    site: Path, num_changed: int, num_played: int, dice: random.Random, altered: Callable[[Any, random.Random], Any]
) -> Counter[str]:
    """Judge all right calls and `num_changed` changed ones by both checkers; print the differences, return the counts.

    Args:
        site: Folder with bfcl-eval and mpmath.
        num_changed: Number of conversations with one change.
        num_played: Number of conversations whose right calls are played call by call in the world.
        dice: Chooses the conversations and their changes.
        altered: Returns another value of the same type.
    """
    tasks = conversation_world(site).tasks()
    print(f"conversations: {len(tasks)}", flush=True)
    right = [Judged(task, "right", [[*calls] for calls in task.data.right_calls]) for task in tasks]
    pool: dict[str, list[PythonCall]] = defaultdict(list)
    for case in right:
        for call in (call for turn in case.turns for call in turn):
            pool[call.name].append(call)
    cases = [*right, *(changed(dice.choice(right), pool, dice, altered) for _ in range(num_changed))]
    verdicts = asyncio.run(_judge(site.resolve(), cases))
    counts = Counter[str]()
    for case, (ours, theirs) in zip(cases, verdicts, strict=True):
        if isinstance(theirs, str):
            verdict = f"BFCL's checker {theirs}"
        else:
            verdict = "accepted by BFCL's checker" if theirs is None else "refused by BFCL's checker"
        counts[f"conversations, {case.kind}: {verdict}"] += 1
        if ours != theirs and not isinstance(theirs, str):
            counts["differences"] += 1
            calls = [[api_process.in_words(as_job(call)) for call in turn] for turn in case.turns]
            print(f"DIFFERENT: {case.task.task_id}, {case.kind}: ours {ours!r}, theirs {theirs!r}: {json.dumps(calls)}")
    playable = [task for task in tasks if not _calls_too_early(task.data)]
    counts["conversations whose right calls use a function before the user brings it"] = len(tasks) - len(playable)
    counts["differences"] += asyncio.run(_played(site, dice.sample(playable, num_played)))
    counts["conversations, right: played call by call"] += num_played
    return counts


def as_job(call: PythonCall) -> Any:
    return call.job


def changed(
    right: Judged, pool: dict[str, list[PythonCall]], dice: random.Random, altered: Callable[[Any, random.Random], Any]
) -> Judged:
    """Return the calls of a conversation with one random change."""
    turns = [[*calls] for calls in right.turns]
    case: ConversationCase = right.task.data
    turn = dice.choice([index for index, calls in enumerate(turns) if calls])
    calls, kind = turns[turn], dice.choice(KINDS)
    position = dice.randrange(len(calls))
    call = calls[position]
    foreign = dice.choice([*case.functions])
    needless = dice.choice(pool.get(foreign) or [PythonCall(foreign)])
    match kind:
        case "left out":
            del calls[position]
        case "doubled":
            calls.insert(position, call)
        case "swapped":
            target_position = dice.randrange(len(calls))
            calls[position], calls[target_position] = calls[target_position], call
        case "other turn":
            del calls[position]
            target = dice.choice(turns)
            target.insert(dice.randint(0, len(target)), call)
        case "no call in a turn":
            calls.clear()
        case "needless":
            target = dice.choice(turns)
            target.insert(dice.randint(0, len(target)), needless)
        case "replaced":
            calls[position] = needless
        case "unknown function":
            calls.insert(position, PythonCall("no_such_function", (), dict(call.named)))
        case _:
            calls[position] = _with_other_arguments(call, kind, dice, altered)
    return Judged(right.task, kind, turns)


def _with_other_arguments(
    call: PythonCall, kind: str, dice: random.Random, altered: Callable[[Any, random.Random], Any]
) -> PythonCall:
    positional, named = copy.deepcopy([*call.positional]), copy.deepcopy(dict(call.named))
    argument_slots: Sequence[tuple[Any, Any]] = [*((positional, index) for index in range(len(positional)))]
    argument_slots = [*argument_slots, *((named, key) for key in named)]
    if kind == "argument added" or not argument_slots:
        return PythonCall(call.name, positional, {**named, "extra_parameter": 1})
    arguments, key = dice.choice(argument_slots)
    if kind == "value":
        arguments[key] = altered(arguments[key], dice)
    elif kind == "type":
        arguments[key] = dice.choice(["1", 1, 1.5, True, [], ["a"], {}, {"a": 1}, None])
    elif kind == "argument left out":
        del arguments[key]
    else:
        value = arguments.pop(key)
        named["renamed_parameter"] = value
    return PythonCall(call.name, positional, named)


def _as_python(call: PythonCall) -> str:
    named = [f"{name}={value!r}" for name, value in call.named.items()]
    return f"{call.name}({', '.join([*map(repr, call.positional), *named])})"


def _line(case: Judged) -> str:
    """Return a line of the worker's input."""
    conversation: ConversationCase = case.task.data
    right = conversation.right_calls
    job = {
        "apis": [
            {"name": api.name, "module": api.module, "state": api.state, "long_context": conversation.long_context}
            for api in conversation.apis
        ],
        "turns": [
            {"made": [call.job for call in calls], "without_effect": 0, "right": [call.job for call in right_calls]}
            for calls, right_calls in zip(case.turns, right, strict=True)
        ],
        "made": [[*map(_as_python, calls)] for calls in case.turns],
        "right": [[*map(_as_python, calls)] for calls in right],
        "entry": {
            "id": case.task.task_id.removeprefix("functions/"),
            "initial_config": {api.name: api.state for api in conversation.apis},
            "involved_classes": [api.name for api in conversation.apis],
        },
    }
    return json.dumps(job)


async def _judge(site: Path, cases: Sequence[Judged]) -> list[tuple[Any, Any]]:
    """Return the verdicts of both checkers on each case."""
    programs = [Path(api_process.__file__), Path(__file__).with_name("bfcl_worker.py")]
    mounts = [Mount(site, "/run/site"), *(Mount(path, f"/run/check/{path.name}") for path in programs)]
    slots, num_judged = asyncio.Semaphore(_PROCESSES), 0

    async def judge(part: Sequence[Judged]) -> list[tuple[Any, Any]]:
        nonlocal num_judged
        async with slots, BubblewrapSandbox(Limits(memory_mb=2048), mounts) as sandbox:
            stdin = "".join(f"{_line(case)}\n" for case in part).encode()
            result = await sandbox.run("python -I /run/check/bfcl_worker.py", _LIMIT_S, stdin=stdin)
        lines = result.text.splitlines()
        if result.exit_code != 0 or len(lines) != len(part):
            raise SystemExit(f"the worker judged {len(lines)} of {len(part)} conversations: {result.text[-2000:]}")
        num_judged += len(part)
        print(f"{num_judged} of {len(cases)} conversations are judged", flush=True)
        return [(ours, theirs) for ours, theirs in map(json.loads, lines)]

    parts = [cases[start : start + _A_PROCESS] for start in range(0, len(cases), _A_PROCESS)]
    return [verdict for verdicts in await asyncio.gather(*map(judge, parts)) for verdict in verdicts]


def _calls_too_early(case: ConversationCase) -> bool:
    """Return whether right calls use a function before the user brings it: BFCL runs it, the world refuses it."""
    first_turns = {name: turn for turn, names in case.held_back.items() for name in names}
    return any(turn < first_turns.get(call.name, 0) for turn, calls in enumerate(case.right_calls) for call in calls)


async def _played(site: Path, tasks: Sequence[Task]) -> int:
    """Play the right calls of each task in the world, call by call; return for how many the verdict is not "right"."""
    world, num_wrong = HookedWorld(conversation_world(site), WorldConfig()), 0
    for task in tasks:
        case: ConversationCase = task.data
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        async with world.session(task) as session:
            for calls in case.right_calls:
                for call in calls:
                    parameters = case.functions[call.name]["parameters"]["properties"]
                    arguments = {**dict(zip(parameters, call.positional, strict=False)), **call.named}
                    await session.run_tool(ToolCall("call", call.name, arguments, ""))
                    messages.append({"role": "assistant", "content": "", "tool_calls": [{"name": call.name}]})
                messages.append({"role": "assistant", "content": "Done."})
                reply = await session.user_reply(messages)
                messages += [] if reply is None else [{"role": "user", "content": reply}]
            left = await session.collect(messages)
        verification = await world.verify(task, left)
        if not verification.all_passed:
            num_wrong += 1
            print(f"PLAYED: {task.task_id}: {verification.judge_report}")
    return num_wrong
