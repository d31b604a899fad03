"""Whose request is it: the keys of the gateway's clients (I/O only to discard refused bodies)."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from hashlib import sha256

from starlette.requests import Request as HttpRequest

from agentic_opd.gateway.config import is_loopback
from agentic_opd.gateway.errors import ClientError

_DISCARD_S = 10.0
"""Maximum seconds for receiving a refused body: many clients read the answer only after sending the whole body."""
_SEND_KEY = "send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"


async def owner_of(http: HttpRequest, keys: Sequence[str]) -> str:
    """Return a digest of the client's key, by which sessions of different clients are kept apart.

    Raises:
        ClientError: 401, `keys` is not empty and lacks the key; 403, it is empty and the host is not a loopback name.
    """
    return digest_of_key(await checked_key(http, bearer(http), keys))


async def checked_key(http: HttpRequest, key: str, keys: Sequence[str], advice: str = _SEND_KEY) -> str:
    """Return the key of a request if it is one of `keys`, or if there are none; raises ClientError as `owner_of`."""
    check_host(http, keys)
    if not is_accepted(key, keys):
        raise await no_key(http, key, advice)
    return key


def check_host(http: HttpRequest, keys: Sequence[str]) -> None:
    """Refuse a host name that is not a loopback name, if there are no keys; raises ClientError (403).

    DNS rebinding: a web page's host name can resolve to this machine, which would make its requests same-origin.
    """
    if not keys and not is_loopback(http.url.hostname or ""):
        raise ClientError(403, "without api_keys the gateway answers on a loopback address only, as 127.0.0.1")


def is_accepted(key: str, keys: Sequence[str]) -> bool:
    """Return whether `key` is one of `keys`, or there are none. The time taken reveals nothing about a match."""
    matches = [secrets.compare_digest(key.encode(), accepted.encode()) for accepted in keys]
    return any(matches) or not keys


def bearer(http: HttpRequest) -> str:
    """Return the request's key, a bearer's or Anthropic's `x-api-key`; empty without one."""
    scheme, _, token = http.headers.get("Authorization", "").partition(" ")
    return (token if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")).strip()


def digest_of_key(key: str) -> str:
    """Return the digest that is stored in place of a key."""
    return sha256(key.encode()).hexdigest()[:32]


async def no_key(http: HttpRequest, key: str, advice: str = _SEND_KEY) -> ClientError:
    """Return the 401 error for a request without a known key, after discarding its body."""
    await discard(http.stream())
    problem = "this key is not one of the gateway's" if key else "a key is needed"
    return ClientError(401, f"{problem}: {advice}", None, "invalid_api_key")


async def discard(chunks: AsyncGenerator[bytes]) -> None:
    """Receive and drop the rest of a refused body, for at most `_DISCARD_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            async for _ in chunks:
                pass
