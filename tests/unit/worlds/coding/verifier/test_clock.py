"""What a check is charged for the time in which the solution's process used no processor."""

import pytest

from agentic_opd.worlds.coding.verifier.harness.clock import idle_s, queued_s, threads_of_others

CHILD, OTHER = 7, 8


@pytest.mark.parametrize(
    ("before", "now", "charged_s"),
    [
        ({}, {}, 0.25),  # It has ended, or there is none.
        ({(CHILD, 7): ("S", 1.0)}, {(CHILD, 7): ("S", 1.0)}, 0.25),  # It sleeps.
        ({(CHILD, 7): ("S", 1.0)}, {(CHILD, 7): ("T", 1.0)}, 0.25),
        ({}, {(CHILD, 7): ("R", 1.0)}, 0.0),  # It waits for a processor.
        ({}, {(CHILD, 7): ("S", 1.0), (CHILD, 9): ("R", 0.0)}, 0.0),  # One of its threads does.
        ({}, {(CHILD, 7): ("D", 1.0)}, 0.0),  # It waits for the disk.
        ({}, {(CHILD, 7): ("D", 1.0), (OTHER, 8): ("S", 0.0)}, 0.25),  # It waits for a new process, which sleeps.
        ({}, {(CHILD, 7): ("D", 1.0), (CHILD, 9): ("S", 0.0)}, 0.25),
        # It waits for its own process, which works, waits for a processor, or lives too short to be seen twice.
        ({(OTHER, 8): ("R", 1.0)}, {(CHILD, 7): ("S", 1.0), (OTHER, 8): ("R", 1.2)}, 0.2),
        ({(OTHER, 8): ("R", 1.0)}, {(CHILD, 7): ("S", 1.0), (OTHER, 8): ("R", 1.0)}, 0.0),
        ({}, {(CHILD, 7): ("S", 1.0), (OTHER, 8): ("R", 0.2)}, 0.25),
        # It waits for a processor that its own process takes.
        ({(OTHER, 8): ("R", 1.0)}, {(CHILD, 7): ("R", 1.0), (OTHER, 8): ("R", 1.5)}, 0.25),
    ],
)
def test_who_waits_for_a_processor_is_not_idle(
    before: dict[tuple[int, int], tuple[str, float]], now: dict[tuple[int, int], tuple[str, float]], charged_s: float
) -> None:
    assert idle_s(CHILD, before, now, 0.25) == pytest.approx(charged_s)


def test_what_the_kernel_says() -> None:
    threads = threads_of_others()
    assert threads
    assert all(state in "RSDTtZXIPWKx" and used_s >= 0 for state, used_s in threads.values())
    assert queued_s() >= 0
