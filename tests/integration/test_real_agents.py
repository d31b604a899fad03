"""Clients from their registries, as they are, before a gateway: one conversation is one session of token-exact turns.

See scripts/agents/try_agents.py: a real vLLM samples a script, and a client reaches nothing but the gateway.
"""

import shutil
from collections.abc import Iterator

import pytest
from agents.clients import CLIENTS
from agents.try_agents import AgentRow, Engine, engine, try_client

pytestmark = [pytest.mark.all, pytest.mark.sandbox, pytest.mark.vllm]

REWRITTEN = ("openclaw", "smolagents")
"""Clients whose every request changes what they sent before: each turn is a branch."""
SIDE = {"opencode": 1}
"""Requests beside the conversation: OpenCode asks for a title."""


@pytest.fixture(scope="module")
def served() -> Iterator[Engine]:
    with engine() as served:
        yield served


@pytest.mark.parametrize("name", CLIENTS)
def test_one_conversation_is_one_session_whose_turns_are_judged_and_scored(name: str, served: Engine) -> None:
    if CLIENTS[name].is_npm and shutil.which("npm") is None:
        pytest.skip("the client is an npm package")
    row = try_client(name, served)
    assert row.error == ""
    side = SIDE.get(name, 0)
    expected = AgentRow(name, row.version, requests=4 + side, sessions=1, branches=1, main=4, side=side)
    expected.judged = expected.scored = 3
    expected.valid = True
    expected.branches = 4 if name in REWRITTEN else 1
    assert row == expected
