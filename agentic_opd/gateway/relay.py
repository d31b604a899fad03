"""The recording gateway: requests go on to `env.upstream` as they came, and answers come back byte for byte (I/O).

    client --request--> relay --the same--> upstream --answer--> relay --the same bytes, as they arrive--> client
                                                                   |
                                                                   +--a copy, after the end--> Recorder

Only the upstream is contacted, and no redirect is followed. The clients' keys for the upstream are passed on, and
neither stored nor logged. The gateway answers by itself at /health, /metrics and /sessions/NAME, and where the upstream
does not answer.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from urllib.parse import unquote

import aiohttp
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from agentic_opd.core.errors import OutputError
from agentic_opd.core.text import read_json
from agentic_opd.gateway.answers import ENCODINGS, LARGEST_BODY, TOO_LARGE
from agentic_opd.gateway.body import EndingBody, read_body
from agentic_opd.gateway.client import Client, read_client
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.keys import bearer, checked_key, digest_of_key, discard
from agentic_opd.gateway.recorder import Recorder, RelayedRequest, load_protocols
from agentic_opd.gateway.telemetry import CONTENT_TYPE

logger = logging.getLogger(__name__)

KEY_HEADER = "x-gateway-key"
"""Header with one of `env.api_keys`; `Authorization` holds the client's key for the upstream."""
_SEND_KEY = f"send '{KEY_HEADER}: KEY'; the other keys of a request are passed on to the upstream"
_OF_CONNECTION = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade".split()
)
"""Headers of one connection, which the other one does not have."""
_OF_GATEWAY = frozenset({"host", "expect", KEY_HEADER})
"""Headers of a request that concern the gateway itself."""
_SESSION = re.compile(r"/sessions/([^/]+)(/.*)?")
_LONGEST_HEADER = 2**16

Headers = list[tuple[str, str]]


class Relay:
    """The web application of a recording gateway (ASGI)."""

    def __init__(self, config: GatewayConfig, recorder: Recorder) -> None:
        """Contact nothing yet. `close` ends the connections to the upstream."""
        assert config.upstream is not None
        self._keys = [key.get_secret_value() for key in config.api_keys]
        self._upstream, self._recorder, self._telemetry = config.upstream, recorder, recorder.telemetry
        self._page_app: ASGIApp | None = None
        # The client sets its own time limit, and sees each answer as it came: its encoding, cookies and redirects.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            max_line_size=_LONGEST_HEADER,
            max_field_size=_LONGEST_HEADER,
        )

    async def close(self) -> None:
        await self._http.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        if scope["path"] == "/ui" or scope["path"].startswith("/ui/"):
            await (await self._page())(scope, receive, send)
            return
        path: str = scope["raw_path"].decode("latin-1")
        named = _SESSION.fullmatch(path)
        name, path = (unquote(named[1]), named[2] or "") if named else (None, path)
        protocol_path = protocol_of(http.method, path)
        is_own = path in ("/health", "/metrics") or (name is not None and path in ("", "/end"))
        with suppress(asyncio.CancelledError):  # By uvicorn's shutdown: the connection ends without the answer's end.
            try:
                owner = await self._owner(http, is_own=is_own, is_open=path == "/health")
                if not is_own:
                    await self._pass_on(http, send, path, protocol_path, owner, name)
                    return
                response = await self._answer(http, path, owner, name or "")
            except ClientDisconnect:
                self._telemetry.hung_up.inc()
                return
            except (ClientError, OutputError) as error:
                response = await _refusal(error, protocol_path)
            self._telemetry.requests.labels(str(response.status_code)).inc()
            await response(scope, receive, send)

    async def _page(self) -> ASGIApp:
        """Return the application of the page `/ui`, which is imported when it is opened first."""
        if self._page_app is None:
            self._page_app = await asyncio.to_thread(self._new_page)
        return self._page_app

    def _new_page(self) -> ASGIApp:
        from agentic_opd.gateway.ui.routes import page_routes

        routes = page_routes(self._recorder, self._keys, lambda key, _: self._owner_of_key(key), self._telemetry)
        return Starlette(routes=routes)

    def _owner_of_key(self, key: str) -> str:
        return f"foreign-{digest_of_key(key if self._keys else '')}"

    async def _owner(self, http: HttpRequest, *, is_own: bool, is_open: bool) -> str:
        """Return a digest of the client's key for the gateway; raises ClientError for a client that may not ask.

        `is_own`: the gateway answers itself, so that its key may be where clients have theirs. `is_open`: no key is
        needed.
        """
        origin = http.headers.get("Origin", "")
        if origin == "null" or origin.startswith(("http://", "https://")):
            await discard(http.stream())
            raise ClientError(403, "this gateway does not pass on requests of web pages")
        key = http.headers.get(KEY_HEADER, "") or (bearer(http) if is_own else "")
        if not is_open:
            await checked_key(http, key, self._keys, _SEND_KEY)
        return self._owner_of_key(key)

    async def _pass_on(
        self, http: HttpRequest, send: Send, path: str, protocol_path: str | None, owner: str, name: str | None
    ) -> None:
        """Pass a request on, and its answer back; record it afterwards if it is of a protocol.

        Raises:
            ClientError: 502, the upstream did not answer; 400, the path or a header is not valid.
            ClientDisconnect: the client disconnected before the end of the answer.
        """
        if not path.startswith("/"):
            await discard(http.stream())
            raise ClientError(400, "the target of a request must be a path")
        client = read_client(http.headers, name, 1)
        upload, download = _Upload(http, is_kept=protocol_path is not None), _Download()
        query: str = http.scope["query_string"].decode("latin-1")
        url = URL(f"{self._upstream}{path}{'?' if query else ''}{query}", encoded=True)
        passing = asyncio.create_task(self._exchange(http.method, url, upload, download, send))
        leaving = asyncio.create_task(upload.disconnected())
        with self._recorder.answering(owner, client):
            try:
                await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                is_gone = not passing.done()
                for task in (passing, leaving):
                    task.cancel()
                await asyncio.gather(passing, leaving, return_exceptions=True)
                status = download.status
                if status is not None:
                    self._telemetry.requests.labels(str(status)).inc()
                if protocol_path is not None and status is not None and 200 <= status < 300:
                    self._record(protocol_path, owner, client, upload, download)
        if is_gone or upload.is_gone:
            raise ClientDisconnect
        passing.result()

    async def _exchange(self, method: str, url: URL, upload: "_Upload", download: "_Download", send: Send) -> None:
        """Send the request and the answer, piece by piece as they arrive.

        Returns without the answer's end, so that the connection breaks off, if the upstream's does.
        """
        try:
            async with self._http.request(
                method, url, headers=upload.headers(), data=upload.data(), allow_redirects=False
            ) as response:
                download.begin(response)
                headers = _passed(response.raw_headers)
                await send({"type": "http.response.start", "status": response.status, "headers": headers})
                async for chunk in response.content.iter_any():
                    download.copy.add(chunk)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = _cause(error)
            if download.status is None:
                message = (
                    f"the upstream {self._upstream} does not answer: {cause}. This gateway only passes requests on"
                )
                raise ClientError(502, message, code="upstream_unreachable") from None
            logger.warning("an answer of the upstream broke off: %s", cause)

    def _record(self, protocol_path: str, owner: str, client: Client, upload: "_Upload", download: "_Download") -> None:
        if upload.copy.is_too_large or download.copy.is_too_large:
            self._recorder.leave_out(TOO_LARGE)
            return
        self._recorder.add(
            RelayedRequest(
                path=protocol_path,
                owner=owner,
                client=client,
                request=bytes(upload.copy),
                request_encoding=upload.encoding,
                answer=bytes(download.copy),
                answer_encoding=download.encoding,
            )
        )

    async def _answer(self, http: HttpRequest, path: str, owner: str, name: str) -> Response:
        """Answer a request to the gateway itself."""
        if path == "" and http.method == "DELETE":
            session_id = await self._recorder.delete_ended(owner, name)
            return JSONResponse({"session_id": name, "id": session_id, "deleted": True})
        expected = "POST" if path == "/end" else "GET"
        if http.method != expected:
            raise ClientError(405, f"expected {expected}")
        if path == "/metrics":
            return Response(self._telemetry.text(), headers={"Content-Type": CONTENT_TYPE})
        if path == "/health":
            problem = await self._recorder.problem()
            degraded = {"status": "degraded", "failing_outputs": {"journal": problem}}
            return JSONResponse({"status": "ok"}) if problem is None else JSONResponse(degraded, 503)
        if path == "":
            return JSONResponse((await self._recorder.status(owner, name)).body())
        try:
            body = read_json(await http.body() or b"{}")
        except (ValueError, RecursionError) as error:
            raise ClientError(400, "the body is not JSON that can be read") from error
        ending = read_body(EndingBody, body)
        if ending.group is not None:
            raise ClientError(400, "recorded sessions form no groups here", "group", "no_groups")
        status = await self._recorder.end(owner, name, ending.reward, ending.feedback)
        return JSONResponse(status.body())


def protocol_of(method: str, path: str) -> str | None:
    """Return the path of the protocol by which a request asks for an answer; None: it asks for something else.

    Upstreams have other prefixes, such as `/api/v1` or `/backend-api/codex`.
    """
    if method != "POST":
        return None
    endings = ("/v1/messages", "/chat/completions", "/responses")
    ending = next((ending for ending in endings if path.endswith(ending)), path if path == "/messages" else None)
    return ending and f"/v1{ending.removeprefix('/v1')}"


class _Copy:
    """The bytes of a body, unless they are too many to be recorded."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self.is_too_large:
            self._chunks.clear()
        else:
            self._chunks.append(chunk)

    @property
    def is_too_large(self) -> bool:
        return self._size > LARGEST_BODY

    def __bytes__(self) -> bytes:
        return b"".join(self._chunks)


class _Upload:
    """A request, passed on as it arrives, and a copy of its body if it `is_kept`."""

    def __init__(self, http: HttpRequest, *, is_kept: bool) -> None:
        self.copy = _Copy()
        self.encoding = http.headers.get("Content-Encoding", "")
        self.is_gone = False
        """Whether the client disconnected before the end of the body."""
        self._http, self._is_kept = http, is_kept
        self._is_received = asyncio.Event()

    def headers(self) -> Headers:
        """Return the headers for the upstream. Only encodings that the journal can read are accepted."""
        passed = [(name.decode("latin-1"), _text(value)) for name, value in _passed(self._http.headers.raw)]
        return [
            (name, _readable(value) if self._is_kept and name == "accept-encoding" else value)
            for name, value in passed
            if name not in _OF_GATEWAY
        ]

    def data(self) -> AsyncGenerator[bytes] | None:
        """Return the pieces of the body as they arrive; None for a request without a body."""
        if self._http.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self._http.headers:
            return self._chunks()
        self._is_received.set()
        return None

    async def _chunks(self) -> AsyncGenerator[bytes]:
        try:
            async for chunk in self._http.stream():
                if chunk:
                    if self._is_kept:
                        self.copy.add(chunk)
                    yield chunk
        except ClientDisconnect:
            self.is_gone = True
            raise
        finally:
            self._is_received.set()

    async def disconnected(self) -> None:
        """Wait until the client disconnects; its request must have arrived before."""
        await self._is_received.wait()
        while (await self._http.receive())["type"] != "http.disconnect":
            pass


class _Download:
    """An answer of the upstream, and a copy of its body."""

    def __init__(self) -> None:
        self.copy = _Copy()
        self.status: int | None = None
        """None: there was no answer."""
        self.encoding = ""

    def begin(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.encoding = response.headers.get("Content-Encoding", "")


def _passed(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that are passed on: all but those of the connection, in lower case."""
    lower = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in lower if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in lower if name not in named | _OF_CONNECTION]


def _text(value: bytes) -> str:
    """Return the value of a header as text that is sent as the same bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _readable(accepted: str) -> str:
    """Return the value of `Accept-Encoding` without the encodings that can't be read here."""
    parts = [part.strip() for part in accepted.split(",")]
    return ", ".join(part for part in parts if part.partition(";")[0].strip().lower() in ENCODINGS) or "identity"


def _cause(error: BaseException) -> str:
    """Return what happened to a connection, without the address, whose query may hold a key."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return type(cause).__name__


async def _refusal(error: ClientError | OutputError, protocol_path: str | None) -> Response:
    """Return an error of the gateway itself, in the form of the request's protocol."""
    if isinstance(error, OutputError):
        logger.warning("a request failed: %s", error)
        error = ClientError(503, "the journal can't be written; the gateway's log names the cause")
    protocols = await asyncio.to_thread(load_protocols)
    protocol = protocols[protocol_path or "/v1/chat/completions"]
    return JSONResponse(protocol.error(error), error.status)
