"""The order in which a large work directory is read."""

import contextlib
import time

import pytest

from agentic_opd.sandboxes.needed_files import needed_first


def batches(files: dict[str, str], first: str = "solution.py") -> list[list[str]]:
    """The batches before the last one, which holds the rest."""
    order = needed_first(first, files)
    found = [next(order)]
    with contextlib.suppress(StopIteration):
        while True:
            found.append(order.send({path: files[path].encode() for path in found[-1]}))
    assert sorted(path for batch in found for path in batch) == sorted(files)
    return [batch for batch in found[:-1] if batch]


@pytest.mark.parametrize(
    ("files", "needed"),
    [
        ({"solution.py": "import util", "util.py": "", "a.py": ""}, [["solution.py"], ["util.py"]]),
        (
            {"solution.py": "from b import x", "b.py": "def f():\n    import c", "c.py": "", "a.py": ""},
            [["solution.py"], ["b.py"], ["c.py"]],
        ),
        (
            {"solution.py": "from lib.deep import part", "lib/__init__.py": "", "lib/deep/part.py": "", "lib/x.py": ""},
            [["solution.py"], ["lib/__init__.py", "lib/deep/part.py"]],
        ),
        (
            {
                "solution.py": "import lib",
                "lib/__init__.py": "from . import a\nfrom .b import c",
                "lib/a.py": "from ..top import x",
                "lib/b/__init__.py": "from .. import d",
                "lib/b/c.py": "",
                "lib/d.py": "",
                "top.py": "",
                "z.py": "",
            },
            [
                ["solution.py"],
                ["lib/__init__.py"],
                ["lib/a.py", "lib/b/__init__.py", "lib/b/c.py"],
                ["top.py", "lib/d.py"],
            ],
        ),
        (  # What it imports stands before what it names.
            {"solution.py": "open('t.csv')\nimport b", "b.py": "open('data/u 1.txt')", "t.csv": "", "data/u 1.txt": ""},
            [["solution.py"], ["b.py"], ["t.csv", "data/u 1.txt"]],
        ),
        (
            {"solution.py": "importlib.import_module('util')", "util.py": "import b", "b.py": "", "c.py": ""},
            [["solution.py"], ["util.py"], ["b.py"]],
        ),
        ({"solution.py": "import util\ndef f(:", "util.py": "", "c.py": ""}, [["solution.py"], ["util.py"]]),
        ({"solution.py": "x = 1\n" * 20_000 + "import util", "util.py": ""}, [["solution.py"], ["util.py"]]),
        ({"solution.py": "import a", "a.py": "import solution, a"}, [["solution.py"], ["a.py"]]),
        ({"solution.py": "from ........ import a", "a.py": ""}, [["solution.py"], ["a.py"]]),
        ({"a.py": ""}, []),
    ],
)
def test_imports_come_first_and_names_second(files: dict[str, str], needed: list[list[str]]) -> None:
    assert batches(files) == needed


@pytest.mark.parametrize(
    "source",
    [
        "(" * 2**20,
        "import a\n" * 2**16,
        "-" * 2**16 + "1",
        "a." * 2**19,
        "import " + "a." * 2**14 + "a",
        "x/" * 2**19,
        "\0" * 2**20,
    ],
)
@pytest.mark.slow
def test_no_source_takes_long(source: str) -> None:
    files = {"solution.py": source, **{f"{number} .py": source[: 2**16] for number in range(200)}, "a.py": source}
    start = time.process_time()
    batches(files)
    assert time.process_time() - start < 5.0
