"""Who may see the page: logins by a gateway's key, and forms that only the page itself can send.

A login is a random token in a cookie, which scripts can't read and other sites' pages don't send. The key is sent once,
in the body of the login form; the token says nothing about it. Cookies are shared by all ports of a host, whose pages
count as the same site, so forms carry a second token and are refused from any other origin.
"""

import secrets
import time
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

_IDLE_S = 12 * 3600.0
"""Seconds without a request after which a login ends."""
_MOST_LOGINS = 1024


class Login(NamedTuple):
    """A visitor who knows a key."""

    owner: str
    """The owner of the sessions that are shown: digest of the key, and the learner's name if the visitor named one."""
    form_token: str
    """Text that each form of the page contains."""
    learner: str | None
    """Name that the visitor gave; None: the key alone says whose sessions are shown."""


class Logins:
    """The logins of one gateway; they end with its process."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, tuple[Login, float]] = {}
        """Login and the time of its last use, by the digest of the cookie's token."""

    def add(self, http: HttpRequest, response: Response, owner: str, learner: str | None) -> None:
        """Log a visitor in: set the cookie in `response`."""
        token, now = secrets.token_urlsafe(32), time.monotonic()
        self._by_digest[_digest(token)] = Login(owner, secrets.token_urlsafe(32), learner), now
        while len(self._by_digest) > _MOST_LOGINS:
            del self._by_digest[min(self._by_digest, key=lambda digest: self._by_digest[digest][1])]
        is_secure = http.url.scheme == "https"
        response.set_cookie(_cookie(http), token, path="/ui", secure=is_secure, httponly=True, samesite="strict")

    def of(self, http: HttpRequest) -> Login | None:
        """Return the visitor's login; None if there is none, or it was idle for too long."""
        digest, now = _digest(http.cookies.get(_cookie(http), "")), time.monotonic()
        login, used = self._by_digest.get(digest, (None, now))
        if login is None or now - used > _IDLE_S:
            self._by_digest.pop(digest, None)
            return None
        self._by_digest[digest] = login, now
        return login

    def remove(self, http: HttpRequest, response: Response) -> None:
        """Log a visitor out."""
        self._by_digest.pop(_digest(http.cookies.get(_cookie(http), "")), None)
        response.delete_cookie(_cookie(http), path="/ui")


def is_from_page(http: HttpRequest) -> bool:
    """Return whether a form was sent by a page of this gateway's own origin, as far as the browser says."""
    site, origin = http.headers.get("Sec-Fetch-Site"), http.headers.get("Origin")
    is_same_host = origin is None or urlsplit(origin).netloc == http.headers.get("Host")
    return is_same_host and site in (None, "same-origin")


def is_token_of(login: Login, token: str) -> bool:
    """Return whether a form carries the login's token; the time taken reveals nothing about it."""
    return secrets.compare_digest(login.form_token.encode(), token.encode(errors="replace"))


def _cookie(http: HttpRequest) -> str:
    """Return the cookie's name, another one for each port: a machine may run several gateways."""
    return f"agentic_opd_ui_{http.url.port or 0}"


def _digest(token: str) -> bytes:
    """Return the key of a token in a table, by which a look-up takes no time that depends on the token."""
    return sha256(token.encode(errors="replace")).digest()
