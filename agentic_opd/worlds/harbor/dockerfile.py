"""The images that a Dockerfile builds on. Pure.

FROM debian:12 AS tools        an image, if a later stage needs `tools`
FROM tools                     a stage
COPY --from=busybox /bin /b    an image
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

_ESCAPE = re.compile(r"#\s*escape\s*=\s*`\s*", re.IGNORECASE)
_HEREDOC = re.compile(r"(?:^|\s)\d*<<-?(['\"]?)([A-Za-z_]\w*)\1")
_WITH_HEREDOC = ("RUN", "COPY", "ADD")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:(:?[-+])([^}]*))?\}|(\w+))")
_MOUNT_FROM = re.compile(r"--mount=\S*\bfrom=([^\s,]+)")
_COPY_FROM = re.compile(r"--from=(\S+)")


@dataclass(slots=True)
class _Stage:
    name: str
    sources: list[str] = field(default_factory=list[str])
    """What it builds on and copies from: stages by name or index, and images."""


def base_images(text: str, arguments: Mapping[str, str], target: str | None = None) -> list[str]:
    """Return the names of the images that the stage `target`, or else the last stage, needs; each once.

    `arguments` are the build arguments. A name with a variable that has no value here is left out.
    """
    stages = _stages(text, arguments)
    images = dict[str, None]()
    open_stages = [_index(target, stages) if target else len(stages) - 1] if stages else []
    visited = set[int]()
    while open_stages:
        index = open_stages.pop()
        if index is None or index in visited:
            continue
        visited.add(index)
        for source in stages[index].sources:
            stage = _index(source, stages[:index])
            if stage is not None:
                open_stages.append(stage)
            elif source != "scratch" and "$" not in source:
                images[source] = None
    return [*images]


def _stages(text: str, arguments: Mapping[str, str]) -> list[_Stage]:
    stages, variables = list[_Stage](), dict[str, str]()
    for keyword, rest in _instructions(text):
        if keyword == "ARG" and not stages:
            for word in _words(rest):
                name, equals, default = word.partition("=")
                if name in arguments or equals:
                    variables[name] = arguments.get(name, _substituted(default, variables) or "")
        elif keyword == "FROM":
            words = [word for word in _words(rest) if not word.startswith("--")]
            base = _substituted(words[0], variables) if words else None
            is_named = len(words) == 3 and words[1].upper() == "AS"
            stages.append(_Stage(words[2].lower() if is_named else "", [base] if base else []))
        elif stages and keyword in ("COPY", "ADD"):
            options = takewhile(lambda word: word.startswith("--"), rest.split())
            stages[-1].sources += [match[1] for word in options if (match := _COPY_FROM.fullmatch(word))]
        elif stages and keyword == "RUN":
            stages[-1].sources += _MOUNT_FROM.findall(rest)
    return stages


def _index(name: str, stages: list[_Stage]) -> int | None:
    """Return the index of the stage that `name` means; None if it is an image."""
    for index in reversed(range(len(stages))):
        if name.lower() == stages[index].name or name == str(index):
            return index
    return None


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction's keyword and the rest, on one line; without comments and the lines of here-documents."""
    lines = text.removeprefix("\ufeff").splitlines()
    directives = takewhile(lambda line: line.startswith("#"), lines)
    escape = "`" if any(_ESCAPE.fullmatch(line) for line in directives) else "\\"
    index = 0
    while index < len(lines):
        instruction = ""
        while index < len(lines):
            line = lines[index].strip()
            index += 1
            if line.startswith("#") or (instruction and not line):
                continue
            instruction += line.removesuffix(escape)
            if not line.endswith(escape):
                break
        keyword, _, rest = re.sub(r"\s+", " ", instruction).partition(" ")
        if keyword.upper() in _WITH_HEREDOC:
            for match in _HEREDOC.finditer(rest):
                ends = (number for number in range(index, len(lines)) if lines[number].strip("\t") == match[2])
                index = next(ends, index - 1) + 1
        if keyword:
            yield keyword.upper(), rest


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _substituted(text: str, variables: Mapping[str, str]) -> str | None:
    """Return `text` with the values of its variables; None if one has no value."""
    is_complete = True

    def value(match: re.Match[str]) -> str:
        nonlocal is_complete
        name, operator, word = match[1] or match[4], match[2] or "", match[3] or ""
        is_set = bool(variables.get(name)) if ":" in operator else name in variables
        if "+" in operator:
            return word if is_set else ""
        if not is_set and not operator:
            is_complete = False
        return variables[name] if is_set else word

    result = _VARIABLE.sub(value, text)
    return result if is_complete else None
