"""One way to ask an HTTP server for JSON: pooled, keyed, retried within a window, with typed errors."""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from agentic_opd.core.errors import ServerRequestError, ServerUnreachableError

_BACKOFF_S = (0.1, 5.0)
"""First and longest pause between two attempts; each pause doubles the one before and is jittered."""


@dataclass
class JsonClient:
    """A client of one server. Requests must be safe to repeat: a lost connection is answered by asking again.

    Args:
        base_url: Where the server is; a trailing `/v1` is part of the routes, not of this.
        api_key: Sent as a bearer token where given; never part of an error or a repr.
        timeout_s: Seconds one attempt may take.
        retry_s: Seconds to go on asking a server that refuses connections, resets them, times out or answers 5xx.
        hint: What to do about a server that is not there; ends the error's message.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    retry_s: float = 60.0
    hint: str = "scripts/serve_vllm MODEL starts one."
    connections: int = field(default=0, init=False)
    """Opened so far. While it stays the same, one process answers."""
    _session: aiohttp.ClientSession | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/").removesuffix("/v1")

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST `body` as JSON and return the answer's JSON; see `request`."""
        return await self.request("POST", path, json.dumps(body).encode())

    async def get(self, path: str) -> Any:
        """GET and return the answer's JSON; see `request`."""
        return await self.request("GET", path, None)

    async def request(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Ask until there is an answer, a refusal, or no time left. `data` is JSON; `headers` are further ones.

        Raises:
            ServerRequestError: 4xx (not 408 and 429); `.status` holds the code.
            ServerUnreachableError: nothing usable within `retry_s`.
        """
        deadline = time.monotonic() + self.retry_s
        pause = _BACKOFF_S[0]
        while True:
            try:
                return await self._once(method, path, data, headers or {})
            except (aiohttp.ClientError, TimeoutError, ConnectionError, json.JSONDecodeError) as error:
                if time.monotonic() + pause > deadline:
                    raise ServerUnreachableError(
                        f"{self.base_url}{path} gave no usable answer for {self.retry_s:g} s: {_describe(error)}. "
                        f"Is the server up at this address? {self.hint}"
                    ) from error
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(2 * pause, _BACKOFF_S[1])

    async def _once(self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]) -> Any:
        headers = {"Content-Type": "application/json", **headers} if data is not None else headers
        async with self._open().request(method, self.base_url + path, data=data, headers=headers) as answer:
            text = await answer.text()
            if answer.status >= 500 or answer.status in (408, 429):
                raise aiohttp.ClientError(f"HTTP {answer.status}: {text[:300]}")
            if answer.status >= 400:
                raise ServerRequestError(
                    f"{self.base_url}{path} refused the request: HTTP {answer.status}: {text[:1000]}", answer.status
                )
            return json.loads(text)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            trace = aiohttp.TraceConfig()
            trace.on_connection_create_end.append(self._count_connection)
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=10),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
                trace_configs=[trace],
            )
        return self._session

    async def _count_connection(self, *_: object) -> None:
        self.connections += 1

    async def close(self) -> None:
        """Close pooled connections."""
        if self._session is not None:
            await self._session.close()


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
