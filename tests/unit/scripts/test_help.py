"""Every executable below scripts/ explains itself with --help, and starts, loads and writes nothing for it."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreters import Interpreters, interpreters

ROOT = Path(__file__).parents[3]
MARK = "AGENTIC_OPD_TEST_OF_HELP"
USAGE_LINES = 3
"""Of a program that says nothing but the names of its options."""


def executables(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and os.access(path, os.X_OK))


def files_below(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def processes_marked(mark: str) -> list[str]:
    variable, commands = f"{MARK}={mark}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (process / "environ").read_bytes().split(b"\0"):
                commands.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # It has ended.
            continue
    return commands


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without an environment, in which whatever a script writes is seen."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    for name in ("agentic_opd", "configs", "environments", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("home", "tmp", "command_lines", "bin"):
        (folder / name).mkdir()
    for name in ("python", "python3"):
        (folder / "bin" / name).write_text(RECORDER)
        (folder / "bin" / name).chmod(0o755)
    return folder


RECORDER = """#!/bin/sh
printf '%s\\0' "$PWD" "$@" > "$(mktemp "$COMMAND_LINES/XXXXXX")"
"""
"""A script in place of Python: it writes its folder and arguments to a file, and a fork that has imported the largest
modules runs them."""
WARM = ("agentic_opd.env", "agentic_opd.gateway.command", "agentic_opd.report.command", "openai", "numpy")


def problems_of(checkout: Path, program: Path, warm: Interpreters) -> list[str]:
    variables = {
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(checkout),
        "HOME": str(checkout / "home"),
        "TMPDIR": str(checkout / "tmp"),
        "COMMAND_LINES": str(checkout / "command_lines"),
        MARK: str(checkout),
    }
    done: Any = subprocess.run(
        [program, "--help"], env=variables, cwd=checkout / "tmp", capture_output=True, text=True, check=False
    )
    problems = list[str]()
    for file in (checkout / "command_lines").iterdir():  # Programs in Bash alone have none.
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        folder, *argv, _ = file.read_text().split("\0")
        file.unlink()
        done = warm.run(argv, Path(folder), variables)
        if heavy := done.packages & {"torch", "vllm"}:
            problems.append(f"imports {', '.join(sorted(heavy))}")
    if done.returncode:
        problems.append(f"exit code {done.returncode}: {done.stderr[-500:]}")
    if not re.match(rf"usage: \S*\b{program.name}\b", done.stdout):
        problems.append(f"does not begin with its usage: {done.stdout[:80]!r}")
    if len(done.stdout.splitlines()) <= USAGE_LINES:
        problems.append("says too little")
    return [f"{program.relative_to(checkout)}: {problem}" for problem in problems]


@pytest.mark.processes
@pytest.mark.slow
def test_help_of_every_executable_helps_and_does_nothing_else(checkout: Path) -> None:
    programs, before = executables(checkout / "scripts"), files_below(checkout)
    assert len(programs) > 20
    with interpreters(*WARM) as warm:
        assert [problem for program in programs for problem in problems_of(checkout, program, warm)] == []
    assert files_below(checkout) == before
    assert processes_marked(str(checkout)) == []


def test_ruff_reads_every_python_executable() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["extend-include"]
    in_python = [path for path in executables(ROOT / "scripts") if b"python" in path.read_bytes().split(b"\n", 1)[0]]
    assert [path for path in in_python if not any(path.match(pattern) for pattern in included)] == []
