"""A program in a sandbox whose only network access is one server outside of it.

program -> 127.0.0.1:PORT (program_inside.py, in the sandbox) -> a Unix socket that the sandbox sees -> the server
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from agentic_opd.core.text import cut_middle
from agentic_opd.core.types import ProgramRun, StoppedFor
from agentic_opd.sandboxes.protocol import CommandResult, Mount, Sandbox

SOCKET_NAME = "socket"
_SOCKET_FOLDER = "/run/agentic-opd"
_TASK_FILE = "task.md"
_BOOT = """
for python in python python3 %s; do
  command -v "$python" >/dev/null && exec "$python" -I -S -c 'import sys; exec(sys.stdin.buffer.readline())'
done
echo "env.agent.command needs Python 3.8 or later in the sandbox, or bin/python3 in one of env.agent.mounts" >&2
exit 127
"""
_OUTPUT_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Program:
    command: str
    """A shell command; it runs in the work directory."""
    task: str
    """The task's text: in the file TASK_FILE and, if it is short enough, in the variable TASK."""
    api_key: str
    model: str
    timeout_s: float
    variables: Mapping[str, str]
    """Further environment variables."""
    pythons: Sequence[str] = ()
    """Paths of interpreters that are tried where the sandbox has no `python` and no `python3`."""


_MAX_VARIABLE_BYTES = 2**16
"""The kernel takes 128 KiB in one variable."""


def socket_mount(folder: Path) -> Mount:
    """Return the mount by which a sandbox sees the folder of the server's socket, SOCKET_NAME."""
    return Mount(folder, _SOCKET_FOLDER)


async def run_program(sandbox: Sandbox, program: Program) -> ProgramRun:
    """Run a program to its end, in an entered sandbox that has the mount of `socket_mount`.

    Raises:
        SandboxError: the sandbox itself does not work.
    """
    task = program.task.replace("\0", "\ufffd").encode(errors="replace").decode()
    variables = {
        **{"OPENAI_API_KEY": program.api_key, "ANTHROPIC_API_KEY": program.api_key, "OPENAI_MODEL": program.model},
        **({"TASK": task} if len(task.encode()) <= _MAX_VARIABLE_BYTES else {}),
        **program.variables,
    }
    job = {
        "command": program.command,
        "task": task,
        "task_file": _TASK_FILE,
        "variables": variables,
        "socket": f"{_SOCKET_FOLDER}/{SOCKET_NAME}",
    }
    stdin = f"exec({_inside()!r})\n{json.dumps(job)}\n".encode()
    result = await sandbox.run(_BOOT % shlex.join(program.pythons), program.timeout_s, stdin=stdin)
    return ProgramRun(result.exit_code, _stopped(result), cut_middle(result.text.strip(), _OUTPUT_CHARS))


def _stopped(result: CommandResult) -> StoppedFor | None:
    limits: dict[StoppedFor, bool] = {
        "disk": result.disk_exceeded,
        "memory": result.memory_exceeded,
        "output": result.output_exceeded,
        "time": result.timed_out,
    }
    return next((name for name, is_over in limits.items() if is_over), None)


@cache
def _inside() -> str:
    return resources.files("agentic_opd.sandboxes").joinpath("program_inside.py").read_text()
