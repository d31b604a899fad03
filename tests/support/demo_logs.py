"""Sessions with the demo policy's mistakes and a user who complains, as logs, and a judge who knows the mistakes."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from demo_policy.variants import TaskVariants, load_variants

from agentic_opd.env.config import default_settings
from agentic_opd.rollout.loop import first_messages
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks

TASKS = ("two_sum", "is_palindrome")
COMPLAINT = "That is wrong, it fails for me."
THANKS = "Thank you, it works."


def write_logs(path: Path, sessions: int, tasks: tuple[str, ...] = TASKS) -> None:
    """Write sessions, a row each: a first solution, results and the user's reply; two of three have a mistake."""
    env, _ = default_settings()
    world, rng = make_world(env), Random(0)
    by_entry_point = {task.entry_point: task for task in builtin_tasks()}
    rows: list[dict[str, Any]] = []
    for number in range(sessions):
        entry_point = tasks[number % len(tasks)]
        fault, is_wrong = rng.choice(load_variants()[entry_point].visible), number % 3 > 0
        code, result = (
            (fault.solution, "FAIL: some examples") if is_wrong else (fault.mended, "ok: all examples passed")
        )
        messages = [
            *first_messages(world, by_entry_point[entry_point]),
            *written(number, "I write the solution and run the examples.", code, result),
            {"role": "user", "content": COMPLAINT if is_wrong else THANKS},
        ]
        time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=number)
        rows.append({"messages": messages, "tools": world.tools, "time": time.isoformat(), "project": "demo"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def written(session: int, text: str, code: str, result: str) -> list[dict[str, Any]]:
    """A turn that writes a solution and runs the examples, and its results."""
    calls = [
        ("write_file", {"path": "solution.py", "content": code}),
        ("terminal", {"command": "python test_solution.py"}),
    ]
    ids = [f"call_{session}_{index}" for index in range(2)]
    return [
        {
            "role": "assistant",
            "content": text,
            "tool_calls": [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for call_id, (name, arguments) in zip(ids, calls, strict=True)
            ],
        },
        {"role": "tool", "tool_call_id": ids[0], "content": f"wrote {code.count(chr(10))} lines to solution.py"},
        {"role": "tool", "tool_call_id": ids[1], "content": result},
    ]


def judge_answer(body: dict[str, Any]) -> list[str]:
    """What the judge says: a hint about the turn's mistake, or a grade of the new turn."""
    system, question = (message["content"] for message in body["messages"])
    is_grade = system.startswith("You grade one turn")
    turn = re.split(r"^## (?:New turn|Turn)\b.*$", question, flags=re.MULTILINE)[-1]
    variants = next(task for name, task in load_variants().items() if f"def {name}(" in question or name in question)
    vote = grade(turn, variants) if is_grade else hint(turn, variants)
    return [vote] * body.get("n", 1)


def grade(turn: str, variants: TaskVariants) -> str:
    return f"\\boxed{{{1 if any(code.strip() in turn for code in variants.correct) else -1}}}"


def hint(turn: str, variants: TaskVariants) -> str:
    fault = next((fault for fault in variants.faults if fault.solution.strip() in turn), None)
    return "\\boxed{-1}" if fault is None else f"\\boxed{{1}}\n[HINT_START]{fault.hints[0]}[HINT_END]"
