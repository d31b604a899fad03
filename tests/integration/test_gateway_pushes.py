"""Weights are pushed while clients of a gateway are answered: nobody is refused, and each turn knows its weights."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from agentic_opd.gateway.journal import Journal, SessionState
from tests.support.gateway import served
from tests.support.plugin_client import ask
from tests.support.vllm import RootedServer

pytestmark = pytest.mark.vllm

CLIENTS, TURNS = 3, 4


def test_a_push_refuses_nobody_and_each_turn_knows_its_weights(rooted: RootedServer, tmp_path: Path) -> None:
    is_pushed = Event()
    with served(rooted.base_url, tmp_path, "--env.opd_enabled", "false") as gateway:

        def talk(number: int) -> None:
            messages: list[Any] = [{"role": "user", "content": f"Say {number}."}]
            for turn in range(TURNS):
                if turn == TURNS - 1:
                    assert is_pushed.wait(120)
                answer = gateway.chat(*messages, session=f"s{number}", max_tokens=60)
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]

        with ThreadPoolExecutor(CLIENTS) as clients:
            talks = [clients.submit(talk, number) for number in range(CLIENTS)]
            version = 0
            while not all(one.done() for one in talks):
                version += 1
                reply = ask(rooted.server, "/v1/opd/reload_weights", {"path": "first", "version": version})
                assert reply.status == 200, reply.body
                is_pushed.set()
            for one in talks:
                one.result()
        groups = [gateway.end(f"s{number}") for number in range(CLIENTS)]
    journal = Journal(tmp_path / "journal.sqlite", only_read=True)
    for row, group in zip(journal.sessions(SessionState.WRITTEN), groups, strict=True):
        turns = journal.turns(group["group_overrides"]["item_id"])
        versions = [turn.completion.weight_version for turn in turns]
        assert None not in versions
        assert versions == sorted(versions, key=lambda one: one or 0)
        assert versions[-1], "there was a push while it talked"
        assert group["group_overrides"]["weight_version"] == versions[0], row.session_id
    journal.close()
