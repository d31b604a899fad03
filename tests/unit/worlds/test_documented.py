"""The environments of docs/worlds.md, exactly as printed, in whole episodes of a scripted policy."""

import asyncio
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from agentic_opd.core.errors import ServerRequestError, ServerUnreachableError, WorldError
from agentic_opd.core.types import Episode, StopReason, Task
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Completion
from agentic_opd.rollout.loop import run_episode
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.config import EvalConfig
from agentic_opd.worlds.custom import HookedWorld
from tests.support.loopback import on_loopback
from tests.unit.worlds.test_custom import documented


class Script:
    """A policy that makes calls in order, and then stops."""

    def __init__(self, tokenizer: Any, *calls: tuple[str, dict[str, Any]]) -> None:
        self.tokenizer = tokenizer
        self.lines = [
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls
        ]

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        line = self.lines.pop(0) if self.lines else "Done."
        ids = tuple(self.tokenizer.encode(f"{line}<|im_end|>", add_special_tokens=False))
        return Completion(ids, (-0.5,) * len(ids))


def loaded(folder: Path, place: int, **options: Any) -> tuple[HookedWorld, list[Task]]:
    config = AgentEnvConfig(world={"type": documented(folder, place), **options}, eval=EvalConfig(fraction=0.0))
    world = make_world(config)
    assert isinstance(world, HookedWorld)
    tasks, _ = asyncio.run(world.train_and_eval_tasks())
    return world, tasks


def played(world: HookedWorld, task: Task, script: Script) -> Episode:
    renderer = load_renderer(script.tokenizer, "qwen3", {"enable_thinking": False})
    chat = ChatFormat(renderer, script.tokenizer, world.tools)
    return asyncio.run(run_episode(task, script, world, chat, RolloutConfig()))


def contents(episode: Episode, role: str = "tool") -> list[str]:
    return [message["content"] for message in episode.messages if message["role"] == role]


# ----------------------------------------------------------------------------------------------------------- gymnasium


class Cards:
    """Blackjack with gymnasium's interface: hitting from a hand of 12 + seed draws a 5."""

    opened: int = 0
    closed: int = 0

    def __init__(self, max_episode_steps: int) -> None:
        Cards.opened += 1
        self.limit, self.total, self.steps, self.is_closed = max_episode_steps, 0, 0, False

    def reset(self, *, seed: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
        self.total, self.steps = 12 + seed, 0
        return (self.total, 10, 0), {}

    def step(self, action: int) -> tuple[tuple[int, int, int], float, bool, bool, dict[str, Any]]:
        assert not self.is_closed
        self.steps, self.total = self.steps + 1, self.total + 5 * action
        is_bust, is_over = self.total > 21, action == 0 or self.total > 21
        reward = -1.0 if is_bust else float(self.total > 19) if is_over else 0.0
        return (self.total, 10, 0), reward, is_over, self.steps == self.limit and not is_over, {}

    def close(self) -> None:
        Cards.closed += 1
        self.is_closed = True


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> type[Cards]:
    def make(name: str, max_episode_steps: int) -> Cards:
        return Cards(max_episode_steps)

    module: Any = ModuleType("gymnasium")
    module.make = make
    monkeypatch.setitem(sys.modules, "gymnasium", module)
    Cards.opened = Cards.closed = 0
    return Cards


HIT, STICK = ("step", {"action": "hit"}), ("step", {"action": "stick"})


@pytest.mark.parametrize(
    ("seed", "calls", "verdict", "report"),
    [
        (3, [HIT, STICK], 1.0, "The sum of the rewards is 1."),
        (0, [STICK], 0.5, "The sum of the rewards is 0."),
        (5, [HIT], 0.0, "The sum of the rewards is -1."),
        (0, [HIT], 0.0, "The game was not played to its end (the player stopped)."),
        (0, [], 0.0, "The game was not played to its end (the player stopped)."),
    ],
)
def test_rewards_of_a_gymnasium_environment_are_the_verdict(
    seed: int, calls: Any, verdict: float, report: str, tmp_path: Path, tokenizer: Any, cards: type[Cards]
) -> None:
    world, tasks = loaded(tmp_path, 2, games=6)
    assert tasks[seed].prompt == f"Your cards count {12 + seed}. The dealer shows 10."
    episode = played(world, tasks[seed], Script(tokenizer, *calls))
    assert episode.verification is not None
    assert (episode.verification.correctness, episode.verification.report) == (verdict, report)
    assert (cards.opened, cards.closed, world.close_failures) == (2, 2, 0)
    if calls:
        assert episode.verification.made_by == frozenset(range(len(calls))), "each step is judged with the verdict"


def test_a_truncated_game_ends_the_episode_and_takes_no_further_step(
    tmp_path: Path, tokenizer: Any, cards: type[Cards]
) -> None:
    world, tasks = loaded(tmp_path, 2, games=1, max_steps=1)
    assert tasks[0].limits == {"max_turns": 2}
    twice = Script(tokenizer, HIT, HIT)
    twice.lines = ["\n".join(twice.lines)]
    episode = played(world, tasks[0], twice)
    assert contents(episode) == [
        "Your cards count 17. The dealer shows 10. The game is over (truncated).",
        "Error: the game is over (truncated).",
    ]
    assert (len(episode.turns), episode.stop_reason) == (1, StopReason.TERMINATED)
    assert episode.verification is not None
    assert (episode.verification.correctness, episode.tool_errors) == (0.0, 1)
    assert episode.verification.report == "The game was not played to its end (truncated)."
    wrong = played(world, tasks[0], Script(tokenizer, ("step", {"action": "fold"})))
    assert "action: input should be 'stick' or 'hit'" in contents(wrong)[0]
    assert cards.opened == cards.closed


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gymnasium") is None, reason="gymnasium is not installed; a stand-in has its interface")
def test_the_documented_environment_of_gymnasium_itself(tmp_path: Path, tokenizer: Any) -> None:
    world, tasks = loaded(tmp_path, 2, games=20)
    assert len({task.prompt for task in tasks}) > 5
    for task in tasks:
        episode = played(world, task, Script(tokenizer, STICK))
        assert episode.verification is not None
        assert episode.verification.correctness in (0.0, 0.5, 1.0)
        assert episode.verification.report.startswith("The sum of the rewards is ")
        again = played(world, task, Script(tokenizer, STICK))
        assert contents(again) == contents(episode), "a seed is a game"
    assert world.close_failures == 0


# ---------------------------------------------------------------------------------------------------------------- HTTP


class Counter:
    """A server whose sessions count to 3: `up` counts, anything else is refused."""

    def __init__(self) -> None:
        self.sessions: dict[str, int] = {}
        self.closed: list[str] = []
        self.is_down = False
        self.app = web.Application()
        routes = {"/start": self.start, "/step": self.step, "/close": self.close}
        self.app.add_routes([web.post(path, handler) for path, handler in routes.items()])

    async def start(self, request: web.Request) -> web.Response:
        name, seed = f"session {len(self.sessions) + len(self.closed)}", (await request.json())["seed"]
        self.sessions[name] = seed
        return web.json_response({"session_id": name, "observation": f"at {seed} of 3"})

    async def step(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.is_down:
            assert request.transport is not None
            request.transport.abort()
        if body["session_id"] not in self.sessions:
            return web.Response(status=404, text="no such session")
        if body["action"] != "up":
            return web.Response(status=422, text=f"{body['action']} is no way to count")
        self.sessions[body["session_id"]] += 1
        count = self.sessions[body["session_id"]]
        done = count == 3
        return web.json_response({"observation": f"at {count} of 3", "reward": float(done), "done": done})

    async def close(self, request: web.Request) -> web.Response:
        name = (await request.json())["session_id"]
        del self.sessions[name]
        self.closed.append(name)
        return web.json_response({})


@pytest.fixture
def counter() -> Iterator[tuple[Counter, str]]:
    server = Counter()
    with on_loopback(server.app) as url:
        yield server, url


LOOK, UP = ("look", {}), ("act", {"action": "up"})


def test_episodes_of_an_environment_behind_http(tmp_path: Path, tokenizer: Any, counter: tuple[Counter, str]) -> None:
    server, url = counter
    world, tasks = loaded(tmp_path, 3, url=url, seeds=3)
    done = played(world, tasks[1], Script(tokenizer, LOOK, ("act", {"action": "down"}), UP, UP, UP))
    assert contents(done) == [
        "at 1 of 3",
        "Error: down is no way to count",
        "at 2 of 3",
        "at 3 of 3",
    ]
    assert done.stop_reason is StopReason.TERMINATED
    assert done.verification is not None
    assert (done.verification.correctness, done.verification.made_by) == (1.0, frozenset({0, 1}))
    left = played(world, tasks[0], Script(tokenizer, UP))
    assert left.verification is not None
    assert (left.verification.correctness, left.verification.report) == (0.0, "The task was not finished.")
    assert (server.sessions, server.closed) == ({}, ["session 0", "session 1"])


def test_a_server_that_is_gone_is_an_error_and_no_reward(
    tmp_path: Path, tokenizer: Any, counter: tuple[Counter, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, url = counter
    world, tasks = loaded(tmp_path, 3, url=url)

    class Down(Script):
        async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
            server.is_down = len(self.lines) == 1
            return await super().sample(prompt_ids, max_tokens)

    episode = played(world, tasks[0], Down(tokenizer, UP, UP))
    assert (episode.stop_reason, episode.reward, episode.verification) == (StopReason.SERVER_ERROR, None, None)
    assert isinstance(episode.error, ServerUnreachableError)
    assert url in str(episode.error)
    assert "Start the environment's server again." in str(episode.error)
    assert server.closed == ["session 0"], "its session was closed as soon as the server answered"

    class Forgetful(Script):
        async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
            server.is_down = False
            server.sessions.clear()  # As if it had been started again.
            return await super().sample(prompt_ids, max_tokens)

    lost = played(world, tasks[0], Forgetful(tokenizer, UP))
    assert isinstance(lost.error, ServerRequestError)
    assert (lost.error.status, lost.reward, world.close_failures) == (404, None, 1)
    assert "world RemoteWorld: close raised ServerUnreachableError" in caplog.text


def test_no_episode_begins_without_a_server(tmp_path: Path, tokenizer: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    world, tasks = loaded(tmp_path, 3, url=url)
    with pytest.raises(ServerUnreachableError, match="Start the environment's server again"):
        played(world, tasks[0], Script(tokenizer, LOOK))
    assert world.close_failures == 0


# ------------------------------------------------------------------------------------------------------------- OpenEnv


class Client:
    """The interface of openenv-core's GenericEnvClient; a session counts to 3."""

    is_up = True
    open_clients = 0

    def __init__(self, base_url: str, message_timeout_s: float) -> None:
        self.count = 0

    async def reset(self, *, seed: int) -> SimpleNamespace:
        if not self.is_up:
            raise ConnectionError("Failed to connect")
        Client.open_clients += 1
        self.count = seed
        return self.seen()

    async def step(self, action: dict[str, Any]) -> SimpleNamespace:
        if not self.is_up:
            raise RuntimeError("connection closed")
        self.count += action["word"] == "up"
        return self.seen()

    def seen(self) -> SimpleNamespace:
        done = self.count >= 3
        return SimpleNamespace(observation={"text": f"at {self.count} of 3"}, reward=float(done), done=done)

    async def close(self) -> None:
        Client.open_clients -= 1


def test_episodes_of_openenvs_client(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("openenv.core.generic_client")
    module.GenericEnvClient = Client
    for name in ("openenv", "openenv.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Client, "is_up", True)
    monkeypatch.setattr(Client, "open_clients", 0)
    world, tasks = loaded(tmp_path, 4, url="http://127.0.0.1:1", seeds=3)
    steps = ("act", {"word": "down"}), ("act", {"word": "up"}), ("act", {"word": "up"})
    episode = played(world, tasks[1], Script(tokenizer, LOOK, *steps))
    assert contents(episode) == ["at 1 of 3", "at 1 of 3", "at 2 of 3", "at 3 of 3"]
    assert episode.verification is not None
    assert (episode.verification.correctness, Client.open_clients) == (1.0, 0)

    class Down(Script):
        async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
            monkeypatch.setattr(Client, "is_up", len(self.lines) > 1)
            return await super().sample(prompt_ids, max_tokens)

    with pytest.raises(WorldError, match=r"act raised RuntimeError: connection closed \(.*documented\.py:\d+\)"):
        played(world, tasks[0], Down(tokenizer, *steps))
    with pytest.raises(ServerUnreachableError, match=r"http://127\.0\.0\.1:1 does not answer: Failed to connect"):
        played(world, tasks[0], Script(tokenizer, LOOK))
    assert Client.open_clients == 0
