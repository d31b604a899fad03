"""Gateway, policy and trajectory API are killed at random moments while clients talk: nothing is lost, or kept twice.

`OPD_TEST_KILLS=20 pytest -s tests/integration/test_gateway_kills.py` kills more often than every run of the tests does.
"""

import itertools
import json
import os
import threading
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
from bench.local_server import free_port

from agentic_opd.cli.validate import validate
from tests.support.environment import read_lines
from tests.support.fake_plugin import FakePlugin
from tests.support.gateway import Served, request, served
from tests.support.places import MODEL
from tests.support.trajectory import Trajectories, ids_of, trajectory_api
from tests.support.waiting import until

PARTS = ("gateway", "policy", "api")
KILLS = int(os.environ.get("OPD_TEST_KILLS", "3"))
CLIENTS, TURNS = 4, 4

History = list[dict[str, str]]


class Protocol(NamedTuple):
    """How a client asks for at most eight tokens, and reads a streamed event: its text, and whether it is the last."""

    path: str
    conversation: str
    limit: str
    """Names of two fields of a request: the conversation, and the most tokens."""
    read: Callable[[Any], tuple[str, bool]]


def read_chat(event: Any) -> tuple[str, bool]:
    (choice,) = event["choices"]
    return choice["delta"].get("content") or "", choice["finish_reason"] is not None


def read_responses(event: Any) -> tuple[str, bool]:
    is_text = event["type"] == "response.output_text.delta"
    return event["delta"] if is_text else "", event["type"] in ("response.completed", "response.incomplete")


def read_messages(event: Any) -> tuple[str, bool]:
    is_text = event["type"] == "content_block_delta"
    return event["delta"]["text"] if is_text else "", event["type"] == "message_stop"


PROTOCOLS = (
    Protocol("chat/completions", "messages", "max_tokens", read_chat),
    Protocol("responses", "input", "max_output_tokens", read_responses),
    Protocol("messages", "messages", "max_tokens", read_messages),
)


class Talkers:
    """Clients that hold one session after the other, and try again whatever happens, until they are told to stop."""

    def __init__(self, port: int) -> None:
        self.histories: dict[str, History] = {}
        """What each ended session's client has said and read, by the session's name."""
        self.failures = 0
        self._url, self._stop, self._given_up = f"http://127.0.0.1:{port}", threading.Event(), threading.Event()
        self._threads = ThreadPoolExecutor(CLIENTS)
        self._talks = [self._threads.submit(self._talk, client) for client in range(CLIENTS)]

    def finish(self) -> None:
        """Let each end the session that it is in."""
        self._stop.set()
        for talk in self._talks:
            talk.result(timeout=240)

    def close(self) -> None:
        """Stop at the next attempt, so that a failed test ends."""
        self._stop.set()
        self._given_up.set()
        self._threads.shutdown()

    def _pause(self) -> None:
        if self._given_up.wait(0.1):
            raise InterruptedError("the test has ended")

    def _talk(self, client: int) -> None:
        number, spoken = 0, PROTOCOLS[client % len(PROTOCOLS)]
        with httpx.Client(headers={"Authorization": "Bearer a-key"}, timeout=60, trust_env=False) as http:
            while not self._stop.is_set():
                name = f"s{client}-{number}"
                messages: History = [{"role": "user", "content": f"Say {name}."}]
                for turn in range(TURNS):
                    messages.append({"role": "assistant", "content": self._answer(http, spoken, name, messages)})
                    messages.append({"role": "user", "content": f"Turn {turn} of {name}."})
                self._end(name)
                self.histories[name] = messages[:-1]
                number += 1

    def _answer(self, http: httpx.Client, spoken: Protocol, name: str, messages: History) -> str:
        body = {"model": MODEL, "stream": True, spoken.conversation: messages, spoken.limit: 8}
        while True:
            text, is_whole = "", False
            try:
                with http.stream(
                    "POST", f"{self._url}/v1/{spoken.path}", json=body, headers={"X-Session-Id": name}
                ) as answer:
                    lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
                    for piece, is_last in (spoken.read(json.loads(line[6:])) for line in lines if answer.is_success):
                        text += piece
                        is_whole = is_whole or is_last
            except (httpx.HTTPError, KeyError):  # A stream that breaks off ends with an error's event.
                is_whole = False
            if is_whole:
                return text
            self.failures += 1
            self._pause()

    def _end(self, name: str) -> None:
        was_asked = False
        while True:
            try:
                request(f"{self._url}/sessions/{name}/end", {})
            except urllib.error.HTTPError as error:
                if error.code == 404 and was_asked:
                    return  # The answer to an earlier attempt was lost.
            except (OSError, HTTPException, ValueError):
                pass
            else:
                return
            was_asked = True
            self._pause()


def test_whatever_is_killed_nothing_is_lost_or_kept_twice(fake_server: FakePlugin, tmp_path: Path) -> None:
    numbers = itertools.count()
    # No answer is given twice, so a question that is repeated after a lost answer begins another branch.
    fake_server.says = lambda prompt, choice: f"{next(numbers)} is done."
    random, port, api_port = Random(11), free_port(), free_port()
    flags = ("--env.opd_enabled", "false", "--env.rollout_server_url", f"http://127.0.0.1:{api_port}")
    taken: list[str] = []
    lost, log = 0, tmp_path / "groups.jsonl"

    def take(api: Trajectories) -> int:
        before = len(taken)
        while (batch := api.ask("/batch")["batch"]) is not None:
            taken.extend(ids_of(batch))
        return len(taken) - before

    with ExitStack() as apis, ExitStack() as gateways:

        def new_api(number: int) -> tuple[Trajectories, int]:
            api = apis.enter_context(trajectory_api(tmp_path / f"api-{number}.log", api_port))
            first = ids_of(api.register_trainer(batch_size=1, num_steps=10_000))
            taken.extend(first)
            return api, len(first)

        def new_gateway() -> Served:
            return gateways.enter_context(served(fake_server.base_url, tmp_path, *flags, port=port))

        (api, had), gateway = new_api(-1), new_gateway()
        talkers = Talkers(port)
        apis.callback(talkers.close)
        for kill in range(KILLS):
            ended = len(talkers.histories) + random.randint(0, 6)
            until(lambda ended=ended: len(talkers.histories) >= ended, 120)
            match PARTS[kill] if kill < len(PARTS) else random.choice(PARTS):
                case "gateway":
                    gateway.process.kill()
                    gateway.process.wait()
                    gateway = new_gateway()
                case "policy":
                    fake_server.kill()
                    fake_server.start()
                case _:
                    had += take(api) if random.random() < 0.5 else 0
                    api.kill()
                    lost += api.received() - had
                    api, had = new_api(kill)
        talkers.finish()
        ended = talkers.histories
        until(lambda: len(log.read_text().splitlines()) == len(ended), 120)
        until(lambda: gateway.metric("groups_to_send") == 0, 120)
        take(api)
    groups = {group["group_overrides"]["session_id"]: group for group in read_lines(log)}
    assert validate(log).violations == 0
    assert len(groups) == len(read_lines(log)), "no session is written twice"
    assert groups.keys() == ended.keys()
    for name, history in ended.items():
        check_turns(groups[name], history)
    # The branches of a session are taken as items by themselves, GROUP/0 and so on.
    reached = {item.partition("/")[0] for item in taken}
    assert reached <= {*ids_of([*groups.values()])}
    assert len(groups) - len(reached) <= lost
    assert len(ended) >= CLIENTS
    assert talkers.failures > 0
    said = {"kills": KILLS, "sessions": len(groups), "taken": len(taken), "of groups": len(reached), "lost": lost}
    print(json.dumps({**said, "failed requests": talkers.failures}))


def check_turns(group: dict[str, Any], history: History) -> None:
    """The conversation as its client saw it is one branch, and no sampled token stands in two."""
    said = [[(message["role"], message["content"]) for message in messages] for messages in group["messages"]]
    assert said.count([(message["role"], message["content"]) for message in history]) == 1
    learned = sum(
        value != -100 and (at == 0 or mask[at - 1] == -100) for mask in group["masks"] for at, value in enumerate(mask)
    )
    context = [turn for about in group["overrides"] for turn in about.get("opd", {}).get("context_turns", ())]
    assert learned + len(context) == sum(role == "assistant" for one in said for role, _ in one)
    assert {turn["why"] for turn in context} <= {"shared"}
