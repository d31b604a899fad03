"""The images that a Dockerfile builds on. Pure.

FROM debian:12 AS tools        an image, if a later stage needs `tools`
FROM tools                     a stage
COPY --from=busybox /bin /b    an image
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import takewhile

from agentic_opd.core.text import text_lines

_ESCAPE = re.compile(r"#\s*escape\s*=\s*`\s*", re.IGNORECASE)
_HEREDOC = re.compile(r"(?:^|\s)\d*<<-?(['\"]?)([A-Za-z_]\w*)\1")
_WITH_HEREDOC = ("RUN", "COPY", "ADD")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:(:?[-+])([^}$]*))?\}|(\w+))")


_Sources = list[int | str]
"""What a stage builds on and copies from: stages by index, and images by name."""


def base_images(text: str, arguments: Mapping[str, str], target: str | None = None) -> list[str]:
    """Return the names of the images that the stage `target`, or else the last stage, needs; each once.

    `arguments` are the build arguments. A name with a variable that has no value here is left out.
    """
    stages, names = _stages(text, arguments)
    images = dict[str, None]()
    open_stages = [names.get(target.lower(), -1) if target else len(stages) - 1]
    visited = {-1}
    while open_stages:
        index = open_stages.pop()
        if index in visited:
            continue
        visited.add(index)
        for source in stages[index]:
            if isinstance(source, int):
                open_stages.append(source)
            elif source != "scratch" and "$" not in source:
                images[source] = None
    return [*images]


def _stages(text: str, arguments: Mapping[str, str]) -> tuple[list[_Sources], dict[str, int]]:
    """Return the stages, and their indices by name and by number."""
    stages, names, variables = list[_Sources](), dict[str, int](), dict[str, str]()
    for keyword, rest in _instructions(text):
        if keyword == "ARG" and not stages:
            for word in _words(rest):
                name, equals, default = word.partition("=")
                if name in arguments or equals:
                    variables[name] = arguments.get(name, _substituted(default, variables) or "")
        elif keyword == "FROM":
            words = [word for word in _words(rest) if not word.startswith("--")]
            base = _substituted(words[0], variables) if words else None
            stages.append([names.get(base.lower(), base)] if base else [])
            names[str(len(stages) - 1)] = len(stages) - 1
            if len(words) == 3 and words[1].upper() == "AS":
                names[words[2].lower()] = len(stages) - 1
        elif stages and keyword in _WITH_HEREDOC:
            stages[-1] += [names.get(source.lower(), source) for source in _sources(rest)]
    return stages, names


def _sources(rest: str) -> Iterator[str]:
    """Yield what `--from=NAME` and `--mount=from=NAME` before the words of an instruction name."""
    for option in takewhile(lambda word: word.startswith("--"), rest.split()):
        name, _, value = option.partition("=")
        parts = value.split(",") if name == "--mount" else [f"from={value}"] if name == "--from" else []
        yield from (part.removeprefix("from=") for part in parts if part.startswith("from="))


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction's keyword and the rest, on one line; without comments and the lines of here-documents."""
    lines = [line.removesuffix("\r") for line in text_lines(text.removeprefix("\ufeff"))]
    directives = takewhile(lambda line: line.startswith("#"), lines)
    escape = "`" if any(_ESCAPE.fullmatch(line) for line in directives) else "\\"
    last_index = {line.strip("\t"): index for index, line in enumerate(lines)}
    index = 0
    while index < len(lines):
        parts: list[str] = []
        while index < len(lines):
            line = lines[index].strip()
            index += 1
            if line.startswith("#") or (parts and not line):
                continue
            parts.append(line.removesuffix(escape))
            if not line.endswith(escape):
                break
        keyword, _, rest = " ".join("".join(parts).split()).partition(" ")
        if keyword.upper() in _WITH_HEREDOC:
            for match in _HEREDOC.finditer(rest):
                if last_index.get(match[2], -1) >= index:
                    while lines[index].strip("\t") != match[2]:
                        index += 1
                    index += 1
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
