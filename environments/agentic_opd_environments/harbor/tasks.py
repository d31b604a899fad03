"""Read tasks in Harbor's format, of its first and its current schema (I/O).

    NAME/instruction.md         what the agent reads
    NAME/task.toml              limits, users, network, variables
    NAME/environment/           Dockerfile, if `docker_image` of task.toml is not on this machine; a compose file of
                                the one service `main`
    NAME/tests/test.sh          the verifier, which writes a reward
    NAME/solution/solve.sh      the reference solution

What would run something else than Harbor does is refused by name; other unknown fields are named once in the log.
"""

import logging
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.text import text_lines, well_formed
from agentic_opd.core.types import Task
from agentic_opd_environments.harbor.compose import COMPOSE_FILE, Service, read_compose

logger = logging.getLogger(__name__)

_MEMORY_MB, _STORAGE_MB, _CPUS = 2048, 10_240, 1.0
"""Harbor's first schema had these defaults; the current one leaves them to the engine."""
_DEEPEST = 6
_MAX_LISTED = 20
_MOST_HIDDEN_BYTES = 2**20
_LONGEST_TASK_FILE = 2**16
"""Characters of a task.toml; `tomllib` takes quadratic time for keys such as `a.b.c`."""
_REFERENCE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


# ----------------------------------------------------------------------------------------------------- tables of TOML


class _TomlTable(BaseModel):
    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True)

    def unknown(self, prefix: str) -> Iterator[str]:
        """Yield the names of the fields that are not declared here, in this table and in those below."""
        yield from (f"{prefix}{name}" for name in self.model_extra or ())
        for name in type(self).model_fields:
            table = getattr(self, name)
            if isinstance(table, _TomlTable):
                yield from table.unknown(f"[{name}] ")


_Network = Literal["no-network", "public", "allowlist"] | None


class Healthcheck(_TomlTable):
    """A command that succeeds when the container is ready; the meaning of the fields is Docker's."""

    command: str
    interval_sec: float = Field(default=5.0, ge=0)
    timeout_sec: float = Field(default=30.0, gt=0)
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: float = Field(default=5.0, ge=0)
    retries: int = Field(default=3, ge=1)


class _Environment(_TomlTable):
    docker_image: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0)
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    memory: str | None = None
    storage_mb: int | None = Field(default=None, gt=0)
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: _Network = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None

    def megabytes(self, name: str, default: int) -> int:
        """Return `NAME_mb`, or `NAME`, a text as `2G`."""
        number, text = getattr(self, f"{name}_mb"), getattr(self, name)
        if text is None:
            return number or default
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B?\s*", text, re.IGNORECASE)
        if match is None:
            raise ValueError(f"[environment] {name} = {text!r}, expected a size as '2G' or '512M'")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
        if size < 1 or number not in (None, size):
            raise ValueError(f"[environment] {name} = {text!r}, but {name}_mb = {number}")
        return size


class _AgentTable(_TomlTable):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | None = None
    network_mode: _Network = None
    allowed_hosts: list[str] | None = None


class _Verifier(_AgentTable):
    timeout_sec: float | None = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Any = None
    collect: list[Any] = []


class _Solution(_TomlTable):
    env: dict[str, str] = {}


class _TaskFile(_TomlTable):
    version: str = ""
    schema_version: str = ""
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    source: str | None = None
    artifacts: list[Any] = []
    steps: list[Any] | None = None
    multi_step_reward_strategy: str | None = None
    environment: _Environment = _Environment()
    agent: _AgentTable = _AgentTable()
    verifier: _Verifier = _Verifier()
    solution: _Solution = _Solution()

    def refused(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the keys of what the file asks for and this package does not have, and its name."""
        environment, verifier = self.environment, self.verifier
        base = environment.network_mode
        if base is None and environment.allow_internet is not None:
            base = "public" if environment.allow_internet else "no-network"
        modes = {mode for mode in (base, self.agent.network_mode, verifier.network_mode) if mode is not None}
        networks = {
            ("environment", "network_mode"): base,
            ("agent", "network_mode"): self.agent.network_mode,
            ("verifier", "network_mode"): verifier.network_mode,
        }
        allowlists = [keys for keys, mode in networks.items() if mode == "allowlist"]
        own_network = ("agent" if self.agent.network_mode else "verifier", "network_mode")
        requests: list[tuple[tuple[str, ...], str, bool]] = [
            (("steps",), "[[steps]]: tasks of several steps", bool(self.steps)),
            (("environment", "os"), f"[environment] os = {environment.os!r}", environment.os.lower() != "linux"),
            (("environment", "gpus"), "[environment] gpus", bool(environment.gpus)),
            (("environment", "tpu"), "[environment] tpu", environment.tpu is not None),
            (("environment", "mcp_servers"), "[environment] mcp_servers", bool(environment.mcp_servers)),
            (allowlists[0] if allowlists else (), "network_mode allowlist", bool(allowlists)),
            (
                own_network,
                "a network for the agent but not the verifier, or the reverse",
                "public" in modes and len(modes) > 1,
            ),
            (
                ("verifier", "environment_mode"),
                "[verifier] environment_mode separate",
                verifier.environment_mode == "separate",
            ),
            (("verifier", "environment"), "[verifier.environment]", verifier.environment is not None),
            (("verifier", "collect"), "[[verifier.collect]]", bool(verifier.collect)),
        ]
        yield from ((keys, name) for keys, name, is_requested in requests if is_requested)

    def has_network(self, *, default: bool) -> bool:
        modes = [self.agent.network_mode, self.verifier.network_mode, self.environment.network_mode]
        mode = next((mode for mode in modes if mode is not None), None)
        if mode is not None:
            return mode == "public"
        return default if self.environment.allow_internet is None else self.environment.allow_internet


# ---------------------------------------------------------------------------------------------------------- the tasks


@dataclass(frozen=True, slots=True)
class Build:
    """How the image of a task is built."""

    folder: Path
    """environment/ of the task, with all that the image depends on."""
    context: Path
    dockerfile: Path
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])
    target: str | None = None
    """Stage to build; None: the last one."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task as its folder describes it; `Task.data` of the world's tasks."""

    folder: Path
    image: str | None
    """Image by name, used if it is on this machine or there is no Dockerfile."""
    build: Build | None
    build_timeout_s: float
    workdir: str | None
    """None: the image's."""
    cpus: float
    memory_mb: int
    disk_mb: int
    has_network: bool
    healthcheck: Healthcheck | None
    variables: Mapping[str, str]
    agent_user: str | None
    """None: the image's user; likewise for the verifier."""
    verifier_user: str | None
    verifier_timeout_s: float
    verifier_variables: Mapping[str, str]
    solution_variables: Mapping[str, str]
    hidden: tuple[str, ...]
    """Texts of the verifier's files: those of Python, then the others."""


def read_tasks(
    folder: Path, variables: Mapping[str, str], *, has_network: bool = False, skip_broken: bool = False
) -> list[Task]:
    """Return the tasks in a folder, sorted by id: the task's path below the folder.

    Args:
        folder: A task, or a folder with tasks at most six levels deep.
        variables: Values of `${NAME}` in tables of variables.
        has_network: Network of tasks that do not mention it.
        skip_broken: Skip tasks with a problem, with a warning, instead of failing.

    Raises:
        DatasetError: there is no task, or tasks have problems; the message names all of them.
    """
    if not folder.is_dir():
        raise DatasetError(f"env.world.folder: there is no folder {str(folder)!r}")
    folders = [folder] if (folder / "task.toml").is_file() else sorted(_below(folder, _DEEPEST))
    if not folders:
        raise DatasetError(f"env.world.folder {str(folder)!r} holds no task: no folder in it has a task.toml")
    tasks, broken, unknown = list[Task](), list[str](), Counter[str]()
    for task_folder in folders:
        task_id = task_folder.name if task_folder == folder else task_folder.relative_to(folder).as_posix()
        try:
            tasks.append(_read_task(task_id, task_folder, variables, has_network, unknown))
        except (ValueError, OSError, RecursionError) as error:
            broken.append(f"{task_id}: {error}")
    for name, count in unknown.items():
        logger.warning("task.toml: %s is unknown here and has no effect (%d tasks)", name, count)
    if broken:
        rest = f"\n... and {len(broken) - _MAX_LISTED} more" if len(broken) > _MAX_LISTED else ""
        problems = f"{len(broken)} of {len(folders)} tasks in {str(folder)!r} can't be run:\n"
        problems += "\n".join(f"  {problem}" for problem in broken[:_MAX_LISTED]) + rest
        if not (skip_broken and tasks):
            remedy = "\nSkip such tasks with env.world.skip_broken." if tasks else "\nNo task is left."
            raise DatasetError(f"{problems}{remedy}")
        logger.warning("%s", problems)
    return tasks


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.is_symlink() or not path.is_dir():
            continue
        if (path / "task.toml").is_file():
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1)


def _read_task(
    task_id: str, folder: Path, variables: Mapping[str, str], has_network: bool, unknown: Counter[str]
) -> Task:
    """Return one task, and count its unknown fields."""
    text = _text(folder, "task.toml")
    if len(text) > _LONGEST_TASK_FILE:
        raise ValueError(f"task.toml has {len(text)} characters, expected at most {_LONGEST_TASK_FILE}")
    try:
        file = _TaskFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(_named_line(str(error), text)) from None
    except RecursionError as error:
        raise ValueError(f"task.toml: {error}") from None
    except ValidationError as error:
        wrong = error.errors()
        reasons = [
            f"{_line_of(text, entry['loc'])}: {'.'.join(map(str, entry['loc']))}: {entry['msg'].lower()}"
            for entry in wrong[:_MAX_LISTED]
        ]
        raise ValueError(
            "; ".join([*reasons, *([f"and {len(wrong) - _MAX_LISTED} more"] if wrong[_MAX_LISTED:] else [])])
        ) from None
    unknown.update(file.unknown(""))
    unknown.update(["[environment] skills_dir"] if file.environment.skills_dir else [])
    data = _read_data(folder, file, text, variables, has_network)
    limit_s = file.agent.timeout_sec
    return Task(
        task_id,
        _instruction(folder),
        hidden_tests=next((text for text in data.hidden if text.strip()), None),
        data=data,
        limits={} if limit_s is None else {"agent_timeout_s": limit_s},
    )


def _read_data(folder: Path, file: _TaskFile, text: str, variables: Mapping[str, str], has_network: bool) -> HarborTask:
    environment, tests = folder / "environment", folder / "tests"
    refused = [f"{name} ({_line_of(text, keys)})" for keys, name in file.refused()]
    for name in ("docker-compose.yml", "compose.yaml", "compose.yml"):
        if (environment / name).exists():
            refused.append(f"environment/{name}: Harbor does not read it; rename it to {COMPOSE_FILE}, or remove it")
    if (folder / "trajectory.json").exists():
        refused.append("trajectory.json: a conversation before the task")
    if refused:
        raise ValueError(f"not supported: {'; '.join(refused)}")
    compose = environment / COMPOSE_FILE
    service = read_compose(compose, variables) if compose.exists() else Service()
    if not (tests / "test.sh").is_file():
        raise ValueError("there is no tests/test.sh")
    image, build = _origin(folder, file.environment.docker_image, service)

    def resolved(table: str, values: Mapping[str, str]) -> dict[str, str]:
        return {name: _resolved(text, (*table.split("."), name), value, variables) for name, value in values.items()}

    def megabytes(name: str, default: int) -> int:
        try:
            return file.environment.megabytes(name, default)
        except ValueError as error:
            raise ValueError(f"{_line_of(text, ('environment', name))}: {error}") from None

    return HarborTask(
        folder=folder.absolute(),
        image=image,
        build=build,
        build_timeout_s=file.environment.build_timeout_sec,
        workdir=file.environment.workdir or service.workdir,
        cpus=file.environment.cpus or _CPUS,
        memory_mb=megabytes("memory", _MEMORY_MB),
        disk_mb=megabytes("storage", _STORAGE_MB),
        has_network=file.has_network(default=has_network),
        healthcheck=file.environment.healthcheck,
        variables={**(service.variables or {}), **resolved("environment.env", file.environment.env)},
        agent_user=file.agent.user or service.user,
        verifier_user=file.verifier.user or service.user,
        verifier_timeout_s=file.verifier.timeout_sec or 600.0,
        verifier_variables=resolved("verifier.env", file.verifier.env),
        solution_variables=resolved("solution.env", file.solution.env),
        hidden=_hidden_texts(tests),
    )


def _origin(folder: Path, image: str | None, service: Service) -> tuple[str | None, Build | None]:
    """Return the image by name, and how it is built; a compose file comes before task.toml, as in Harbor."""
    if service.is_built:
        image = None
    elif service.image is not None:
        return service.image, None
    environment = folder.absolute() / "environment"
    context = environment / service.context
    dockerfile = context / service.dockerfile
    if dockerfile.is_file():
        return image, Build(environment, context, dockerfile, service.arguments or {}, service.target)
    if service.is_built:
        raise ValueError(f"environment/{COMPOSE_FILE}: build: there is no {dockerfile.relative_to(folder.absolute())}")
    if image is None:
        raise ValueError("there is neither [environment] docker_image nor environment/Dockerfile")
    return image, None


# ------------------------------------------------------------------------------------------------------ lines of files


def _text(folder: Path, name: str) -> str:
    """Return the text of a file of a task."""
    content = (folder / name).read_bytes()
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8") from None


def _named_line(message: str, text: str) -> str:
    """Return a message of the TOML parser, such as `Expected ... (at line 3, column 7)`, with the file first."""
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message, re.DOTALL)
    if match is None:
        return f"task.toml: {message}"
    line = match[2] or len(text_lines(text)) or 1
    return f"task.toml, line {line}: {match[1][0].lower()}{match[1][1:]}"


def _line_of(text: str, keys: Sequence[str | int]) -> str:
    """Return `task.toml, line N`: the line where the value of `keys` begins, or of the last table above it."""
    names = [key for key in keys if isinstance(key, str)]
    table, best, delimiter = list[str](), (0, 0), ""
    for number, line in enumerate(text.split("\n"), start=1):
        if delimiter:  # A text of several lines.
            delimiter = "" if delimiter in line else delimiter
            continue
        is_header = line.lstrip().startswith("[")
        head = line.partition("#")[0].strip().strip("[]") if is_header else line.partition("=")[0]
        path = [*([] if is_header else table), *(part.strip(" \t\"'") for part in head.split("."))]
        table = path if is_header else table
        depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, names, strict=False)))
        if depth > best[0]:
            best = (depth, number)
        delimiter = next((quotes for quotes in ('"""', "'''") if line.count(quotes) % 2), "")
    return f"task.toml, line {best[1]}" if best[1] else "task.toml"


def _instruction(folder: Path) -> str:
    """Return the instruction without the marks at its start against its use as training data."""
    lines = _text(folder, "instruction.md").split("\n")
    text = well_formed("\n".join(dropwhile(_is_no_instruction, lines)).strip())
    if not text:
        raise ValueError("instruction.md is empty")
    return text


def _is_no_instruction(line: str) -> bool:
    """Return whether a line is empty, or a comment with the mark against training."""
    text = line.strip()
    is_comment = text.startswith("#") or (text.startswith("<!--") and text[4:].endswith("-->"))
    return not text or (is_comment and "canary" in text.lower())


def _resolved(text: str, keys: Sequence[str], value: str, variables: Mapping[str, str]) -> str:
    match = _REFERENCE.fullmatch(value)
    if match is None:
        return value
    name, default = match.groups()
    if name in variables:
        return variables[name]
    if default is None:
        table = f"[{'.'.join(keys[:-1])}] {keys[-1]}"
        raise ValueError(f"{_line_of(text, keys)}: {table} needs a value: set env.world.variables to {{{name}: ...}}")
    return default


def _hidden_texts(tests: Path) -> tuple[str, str]:
    """Return the texts of the tests' Python files, and of their other files."""
    python_files, other_files, remaining_bytes = list[str](), list[str](), _MOST_HIDDEN_BYTES
    for path in sorted(tests.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > remaining_bytes:
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            remaining_bytes -= len(content)
            texts = python_files if path.suffix == ".py" else other_files
            texts.append(well_formed(content.decode(errors="replace")))
    return "\n\n".join(python_files), "\n\n".join(other_files)
