"""Random and hostile tool calls in one evaluation: every episode has a row, nothing raises, nothing outlives it.

OPD_FUZZ_CALLS and OPD_FUZZ_EPISODES ask for more than is run by default, for example 2000 and 32.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentic_opd.core.types import Episode, StopReason, Task, ToolCall
from agentic_opd.rollout.chat_format import ChatFormat, ParsedTurn
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Completion
from agentic_opd.rollout.loop import run_episode
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.evaluate import Evaluated, Evaluator
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.sandboxes.config import BubblewrapConfig
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import EvalConfig, WorldConfig
from tests.integration.attacks.arena import MARK, arena
from tests.support.places import MODEL

CALLS = int(os.environ.get("OPD_FUZZ_CALLS", "160"))
EPISODES = int(os.environ.get("OPD_FUZZ_EPISODES", "8"))
CALLS_A_TURN = 4
AT_ONCE = 4

pytestmark = pytest.mark.sandbox

TESTS = "from solution import f\nassert f(1) == 1\nassert f(2) == 2\n"

COMMANDS = (
    "kill -9 -1; kill -9 0; kill -9 $PPID; kill -9 1",
    "bomb() {{ bomb | bomb & }}; bomb; sleep 9 # {mark}",
    "setsid nohup sleep 600 {mark} & (sleep 600 {mark} &) ; echo",
    "chmod 000 . .. ~ /tmp /dev/shm; mkdir -p a/b; chmod 000 a",
    "rm -rf /workspace /tmp ~ / --no-preserve-root",
    "for i in $(seq 400); do echo > $(head -c 60 /dev/urandom | base32 -w0)$i; done",
    'python -c \'import os\nfor i in range(200): os.mkdir("d" * 250); os.chdir("d" * 250)\'',
    'python -c \'import os\nfor i in range(300): open(os.fsencode(".") + b"/" + bytes([i % 255 + 1]) * 9, "w")\'',
    "for i in 1 2 3 4; do (while :; do mkdir -p r/$i/{{1..50}}; rm -rf r/$i; done) & done; sleep 1 # {mark}",
    "for i in $(seq 9); do head -c 15000000 /dev/zero > /tmp/big$i; done",
    "mkfifo solution.py p; ln -s /dev/zero z; ln -s / root; ln -s . loop; ln -s loop/loop loop2",
    "echo 'import os; os._exit(9)' | tee sitecustomize.py site.py os.py tarfile.py > ~/.local",
    "echo 'bwrap: broken' >&2; exit 1",
    "yes; cat /dev/urandom",
    "exec 0<&- 1>&- 2>&-; sleep 0.2",
    "python -c 'import ctypes; ctypes.string_at(0)'; kill -SEGV $$",
    "python -c 'x = bytearray(2**31)'; python -c 'import os\nwhile 1: os.memfd_create(\"m\")'",
    "trap '' TERM HUP INT; sleep 600 # {mark}",
    "touch -d @99999999999999 x; truncate -s 60M solution.py; echo 'def f(x): return x' > solution.py",
    "ulimit -n 9; ulimit -u 1; ulimit -v 1000; exec bash",
)


def hostile_text(rng: Random) -> str:
    """Text of 0 to 2**20 characters, short ones mostly, of one of several alphabets."""
    length = min(int(2 ** rng.uniform(0, 14 if rng.random() < 0.9 else 20.5)) - 1, 2**20)
    alphabet = rng.choice(
        [
            "".join(map(chr, range(256))),
            "".join(map(chr, range(256))) + "\ud800\udfff\U0010ffff\ufeff\u202e",
            "'\"`$\\!;&|<>(){}[]*?~#\n\r\t\0 ",
            "../",
            "a",
            "é\U0001f600",
            "-",
        ]
    )
    return "".join(rng.choices(alphabet, k=length))


def hostile_path(rng: Random) -> str:
    return rng.choice(
        [
            hostile_text(rng),
            *("solution.py", "/dev/zero", "/dev/stdin", "/dev/stdout", "/dev/fd/1", "/proc/self/mem", "/proc/1/root/x"),
            *("a/" * rng.randrange(3000) + "b", "b" * rng.randrange(300), "../" * 40 + "etc/shadow", ".", "~", "/tmp"),
            *("z", "p", "loop/loop2/x", "root/etc/passwd", "-rf", "\n", "$(sleep 60)"),
        ]
    )


def hostile_arguments(rng: Random) -> tuple[str, dict[str, Any]]:
    solution = {"path": "solution.py", "content": "def f(x):\n    return x\n"}
    command = rng.choice([*COMMANDS, hostile_text(rng)])
    calls: list[tuple[str, dict[str, Any]]] = [
        ("write_file", solution),
        ("write_file", {"path": hostile_path(rng), "content": hostile_text(rng)}),
        ("read_file", {"path": hostile_path(rng)}),
        ("patch", {"path": hostile_path(rng), "old": hostile_text(rng), "new": hostile_text(rng)}),
        ("patch", {"path": "solution.py", "old": "return", "new": hostile_text(rng)}),
        (hostile_text(rng), {hostile_text(rng): hostile_text(rng)}),
        ("read_file", {"path": rng.choice([None, 3, [], {}, True, 1e999]), "x": 1}),
        *[("terminal", {"command": command.replace("{mark}", MARK).replace("{{", "{").replace("}}", "}")})] * 6,
    ]
    return rng.choice(calls)


def hostile_call(rng: Random) -> ToolCall:
    if rng.random() < 0.03:
        return ToolCall("c", hostile_text(rng), None, raw=hostile_text(rng), error=hostile_text(rng) or "broken")
    name, arguments = hostile_arguments(rng)
    return ToolCall("c", name, arguments, raw="")


class HostileChat(ChatFormat):
    """Reads hostile calls out of every turn but the last, whatever was sampled."""

    def __init__(self, chat: ChatFormat, rng: Random, turns: int) -> None:
        super().__init__(chat.renderer, chat.tokenizer, chat.tools)
        self.rng, self.turns = rng, turns

    def parse(self, tokens: Any, ids: Any, index: int) -> ParsedTurn:
        self.turns -= 1
        calls = [] if self.turns < 0 else [hostile_call(self.rng) for _ in range(CALLS_A_TURN)]
        return ParsedTurn(self.unparsed(ids).message, tuple(calls))


class OneWord:
    """A policy that always says the same."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        return Completion(self.ids, (-0.5,) * len(self.ids))


def test_every_episode_of_an_evaluation_has_a_row_whatever_its_calls(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    settings = WorldConfig(sandbox=BubblewrapConfig(memory_mb=256, disk_mb=64), tool_timeout_s=2.0)
    world = CodingWorld(settings, settings=CodingSettings(verify_timeout_s=10.0))
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, world.tools)
    policy = OneWord(tokenizer.encode("x<|im_end|>", add_special_tokens=False))
    turns = -(-CALLS // EPISODES // CALLS_A_TURN)
    rollout = RolloutConfig(max_turns=turns + 1, max_token_length=10**7)
    slots, seeds = asyncio.Semaphore(AT_ONCE), iter(range(EPISODES))

    async def roll_out(task: Task) -> Episode:
        async with slots:
            hostile = HostileChat(chat, Random(next(seeds)), turns)
            return await run_episode(task, policy, world, hostile, rollout)

    async def save(evaluated: Evaluated, start: float) -> None:
        pass

    async def versions() -> list[int]:
        return []

    async def main() -> Evaluated:
        config = RunConfig(eval=EvalConfig(samples=1))
        metrics = RunMetrics(config, lambda ids: "", list)
        tasks = [Task(f"t{number}", "Write f.", TESTS) for number in range(EPISODES)]
        return await Evaluator(tasks, roll_out, save, versions, config, metrics).measure()

    with arena(tmp_path) as place:
        evaluated = asyncio.run(main())
        place.check()
    assert len(evaluated.samples) == EPISODES
    for sample in evaluated.samples:
        json.dumps(sample.to_row()).encode()
    stops = [sample.episode.stop_reason for sample in evaluated.samples]
    print({stop.value: stops.count(stop) for stop in StopReason if stop in stops}, evaluated.metrics)
    assert sum(sample.episode.tool_calls for sample in evaluated.samples) >= CALLS // 2
