"""The real trajectory API as a child process, and a trainer that takes batches from it and does not train."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.local_server import free_port, stop

from agentic_opd.core.processes import end_of

from . import commands
from .recording_proxy import Exchange


@dataclass
class Trajectories:
    """A running API, and the trainer's side of it."""

    url: str
    port: int
    log: Path
    process: Any

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def kill(self) -> None:
        """End it at once, as a crash would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def left_over(self) -> int:
        """Take what is left: the groups in batches that it has made up already, and those in its queue."""
        count = 0
        while (batch := self.ask("/batch")["batch"]) is not None:
            count += len(batch)
        return count + self.queue_size()

    def queued_by_env(self) -> list[int]:
        """Groups of each environment that wait, in the order of registration."""
        sizes: list[int] = []
        with suppress(urllib.error.HTTPError):  # The first id that it does not know is a 500.
            while True:
                status = self.ask("/status-env", {"env_id": len(sizes)}, "GET")
                sizes.append(status["self_queue_size"])
        return sizes

    def received(self) -> int:
        """Groups that it took, by its own log."""
        return self.log.read_text().count('"POST /scored_data HTTP/1.1" 200')

    def reset(self) -> None:
        """Let the API forget everything, as a restart does."""
        with urllib.request.urlopen(self.url + "/reset_data", timeout=120) as answer:
            assert answer.status == 200

    def register_trainer(self, *, batch_size: int, num_steps: int, max_token_len: int = 4096) -> list[dict[str, Any]]:
        """Register as a trainer does, and ask once for a batch: that opens the API to environments.

        Returns the groups of that first batch: an environment that was waiting may have been quicker.
        """
        registration = {"wandb_group": "g", "wandb_project": "p", "checkpoint_dir": "", "save_checkpoint_interval": -1}
        sizes = {"batch_size": batch_size, "max_token_len": max_token_len, "starting_step": 0, "num_steps": num_steps}
        self.ask("/register", {**registration, **sizes})
        return self.ask("/batch")["batch"] or []

    def batch(self, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """The next batch: a list of groups."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            batch = self.ask("/batch")["batch"]
            if batch is not None:
                return batch
            time.sleep(0.1)
        raise TimeoutError(f"no batch within {timeout_s:g} s; the API's log ends with:\n{end_of(self.log)}")

    def queue_size(self) -> int:
        return self.ask("/status")["queue_size"]

    def batches_made(self) -> int:
        return self.ask("/status")["current_step"]


@contextmanager
def trajectory_api(log: Path, port: int | None = None) -> Generator[Trajectories]:
    """Run the API while the body runs; on `port`, or a free one."""
    port = port or free_port()
    argv = ("atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port))
    with log.open("wb") as output:
        process = commands.start(*argv, stdout=output, stderr=commands.STDOUT, start_new_session=True)
    api = Trajectories(f"http://127.0.0.1:{port}", port, log, process)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                api.ask("/")
                break
            except OSError:
                assert process.poll() is None, end_of(log)
                assert time.monotonic() < deadline, end_of(log)
                time.sleep(0.1)
        yield api
    finally:
        stop(process)


def ids_of(groups: Sequence[dict[str, Any]]) -> list[str]:
    """The groups' ids."""
    return [group["group_overrides"]["group_id"] for group in groups]


def sent(exchanges: Sequence[Exchange]) -> list[str]:
    """The groups that an API took, as a proxy saw it."""
    return ids_of([one.request for one in exchanges if one.path == "/scored_data" and one.status == 200])


def handed_out(exchanges: Sequence[Exchange]) -> list[str]:
    """The groups that it gave a trainer."""
    batches = [one.answer["batch"] for one in exchanges if one.path == "/batch" and one.status == 200]
    return [group_id for batch in batches for group_id in ids_of(batch or [])]
