"""What all tests share."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, here and in the processes that tests start. Its threads wait for each other in busy loops:
# on two cores that other processes use too, two of them take ten times the processor time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests share their two cores with whatever else runs; a slow example is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


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
    from agentic_opd.sandboxes.cgroups import group_place
    from tests.support.memory import MARK, only_watch
    from tests.support.sandboxes import gone

    if request.param == "watch":
        only_watch(monkeypatch)
    elif group_place() is None:
        pytest.skip("no memory cgroup can be made below this process's own")
    yield request.param
    assert gone(MARK)
    place = group_place()
    assert place is None or list(place.folder.glob(f"agentic-opd-{os.getpid()}-*")) == []
