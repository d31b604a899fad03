"""The environment's modes as a person runs them with configs/demo.yaml, and the files that they write."""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.local_server import stop

from . import commands
from .places import ROOT
from .waiting import until


def command(mode: str, server_url: str, *flags: str) -> list[str]:
    """A mode of the environment on the server at `server_url` (without `/v1`): a module and its arguments."""
    return [
        *("agentic_opd.env", mode, "--config", str(ROOT / "configs" / "demo.yaml")),
        *("--openai.base_url", f"{server_url}/v1", *flags),
    ]


def process_command(server_url: str, out: Path, *flags: str) -> list[str]:
    """A `process` run that neither replaces nor continues an earlier one, unless `flags` say so."""
    own = ("--env.data_path_to_save_groups", str(out), "--env.overwrite", "false", "--env.server_retry_s", "2")
    return command("process", server_url, *own, *flags)


def process(server_url: str, out: Path, *flags: str, **variables: str) -> commands.Done:
    """Run it to its end."""
    return commands.run(*process_command(server_url, out, *flags), **variables)


def exit_code_of(main: Callable[[], int]) -> int:
    """What a command in this process would end with; argparse raises it."""
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def validate(out: Path) -> commands.Done:
    """`python -m agentic_opd.validate` on a file."""
    return commands.run("agentic_opd.validate", str(out), timeout_s=120)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def items(out: Path) -> list[str]:
    """The items that the groups of a file are of."""
    return [group["group_overrides"]["item_id"] for group in read_lines(out)]


@dataclass
class Serving:
    """A `serve` process."""

    process: Any
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        until(lambda: text in self.said(), timeout_s, self.process, lambda: f"{text!r} was not said:\n{self.said()}")


@contextmanager
def serving(api_url: str, vllm_url: str, folder: Path, *flags: str) -> Generator[Serving]:
    """A `serve` process while the block runs; it writes to `folder`."""
    folder.mkdir(exist_ok=True)
    own = ("--env.data_path_to_save_groups", str(folder / "groups.jsonl"), "--env.server_retry_s", "2")
    argv = command("serve", vllm_url, "--env.rollout_server_url", api_url, *own, *flags)
    log = folder / "serve.log"
    with log.open("wb") as output:
        running = commands.start(*argv, stdout=output, stderr=commands.STDOUT, start_new_session=True)
    try:
        yield Serving(running, log)
    finally:
        stop(running)
