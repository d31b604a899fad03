"""Run the gateway with uvicorn, from its start to SIGINT or SIGTERM (I/O)."""

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from agentic_opd.core.concurrency import rare_collections
from agentic_opd.core.errors import ConfigError
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.journal import Journal
from agentic_opd.gateway.recorder import Recorder
from agentic_opd.gateway.relay import Relay
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.settings.atropos import PolicyServerConfig

_GRACE_S = 5
"""Seconds that pending answers have at shutdown."""


KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open.

A client that reuses a connection just as it closes sees a connection error. With uvicorn's default of 5 s that happens
often, because agents pause that long between requests.
"""


_STATUS = b"HTTP/1.1 "
"""The beginning of every response."""
_MOST_ZEROS = 8
"""Maximum number of zeros before the size of a chunk; clients read at least 16 digits."""
_PROBES_S = (0.0, 0.05, 0.2, 1.0, 5.0, 15.0, 60.0)
"""Seconds before each byte that tells whether a client has gone; the last value is repeated."""


class _ProbedTransport:
    """A transport that can send a byte of the response early: of its first line, or a zero before a chunk's size."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._status_sent = self._zeros_sent = 0
        self._is_chunked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if data.startswith(_STATUS):
            self._is_chunked = b"transfer-encoding: chunked" in data.lower()
            data = data[self._status_sent :]
            self._status_sent = 0
        if data:
            self._zeros_sent = 0
            self._transport.write(data)

    def probe(self, *, has_begun: bool) -> None:
        """Send a byte, if there is one that fits; `has_begun` is whether the response has."""
        if not has_begun and self._status_sent < len(_STATUS):
            self._transport.write(_STATUS[self._status_sent : self._status_sent + 1])
            self._status_sent += 1
        elif has_begun and self._is_chunked and self._zeros_sent < _MOST_ZEROS:
            self._transport.write(b"0")
            self._zeros_sent += 1


class HalfClosed(asyncio.Protocol):
    """Mixed into uvicorn's protocol: a client that closes its sending half after a whole request gets the response.

    Uvicorn takes the end of the client's data for the end of the client. TCP tells the two apart only by a byte that is
    sent: a client that has gone resets the connection. While the application has nothing to send, bytes are therefore
    sent that every client ignores, or that the response needs anyway.
    """

    transport: Any
    cycle: Any
    _is_half_closed = False
    _probe: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        probed: Any = _ProbedTransport(transport)
        super().connection_made(probed)

    def eof_received(self) -> bool:
        """Return whether the connection stays open: while a request that has arrived as a whole is answered."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self._is_half_closed = True
        self._probe_later(0)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()  # pyright: ignore[reportAttributeAccessIssue] - uvicorn's
        if self._is_half_closed and self.cycle.response_complete:  # Of several requests the last one.
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)

    def _probe_later(self, number: int) -> None:
        delay_s = _PROBES_S[min(number, len(_PROBES_S) - 1)]
        self._probe = asyncio.get_running_loop().call_later(delay_s, self._send_probe, number)

    def _send_probe(self, number: int) -> None:
        if self.transport.is_closing():
            return
        if not getattr(self, "pipeline", ()):  # Of several requests `cycle` is the last one.
            self.transport.probe(has_begun=self.cycle.response_started)
        self._probe_later(number + 1)


PROTOCOL = type("HalfClosedProtocol", (HalfClosed, AutoHTTPProtocol), {})


class WebServer(uvicorn.Server):
    """A uvicorn server for sockets that already listen, without signal handlers.

    Uvicorn's handlers raise captured signals again after the shutdown, which would end the process too early.
    """

    def __init__(self, app: ASGIApp, on_stop: Callable[[], None] = lambda: None, *, is_relay: bool = False) -> None:
        """Serve `app`.

        Args:
            app: The application.
            on_stop: Called when the server begins to stop: it ends the endless responses.
            is_relay: The answers are those of another server, and stay unchanged.
        """
        self._on_stop = on_stop
        # No access log: paths contain the clients' session names.
        config = uvicorn.Config(
            app,
            http=PROTOCOL,
            ws="none" if is_relay else "auto",
            access_log=False,
            log_config=None,
            lifespan="off",
            server_header=not is_relay,
            date_header=not is_relay,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(
    config: GatewayConfig, servers: Sequence[PolicyServerConfig], ready: Callable[[str, str], None]
) -> None:
    """Serve until SIGINT or SIGTERM. `ready` is called with the address and the name of the service."""
    listener = _listener(config)
    with listener:
        serving = _policy(config, servers) if config.upstream is None else recording(config)
        async with serving as (server, described):
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, server.handle_exit, number, None)
            host, port = listener.getsockname()[:2]
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", described)
            with rare_collections():
                await server.serve([listener])


@asynccontextmanager
async def _policy(
    config: GatewayConfig, servers: Sequence[PolicyServerConfig]
) -> AsyncGenerator[tuple[WebServer, str]]:
    """A gateway before the policy's servers. What only records does without these imports."""
    from agentic_opd.gateway.gateway import Gateway
    from agentic_opd.gateway.web import make_app

    gateway = await Gateway.start(config, servers)
    try:
        yield WebServer(make_app(gateway), gateway.changes.close), f"serves {gateway.model!r}"
    finally:
        await gateway.close()


@asynccontextmanager
async def recording(config: GatewayConfig) -> AsyncGenerator[tuple[WebServer, str]]:
    """A gateway before a foreign model."""
    journal = Journal(config.journal)
    try:
        recorder = Recorder(config, journal, Telemetry())
        relay = Relay(config, recorder)
        try:
            server = WebServer(relay, recorder.changes.close, is_relay=True)
            yield server, f"records what {config.upstream} answers, in {str(journal.path)!r}"
        finally:
            await relay.close()
            await recorder.close()
    finally:
        journal.close()


def _listener(config: GatewayConfig) -> socket.socket:
    """Open the listening socket; connections wait until the gateway is ready."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"nothing can listen at {config.host}:{config.port} ({error.strerror or error}); choose another env.port"
        ) from error
    return listener
