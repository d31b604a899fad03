"""A world whose answers count their steps, so that a scripted policy knows from a prompt which turn is due."""

from collections.abc import Iterator, Sequence
from typing import Any

from agentic_opd.worlds.custom import Checks, CustomWorld, Task, tool


class Rooms(CustomWorld):
    """Rooms that count the steps; a user who speaks once."""

    system_prompt = "You look around."

    def tasks(self) -> Iterator[Task]:
        yield Task("rooms", "step 0: what is here?", "nobody knows")

    def start(self, task: Task) -> dict[str, int]:
        return {"step": 0, "replies": 0}

    @tool
    def look(self, state: dict[str, int], place: str) -> str:
        """Look somewhere.

        Args:
            place: Where.
        """
        state["step"] += 1
        return f"A door, {place}. step {state['step']}"

    @tool
    def note(self, state: dict[str, int], text: str) -> str:
        """Note something.

        Args:
            text: What.
        """
        state["step"] += 1
        return f"Noted. step {state['step']}"

    def verify(self, task: Task, state: dict[str, int]) -> Checks:
        return Checks(passed=int(state["step"] == 3), total=1, judge_report="It was counted.")

    def user_reply(self, task: Task, state: dict[str, int], messages: Sequence[Any]) -> str | None:
        state["replies"] += 1
        return "step 4: Go on." if state["replies"] == 1 else None
