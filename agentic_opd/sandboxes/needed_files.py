"""Which files of a work directory a Python program needs: what it imports, and then the files that it names. Pure.

Only a part of a large work directory is read (`MAX_FILES`). This order decides what: without it, a module that the
program imports could be left out for files that it never opens.
"""

import ast
import re
from collections.abc import Collection, Generator, Iterator, Mapping
from functools import lru_cache
from pathlib import PurePosixPath

from agentic_opd.core.syntax import parse_module

_MAX_PARSED_BYTES, _MAX_PARSED_IN_ALL = 2**16, 2**19
"""Of one file, and of all: parsing 64 KiB takes about 20 ms. Any word of a larger file may be a module's name."""
_MAX_ODD_NAMES = 100
"""Number of files whose names have spaces or the like, for which each text is searched."""
_WORD = re.compile(r"[\w.\-/]+")
_MODULE = re.compile(r"[^\W\d][\w.]*")


def needed_first(first: str, paths: Collection[str]) -> Generator[list[str], Mapping[str, bytes], None]:
    """Yield all paths in batches, each path once, the needed ones first; send the content of each batch's files.

    The first batch is `first`. What these files import comes before what they name, and both before the rest.
    """
    left, names = dict.fromkeys(sorted(paths)), _Names(paths)
    imported, named, num_parsed = [first], list[str](), 0
    while imported or named:
        batch = [path for path in dict.fromkeys(imported or named) if path in left]
        imported, named = [], named if imported else []
        for path in batch:
            del left[path]
        for path, content in (yield batch).items() if batch else ():
            if path.endswith(".py"):
                is_parsed = len(content) <= _MAX_PARSED_BYTES and num_parsed < _MAX_PARSED_IN_ALL
                num_parsed += len(content) if is_parsed else 0
                imported += [module for module in _imports(path, content, is_parsed) if module in left]
                named += names.in_text(content.decode(errors="replace"))
    yield [*left]


class _Names:
    """The words by which a text may name files: a path, the last part of it, and that without `.py`."""

    def __init__(self, paths: Collection[str]) -> None:
        self._paths: dict[str, list[str]] = {}
        self._odd: list[tuple[str, str]] = []  # Names that are not words, and their paths.
        for path in sorted(paths):
            name = path.rpartition("/")[2]
            for word in {path, name, name.removesuffix(".py")}:
                self._paths.setdefault(word, []).append(path)
            if _WORD.fullmatch(name) is None and len(self._odd) < _MAX_ODD_NAMES:
                self._odd.append((name, path))

    def in_text(self, text: str) -> list[str]:
        """Return the paths of the files that a text names, sorted."""
        words = self._paths.keys() & {*_WORD.findall(text)}
        return sorted(
            {path for word in words for path in self._paths[word]} | {p for name, p in self._odd if name in text}
        )


@lru_cache(maxsize=256)
def _imports(path: str, content: bytes, is_parsed: bool) -> tuple[str, ...]:
    """Return the paths at which a Python file's imports may be."""
    folder = PurePosixPath(path).parent
    try:
        nodes = [*ast.walk(parse_module(content))] if is_parsed else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        nodes = None
    if nodes is None:
        words = dict.fromkeys(_MODULE.findall(content.decode(errors="replace")))
        return tuple(file for word in words for root in {folder, PurePosixPath()} for file in _module_files(root, word))
    files: list[str] = []
    for node in nodes:
        match node:
            case ast.Import(names=aliases):
                modules, roots = [alias.name for alias in aliases], (PurePosixPath(), folder)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                roots = (
                    (PurePosixPath(), folder)
                    if level == 0
                    else ((folder / "x").parents[min(level - 1, len(folder.parts))],)
                )
                modules = [f"{module}.{alias.name}" if module else alias.name for alias in aliases]
                files += [f"{root / '__init__.py'}" for root in roots if level]
            case _:
                continue
        files += [file for module in modules for root in roots for file in _module_files(root, module)]
    return tuple(files)


def _module_files(root: PurePosixPath, module: str) -> Iterator[str]:
    """Yield the files of a module and of the packages around it, below `root`."""
    package = root
    for name in filter(None, module.split(".")[:20]):
        package /= name
        yield f"{package}.py"
        yield f"{package / '__init__.py'}"
