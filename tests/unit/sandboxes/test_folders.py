"""What killed runs left, told apart from what belongs to living ones: real processes, real folders."""

import asyncio
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentic_opd.sandboxes.folders import (
    PREFIX,
    is_dead,
    make_folder,
    owner_tag,
    remove_leftovers,
    remove_tree,
)

TAG = re.compile(r"(\d+)-(\d+)-([0-9a-f]{12})")


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead_tag() -> Iterator[str]:
    """The tag of a process that was killed, and is a zombie yet."""
    package = "agentic_opd.sandboxes"
    code = f"import sys; from {package} import folders as l; print(l.owner_tag(), flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    tag = child.stdout.readline().strip()
    assert not is_dead(tag)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield tag
    child.communicate()


def test_whose_process_lives(dead_tag: str) -> None:
    match = TAG.fullmatch(owner_tag())
    assert match is not None
    pid, start, place = match.groups()
    assert int(pid) == os.getpid()
    assert not is_dead(f"{pid}-{start}-{place}")
    assert not is_dead(f"{pid}-{start}-{place}-a1b2")
    assert is_dead(f"{pid}-{int(start) - 1}-{place}"), "the process id was used again"
    assert not is_dead(f"{pid}-{int(start) - 1}-0123456789ab"), "process ids of another place tell nothing"
    assert not is_dead(pid)
    assert not is_dead(f"{pid}-abc")
    assert is_dead(dead_tag)


@pytest.mark.slow
def test_only_folders_of_dead_runs_go(temp: Path, dead_tag: str) -> None:
    mine = make_folder()
    dead = temp / f"{PREFIX}{dead_tag}-abcd1234"
    (dead / "work" / "closed").mkdir(parents=True)
    (dead / "work" / "closed").chmod(0o000)
    others = [temp / f"{PREFIX}notes", temp / f"{PREFIX}12-abcd", temp / "unrelated"]
    for path in others:
        path.mkdir()
    link = temp / f"{PREFIX}{dead_tag}-link"
    link.symlink_to(temp / "unrelated")
    file = temp / f"{PREFIX}{dead_tag}-file"
    file.touch()
    assert asyncio.run(remove_leftovers()) == [dead]
    assert sorted(temp.iterdir()) == sorted([mine, *others, link, file])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_other_users_folders_stay(temp: Path, dead_tag: str) -> None:
    folder = temp / f"{PREFIX}{dead_tag}-abcd1234"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    assert asyncio.run(remove_leftovers()) == []
    assert folder.is_dir()


def test_processes_at_work_in_it_end(temp: Path, dead_tag: str) -> None:
    """But for those with a terminal: a person looks around there."""
    folder = temp / f"{PREFIX}{dead_tag}-abcd1234"
    (folder / "work").mkdir(parents=True)
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    inside = subprocess.Popen(sleeping, cwd=folder / "work", start_new_session=True)
    on_it = subprocess.Popen([*sleeping, str(folder)], start_new_session=True)
    bystander = subprocess.Popen(sleeping, cwd=temp, start_new_session=True)
    terminal, inner = pty.openpty()
    person = subprocess.Popen(["setsid", "--ctty", *sleeping], cwd=folder, stdin=inner)
    everyone = (inside, on_it, bystander, person)
    try:
        while Path(f"/proc/{person.pid}/stat").read_text().split()[6] == "0":
            time.sleep(0.01)
        asyncio.run(remove_leftovers())
        assert (inside.wait(60), on_it.wait(60)) == (-9, -9)
        assert (bystander.poll(), person.poll()) == (None, None)
    finally:
        for process in everyone:
            process.kill()
            process.wait()
        os.close(terminal)
        os.close(inner)


def test_very_deep_trees_go(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    nest = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    subprocess.run([sys.executable, "-c", nest], cwd=tmp_path / "deep", check=True)
    remove_tree(tmp_path / "deep")
    assert not (tmp_path / "deep").exists()
