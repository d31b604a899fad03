"""Run the gateway with uvicorn, from its start to SIGINT or SIGTERM (I/O)."""

import asyncio
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from agentic_opd.core.concurrency import rare_collections
from agentic_opd.core.errors import ConfigError
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.gateway import Gateway
from agentic_opd.gateway.web import make_app
from agentic_opd.settings.atropos import PolicyServerConfig

_GRACE_S = 5
"""Seconds that pending answers have at shutdown."""


KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open.

A client that reuses a connection just as it closes sees a connection error. With uvicorn's default of 5 s that happens
often, because agents pause that long between requests.
"""


class WebServer(uvicorn.Server):
    """A uvicorn server for sockets that already listen, without signal handlers.

    Uvicorn's handlers raise captured signals again after the shutdown, which would end the process too early.
    """

    def __init__(self, app: Starlette) -> None:
        # No access log: paths contain the clients' session names.
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(
    config: GatewayConfig, servers: Sequence[PolicyServerConfig], ready: Callable[[str, str], None]
) -> None:
    """Serve until SIGINT or SIGTERM."""
    listener = _listener(config)
    with listener:
        gateway = await Gateway.start(config, servers)
        try:
            server = WebServer(make_app(gateway))
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, server.handle_exit, number, None)
            host, port = listener.getsockname()[:2]
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", gateway.model)
            with rare_collections():
                await server.serve([listener])
        finally:
            await gateway.close()


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
