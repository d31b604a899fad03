"""scripts/checks/types: which files are checked before a commit."""

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

TYPES = Path(__file__).parents[3] / "scripts/checks/types"


@pytest.fixture
def types() -> dict[str, Any]:
    return runpy.run_path(str(TYPES))


def test_what_differs_from_the_last_commit_is_checked(
    types: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    names = ("a/equal.py", "a/edited.py", "a/deleted.py", "b/edited.py")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    for name in ("a/edited.py", "a/new.py", "b/edited.py"):
        (tmp_path / name).write_text("1\n")
    (tmp_path / "a/deleted.py").unlink()
    changed_files = types["changed_files"]
    monkeypatch.setitem(changed_files.__globals__, "ROOT", tmp_path)
    assert sorted(changed_files("a")) == ["a/edited.py", "a/new.py"]
    assert changed_files("a/equal.py") == []


def test_a_folder_that_is_no_repository_is_an_error(
    types: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(types["changed_files"].__globals__, "ROOT", tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        types["changed_files"]("a")


def test_the_modules_that_import_a_changed_one_are_checked_too(types: dict[str, Any]) -> None:
    files = types["with_importers"](["agentic_opd/core/syntax.py", "environments/sql_notes.txt"])
    importers = [path for path in Path("agentic_opd").rglob("*.py") if "agentic_opd.core.syntax" in path.read_text()]
    assert {"agentic_opd/core/syntax.py", *map(str, importers)} == files - {
        str(path) for path in Path("environments").rglob("*.py") if "agentic_opd.core.syntax" in path.read_text()
    }
    assert len(importers) > 1


def test_a_package_is_its_init_file(types: dict[str, Any]) -> None:
    assert types["file_of"]("agentic_opd.core") == "agentic_opd/core/__init__.py"
    assert types["file_of"]("agentic_opd_environments.replay") == "environments/agentic_opd_environments/replay.py"
