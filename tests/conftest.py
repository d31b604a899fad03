"""What all tests share. `--all` adds what takes minutes, `--shuffle SEED` runs them in another order."""

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.forks"]

# Before torch is imported, here and in the processes that tests start. Its threads wait for each other in busy loops:
# on two cores that other processes use too, two of them take ten times the processor time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests share their two cores with whatever else runs; a slow example is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
settings.load_profile("patient")
# What scripts/check uses; scripts/test looks at more, and with --all at most.
settings.register_profile("quick", settings.get_profile("patient"), max_examples=30)
settings.register_profile("thorough", settings.get_profile("patient"), max_examples=200)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what is marked `all`: experiments, benches, real agents")
    parser.addoption("--shuffle", metavar="SEED", help="shuffle modules, and the tests of each, by this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("all") is not None]
        items[:] = [item for item in items if item.get_closest_marker("all") is None]
        config.hook.pytest_deselected(items=left_out)
    if (seed := config.getoption("--shuffle")) is not None:
        items[:] = shuffled(items, seed)


def shuffled(items: Iterable[Any], seed: str) -> Iterator[Any]:
    """The items with their modules, and the tests of each module, in an order that the seed decides."""
    random = Random(seed)
    modules = [list(module) for _, module in groupby(items, key=lambda item: item.path)]
    random.shuffle(modules)
    for module in modules:
        functions = [list(function) for _, function in groupby(module, key=lambda item: item.function)]
        random.shuffle(functions)
        for function in functions:
            random.shuffle(function)
            yield from function


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `sandbox` where there can be none, which only tests that want one try out."""
    if item.get_closest_marker("sandbox"):
        from tests.support.sandboxes import why_not

        if reason := why_not():
            pytest.skip(f"bubblewrap cannot run here: {reason}")


@pytest.fixture(params=["cgroup", "watch"])
def memory_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How the memory of sandboxes is limited, and that neither a process nor a group of them is left."""
    # What it needs tries out a sandbox, for which most runs of tests need not wait.
    from agentic_opd.sandboxes.cgroups import parent_group
    from tests.support.memory import MARK, only_watch
    from tests.support.sandboxes import gone

    if request.param == "watch":
        only_watch(monkeypatch)
    elif parent_group() is None:
        pytest.skip("no memory cgroup can be made below this process's own")
    yield request.param
    assert gone(MARK)
    place = parent_group()
    assert place is None or list(place.folder.glob(f"agentic-opd-{os.getpid()}-*")) == []
