"""A server on a Unix socket, as programs in a sandbox see the policy: it answers what it is told to, and remembers."""

import json
import socketserver
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

from agentic_opd.sandboxes.program import SOCKET_NAME


class Request(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Door(socketserver.ThreadingUnixStreamServer):
    """`/slow` is answered in two pieces, the second once anything else is asked for, which is answered at once."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.requests: list[Request] = []
        self.before_answer: Callable[[], object] = lambda: None
        self.goes_on = threading.Event()
        super().__init__(str(folder / SOCKET_NAME), _Handler)
        (folder / SOCKET_NAME).chmod(0o666)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        self.server.requests.append(Request(self.path, dict(self.headers), self.rfile.read(length)))
        self.server.before_answer()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.path == "/slow":
            self.wfile.write(b"begun\n")
            self.wfile.flush()
            self.server.goes_on.wait(60)
        self.server.goes_on.set()
        self.wfile.write(json.dumps({"path": self.path}).encode())
        self.close_connection = True

    do_GET = do_POST = _answer

    def address_string(self) -> str:
        return "a program"

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def door(folder: Path) -> Generator[Door]:
    """Serve on the socket in `folder` while the block runs."""
    folder.chmod(0o755)
    with Door(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
