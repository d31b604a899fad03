"""Which first solutions pass, and which of the others are repaired: what is behind a pass rate.

    PYTHONPATH=scripts .venv/bin/python -m learning.first_solutions runs/learn/*/seed-?-*/eval-000256/samples.jsonl

A first solution is the first text that an episode wrote to solution.py; it is run against the hidden tests.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.text import text_lines
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig


def first_solution(messages: Sequence[dict[str, Any]]) -> str | None:
    """The first text that was written to solution.py; None if there was none."""
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        try:
            arguments = json.loads(call["function"]["arguments"])
        except json.JSONDecodeError:
            continue  # What the model wrote is not always JSON.
        if isinstance(arguments, dict) and arguments.get("path") == "solution.py" and "content" in arguments:
            return str(arguments["content"])
    return None


async def first_solutions(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """How many first solutions pass, and how many of the other episodes pass in the end.

    Args:
        rows: Lines of a samples.jsonl of the built-in tasks.
    """
    tasks = {task.task_id: task for task in builtin_tasks()}
    world, slots = CodingWorld(WorldConfig()), asyncio.Semaphore(8)
    firsts = [(row["task_id"], first_solution(row["messages"])) for row in rows]
    different = sorted({(task_id, text) for task_id, text in firsts if text is not None})

    async def passes(task_id: str, text: str) -> bool:
        async with slots:
            verification = await world.verify(tasks[task_id], {"solution.py": text.encode()})
            return verification.passed == verification.total

    verdicts = await gather_all(passes(task_id, text) for task_id, text in different)
    passing = {kind for kind, passed in zip(different, verdicts, strict=True) if passed}
    repaired = sum(row["passed"] and first not in passing for row, first in zip(rows, firsts, strict=True))
    return sum(first in passing for first in firsts), repaired


def main() -> None:
    """A line for each file."""
    for name in sys.argv[1:]:
        rows = [json.loads(line) for line in text_lines(Path(name).read_text())]
        passing, repaired = asyncio.run(first_solutions(rows))
        print(f"{name}: {passing} of {len(rows)} pass at once, {repaired} of the other {len(rows) - passing} later")


if __name__ == "__main__":
    main()
