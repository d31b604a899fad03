"""A program in the sandbox: what it is told, its one way out, and what is said of how it ended. Real bwrap."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.types import ProgramRun
from agentic_opd.sandboxes.bubblewrap import BubblewrapSandbox
from agentic_opd.sandboxes.program import Program, run_program, socket_mount
from agentic_opd.sandboxes.protocol import Limits, Mount
from agentic_opd.sandboxes.workdir import get_files, put_files
from tests.support.door import Door, door

pytestmark = pytest.mark.sandbox


@pytest.fixture
def served() -> Iterator[tuple[Door, Path]]:
    # The path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory() as name, door(Path(name)) as server:
        yield server, Path(name)


def program(command: str, task: str = "Write f.", timeout_s: float = 30.0, **variables: str) -> Program:
    return Program(command, task, "s3cret", "the-model", timeout_s, variables)


def run(folder: Path, one: Program, *mounts: Mount, limits: Limits | None = None) -> ProgramRun:
    async def main() -> ProgramRun:
        async with BubblewrapSandbox(limits, [socket_mount(folder), *mounts]) as box:
            await put_files(box, {"given.py": "x = 1\n"})
            return await run_program(box, one)

    return asyncio.run(main())


ASK = "python -c 'import os, sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())'"


def test_it_is_told_its_task_and_where_to_ask(served: tuple[Door, Path]) -> None:
    _, folder = served
    command = (
        'echo "$TASK|$OPENAI_API_KEY|$OPENAI_MODEL|$MORE"; cat "$TASK_FILE"; echo; pwd; ls; '
        'echo "$ANTHROPIC_BASE_URL|$ANTHROPIC_API_KEY"; echo "$OPENAI_BASE_URL"'
    )
    ended = run(folder, program(command, "Write f.\nSoon: 'é' $HOME", MORE="more"))
    *lines, anthropic, address = ended.output.splitlines()
    assert anthropic == f"{address.removesuffix('/v1')}|s3cret"
    assert lines == [
        *("Write f.", "Soon: 'é' $HOME|s3cret|the-model|more", "Write f.", "Soon: 'é' $HOME", "/workspace", "given.py")
    ]
    assert address.startswith("http://127.0.0.1:")
    assert address.endswith("/v1")
    assert (ended.exit_code, ended.stopped) == (0, None)


def test_a_task_that_is_too_long_for_a_variable_is_in_the_file(served: tuple[Door, Path]) -> None:
    ended = run(served[1], program('echo "[$TASK]"; wc -c <"$TASK_FILE"', "x" * 300_000))
    assert ended.output == "[]\n300000"


def test_its_requests_reach_the_socket(served: tuple[Door, Path]) -> None:
    server, folder = served
    ended = run(folder, program(f'{ASK} "${{OPENAI_BASE_URL}}/one"; {ASK} "${{OPENAI_BASE_URL}}/two"'))
    assert ended.output.split("\n") == ['{"path": "/v1/one"}', '{"path": "/v1/two"}']
    assert all(request.headers["Connection"] == "close" for request in server.requests)


def test_its_files_are_read_while_it_waits_for_an_answer(served: tuple[Door, Path]) -> None:
    server, folder = served
    found = list[bytes]()

    async def main() -> ProgramRun:
        async with BubblewrapSandbox(None, [socket_mount(folder)]) as box:
            loop = asyncio.get_running_loop()

            def read() -> None:
                found.append(asyncio.run_coroutine_threadsafe(get_files(box), loop).result(60)["solution.py"])

            server.before_answer = read
            steps = "; ".join(f'echo {step} >solution.py; {ASK} "$OPENAI_BASE_URL/{step}"' for step in (1, 2))
            return await run_program(box, program(f"{steps}; rm solution.py", timeout_s=120.0))

    assert asyncio.run(main()).output == '{"path": "/v1/1"}\n{"path": "/v1/2"}'
    assert found == [b"1\n", b"2\n"]


def test_a_body_and_a_stream_pass_as_they_are(served: tuple[Door, Path]) -> None:
    server, folder = served
    script = (
        "import http.client, os\n"
        "from urllib.parse import urlsplit\n"
        "at, other = (http.client.HTTPConnection(urlsplit(os.environ['OPENAI_BASE_URL']).netloc) for _ in range(2))\n"
        "body = bytes(range(256)) * 4000\n"
        "at.request('POST', '/slow', body, {'X-Own': 'kept'})\n"
        "answer = at.getresponse()\n"
        "print(answer.readline())\n"
        "other.request('GET', '/other')\n"
        "print(answer.read())\n"
    )
    ended = run(folder, program(f"python - <<'EOF'\n{script}EOF"))
    assert ended.output == "b'begun\\n'\nb'{\"path\": \"/slow\"}'"
    request, other = server.requests
    assert other.path == "/other"
    assert request.body == bytes(range(256)) * 4000
    assert request.headers["X-Own"] == "kept"


def test_there_is_no_other_way_out(served: tuple[Door, Path]) -> None:
    server, folder = served
    script = (
        "import socket\n"
        "for place in (('127.0.0.1', 22), ('10.0.0.1', 80), ('1.1.1.1', 53)):\n"
        "    with socket.socket() as at:\n"
        "        at.settimeout(2)\n"
        "        print(at.connect_ex(place) == 0)\n"
    )
    ended = run(folder, program(f"python - <<'EOF'\n{script}EOF\ntouch /run/agentic-opd/x; ls /run/agentic-opd"))
    assert ended.output.splitlines()[:3] == ["False"] * 3
    assert ended.output.splitlines()[-1] == "socket"
    assert "Read-only" in ended.output
    assert server.requests == []


@pytest.mark.parametrize(
    ("command", "timeout_s", "expected"),
    [
        ("echo bye; exit 7", 30.0, (7, None)),
        ("kill -9 $$", 30.0, (137, None)),
        ("no-such-program", 30.0, (127, None)),
        ("sleep 60", 2.0, (None, "time")),
        ("yes", 30.0, (None, "output")),
    ],
)
def test_how_it_ended_is_said(served: tuple[Door, Path], command: str, timeout_s: float, expected: Any) -> None:
    ended = run(served[1], program(command, timeout_s=timeout_s))
    code, stopped = expected
    assert ended.stopped == stopped
    assert code is None or ended.exit_code == code
    assert len(ended.output) < 5000


def test_a_program_that_takes_too_much_memory_is_stopped_for_it(served: tuple[Door, Path]) -> None:
    hold = "python -c 'import time; x = bytearray(10**8); time.sleep(30)' &"
    ended = run(served[1], program(f"{hold} {hold} {hold} wait"), limits=Limits(memory_mb=200))
    assert ended.stopped == "memory"


def test_mounts_are_read_only_and_where_they_are(served: tuple[Door, Path], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "agent.py").write_text("print('an agent')")
    command = f"python {tmp_path}/agent.py; touch {tmp_path}/new || ls {tmp_path}; ls {tmp_path.parent}"
    ended = run(served[1], program(command), Mount(tmp_path, str(tmp_path)))
    lines = ended.output.splitlines()
    assert (lines[0], lines[-2:]) == ("an agent", ["agent.py", tmp_path.name])
    assert not (tmp_path / "new").exists()
