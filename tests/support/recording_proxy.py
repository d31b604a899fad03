"""An HTTP proxy on a port of its own that forwards to one server, keeps what passed, and can lose or hold answers.

A stream of server-sent events passes as it comes; its events are kept when it has ended.
"""

import contextlib
import gzip
import http.client
import json
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any
from urllib.parse import urlsplit

_KEPT_HEADERS = ("Content-Type", "Content-Encoding", "Authorization")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that the server answered; bodies are parsed JSON, None where there was none, a list of a stream's."""

    path: str
    request: Any
    status: int
    answer: Any
    is_stream: bool = False


@dataclass
class RecordingProxy:
    """What passed through `url` to `target`, in the order of the answers."""

    target: str
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    to_lose: list[str] = field(default_factory=list)
    """Paths: the next answer of each never reaches the client, though the server gave it. No batch is no answer."""
    to_hold: list[str] = field(default_factory=list)
    """Paths: the next answer of each waits until `release` is set, a stream behind its first event."""
    hidden: tuple[str, ...] = ()
    """Paths that begin so are not there, as on a server without the plugin."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the plugin says of itself in place of the truth: a server that was started with fewer flags."""
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)
    under_way: int = 0
    is_closed: bool = False
    connections: set[socket.socket] = field(default_factory=set[socket.socket])
    """Those of its clients."""

    def of(self, path: str) -> list[Exchange]:
        """The exchanges of one route."""
        with self.lock:
            return [exchange for exchange in self.exchanges if exchange.path == path]

    def streams(self, path: str) -> list[tuple[Any, list[Any]]]:
        """The requests of one route that were answered by a stream, and its events."""
        return [(one.request, one.answer) for one in self.of(path) if one.is_stream]

    @contextmanager
    def between_exchanges(self) -> Generator[list[Exchange]]:
        """Begin no exchange while the body runs, which gets all earlier ones: a kill in it loses no answer."""
        with self.changed:
            self.is_closed = True
            assert self.changed.wait_for(lambda: not self.under_way, 60), "an exchange does not end"
        try:
            yield list(self.exchanges)
        finally:
            with self.changed:
                self.is_closed = False
                self.changed.notify_all()

    def disconnect(self) -> None:
        """Let the clients' connections end, as those of a killed server, so that none leads to the next one."""
        for connection in self.connections.copy():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # Answers that are being written come to their end.

    def forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str], begin_stream: Callable[[], BufferedIOBase]
    ) -> tuple[int, bytes] | None:
        """Ask the server. None where the client is to see a lost connection: nobody answered, or the answer is lost.

        A stream is written to what `begin_stream` gives, and its end is seen by the connection's.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self.is_closed)
            self.under_way += 1
        try:
            return self._ask(method, path, body, headers, begin_stream)
        finally:
            with self.changed:
                self.under_way -= 1
                self.changed.notify_all()

    def _ask(
        self, method: str, path: str, body: bytes, headers: dict[str, str], begin_stream: Callable[[], BufferedIOBase]
    ) -> tuple[int, bytes] | None:
        if self.hidden and path.startswith(self.hidden):
            return 404, b'{"detail": "Not Found"}'
        place = urlsplit(self.target)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=600)
        with contextlib.closing(connection):
            try:
                connection.request(method, path, body or None, headers)
                reply = connection.getresponse()
                if (reply.getheader("Content-Type") or "").startswith("text/event-stream"):
                    self._pass_stream(path, body, reply, begin_stream())
                    return None
                status, answer = reply.status, reply.read()
            except (OSError, http.client.HTTPException):
                return None
        if path == "/v1/opd/info" and self.info:
            answer = json.dumps(json.loads(answer) | self.info).encode()
        plain = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        with self.lock:
            self.exchanges.append(Exchange(path, parsed(plain), status, parsed(answer)))
            is_lost = path in self.to_lose and self.exchanges[-1].answer != {"batch": None}
            if is_lost:
                self.to_lose.remove(path)
        if self._takes(self.to_hold, path):
            self.release.wait(60)
        return None if is_lost else (status, answer)

    def _pass_stream(self, path: str, body: bytes, reply: http.client.HTTPResponse, client: BufferedIOBase) -> None:
        events: list[Any] = []
        is_held = self._takes(self.to_hold, path)
        for line in reply:
            if line.startswith(b"data: {"):
                events.append(json.loads(line.removeprefix(b"data: ")))
            if line.startswith(b"data: [DONE]"):  # Before the client knows that it is over.
                with self.lock:
                    self.exchanges.append(Exchange(path, parsed(body), reply.status, events, is_stream=True))
            client.write(line)
            client.flush()
            if is_held and events and not line.strip():
                self.release.wait(60)
                is_held = False

    def _takes(self, paths: list[str], path: str) -> bool:
        """Take a path off a list, if it is there."""
        with self.lock:
            is_there = path in paths
            if is_there:
                paths.remove(path)
        return is_there


def seen(proxy: RecordingProxy) -> list[tuple[list[int], list[list[int]]]]:
    """(prompt ids, sampled ids of each choice) of every stream of the policy that passed, as they were answered."""
    found: list[tuple[list[int], list[list[int]]]] = []
    for request, answer in proxy.streams("/generate"):
        choices: list[list[int]] = [[] for _ in range(request["n"])]
        for event in answer:
            choices[event["index"]] += event["token_ids"]
        found.append((request["prompt"]["prompt_token_ids"], choices))
    return found


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def handler_of(proxy: RecordingProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            proxy.connections.add(self.connection)

        def finish(self) -> None:
            proxy.connections.discard(self.connection)
            super().finish()

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: self.headers[name] for name in _KEPT_HEADERS if name in self.headers}
            reply = proxy.forward(self.command, self.path, body, headers, self.begin_stream)
            self.close_connection = reply is None
            if reply is None:
                return
            status, answer = reply
            with contextlib.suppress(ConnectionError):  # The client may have given up.
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def begin_stream(self) -> BufferedIOBase:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            return self.wfile

        do_GET = do_POST = pass_on

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def recording_proxy(target: str) -> Generator[RecordingProxy]:
    """Forward to `target` (`http://HOST:PORT`) while the body runs."""
    proxy = RecordingProxy(target)
    with _Server(("127.0.0.1", 0), handler_of(proxy)) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
