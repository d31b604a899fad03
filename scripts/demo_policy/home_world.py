"""A small world of one-step tool calls: a sentence in, one call out.

agentic-opd process --env.world scripts/demo_policy/home_world.py:Home --env.renderer.tool_format text ...
"""

from collections.abc import Iterator, Sequence
from typing import Any

from agentic_opd.worlds.custom import Checks, CustomWorld, Message, Task, ToolError, tool

Call = tuple[str, Any]

REQUESTS: dict[str, Call] = {
    "Set a timer for 12 minutes.": ("timer", 12),
    "Set a timer for 3 minutes.": ("timer", 3),
    "Set a timer for 20 minutes.": ("timer", 20),
    "Set a timer for 45 minutes, please.": ("timer", 45),
    "Please set a timer for 8 minutes.": ("timer", 8),
    "Set a timer for half an hour.": ("timer", 30),
    "Call Maria.": ("phone", "Maria"),
    "Call Ahmed.": ("phone", "Ahmed"),
    "Please call Tom.": ("phone", "Tom"),
    "Call my friend Yuki.": ("phone", "Yuki"),
    "I want to talk to Ms Novak.": ("phone", "Novak"),
    "Buy milk.": ("buy", "milk"),
    "Buy apples.": ("buy", "apples"),
    "Please buy soap.": ("buy", "soap"),
    "Buy some coffee.": ("buy", "coffee"),
    "There is no bread left.": ("buy", "bread"),
}


def _example(request: str, name: str, arguments: dict[str, Any], result: str) -> list[Message]:
    return [
        {"role": "user", "content": request},
        {"role": "assistant", "tool_calls": [{"name": name, "arguments": arguments}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "Done."},
    ]


EXAMPLES = {
    "timer": _example("Set a timer for 5 minutes.", "timer", {"minutes": 5}, "The timer rings in 5 minutes."),
    "phone": _example("Call Ben.", "phone", {"name": "Ben"}, "Calling Ben."),
    "buy": _example("Buy butter.", "buy", {"item": "butter"}, "On the list: butter."),
}
"""Of each tool, how it is called."""


class Home(CustomWorld):
    """Each request is done by one call; what the house answers to it is the next state."""

    system_prompt = "You help at home. Do what is asked with one tool call."

    def tasks(self) -> Iterator[Task]:
        """The requests, each behind an example of the tool that does it."""
        for text, (name, _) in REQUESTS.items():
            yield Task(task_id=text, prompt=text, hidden_tests=None, examples=EXAMPLES[name])

    def start(self, task: Task) -> list[Call]:
        """The calls that were made."""
        return []

    @tool
    def timer(self, calls: list[Call], minutes: int) -> str:  # noqa: D417 - the policy reads it, and gives no calls
        """Set a timer.

        Args:
            minutes: In how many minutes it rings.
        """
        if not 0 < minutes <= 600:
            raise ToolError(f"a timer takes 1 to 600 minutes, not {minutes}.")
        calls.append(("timer", minutes))
        return f"The timer rings in {minutes} minutes."

    @tool
    def phone(self, calls: list[Call], name: str) -> str:  # noqa: D417 - likewise
        """Call a person.

        Args:
            name: Whom to call.
        """
        calls.append(("phone", name))
        return f"Calling {name}."

    @tool
    def buy(self, calls: list[Call], item: str) -> str:  # noqa: D417 - likewise
        """Put something on the shopping list.

        Args:
            item: What to buy.
        """
        calls.append(("buy", item))
        return f"On the list: {item}."

    def user_reply(self, task: Task, state: list[Call], messages: Sequence[Message]) -> str:
        """What the user says to a turn that called nothing."""
        return "Nothing happened. Call one of the tools: timer, phone or buy."

    def verify(self, task: Task, state: list[Call]) -> Checks:
        """Return whether the only call was the right one."""
        name, value = REQUESTS[task.task_id]
        is_right = [(called, str(argument).lower()) for called, argument in state] == [(name, str(value).lower())]
        return Checks(
            is_right, 1, f"Called: {state}.", "That was right." if is_right else "That was not what I asked for."
        )
