"""Learners of a gateway's key: their trainer, their folders, and what is held out."""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.local_server import stop

from agentic_opd.core.processes import end_of
from agentic_opd.gateway.config import LearnersConfig
from agentic_opd.gateway.keys import digest_of_key
from agentic_opd.gateway.learners import learner_of
from agentic_opd.wire.files import whole_lines

from . import commands
from .places import MODEL
from .plugin_client import ask
from .vllm import RootedServer
from .waiting import until

HELD_OUT_TURNS = 13


def name_of(person: str) -> str:
    return learner_of(f"{digest_of_key('a-key')}/{person}", LearnersConfig(by="header")) or ""


@contextmanager
def training(server: RootedServer, folder: Path, *flags: str) -> Generator[Any]:
    """The trainer of the gateway's learners, while the block runs."""
    with (folder / "train.log").open("ab") as output:
        process = commands.start(
            *("agentic_opd.training", "--model", MODEL, "--learners.folder", str(folder / "learners")),
            *("--weights_dir", str(server.root / "learners"), "--vllm_urls", f"[{server.base_url}]", "--device", "cpu"),
            *("--lora_rank", "4", "--lr", "0.003", "--batch_size", "4", "--epochs_per_batch", "4"),
            *("--minibatches", "1", "--loss.grpo", "1", *flags),
            stdout=output,
            stderr=commands.STDOUT,
            start_new_session=True,
            kind="train",
        )
    try:
        yield process
    finally:
        stop(process)


def hold_out(folder: Path, person: str) -> None:
    """Write a held-out conversation with as many turns as the brake needs, as a gateway does."""
    messages: list[dict[str, str]] = []
    for number in range(HELD_OUT_TURNS):
        messages += [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": "Hm."}]
    row = {
        "item_id": "s/0",
        "session_id": "s",
        "messages": [*messages, {"role": "user", "content": "Bad."}],
        "tools": [],
    }
    (folder / "learners" / name_of(person) / "held_out.jsonl").write_text(json.dumps(row) + "\n")


def learners_of(server: RootedServer) -> dict[str, int]:
    return ask(server.server, "/v1/opd/info").body["learners"]


def groups_of(folder: Path, person: str) -> list[dict[str, Any]]:
    """The groups of a person; the gateway may be writing another line."""
    path = folder / "learners" / name_of(person) / "groups.jsonl"
    return [json.loads(line) for line, _ in whole_lines(path, may_be_missing=True)]


def wait_for(process: Any, folder: Path, is_so: Callable[[], bool]) -> None:
    def is_done() -> bool:
        assert process.poll() is None, end_of(folder / "train.log")
        return is_so()

    until(is_done, 180)
