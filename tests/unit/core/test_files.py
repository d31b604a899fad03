"""What is no regular file: refused by name, and not opened, which would wait for ever where it is a FIFO."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.validate import main as validate
from agentic_opd.core.errors import ConfigError, DatasetError, OPDError, OutputError, PlaceError
from agentic_opd.core.files import check_regular
from agentic_opd.gateway.journal import Journal
from agentic_opd.report.brake import brake_notes
from agentic_opd.report.page import write_report
from agentic_opd.report.read import read_run, read_settings
from agentic_opd.runs.distill_file import read_lines
from agentic_opd.runs.metric_log import MetricFile
from agentic_opd.settings.files import read_yaml
from agentic_opd.wire.files import check_place
from agentic_opd_environments.functions import _rows
from agentic_opd_environments.sql.files import read_questions
from tests.support.disk import KINDS, make


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_path_is_stands_in_the_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "path"
    make(kind, path)
    for is_read in (False, True):
        with pytest.raises(OSError, match=f"{kind}|FIFO") as refused:
            check_regular(path, is_read=is_read)
        assert refused.value.filename == str(path)


def test_files_new_files_and_open_pipes_are_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link", "new", "new/below", "file/below"):
        check_regular(tmp_path / name)
    reading, writing = os.pipe()
    check_regular(Path(f"/dev/fd/{reading}"), is_read=True)
    check_regular(Path("/dev/stdin"), is_read=True)
    with pytest.raises(OSError, match="FIFO"):
        check_regular(Path(f"/dev/fd/{writing}"))
    os.close(reading)
    os.close(writing)


READERS: list[tuple[Callable[[Path], Any], type[Exception]]] = [
    (read_run, PlaceError),
    (lambda path: brake_notes(path), PlaceError),
    (lambda path: list(read_lines(path)), OSError),
    (lambda path: read_yaml(path, "settings"), ConfigError),
    (lambda path: list(read_questions(path, path.parent)), ConfigError),
    (lambda path: list(_rows(str(path))), DatasetError),
    (lambda path: Journal(path, only_read=True), OutputError),
]
WRITERS: list[tuple[Callable[[Path], Any], type[Exception]]] = [
    (Journal, OutputError),
    (MetricFile, PlaceError),
    (check_place, PlaceError),
    (lambda path: write_report([], path), OutputError),
    (lambda path: write_report([], path.with_suffix("")), OutputError),
]


@pytest.mark.parametrize(("use", "error"), [*READERS, *WRITERS])
def test_every_file_of_a_user_is_looked_at_before_it_is_opened(
    tmp_path: Path, use: Callable[[Path], Any], error: type[OPDError]
) -> None:
    os.mkfifo(tmp_path / "named.part")
    with pytest.raises(error, match="FIFO"):
        use(tmp_path / "named.part")


def test_a_fifo_is_no_file_to_check_and_no_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "groups.jsonl")
    assert validate([str(tmp_path / "groups.jsonl")]) == 2
    assert "FIFO" in capsys.readouterr().err
    assert read_settings(tmp_path / "groups.jsonl") == {}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="the system has no /dev/stdin")
def test_groups_may_come_through_a_pipe(tmp_path: Path) -> None:
    code = "from agentic_opd.cli.validate import main; raise SystemExit(main(['/dev/stdin']))"
    done = subprocess.run([sys.executable, "-c", code], input="{}\n", text=True, capture_output=True, timeout=60)
    assert done.returncode == 1, done.stderr
