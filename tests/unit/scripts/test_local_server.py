"""Starting and stopping a server, with small programs in vLLM's place."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.local_server import ServerFailedError, local_server

from tests.support.places import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.processes

HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not runs(pid)


def launcher(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


def test_it_is_up_inside_and_gone_after_with_all_its_processes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with local_server("m", log=log, launcher=launcher(HEALTHY)) as server:
        child = int(log.read_text().split()[1])
        assert runs(server.process.pid)
        assert runs(child)
        assert server.model == "m"
    assert gone(server.process.pid)
    assert gone(child)


def test_it_is_gone_after_an_error_and_after_being_killed(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        local_server("m", log=tmp_path / "log", launcher=launcher(HEALTHY)) as server,
    ):
        raise ZeroDivisionError
    assert gone(server.process.pid)
    with local_server("m", log=tmp_path / "log", launcher=launcher(HEALTHY)) as server:
        server.kill()
        assert gone(server.process.pid)


def test_a_server_that_ends_shows_its_last_words(tmp_path: Path) -> None:
    program = "import sys; print('no such model'); sys.exit(3)"
    with (
        pytest.raises(ServerFailedError, match=r"code 3:\nno such model"),
        local_server("m", log=tmp_path / "log", launcher=launcher(program)),
    ):
        pass


@pytest.mark.slow
def test_a_server_that_stays_silent_is_given_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(ServerFailedError, match=r"does not answer after 1\.5 s"),
        local_server("m", log=log, launcher=("sh", "-c", "echo $$; exec sleep 600"), timeout_s=1.5),
    ):
        pass
    assert gone(int(log.read_text()))


def test_a_child_that_would_finish_its_work_ends_at_once_with_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = f"""
import signal, time
from pathlib import Path
from bench.local_server import child_process
patient = ("sh", "-c", "trap '' TERM; echo $$; exec sleep 600")
with child_process(patient, Path({str(log)!r}), last_signal=signal.SIGKILL):
    time.sleep(600)
"""
    argv, variables = [sys.executable, "-c", parent], {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    with subprocess.Popen(argv, env=variables, start_new_session=True) as process:
        until(lambda: log.exists() and log.read_text().endswith("\n"), process=process)
        process.kill()
    assert gone(int(log.read_text()))
