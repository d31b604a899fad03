"""One limit for all that a sandbox holds in memory: by a cgroup where there can be one, and by the watch everywhere."""

import os
import re
from pathlib import Path

import pytest

from agentic_opd.sandboxes.cgroups import parent_group
from agentic_opd.sandboxes.launcher import launcher
from agentic_opd.sandboxes.protocol import CommandResult
from tests.support.memory import LIMIT, TRICKS, UNLINKED, command_of
from tests.support.sandboxes import in_sandbox, run_all

pytestmark = pytest.mark.sandbox


def attack(code: str) -> tuple[int, CommandResult, CommandResult]:
    """The most MiB that the code said it holds, how it ended, and what the sandbox says to another command."""
    result, after = run_all(command_of(code), "echo works", limits=LIMIT, timeout_s=20.0)
    numbers = re.findall(r"^\d+$", result.text, re.MULTILINE)
    return max(map(int, numbers), default=0), result, after


@pytest.mark.parametrize("trick", TRICKS)
def test_no_trick_holds_more_than_the_limit(trick: str, memory_kind: str) -> None:
    held, result, after = attack(TRICKS[trick])
    assert result.memory_exceeded, result
    assert not result.timed_out
    # All tricks but the last would hold 448 MiB: the watch ends them before that, however late it looks.
    assert held <= (2.5 if memory_kind == "watch" else 1.5) * LIMIT.memory_mb
    assert (after.memory_exceeded, after.text) == (False, "works\n")


def test_open_files_without_a_name_count(memory_kind: str) -> None:
    held, result, after = attack(UNLINKED)
    assert held <= (2.5 if memory_kind == "watch" else 1.5) * LIMIT.memory_mb
    assert result.memory_exceeded or result.disk_exceeded or "No space left on device" in result.text
    assert after.text == "works\n"


def test_one_process_by_itself_learns_of_it_by_an_error(memory_kind: str) -> None:
    (result,) = run_all("python -I -S -c 'bytearray(2**28)'", limits=LIMIT)
    assert "MemoryError" in result.text
    assert not result.memory_exceeded


def test_what_is_shared_counts_once(memory_kind: str) -> None:
    """Six processes that share 60 MiB hold 60, not 360."""
    code = "import os, time\ndata = bytearray(b'x') * (2**20 * 60)\n"
    code += "for _ in range(5):\n    if os.fork() == 0: break\ntime.sleep(1)\n"
    (result,) = run_all(f'python -I -S -c "{code}"', limits=LIMIT)
    assert (result.exit_code, result.memory_exceeded) == (0, False)


only_root_sees_sizes = pytest.mark.skipif(
    os.geteuid() != 0, reason="others may not look at a mapped file: it counts as one of full size"
)


@only_root_sees_sizes
def test_small_mappings_count_as_what_they_hold(memory_kind: str) -> None:
    """Such as the locks of multiprocessing, which are files without a name that are only mapped."""
    code = "import mmap, time; held = [mmap.mmap(-1, 4096) for _ in range(50)]; time.sleep(1)"
    (result,) = run_all(f'python -I -S -c "{code}"', limits=LIMIT)
    assert (result.exit_code, result.memory_exceeded) == (0, False)


@only_root_sees_sizes
def test_mappings_that_come_and_go_count_as_what_they_hold(memory_kind: str) -> None:
    """Such as those of processes that end while the watch looks at them."""
    code = "import mmap, time\nend = time.monotonic() + 1\n"
    code += "while time.monotonic() < end: held = [mmap.mmap(-1, 4096) for _ in range(50)]; held.clear()"
    (result,) = run_all(f'python -I -S -c "{code}"', limits=LIMIT)
    assert (result.exit_code, result.memory_exceeded) == (0, False)


def test_the_sandbox_is_first_in_line_for_the_out_of_memory_killer(memory_kind: str) -> None:
    (result,) = run_all("cat /proc/self/oom_score_adj")
    assert result.text == "1000\n"


def test_a_sandbox_may_open_few_files() -> None:
    (result,) = run_all("ulimit -n; ulimit -Hn")
    assert result.text == "256\n256\n"


def test_roots_files_lie_in_a_tmpfs_of_their_own_that_nobody_else_sees() -> None:
    if not launcher().has_own_mounts or parent_group() is None:
        pytest.skip("folders on a disk are used here")

    async def use(box: object) -> str:
        return Path("/proc/self/mountinfo").read_text()  # noqa: ASYNC240 - it takes no time

    assert "agentic-opd-" not in in_sandbox(use)
    kind, full = run_all(
        "for d in . /tmp ~ /dev/shm; do stat -f -c %T $d; done",
        "for i in 1 2 3; do head -c 30000000 /dev/zero > /tmp/f$i; done; rm /tmp/f1; echo > works && ls works",
        limits=LIMIT,
    )
    assert kind.text == "tmpfs\n" * 4
    assert "No space left on device" in full.text
    assert full.text.endswith("works\n")
