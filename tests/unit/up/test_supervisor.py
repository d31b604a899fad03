"""`agentic-opd up` with small scripts as parts: order, readiness, early ends, and no process left."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from bench.local_server import free_port

from agentic_opd.core.errors import ConfigError, OPDError, PlaceError, RolledBackError
from agentic_opd.up.config import UpConfig
from agentic_opd.up.parts import LoopPart, Role
from agentic_opd.up.supervisor import PartFailedError, Supervisor
from tests.support.waiting import until

pytestmark = pytest.mark.processes

SERVES = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
print('listening', flush=True)
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
"""
ROLLS_BACK = """
import sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen(sys.argv[1]).read()
        raise SystemExit(3)
    except OSError:
        time.sleep(0.05)
"""
"""Ends as after a roll-back, once the address answers."""
WAITS = "import time; print('here', flush=True); time.sleep(600)"


class Loop:
    """Parts that write `NAME start` or `NAME end` into one file."""

    def __init__(self, folder: Path, **settings: float) -> None:
        self.folder, self.port = folder, free_port()
        self.story = folder / "story"
        self.parts: list[LoopPart] = []
        given = {"output_dir": folder, "servers": {"s": {"model": "m"}}, "environments": {"e": {}}, "stop_s": 5}
        self.config = UpConfig.model_validate(given | settings)

    def add(self, name: str, role: Role, code: str, *arguments: str, port: int | None = None) -> LoopPart:
        note = f"open({str(self.story)!r}, 'a').write({name!r} + ' start\\n')\n"
        program = (sys.executable, "-c", note + code)
        url = f"http://127.0.0.1:{port}/" if port else None
        self.parts.append(LoopPart(name, role, program, arguments, {}, port, url))
        return self.parts[-1]

    def server(self) -> None:
        self.add("policy", "server", SERVES, str(self.port), port=self.port)

    def run(self) -> None:
        asyncio.run(asyncio.wait_for(Supervisor(self.parts, self.config).run(), 60))

    def fails(self, kind: type[OPDError]) -> str:
        with pytest.raises(kind) as error:
            self.run()
        return str(error.value)

    def told(self) -> list[str]:
        return self.story.read_text().splitlines() if self.story.exists() else []

    def marked(self) -> list[str]:
        """Processes that are parts of this loop or their children, by a variable that they inherit."""
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"LOOP={self.folder}".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text()[:200])
        return found


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setenv("LOOP", str(tmp_path))
    return Loop(tmp_path)


ENVIRONMENT = "import time; time.sleep(0.2)"
TRAINER = """
import sys, time, urllib.request
urllib.request.urlopen(sys.argv[1]).read()
while 'tasks start' not in open(sys.argv[2]).read(): time.sleep(0.02)
"""


def test_each_starts_when_what_it_needs_answers_and_all_end(loop: Loop) -> None:
    loop.server()
    loop.add("tasks", "environment", ENVIRONMENT)
    loop.add("trainer", "trainer", TRAINER, f"http://127.0.0.1:{loop.port}/", str(loop.story))
    loop.run()
    assert loop.told()[0] == "policy start"
    assert sorted(loop.told()[1:]) == ["tasks start", "trainer start"]
    assert loop.marked() == []


@pytest.mark.parametrize(
    ("role", "code", "how"),
    [
        ("trainer", "import os; os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("environment", "print('no disk', flush=True); raise SystemExit(1)", "ended with code 1"),
        ("api", "", "ended with code 0"),
    ],
)
def test_a_part_that_ends_too_early_ends_all(loop: Loop, role: Role, code: str, how: str) -> None:
    """Also a child that the part has left behind, in a session of its own, which is in no process group of the loop."""
    child = "import subprocess, sys\n"
    child += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    loop.server()
    loop.add("dies", role, child + code)
    if role != "trainer":
        loop.add("trainer", "trainer", WAITS)
    said = loop.fails(PartFailedError)
    assert f"dies {how}, so all parts are ended" in said
    assert ("no disk" in said) == (role == "environment")
    assert loop.told().count("dies start") == 1
    assert loop.marked() == []


@pytest.mark.parametrize("code", [3, 1])
def test_without_clients_a_roll_back_ends_all(loop: Loop, code: int) -> None:
    """torchrun hides the trainer's code, and the file of verdicts says it."""
    verdicts = f"open({str(loop.folder / 'brake.jsonl')!r}, 'w').write('{{\"verdict\": \"rolled_back\"}}\\n')"
    loop.server()
    loop.add("tasks", "environment", WAITS)
    loop.add("trainer", "trainer", f"print('version 3 was worse'); {verdicts}; raise SystemExit({code})")
    assert "version 3 was worse" in loop.fails(RolledBackError)
    assert loop.marked() == []


def test_a_gateway_serves_on_after_a_roll_back(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    loop.server()
    port = free_port()
    loop.add("talk", "environment", SERVES, str(port), port=port)
    loop.add("trainer", "trainer", ROLLS_BACK, f"http://127.0.0.1:{port}/")

    async def run() -> None:
        running = asyncio.create_task(Supervisor(loop.parts, loop.config).run())
        async with asyncio.timeout(60):
            while "they are served, untrained" not in caplog.text:
                assert not running.done()
                await asyncio.sleep(0.05)
        with await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/") as answer:
            assert answer.status == 200
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert loop.marked() == []


def test_wrong_settings_are_said_with_the_end_of_the_log(loop: Loop) -> None:
    loop.server()
    loop.add("trainer", "trainer", "print('error: no such model'); raise SystemExit(2)")
    assert "no such model" in loop.fails(ConfigError)


def test_the_lines_of_the_trainer_are_shown(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    loop.server()
    loop.add("trainer", "trainer", "print('step 1 of 2\\n'); print('step 2 of 2\\n')")
    with caplog.at_level("INFO"):
        loop.run()
    said = [record.getMessage() for record in caplog.records]
    assert said[-3:] == ["trainer: step 1 of 2", "trainer: step 2 of 2", "trainer is done"]


def test_a_server_that_does_not_start(loop: Loop) -> None:
    loop.add("policy", "server", "raise SystemExit('out of memory')", port=loop.port)
    loop.add("trainer", "trainer", WAITS)
    said = loop.fails(PartFailedError)
    assert "policy ended with code 1 before it was ready" in said
    assert "out of memory" in said
    assert loop.told() == ["policy start"]


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    loop = Loop(tmp_path, ready_s=0.5)
    loop.add("policy", "server", WAITS, port=loop.port)
    loop.add("trainer", "trainer", WAITS)
    assert "does not answer" in loop.fails(PartFailedError)


def test_a_port_that_is_taken_is_named_before_anything_starts(loop: Loop) -> None:
    import socket

    loop.server()
    with socket.socket() as other:
        other.bind(("127.0.0.1", loop.port))
        other.listen()
        assert f"policy can't listen on port {loop.port}" in loop.fails(PlaceError)
    assert loop.told() == []


def test_a_part_that_does_not_hear_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOP", str(tmp_path))
    loop = Loop(tmp_path, stop_s=0.5)
    loop.server()
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
    loop.add("talk", "server", deaf + "time.sleep(600)")
    loop.add("trainer", "trainer", "import time; time.sleep(0.5)")
    loop.run()
    assert loop.marked() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_it_is_killed_its_parts_end(loop: Loop, number: signal.Signals) -> None:
    loop.server()
    loop.add("trainer", "trainer", WAITS)
    parts = [(part.name, part.role, part.program, part.arguments, {}, part.port, part.ready_url) for part in loop.parts]
    code = f"""
import asyncio, os, signal
from agentic_opd.up.config import UpConfig
from agentic_opd.up.parts import LoopPart
from agentic_opd.up.supervisor import Supervisor
parts = [LoopPart(*given) for given in {parts!r}]
config = UpConfig.model_validate({loop.config.model_dump(mode="json")!r})
async def run():
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await Supervisor(parts, config).run()
try: asyncio.run(run())
except asyncio.CancelledError: pass
"""
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    until(lambda: "trainer start" in loop.told(), process=process)
    until(lambda: len(loop.marked()) == 3)
    process.send_signal(number)
    process.wait(60)
    until(lambda: loop.marked() == [], said=lambda: str(loop.marked()))


def test_an_environment_that_fails_after_the_trainer_is_done_spoils_nothing(loop: Loop) -> None:
    place = loop.folder / "pid"
    is_there = f"not os.path.exists({str(place)!r}) or os.path.exists('/proc/' + open({str(place)!r}).read())"
    fails = f"import os, time\nwhile {is_there}: time.sleep(0.02)\ntime.sleep(0.5)\nraise SystemExit(1)"
    loop.server()
    loop.add("tasks", "environment", fails)
    has_begun = f"while 'tasks start' not in open({str(loop.story)!r}).read(): time.sleep(0.02)"
    ends = f"import os, time\n{has_begun}\nopen({str(place)!r}, 'w').write(str(os.getpid()))"
    loop.add("trainer", "trainer", ends)
    loop.run()
    assert loop.told().count("tasks start") == 1
