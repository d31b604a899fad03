"""Answers before and after the training -> the judge's grades, in an order that is independent of them (I/O).

The judge is that of the world `replay`: it reads one new answer at a time beside the log's answer and what came after
it, and never which weights wrote it. Answers of both are shuffled together; two equal answers are graded once.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

from agentic_opd.core.errors import ServerMismatchError
from agentic_opd.core.text import json_line
from agentic_opd.core.types import Task, World
from agentic_opd.learn.stages import RowFile
from agentic_opd.worlds.custom import Left


def grade_key(name: str, message: Mapping[str, Any]) -> str:
    """Return the key of an answer's grade, the same for equal answers to a turn."""
    content = {key: message.get(key) for key in ("content", "tool_calls")}
    return f"{name} {hashlib.sha256(json_line(content)).hexdigest()[:16]}"


async def grade_answers(
    tasks: Mapping[str, Task],
    arms: Mapping[str, Mapping[str, Any]],
    world: World,
    file: RowFile,
    seed: int,
    at_once: int,
) -> None:
    """Grade each distinct answer of both arms; a row's `grade` is from 0 to 1, or None without a readable vote.

    Raises:
        ServerError: the judge failed.
    """
    questions = {
        grade_key(name, row["message"]): (tasks[name], row["message"])
        for rows in arms.values()
        for name, row in rows.items()
    }
    keys = sorted(questions)
    Random(seed).shuffle(keys)

    async def grade(key: str) -> dict[str, Any]:
        task, message = questions[key]
        left: Any = Left(None, {}, messages=[*task.messages, message])
        try:
            verification = await world.verify(task, left)
        except ServerMismatchError as error:  # No answer held a vote.
            return {"grade": None, "problem": str(error)}
        return {"grade": verification.correctness, "report": verification.report}

    await file.fill("grades", {key: partial(grade, key) for key in keys}, at_once)
