"""Read environment/docker-compose.yaml of a task whose only service is `main`, the agent's container (I/O).

Harbor lays such a file over its own, which starts `main` from the task's Dockerfile or image and lets it sleep. The
image, how it is built, variables, work directory and user are read; what Harbor's own file has too has no effect. All
other services and keys are refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml

COMPOSE_FILE = "docker-compose.yaml"
_SERVICE = "main"

_LONGEST = 2**16
"""Characters of a file."""
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:?[-?])([^}$]*))?\}|(\w+))")
_OF_HARBOR = {
    **{"CONTEXT_DIR": ".", "MAIN_IMAGE_NAME": "", "PREBUILT_IMAGE_NAME": "", "TEST_DIR": "/tests"},
    **{"ENV_VERIFIER_LOGS_PATH": "/logs/verifier", "ENV_AGENT_LOGS_PATH": "/logs/agent"},
    **{"ENV_ARTIFACTS_PATH": "/logs/artifacts"},
}
"""Values of the variables that Harbor itself defines for the file; the names of images are its own."""
_OF_LIMITS = re.compile(r"\$\{?(?:CPUS|MEMORY)\b.*")
_OF_LOGS = re.compile(r"\$\{?HOST_\w+_PATH\b.*")
_SLEEPS = re.compile(r"(?:\S*/)?(?:sleep (?:infinity|inf|\d+\w?)|tail -[fF] /dev/null)")
_NO_EFFECT = frozenset(
    {"container_name", "expose", "init", "labels", "logging", "pull_policy", "restart", "stdin_open"}
    | {"stop_grace_period", "stop_signal", "tty"}
)
_TOP_LEVEL = frozenset({"version", "name", "services"})
_REMEDIES = {
    "healthcheck": "write [environment.healthcheck] in task.toml",
    "command": "let the image's ENTRYPOINT start it",
    "entrypoint": "write ENTRYPOINT in the Dockerfile",
    "network_mode": "write [environment] network_mode in task.toml",
    "networks": "write [environment] network_mode in task.toml",
    "volumes": "copy the files in the Dockerfile",
    "env_file": "write its variables as environment",
    "deploy": "write [environment] cpus and memory_mb in task.toml",
    "cpus": "write [environment] cpus in task.toml",
    "mem_limit": "write [environment] memory_mb in task.toml",
    "ports": "remove them: nothing outside reaches the container",
    "depends_on": "start what it needs in the image's ENTRYPOINT",
}
_OTHERWISE = "remove it, or leave the task out"


class _ComposeLoader(yaml.SafeLoader):
    """Refuses aliases, with which a small file can mean a value of any size."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not read: write the value out", problem_mark=mark)
        return super().compose_node(parent, index)


@dataclass(frozen=True, slots=True)
class Service:
    """What the file says about the agent's container; None and empty where it says nothing."""

    image: str | None = None
    is_built: bool = False
    context: str = "."
    """Folder of the build, relative to environment/; likewise `dockerfile`."""
    dockerfile: str = "Dockerfile"
    arguments: Mapping[str, str] | None = None
    target: str | None = None
    variables: Mapping[str, str] | None = None
    workdir: str | None = None
    user: str | None = None


def read_compose(path: Path, variables: Mapping[str, str]) -> Service:
    """Return the service of a compose file; `variables` are the values of `${NAME}` in it.

    Raises:
        ValueError: the file is not YAML, or has other services or keys than those that are read; the message names the
            file, all of them, and what to do.
    """
    name = f"environment/{path.name}"
    try:
        text = path.read_text("utf-8-sig")
        if len(text) > _LONGEST:
            raise ValueError(f"it has {len(text)} characters, expected at most {_LONGEST}")
        content = yaml.load(text, _ComposeLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{name}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None
    try:
        return _service(content, variables)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _service(content: Any, variables: Mapping[str, str]) -> Service:
    file = _table(content, "the file")
    services = _table(file.get("services"), "services")
    if not services:
        raise ValueError("it has no service: name the agent's container `main`, or remove the file")
    if [*services] != [_SERVICE]:
        names = ", ".join(map(repr, services))
        if len(services) == 1:
            raise ValueError(
                f"its only service is {names}, which Harbor runs beside the agent's container, the service "
                f"{_SERVICE!r}: name it {_SERVICE!r}, or remove the file"
            )
        raise ValueError(
            f"services {names}: containers of several services are not supported. The agent's container is the service "
            f"{_SERVICE!r}: let the image's ENTRYPOINT start what the others do, and keep {_SERVICE!r} alone; or leave "
            "the task out"
        )
    service = _table(services[_SERVICE], _SERVICE)
    refused = [f"{key}: {_OTHERWISE}" for key in file if key not in _TOP_LEVEL and not key.startswith("x-")]
    refused += _refused(service)
    if refused:
        raise ValueError(f"not supported: {'; '.join(refused)}")
    build = service.get("build")
    table = {"context": build} if isinstance(build, str) else _table(build, "build")

    def text(value: Any, key: str) -> str | None:
        return None if value is None else _interpolated(_scalar(value, key), variables, key)

    return Service(
        image=text(service.get("image"), "image") or None,
        is_built=build is not None,
        context=_inside(text(table.get("context"), "build.context") or "."),
        dockerfile=_inside(text(table.get("dockerfile"), "build.dockerfile") or "Dockerfile"),
        arguments=_pairs(table.get("args"), "build.args", variables),
        target=text(table.get("target"), "build.target"),
        variables=_pairs(service.get("environment"), "environment", variables),
        workdir=text(service.get("working_dir"), "working_dir"),
        user=text(service.get("user"), "user"),
    )


def _refused(service: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of the service that would have an effect and are not read, with what to do."""
    supported = {"image", "build", "environment", "working_dir", "user"} | _NO_EFFECT
    for key, value in service.items():
        if key in supported or key.startswith("x-") or value in (None, [], {}):
            continue
        if key == "command" and _SLEEPS.fullmatch(_last_argument(value)):
            continue
        if key == "volumes" and isinstance(value, list) and all(map(_is_of_logs, cast(list[Any], value))):
            continue
        if key in ("deploy", "cpus", "mem_limit") and all(map(_OF_LIMITS.fullmatch, _leaves(value))):
            continue
        if key == "network_mode" and value == "none":
            yield f"{_SERVICE}.network_mode: write [environment] network_mode = 'no-network' in task.toml"
            continue
        yield f"{_SERVICE}.{key}: {_REMEDIES.get(key, _OTHERWISE)}"
    build = service.get("build")
    if isinstance(build, dict):
        for key in cast(dict[str, Any], build):
            if key not in ("context", "dockerfile", "args", "target"):
                yield f"{_SERVICE}.build.{key}: write it in environment/Dockerfile"


def _last_argument(value: Any) -> str:
    """Return a command without the shell that runs it."""
    words = [str(word) for word in cast(list[Any], value)] if isinstance(value, list) else [str(value)]
    if len(words) == 3 and words[0].rpartition("/")[2] in ("sh", "bash") and words[1].startswith("-"):
        return words[2].strip()
    return re.sub(r"^\S*sh -l?c (['\"]?)(.*)\1$", r"\2", " ".join(words).strip())


def _is_of_logs(value: Any) -> bool:
    source = cast(dict[str, Any], value).get("source", "") if isinstance(value, dict) else value
    return _OF_LOGS.fullmatch(str(source)) is not None


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for part in cast(dict[str, Any], value).values():
            yield from _leaves(part)
    else:
        yield str(value)


def _table(value: Any, key: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a mapping, got {type(value).__name__}")
    return {str(key): part for key, part in cast(dict[Any, Any], value).items()}


def _scalar(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ValueError(f"{key} must be a text, got {type(value).__name__}")
    return str(value)


def _pairs(value: Any, key: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return `{NAME: VALUE}` of a mapping or of a list of `NAME=VALUE`; a NAME alone is that of a variable."""
    pairs: dict[str, str | None] = {}
    if isinstance(value, list):
        for entry in cast(list[Any], value):
            name, equals, text = _scalar(entry, key).partition("=")
            pairs[name] = text if equals else None
    else:
        for name, text in _table(value, key).items():
            pairs[name] = None if text is None else _scalar(text, f"{key}.{name}")
    return {
        name: _interpolated(f"${{{name}}}" if text is None else text, variables, f"{key}.{name}")
        for name, text in pairs.items()
    }


def _interpolated(text: str, variables: Mapping[str, str], key: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name, operator, default = match[2] or match[5], match[3] or "", match[4]
        present = variables.get(name, _OF_HARBOR.get(name))
        if present or (present is not None and ":" not in operator):
            return present
        if "-" in operator:
            return default or ""
        if name in _OF_HARBOR:
            return ""
        raise ValueError(f"{key} needs a value: set env.world.variables to {{{name}: ...}}")

    return _VARIABLE.sub(value, text)


def _inside(path: str) -> str:
    """Return a path in environment/; refuse others."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts:
        raise ValueError(f"build: {path!r} is not in environment/: move it there")
    return path
