"""Input and output of supervisor.py: command -> line of JSON; its line of JSON -> result."""

import base64
import json
import math
from functools import cache
from importlib import resources

from agentic_opd.core.errors import SandboxError
from agentic_opd.sandboxes.protocol import CommandResult, Limits, variables

FOLDERS = ("work", "tmp", "home", "bin")
"""Subfolders of a supervised sandbox's folder."""

KILLED = CommandResult(128 + 9, b"")
"""The result of a command that killed its supervisor."""


@cache
def program() -> str:
    """Return the source of the supervisor."""
    return (resources.files("agentic_opd.sandboxes") / "supervisor.py").read_text(encoding="utf-8")


def job_line(
    command: str,
    timeout_s: float,
    stdin: bytes | None,
    *,
    folder: str,
    path: str,
    limits: Limits,
    result: str,
) -> str:
    """Return the supervisor's input: a command for a shell in the work directory of `folder`, which contains FOLDERS.

    `path` is the PATH of the command, and the answer goes to the file `result`. A `stdin` of None is an empty input.
    """
    job = {
        "command": command,
        "timeout_s": timeout_s,
        "stdin": None if stdin is None else base64.b64encode(stdin).decode(),
        "cwd": f"{folder}/work",
        "env": variables(f"{folder}/home", PATH=f"{folder}/bin:{path}", TMPDIR=f"{folder}/tmp"),
        "limits": {
            "RLIMIT_AS": limits.memory_mb * 2**20,
            "RLIMIT_FSIZE": limits.file_mb * 2**20,
            "RLIMIT_CPU": math.ceil(timeout_s) + 1,
            "RLIMIT_CORE": 0,
        },
        "output_bytes": limits.output_bytes,
        "result": result,
    }
    return json.dumps(job) + "\n"


def read_answer(answer: bytes) -> CommandResult:
    """Parse the supervisor's answer.

    Raises:
        SandboxError: It is not an answer, or some process could not be ended.
    """
    try:
        fields = json.loads(answer)
        result = CommandResult(
            exit_code=fields["exit_code"],
            output=base64.b64decode(fields["output"]),
            timed_out=fields["timed_out"],
            output_exceeded=fields["output_exceeded"],
        )
    except (ValueError, KeyError, TypeError) as error:
        text = answer.decode(errors="replace").strip()[-500:]
        raise SandboxError(f"the program that runs the sandbox's commands failed: {text!r}") from error
    if fields["survivors"]:
        raise SandboxError(f"{fields['survivors']} processes of a sandboxed command could not be killed")
    return result
