"""The pool of sandboxes: how many are in use, which wait, and that none serves two episodes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

import pytest
from pydantic import ValidationError

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.config import BubblewrapConfig
from agentic_opd.sandboxes.pool import pooled
from agentic_opd.sandboxes.protocol import CommandResult, SandboxFactory


class Box:
    """A sandbox that does nothing; `made` has all of a test."""

    def __init__(self, made: list["Box"], *, works: bool = True) -> None:
        self.entered = self.left = 0
        self.is_running, self.works = False, works
        made.append(self)

    async def __aenter__(self) -> Self:
        if not self.works:
            raise SandboxError("no engine")
        self.entered += 1
        self.is_running = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.left += self.is_running
        self.is_running = False

    async def run(self, command: str, timeout_s: float, stdin: bytes | None = None) -> CommandResult:
        return CommandResult(0, b"")

    async def check(self) -> None: ...


Factories = Callable[[str], SandboxFactory]
"""Kind -> factory of its sandboxes."""
Use = Callable[[Factories, list[Box]], Coroutine[Any, Any, None]]


def boxes(use: Use, most: int | None = None, warm: int = 0, works: bool = True) -> list[Box]:
    """Run `use` with a pool and the list of its sandboxes, to the end of the loop; returns that list."""
    made: list[Box] = []

    async def main() -> None:
        await use(lambda kind: pooled(lambda: Box(made, works=works), kind, most, warm), made)

    asyncio.run(main())
    return made


async def started() -> None:
    """Let the starts ahead end."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_no_sandbox_serves_two_episodes_and_all_are_left() -> None:
    async def use(factory: Factories, made: list[Box]) -> None:
        seen: list[object] = []
        for _ in range(4):
            async with factory("a")() as sandbox:
                assert sandbox not in seen
                seen.append(sandbox)
                await started()

    made = boxes(use, warm=2)
    assert [(box.entered, box.left) for box in made] == [(1, 1)] * 6, "four in use, two that were started ahead"


def test_an_episode_takes_one_that_was_started_ahead() -> None:
    async def use(factory: Factories, made: list[Box]) -> None:
        async with factory("a")():
            await started()
        async with factory("a")() as second:
            assert second is made[1]

    boxes(use, warm=1)


def test_no_more_are_in_use_than_may_be() -> None:
    in_use, most = [0], [0]

    async def use(factory: Factories, made: list[Box]) -> None:
        async def episode() -> None:
            async with factory("a")():
                in_use[0] += 1
                most[0] = max(most[0], in_use[0])
                await started()
                in_use[0] -= 1

        await asyncio.gather(*(episode() for _ in range(20)))

    boxes(use, most=3, warm=1)
    assert most == [3]


def test_those_of_another_kind_make_room() -> None:
    async def use(factory: Factories, made: list[Box]) -> None:
        async with factory("a")():
            await started()
        async with factory("b")():
            await started()
            assert [box.is_running for box in made] == [False, False, True, True]

    assert not any(box.is_running for box in boxes(use, warm=1))


def test_one_that_has_ended_while_it_waited_is_not_used() -> None:
    async def use(factory: Factories, made: list[Box]) -> None:
        async with factory("a")():
            await started()
        made[1].is_running = False
        async with factory("a")() as second:
            assert second is made[2]

    boxes(use, warm=1)


def test_an_engine_that_starts_nothing_is_the_episodes_error() -> None:
    async def use(factory: Factories, made: list[Box]) -> None:
        with pytest.raises(SandboxError, match="no engine"):
            async with factory("a")():
                raise AssertionError

    boxes(use, most=1, warm=1, works=False)


def test_only_containers_are_started_ahead() -> None:
    with pytest.raises(ValidationError, match=r"(?s)warm.*Extra inputs"):
        BubblewrapConfig.model_validate({"warm": 1})
