"""The routes of the page `/ui` (I/O). Keys and texts of sessions are in no address and in no log."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentic_opd.core.errors import OPDError, PlaceError
from agentic_opd.core.text import json_line
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.journal import SessionRow, turn_as_json
from agentic_opd.gateway.keys import check_host, is_accepted
from agentic_opd.gateway.learners import no_learner
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import Feedback
from agentic_opd.gateway.ui.access import Login, Logins, is_from_page, is_token_of
from agentic_opd.gateway.ui.html import (
    Listing,
    Shell,
    error_page,
    listing_page,
    login_page,
    security_policy,
    session_page,
)
from agentic_opd.gateway.ui.view import Source, session_view
from agentic_opd.report.curves import correction_curve, score_curve
from agentic_opd.report.tokens import TokenTexts
from agentic_opd.wire.brake import BRAKE_FILE, evaluations

logger = logging.getLogger(__name__)

SESSIONS_A_PAGE = 50
_CURVE_SESSIONS = 480
"""Number of the last sessions in the curve of corrections."""
_MOST_FORM_BYTES = 2**17
_MOST_TEXT = 10_000
"""Characters of a feedback's text."""
_BEAT_S = 15.0
"""Seconds between two lines of a quiet event stream, by which both sides notice that the other has gone."""
_BETWEEN_S = 0.5
"""Seconds between two events: an answer that is being written changes with each token."""
_REWARDS = {"1": 1.0, "-1": -1.0, "": None}

Handler = Callable[[HttpRequest, Login], Awaitable[Response]]


def page_routes(
    source: Source,
    keys: Sequence[str],
    owner_of_key: Callable[[str, str], str],
    telemetry: Telemetry,
    *,
    tokenizer: Any | None = None,
    trainer_dir: Path | None = None,
    learner_folder: Callable[[str], Path | None] = no_learner,
    has_named_learners: bool = False,
) -> list[Route]:
    """Return the routes of `/ui` and all paths below it.

    Args:
        source: The gateway.
        keys: The keys that open it; empty: any key does, on a loopback address.
        owner_of_key: Returns the owner of the sessions of a key and of the learner that the visitor named; raises
            ClientError for what is no learner's name.
        telemetry: The gateway's metrics.
        tokenizer: The policy's; None: the answers have no tokens.
        trainer_dir: Output folder of the trainer, for the curve of held-out scores.
        learner_folder: Returns the folder of the learner that an owner of sessions teaches, for its curve; None: the
            owner teaches the policy of all.
        has_named_learners: Whether the visitor names a learner beside the key.
    """
    page = _PageRoutes(
        source, keys, owner_of_key, telemetry, tokenizer, trainer_dir, learner_folder, has_named_learners
    )
    session = "/ui/sessions/{session_id}"
    return [
        Route("/ui", page.guarded(page.sessions)),
        Route("/ui/login", page.login, methods=["POST"]),
        Route("/ui/logout", page.guarded(page.logout), methods=["POST"]),
        Route("/ui/events", page.guarded(page.events)),
        Route(f"{session}.jsonl", page.guarded(page.download)),
        Route(session, page.guarded(page.session)),
        Route(f"{session}/turns/{{turn_id:int}}/feedback", page.guarded(page.feedback), methods=["POST"]),
        Route("/ui/{path:path}", page.guarded(page.nothing)),
    ]


class _PageRoutes:
    """The routes. Pages are rendered on a thread, one at a time."""

    def __init__(
        self,
        source: Source,
        keys: Sequence[str],
        owner_of_key: Callable[[str, str], str],
        telemetry: Telemetry,
        tokenizer: Any | None,
        trainer_dir: Path | None,
        learner_folder: Callable[[str], Path | None],
        has_named_learners: bool,
    ) -> None:
        self._source, self._keys, self._owner_of_key, self._telemetry = source, keys, owner_of_key, telemetry
        self._tokenizer, self._trainer_dir, self._learner_folder = tokenizer, trainer_dir, learner_folder
        self._has_named_learners = has_named_learners
        self._logins, self._rendering = Logins(), asyncio.Lock()
        self._texts: TokenTexts | None = None

    # ------------------------------------------------------------------------------------------------------- access

    def guarded(self, handler: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Wrap `handler`: only visitors who are logged in reach it; errors become pages."""

        async def handle(http: HttpRequest) -> Response:
            login = self._logins.of(http)
            try:
                check_host(http, self._keys)
                if login is None:
                    return self._answer(self._login_form(None), 401)
                response = await handler(http, login)
                self._telemetry.requests.labels(str(response.status_code)).inc()
                return response
            except ClientDisconnect:
                return Response(status_code=499)
            except ClientError as error:
                return self._answer(error_page(self._shell(login), error.status, error.message), error.status)
            except OPDError as error:
                logger.warning("a page could not be shown: %s: %s", type(error).__name__, error)
                text = "the journal can't be read or written now; the gateway's log names the cause"
                return self._answer(error_page(self._shell(login), 502, text), 502)

        return handle

    async def login(self, http: HttpRequest) -> Response:
        """Answer `POST /ui/login`: the key in the form, and the learner's name if it asks for one, open the page."""
        try:
            check_host(http, self._keys)
            form = await _form(http)
        except ClientError as error:
            return self._answer(error_page(self._shell(None), error.status, error.message), error.status)
        key, learner = form.get("key", "").strip(), form.get("learner", "").strip()
        if not is_from_page(http):
            return self._answer(self._login_form("The form was sent by another page; send it from this one."), 403)
        if not is_accepted(key, self._keys):
            problem = "This key is not one of the gateway's." if key else "A key is needed."
            return self._answer(self._login_form(problem), 401)
        try:
            owner = self._owner_of_key(key, learner)
        except ClientError as error:
            return self._answer(self._login_form(f"{error.message[0].upper()}{error.message[1:]}."), error.status)
        response = _to("/ui")
        self._logins.add(http, response, owner, learner if self._has_named_learners else None)
        return response

    async def logout(self, http: HttpRequest, login: Login) -> Response:
        """Answer `POST /ui/logout`."""
        await _own_form(http, login)
        response = _to("/ui")
        self._logins.remove(http, response)
        return response

    def _login_form(self, problem: str | None) -> str:
        has_keys, has_learners = bool(self._keys), self._has_named_learners
        return login_page(self._shell(None), problem, has_keys=has_keys, has_named_learners=has_learners)

    def _shell(self, login: Login | None) -> Shell:
        # The model's name is for those with a key.
        return Shell(self._source.model if login is not None else "", login)

    def _answer(self, html: str, status: int = 200) -> Response:
        self._telemetry.requests.labels(str(status)).inc()
        return HTMLResponse(html, status, headers=_headers())

    # -------------------------------------------------------------------------------------------------------- pages

    async def sessions(self, http: HttpRequest, login: Login) -> Response:
        """Answer `GET /ui`: a page of sessions, what waits, and the curves."""
        journal = self._source.journal
        states = await journal.run(partial(journal.states, login.owner))
        pages = max(1, -(-sum(states.values()) // SESSIONS_A_PAGE))
        page = min(_page_number(http) or 1, pages)
        first = (page - 1) * SESSIONS_A_PAGE
        rows = await journal.run(partial(journal.listed, login.owner, first, SESSIONS_A_PAGE))
        corrections = await journal.run(partial(journal.corrections, login.owner, _CURVE_SESSIONS))
        curves, problem = await asyncio.to_thread(self._score_curves, login.owner)
        if corrections:
            curves.append(correction_curve("", corrections))
        listing = Listing(rows, page, pages, states, self._source.waiting, curves, problem)
        return self._answer(listing_page(self._shell(login), listing))

    def _score_curves(self, owner: str) -> tuple[list[str], str | None]:
        """Return the curves of the policy of all and of the owner's learner, and why one can't be drawn."""
        learner = self._learner_folder(owner)
        folders = {"": self._trainer_dir} | ({learner.name: learner} if learner is not None else {})
        files = {name: folder / BRAKE_FILE for name, folder in folders.items() if folder is not None}
        try:
            by_learner = {name: evaluations(file) for name, file in files.items() if file.exists()}
        except PlaceError as error:
            return [], str(error)
        return [score_curve(name, rows) for name, rows in by_learner.items()], None

    async def session(self, http: HttpRequest, login: Login) -> Response:
        """Answer `GET /ui/sessions/ID`: a page of the session's turns."""
        row = await self._row(http, login)
        async with self._rendering:
            view = await session_view(self._source, row, _page_number(http))
            html = await asyncio.to_thread(lambda: session_page(self._shell(login), view, self._token_texts()))
        return self._answer(html)

    def _token_texts(self) -> TokenTexts:
        # Of the tokenizer only the vocabulary is read, which is safe beside the event loop's use of it.
        if self._texts is None:
            self._texts = TokenTexts(self._tokenizer)
        return self._texts

    async def download(self, http: HttpRequest, login: Login) -> Response:
        """Answer `GET /ui/sessions/ID.jsonl`: the turns as JSON lines, with ids and logprobs."""
        row, journal = await self._row(http, login), self._source.journal
        turns = await journal.run(partial(journal.spoken_turns, row))
        body = await asyncio.to_thread(lambda: "".join(f"{turn_as_json(turn)}\n" for turn in turns))
        name = f'attachment; filename="{row.session_id}.jsonl"'
        headers = {**_headers(), "Content-Disposition": name}
        return Response(body, media_type="application/x-ndjson", headers=headers)

    async def nothing(self, http: HttpRequest, login: Login) -> Response:
        raise ClientError(404, "There is no such page.")

    async def _row(self, http: HttpRequest, login: Login) -> SessionRow:
        """Return the session in the path; raises ClientError (404) for one that is not the visitor's."""
        session_id, journal = http.path_params["session_id"], self._source.journal
        row = await journal.run(partial(journal.latest, login.owner, session_id))
        if row is None or row.session_id != session_id:
            raise ClientError(404, "There is no such session of your key.")
        return row

    async def feedback(self, http: HttpRequest, login: Login) -> Response:
        """Answer `POST /ui/sessions/ID/turns/TURN/feedback`: a thumb, a text or both."""
        row, form = await self._row(http, login), await _own_form(http, login)
        reward, text = form.get("reward", ""), form.get("text", "").strip().replace("\r\n", "\n")
        if reward not in _REWARDS or len(text) > _MOST_TEXT:
            raise ClientError(400, f"A vote is 1 or -1, and a text has at most {_MOST_TEXT:,} characters.")
        if not reward and not text:
            raise ClientError(400, "Feedback has a vote, a text or both.")
        turn_id = http.path_params["turn_id"]
        feedback = Feedback(_REWARDS[reward], text or None)
        await self._source.give_feedback(login.owner, row.session_id, str(turn_id), feedback)
        page = _page_number(http)
        return _to(f"/ui/sessions/{row.session_id}{f'?page={page}' if page else ''}#turn-{turn_id}")

    async def events(self, http: HttpRequest, login: Login) -> Response:
        """Answer `GET /ui/events`: an event for each change of the visitor's sessions, with their ids."""
        headers = {**_headers(), "X-Accel-Buffering": "no"}
        return _Events(self._changes(http, login), media_type="text/event-stream", headers=headers)

    async def _changes(self, http: HttpRequest, login: Login) -> AsyncGenerator[str]:
        with self._source.changes.watch(login.owner) as watch:
            yield "event: ready\ndata: {}\n\n"
            while self._logins.of(http) is not None and not watch.is_closed:
                try:
                    async with asyncio.timeout(_BEAT_S):
                        session_ids = await watch.changed()
                except TimeoutError:
                    yield ": still here\n\n"
                else:
                    if session_ids:
                        yield f"event: changed\ndata: {json_line({'sessions': session_ids}).decode().strip()}\n\n"
                        await asyncio.sleep(_BETWEEN_S)


class _Events(StreamingResponse):
    """An event stream. If uvicorn's shutdown cancels it, the connection ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await super().__call__(scope, receive, send)


def _headers() -> dict[str, str]:
    return {
        "Content-Security-Policy": security_policy(),
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


def _to(path: str) -> Response:
    return RedirectResponse(path, 303, headers=_headers())


def _page_number(http: HttpRequest) -> int | None:
    text = http.query_params.get("page", "")
    return int(text) if text.isdecimal() and 0 < len(text) < 9 and int(text) else None


async def _own_form(http: HttpRequest, login: Login) -> dict[str, str]:
    """Return the fields of a form of this page; raises ClientError (403) for one of another page."""
    form = await _form(http)
    if not is_from_page(http) or not is_token_of(login, form.get("form_token", "")):
        raise ClientError(403, "This form was not sent by this page, or its page is too old: load it again.")
    return form


async def _form(http: HttpRequest) -> dict[str, str]:
    """Return the last value of each field of a form, as browsers send it without files.

    Raises:
        ClientError: 413, it is too long; 400, it can't be read.
    """
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > _MOST_FORM_BYTES:
            raise ClientError(413, f"A form has at most {_MOST_FORM_BYTES:,} bytes.")
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=16)
    except ValueError as error:
        raise ClientError(400, "This form can't be read.") from error
    return {name: values[-1] for name, values in fields.items()}
