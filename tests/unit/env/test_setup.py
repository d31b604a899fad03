import asyncio
from typing import Any

import pytest

from agentic_opd.core.errors import DatasetError, ServerMismatchError
from agentic_opd.env.setup import Note, SetupCheck, Status, meet


def check(name: str, result: Note | Exception, *needs: str) -> SetupCheck:
    async def run(setup: Any) -> Note:
        setup.append(name)
        if isinstance(result, Exception):
            raise result
        return result

    return SetupCheck(name, run, needs)


def test_all_caps_that_do_not_fit_are_named_at_once() -> None:
    """`renderer` needs the tokenizer, which does not fit, so that it is left out."""
    ran: Any = []
    checks = [
        check("context", ServerMismatchError("context 2048")),
        check("logprobs", Note("50")),
        check("tokenizer", ServerMismatchError("other ids")),
        check("renderer", DatasetError("not reached"), "tokenizer"),
    ]
    with pytest.raises(ServerMismatchError, match=r"\Acontext 2048\nother ids\Z"):
        asyncio.run(meet(checks, ran))
    assert ran == ["context", "logprobs", "tokenizer"]


def test_another_error_ends_the_checks_and_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    ran: Any = []
    left_out = check("prompts", Note("2 tasks are left out", Status.WARNING))
    with pytest.raises(DatasetError, match="no such file"):
        asyncio.run(meet([left_out, check("tasks", DatasetError("no such file")), check("server", Note("up"))], ran))
    assert ran == ["prompts", "tasks"]
    assert caplog.messages == ["2 tasks are left out"]
