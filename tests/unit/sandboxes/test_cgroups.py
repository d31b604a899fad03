"""Memory cgroups by their files: which group is this process's own, and what is written to and read from each version.

What the kernel makes of the files is shown in test_memory.py, on whichever version the machine has.
"""

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from agentic_opd.sandboxes import cgroups
from agentic_opd.sandboxes.cgroups import MemoryGroup, ParentGroup, groups_of_process, parent_group

V1 = ParentGroup(Path("/sys/fs/cgroup/memory/box"), 1)
V2 = ParentGroup(Path("/sys/fs/cgroup/user.slice/app.scope"), 2)

PURE = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
HYBRID = """\
31 22 0:27 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
32 22 0:28 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 22 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
"""
IN_CONTAINER = "40 39 0:29 /docker/0123 /sys/fs/cgroup/memory ro,nosuid master:13 - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("mountinfo", "cgroup", "places"),
    [
        (PURE, "0::/user.slice/app.scope\n", [V2]),
        (PURE, "0::/\n", [ParentGroup(Path("/sys/fs/cgroup"), 2)]),
        (
            HYBRID,
            "9:name=systemd:/\n4:memory:/box\n1:cpu:/\n0::/\n",
            [V1, ParentGroup(Path("/sys/fs/cgroup/unified"), 2)],
        ),
        (IN_CONTAINER, "4:cpu,memory:/docker/0123/box\n", [V1]),
        (IN_CONTAINER, "4:memory:/elsewhere\n0::/\n", []),
        ("", "0::/\n", []),
    ],
)
def test_the_groups_of_a_process(mountinfo: str, cgroup: str, places: list[ParentGroup]) -> None:
    assert list(groups_of_process(mountinfo, cgroup)) == places


def lives(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


class Kernel:
    """The rules of the kernel for the files of version 2 below a folder, as far as they concern memory."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._mkdir, self._rmdir, self._write = root, Path.mkdir, Path.rmdir, Path.write_text
        self.swap_is_counted = True

        def mkdir(path: Path) -> None:
            self.mkdir(path)

        def rmdir(path: Path) -> None:
            self.rmdir(path)

        def write_text(path: Path, text: str) -> None:
            self.write(path, text)

        for function in (mkdir, rmdir, write_text):
            monkeypatch.setattr(Path, function.__name__, function)
        self.fill(root)

    def fill(self, folder: Path) -> None:
        files = {"cgroup.procs": "", "cgroup.subtree_control": ""}
        if folder != self.root and "memory" in (folder.parent / "cgroup.subtree_control").read_text():
            events = "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n"
            files |= {"memory.max": "max", "memory.oom.group": "0", "memory.events": events}
            files |= {"memory.swap.max": "max"} if self.swap_is_counted else {}
        for name, text in files.items():
            self._write(folder / name, text)

    def mkdir(self, folder: Path) -> None:
        self._mkdir(folder)
        self.fill(folder)

    def rmdir(self, folder: Path) -> None:
        if any(lives(pid) for pid in self.processes(folder)):
            raise OSError(errno.EBUSY, "busy")
        for path in folder.iterdir():
            path.unlink()
        self._rmdir(folder)

    def write(self, path: Path, text: str) -> None:
        if path.name == "cgroup.procs":
            text = str(os.getpid()) if text == "0" else text
            for group in (self.root, *self.groups()):
                left = [pid for pid in self.processes(group) if pid != text]
                self._write(group / path.name, "\n".join([*left, text] if group == path.parent else left))
        elif path.name == "cgroup.subtree_control" and self.processes(path.parent):
            raise OSError(errno.EBUSY, "a group that holds processes hands nothing on")
        else:
            self._write(path, text.removeprefix("+"))

    def processes(self, folder: Path) -> list[str]:
        return (folder / "cgroup.procs").read_text().split()

    def groups(self) -> list[Path]:
        return [path for path in self.root.iterdir() if path.is_dir()]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(tmp_path, monkeypatch)
    (tmp_path / "cgroup.procs").write_text("0")
    places = [ParentGroup(tmp_path, 2)]
    monkeypatch.setattr(cgroups, "groups_of_process", lambda *_: places)  # pyright: ignore[reportUnknownLambdaType]
    return kernel


def made(kernel: Kernel, limit_mb: int = 64) -> tuple[MemoryGroup, Path]:
    """A group of version 2, and its folder."""
    place = parent_group.__wrapped__()
    assert place is not None
    before = kernel.groups()
    group = MemoryGroup(place, limit_mb)
    (folder,) = set(kernel.groups()) - set(before)
    return group, folder


def test_this_process_leaves_its_group_of_version_2_which_then_hands_memory_on(kernel: Kernel) -> None:
    assert parent_group.__wrapped__() == ParentGroup(kernel.root, 2)
    assert kernel.processes(kernel.root) == []
    (own,) = kernel.groups()
    assert kernel.processes(own) == [str(os.getpid())]
    assert (kernel.root / "cgroup.subtree_control").read_text() == "memory"
    assert parent_group.__wrapped__() == ParentGroup(kernel.root, 2)
    assert kernel.groups() == [own]


def test_a_group_of_version_2_that_others_are_in_stays_as_it_is(kernel: Kernel) -> None:
    (kernel.root / "cgroup.procs").write_text("1")
    assert parent_group.__wrapped__() is None
    assert kernel.processes(kernel.root) == ["1", str(os.getpid())]
    assert kernel.groups() == []


@pytest.mark.parametrize("swap_is_counted", [True, False])
def test_a_limit_of_version_2(kernel: Kernel, swap_is_counted: bool) -> None:
    kernel.swap_is_counted = swap_is_counted
    _, folder = made(kernel)
    assert (folder / "memory.max").read_text() == str(64 * 2**20)
    assert (folder / "memory.oom.group").read_text() == "1"
    assert not swap_is_counted or (folder / "memory.swap.max").read_text() == "0"


def test_a_limit_of_version_1(tmp_path: Path) -> None:
    assert ParentGroup(tmp_path, 1).limit_files == {
        "memory.limit_in_bytes": "{}",
        "memory.memsw.limit_in_bytes": "{}",  # Never below the first, so it comes after it.
    }


def events(version: int, kills: int) -> str:
    """What the kernel says of a group with so many killed processes."""
    if version == 1:
        return f"oom_kill_disable 0\nunder_oom 1\noom_kill {kills}\n"
    return f"low 0\nhigh 0\nmax 7\noom 7\noom_kill {kills}\noom_group_kill 7\n"


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_is_told_once(tmp_path: Path, version: int) -> None:
    place = ParentGroup(tmp_path, version)
    group = MemoryGroup(place, 64)
    (folder,) = tmp_path.iterdir()
    told: list[bool] = []
    for kills in (0, 1, 1, 3, 3):
        (folder / place.kills_file).write_text(events(version, kills))
        told.append(group.exceeded(1))
    assert told == [False, True, False, True, False]
    (folder / place.kills_file).write_text(events(version, 5))
    group.wrap(["echo"])
    assert not group.exceeded(1), "what was killed before a command is not that command's"


def test_a_command_enters_the_group_first_in_line(kernel: Kernel) -> None:
    group, folder = made(kernel)
    done = subprocess.run(group.wrap(["cat", "/proc/self/oom_score_adj"]), capture_output=True, text=True, check=True)
    assert done.stdout == "1000\n"
    assert (folder / "cgroup.procs").read_text() == "0\n"  # "Whoever writes", to the kernel.


def test_a_group_that_cannot_be_entered_starts_nothing(kernel: Kernel) -> None:
    group, folder = made(kernel)
    folder.rmdir()
    done = subprocess.run(group.wrap(["echo", "started"]), capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == ""


def test_what_is_left_in_a_group_ends_with_it(kernel: Kernel) -> None:
    group, folder = made(kernel)
    with subprocess.Popen(["sleep", "60"]) as left:
        (folder / "cgroup.procs").write_text(str(left.pid))
        group.remove()
    assert left.returncode == -signal.SIGKILL
    assert folder not in kernel.groups()
    group.remove()
