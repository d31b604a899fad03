"""A program that runs another one inside a sandbox, and connects it to one server outside.

It is started as `python -I -S -c SOURCE`, and so imports only the standard library (Python 3.8 or later).
program.py writes its input, one line of JSON on stdin. It listens on a free port of the sandbox's 127.0.0.1, and
forwards every request to a Unix socket. Its output and exit code are those of the other program.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_HEAD = 2**17
_LISTENING = 128
_MOST_REQUESTS = 64
"""Forwarded at the same time; each takes two descriptors and a thread of the sandbox's."""


def main() -> None:
    job = json.loads(sys.stdin.readline())
    listener = socket.create_server(("127.0.0.1", 0), backlog=_LISTENING)
    threading.Thread(target=_serve, args=(listener, job), daemon=True).start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    home = os.environ.get("HOME", "/")
    folder = home if os.access(home, os.W_OK) else "/tmp"  # A user without a name has the home `/`.
    task_file = os.path.join(folder, job["task_file"])  # noqa: PTH118 - pathlib takes 5 ms to import
    with open(task_file, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(job["task"])
    named = {"OPENAI_BASE_URL": f"{address}/v1", "ANTHROPIC_BASE_URL": address, "TASK_FILE": task_file}
    shell = "bash" if os.path.exists("/bin/bash") else "sh"  # noqa: PTH110
    code = subprocess.run(
        [shell, "-c", job["command"]],
        check=False,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env={**os.environ, **job["variables"], **named},
    ).returncode
    sys.stdout.flush()
    os._exit(128 - code if code < 0 else code)


def _serve(listener: socket.socket, job: dict[str, Any]) -> None:
    free = threading.BoundedSemaphore(_MOST_REQUESTS)
    while True:
        free.acquire()
        try:
            client, _ = listener.accept()
            threading.Thread(target=_hand_on, args=(client, job, free), daemon=True).start()
        except (OSError, RuntimeError):  # The program uses all descriptors or processes at the moment.
            free.release()
            time.sleep(0.1)


def _hand_on(client: socket.socket, job: dict[str, Any], free: threading.BoundedSemaphore) -> None:
    try:
        _answer(client, job)
    finally:
        free.release()


def _answer(client: socket.socket, job: dict[str, Any]) -> None:
    """Forward one request and its answer, then close both sides."""
    with client, contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        head, rest = _head(client)
        if not head:
            return
        first, *fields = head.split(b"\r\n")
        other_fields = [field for field in fields if field.partition(b":")[0].strip().lower() != b"connection"]
        server.connect(job["socket"])
        server.sendall(b"\r\n".join([first, *other_fields, b"Connection: close"]) + b"\r\n\r\n" + rest)
        _join(client, server)


def _head(client: socket.socket) -> tuple[bytes, bytes]:
    """Read a request's head and the bytes after it; both are empty if it breaks off or is too long."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = client.recv(65536)
        received += chunk
        if not chunk or len(received) > _MAX_HEAD:
            return b"", b""
    head, _, rest = received.partition(b"\r\n\r\n")
    return head, rest


def _join(client: socket.socket, server: socket.socket) -> None:
    """Carry bytes both ways until the server has closed, or the client has gone."""
    sides = {client: server, server: client}
    while True:
        for side in select.select([*sides], [], [])[0]:
            chunk = side.recv(65536)
            if not chunk:
                return
            sides[side].sendall(chunk)


if __name__ == "__main__":
    main()
