"""Trees of source that several threads ask for at once."""

import ast
import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentic_opd.core.syntax import parse_expression, parse_module

SOURCE = "\n".join(f"assert f([{i}, {i}], ['a{i}']) == [['x', {i}]]" for i in range(50))


@pytest.fixture
def threads_that_change_in_the_collector() -> Iterator[None]:
    interval = sys.getswitchinterval()

    def look(*_: object) -> None:
        sum(range(100))

    gc.callbacks.append(look)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.callbacks.remove(look)


@pytest.mark.slow
@pytest.mark.usefixtures("threads_that_change_in_the_collector")
def test_threads_that_parse_at_once_do_not_spoil_each_others_trees() -> None:
    def parsed(depth: int) -> list[str]:
        """Return the trees, parsed so many calls below the others."""
        if depth > 0:
            return parsed(depth - 1)
        return [ast.dump(parse_module(SOURCE)) for _ in range(20)] + [ast.dump(parse_expression("f([1], 'a')"))]

    with ThreadPoolExecutor(4) as pool:
        first, *later = pool.map(parsed, (0, 5, 10, 15))
    assert later == [first] * 3


def test_an_expression_is_without_its_module() -> None:
    assert ast.unparse(parse_expression("f(1)")) == "f(1)"
    with pytest.raises(SyntaxError):
        parse_expression("x = 1")
