"""Python command lines as forks of one process that has imported what many of them import: 0.1 s each, not 1 s.

    python -m tests.support.interpreters MODULE ...

imports the modules, and reads requests as lines of JSON. An answer is a line of JSON too.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from .places import ROOT

MOST_S = 300
"""Seconds that a command line may take."""


class Ended(NamedTuple):
    """How a command line ended, what it wrote, and the top-level packages that it had imported."""

    returncode: int
    stdout: str
    stderr: str
    packages: frozenset[str]


class Interpreters:
    """The process that forks."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, argv: Sequence[str], cwd: Path, variables: dict[str, str]) -> Ended:
        """Run what `python ARGV` runs: a script, `-m MODULE` or `-c CODE`. PYTHONPATH is that of the variables."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"argv": [*argv], "cwd": str(cwd), "variables": variables}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        returncode, stdout, stderr, packages = json.loads(self._process.stdout.readline())
        return Ended(returncode, stdout, stderr, frozenset(packages))


@contextmanager
def interpreters(*modules: str) -> Generator[Interpreters]:
    """Start the process, which imports the modules."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "environments", "scripts"))
    command = [sys.executable, "-m", "tests.support.interpreters", *modules]
    pipe, env = subprocess.PIPE, {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env) as process:
        yield Interpreters(process)


def main() -> None:
    initial = [path for path in sys.path if not path.startswith(str(ROOT)) or ".venv" in path]
    for module in sys.argv[1:]:
        import_module(module)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line), initial)), file=answers, flush=True)


def forked(request: dict[str, Any], initial: Sequence[str]) -> list[Any]:
    """Run a request in a fork; returns the fields of `Ended`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error, tempfile.TemporaryFile("w+") as of:
        if (pid := os.fork()) == 0:
            signal.alarm(MOST_S)
            os.dup2(out.fileno(), 1)
            os.dup2(error.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            code = ended_with(request, initial)
            imported = {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
            json.dump(sorted(imported), of)
            for stream in (sys.stdout, sys.stderr, of):
                stream.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = list[str]()
        for file in (out, error, of):
            file.seek(0)
            texts.append(file.read())
    return [code, texts[0], texts[1], json.loads(texts[2] or "[]")]


def ended_with(request: dict[str, Any], initial: Sequence[str]) -> int:
    """Be the interpreter of a command line, with the paths that it would have; returns the exit code."""
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(request["variables"])
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    program, *arguments = request["argv"]
    try:
        if program == "-m":
            sys.path[:] = ["", *own, *initial]
            sys.argv = arguments
            sys.modules.pop(arguments[0], None)
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif program == "-c":
            sys.path[:] = ["", *own, *initial]
            sys.argv = ["-c", *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[:] = [str(Path(program).resolve().parent), *own, *initial]
            sys.argv = [program, *arguments]
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - an interpreter ends with 1
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
