"""Sessions, turns and curves -> the page's HTML. Pure.

Texts of sessions become text only: all are escaped, and characters that can't be seen have names. The page is complete
without its script, which colours the tokens (with the report's own script) and adds new turns.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache
from hashlib import sha256
from html import escape
from importlib import resources
from typing import NamedTuple

from agentic_opd.core.types import Message
from agentic_opd.gateway.foreign import ForeignTurn
from agentic_opd.gateway.journal import ListedSession, SessionRow, SessionState
from agentic_opd.gateway.turns import Feedback
from agentic_opd.gateway.ui.access import Login
from agentic_opd.gateway.ui.view import SessionView, TurnView
from agentic_opd.gateway.under_way import RunningAnswer, Waiting
from agentic_opd.report.page import TURN_SCRIPTS, Packer, content_hash, page_script, plain_style, static_text
from agentic_opd.report.tokens import TokenTexts
from agentic_opd.report.words import EVIDENCE, WHY, shown_html
from agentic_opd.wire.group import JudgedWindow, TurnRecord

_MOST_CHARS = 20_000
"""Characters of a text on the page; the download has the rest."""
_LONG = 1200
"""Characters from which a text is folded."""
_NAME_CHARS = 120
_NONE = "\u2013"
"""Sign in place of a number that is not known."""
_STATES = {
    SessionState.OPEN: "open",
    SessionState.CLOSED: "being judged",
    SessionState.WRITTEN: "group written",
    SessionState.EMPTY: "nothing to learn from",
    SessionState.FAILED: "failed",
    SessionState.RECORDING: "recording",
    SessionState.RECORDED: "recorded",
}
_THUMB = "M2 9h3v9H2zM7 9l4-7c1.5 0 2 1 2 2l-.6 4H17c1 0 1.7 1 1.4 2l-1.7 6.500c-.2.9-1 1.500-1.900 1.500H7z"


class Shell(NamedTuple):
    """What all pages of a visitor have in common."""

    model: str
    login: Login | None


@cache
def _style() -> str:
    return plain_style() + _static("ui.css")


@cache
def _script() -> str:
    return page_script(*map(static_text, TURN_SCRIPTS), _static("ui.js"))


def _static(name: str) -> str:
    return (resources.files("agentic_opd.gateway.ui") / "static" / name).read_text(encoding="utf-8")


@cache
def security_policy() -> str:
    """Return the content security policy: the page's own script and style, requests to its own origin, no frames."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{content_hash(_script())}'",
            f"style-src '{content_hash(_style())}'",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def document(title: str, body: str, shell: Shell) -> str:
    """Return a whole page."""
    bar = ""
    if shell.login is not None:
        name = shell.login.learner
        learner = "" if name is None else f'<span class="note">learner {shown_html(name)}</span>'
        bar = (
            '<nav aria-label="Views"><a href="/ui">Sessions</a></nav>'
            f"{learner}"
            '<span id="live" class="note" role="status"></span>'
            '<button type="button" id="theme" hidden>Dark</button>'
            f'<form method="post" action="/ui/logout">{_form_token(shell.login)}<button>Sign out</button></form>'
        )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{shown_html(title)}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the content</a>\n'
        f'<header class="top"><p class="brand">agentic-opd <span>{shown_html(shell.model)}</span></p>{bar}</header>\n'
        f'<main id="main" class="page" tabindex="-1">\n{body}\n</main>\n'
        '<div id="detail" role="region" aria-label="Token" hidden></div>\n'
        f"<script>{_script()}</script>\n</body>\n</html>\n"
    )


def login_page(shell: Shell, problem: str | None, *, has_keys: bool, has_named_learners: bool) -> str:
    """Return the form that asks for a key, and for a learner where clients name theirs."""
    intro = (
        "The page shows the sessions of the key that opens it."
        if has_keys
        else "This gateway has no API keys: enter the key that your agent sends, or leave the field empty if it sends "
        "none. The page shows the sessions of that key."
    )
    learner = ""
    if has_named_learners:
        intro += " Sessions belong to a learner: enter the name that your agent sends in X-Learner."
        learner = '<label>Learner <input name="learner" autocomplete="username" required></label>'
    error = "" if problem is None else f'<p class="error" role="alert">{escape(problem)}</p>'
    return document(
        "Sign in",
        '<form class="login" method="post" action="/ui/login"><h1>Sign in</h1>'
        f'<p class="note">{intro}</p>{error}'
        '<label>Key <input type="password" name="key" autocomplete="current-password" autofocus></label>'
        f"{learner}"
        "<button>Sign in</button></form>",
        shell,
    )


def error_page(shell: Shell, status: int, text: str) -> str:
    """Return a page that says what went wrong."""
    body = f'<h1>{status}</h1><p class="finding">{shown_html(text)}</p><p><a href="/ui">Sessions</a></p>'
    return document(f"{status}", body, shell)


# ------------------------------------------------------------------------------------------------------------ sessions


class Listing(NamedTuple):
    """One page of a visitor's sessions, and the figures over all of them."""

    sessions: Sequence[ListedSession]
    page: int
    pages: int
    states: dict[SessionState, int]
    waiting: Waiting | None
    curves: Sequence[str]
    """As SVG, with captions."""
    problem: str | None
    """Why the trainer's evaluations can't be read."""


def listing_page(shell: Shell, listing: Listing) -> str:
    """Return the page that lists sessions."""
    rows = "".join(_session_row(session) for session in listing.sessions)
    heads = "".join(
        f'<th scope="col"{kind}>{name}</th>'
        for name, kind in (
            *(("session", ""), ("state", "")),
            *((name, ' class="n"') for name in ("turns", "corrections", "rated", "last used")),
        )
    )
    problem = "" if listing.problem is None else f'<p class="finding">{escape(listing.problem)}</p>'
    curves = f'{problem}<div class="curves">{"".join(listing.curves)}</div>'
    body = (
        f'<h1>Sessions</h1><div data-live id="numbers">{_live("figures", _figures(listing.states, listing.waiting))}'
        f"{_live('curves', curves) if listing.curves or problem else ''}</div>"
        '<div class="table" tabindex="0" role="region" aria-label="Sessions"><table class="sessions">'
        f'<thead><tr>{heads}</tr></thead><tbody data-live id="sessions">{rows}</tbody></table></div>'
        '<p class="note" id="none">No session of this key yet. It appears here with its first answer.</p>'
        f"{_page_links('/ui', listing.page, listing.pages, 'Newer', 'Older')}"
    )
    return document("Sessions", body, shell)


def _figures(states: dict[SessionState, int], waiting: Waiting | None) -> str:
    open_sessions = states.get(SessionState.OPEN, 0) + states.get(SessionState.RECORDING, 0)
    figures: list[tuple[str, int | str, str]] = [("sessions", sum(states.values()), f"{open_sessions} open")]
    if waiting is not None:
        written = states.get(SessionState.WRITTEN, 0)
        figures.append(("being judged", waiting.sessions, "ended sessions without a group yet"))
        figures.append(("learned from", written, "sessions whose group is written"))
        if waiting.unsent is None:
            figures.append(("wait to be trained", _NONE, "no trajectory API is set"))
        else:
            queued = waiting.queued or 0
            figures.append(
                ("wait to be trained", waiting.unsent + queued, f"{queued} queued, {waiting.unsent} to send")
            )
    items = "".join(
        f'<div class="fact"><dt>{name}</dt><dd><b>{value}</b><span>{note}</span></dd></div>'
        for name, value, note in figures
    )
    return f'<dl class="facts">{items}</dl>'


def _session_row(session: ListedSession) -> str:
    row, corrections = session.row, session.corrections
    hints = _NONE if corrections is None else f"{corrections.hints:g} of {corrections.turns:g}"
    cells = (
        f'<th scope="row"><a href="/ui/sessions/{escape(row.session_id)}">{_session_name(row)}</a></th>'
        f'<td data-label="state">{_state(row)}</td>'
        f'<td class="n" data-label="turns">{session.turns}</td>'
        f'<td class="n" data-label="corrections">{hints}</td>'
        f'<td class="n" data-label="rated">{session.rated or _NONE}</td>'
        f'<td class="n" data-label="last used">{_time(row.used)}</td>'
    )
    return f'<tr id="row-{escape(row.session_id)}" data-mark="{_mark(cells)}">{cells}</tr>'


def _session_name(row: SessionRow) -> str:
    name = row.name or row.session_id.removeprefix("session-")[:12]
    return shown_html(name if len(name) <= _NAME_CHARS else f"{name[:_NAME_CHARS]}…")


def _state(row: SessionRow) -> str:
    return f'<span class="chip s-{row.state.value}">{_STATES[row.state]}</span>'


def _time(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds).astimezone()
    return f'<time datetime="{moment.isoformat("T", "seconds")}">{moment.strftime("%Y-%m-%d %H:%M")}</time>'


def _page_links(path: str, page: int, pages: int, before: str, after: str) -> str:
    if pages == 1:
        return ""
    links = [
        f'<a class="button" href="{path}?page={number}">{word}</a>'
        for word, number in ((before, page - 1), (after, page + 1))
        if 1 <= number <= pages
    ]
    where = f'<span class="note">page {page} of {pages}</span>'
    return f'<nav class="pages" aria-label="Pages">{where}{"".join(links)}</nav>'


# ------------------------------------------------------------------------------------------------------------- session


def session_page(shell: Shell, view: SessionView, texts: TokenTexts) -> str:
    """Return the page of a session."""
    row = view.row
    path = f"/ui/sessions/{escape(row.session_id)}"
    facts = [f"{view.num_turns} turns", f"opened {_time(row.opened)}", f"last used {_time(row.used)}"]
    if row.parent is not None:
        facts.append(f'<a href="/ui/sessions/{escape(row.parent)}">of this session</a>')
    if row.group_name is not None:
        facts.append(f"group {shown_html(row.group_name[:_NAME_CHARS])}")
    if row.ending is not None:
        facts.append(f"ended: {row.ending.stop.value}")
        if row.ending.reward is not None:
            facts.append(f"reward {row.ending.reward:g}")
    facts.append(f'<a href="{path}.jsonl" download>download</a>')
    ending = ""
    if row.ending is not None and row.ending.feedback:
        ending = f'<div class="context r-user"><p class="who">feedback at the end</p>{_text(row.ending.feedback)}</div>'
    head = (
        '<p class="steps"><a class="button" href="/ui">&lsaquo; Sessions</a></p>'
        f"<h1>{_session_name(row)} {_state(row)}</h1>"
        f'<ul class="facts-line">{"".join(f"<li>{fact}</li>" for fact in facts)}</ul>'
        f"{''.join(_window(window) for window in view.windows)}"
    )
    links = _page_links(path, view.page, view.pages, "Earlier turns", "Later turns")
    steps = "".join(_step(turn, row, shell.login, texts, is_recorded=row.state.is_foreign) for turn in view.turns)
    steps += "".join(_running(answer, number) for number, answer in enumerate(view.answers, start=1))
    body = (
        f'<div data-live id="head">{_live("session-head", head)}</div>{links}<div id="scale"></div>'
        f'<div data-live id="turns" data-limit="{view.colour_limit:g}">{steps}</div>{ending}{links}'
    )
    return document(f"{row.name or row.session_id}", body, shell)


def _window(window: JudgedWindow) -> str:
    """Return the judge's answers about the whole session."""
    answers = "".join(
        f'<div><p class="who">{_named(vote.turns)}</p><pre>{_cut(vote.text)}</pre></div>' for vote in window.votes
    )
    range_text = f"turns {window.first} to {window.last}"
    summary = f"{len(window.votes)} answers of the judge about {range_text}"
    read = f"what the judge read about {range_text}"
    question = f'<details class="votes"><summary>{read}</summary><pre>{_cut(window.question)}</pre></details>'
    return f'<details class="votes"><summary>{summary}</summary>{answers}</details>{question}'


def _named(turns: Sequence[int]) -> str:
    return f"names {'turns' if len(turns) > 1 else 'turn'} {', '.join(map(str, turns))}" if turns else "names no turn"


def _step(view: TurnView, row: SessionRow, login: Login | None, texts: TokenTexts, *, is_recorded: bool) -> str:
    """Return a turn after the messages before it."""
    turn, number = view.turn, view.number
    identifier = f"turn-{turn.turn_id}"
    packed = "" if view.tokens is None else Packer(texts).turn_block(view.tokens)
    calls = [call["function"]["name"] for call in turn.messages[-1].get("tool_calls") or ()]
    called = ", ".join(f"<code>{shown_html(name)}</code>" for name in calls)
    version = None if isinstance(turn, ForeignTurn) else turn.completion.weight_version
    size = "" if isinstance(turn, ForeignTurn) else _count(len(turn.completion.token_ids), "token")
    headings = [
        f'<h2 id="title-{turn.turn_id}"><a href="#{identifier}">Turn {number}</a></h2>',
        f'<span class="note">continues turn {view.behind}</span>' if view.behind is not None else "",
        f'<span class="calls">calls {called}</span>' if calls else "",
        f'<span class="version">weights {version}</span>' if version is not None else "",
        f'<span class="version">{shown_html(turn.model)}</span>' if isinstance(turn, ForeignTurn) else "",
        f'<span class="size">{size}</span>',
    ]
    feedback = _feedback(view, row, login) if not is_recorded else ""
    inner = (
        f"{''.join(_context(turn.messages[:-1], is_rewritten=view.is_rewritten))}"
        f'<section class="turn" data-packed="{packed}" data-number="{number}" aria-labelledby="title-{turn.turn_id}">'
        f"<header>{''.join(headings)}</header>"
        f'<div class="said">{_answer_text(turn.messages[-1])}</div>'
        f'<div class="beside">{_verdict(view, is_recorded=is_recorded)}{_next_state(view)}{feedback}</div></section>'
    )
    return f'<article class="step" id="{identifier}" data-mark="{_mark(inner)}">{inner}</article>'


def _running(answer: RunningAnswer, number: int) -> str:
    """Return an answer that is being sampled after the messages before it."""
    inner = (
        f"{''.join(_context(answer.messages, is_rewritten=answer.is_rewritten))}"
        '<section class="turn" aria-label="The answer that is being written"><header>'
        '<span class="chip">being written</span></header>'
        f'<div class="said">{_answer_text(answer.message, empty="no text yet")}</div></section>'
    )
    return f'<article class="step running" id="running-{number}" data-mark="{_mark(inner)}">{inner}</article>'


def _context(messages: Sequence[Message], *, is_rewritten: bool) -> Iterator[str]:
    """Yield the messages between a turn and the one before it."""
    blocks = [_message(message) for message in messages]
    if is_rewritten and len(messages) > 1:
        summary = f"the history as the client sent it again, {_count(len(messages), 'message')}"
        yield f'<details class="context"><summary class="who">{summary}</summary>{"".join(blocks)}</details>'
    else:
        yield from blocks


def _message(message: Message) -> str:
    role, name = str(message["role"]), message.get("name")
    label = shown_html(f"{role} · {name}"[:_NAME_CHARS] if isinstance(name, str) else role)
    kind = role if role in ("system", "user", "tool", "assistant") else "context"
    text = _message_text(message)
    body = f"<pre>{_cut(text)}</pre>"
    if role == "system" or len(text) > _LONG:
        first = shown_html(" ".join(text[:90].split()))
        body = (
            f'<details><summary><span class="who">{label}</span><span class="first">{first}…</span></summary>'
            f"{body}</details>"
        )
    else:
        body = f'<p class="who">{label}</p>{body}'
    return f'<div class="context r-{kind}">{body}</div>'


def _message_text(message: Message) -> str:
    """Return a message as text, with its pictures and calls."""
    parts = [str(message.get("reasoning_content") or ""), str(message.get("content") or "")]
    parts += [f"[picture {digest}]" for digest in message.get("images", ())]
    for call in message.get("tool_calls") or ():
        parts.append(f"{call['function']['name']} {call['function']['arguments']}")
    return "\n".join(part for part in parts if part)


def _answer_text(message: Message, empty: str = "an empty answer") -> str:
    """Return an answer as text; the script puts its tokens in this place."""
    reasoning, content = str(message.get("reasoning_content") or ""), str(message.get("content") or "")
    parts = [
        f'<div class="think">{_cut(reasoning)}</div>' if reasoning else "",
        f'<div class="say">{_cut(content)}</div>' if content else "",
        *(
            f'<div class="call">{shown_html(call["function"]["name"])} {_cut(call["function"]["arguments"])}</div>'
            for call in message.get("tool_calls") or ()
        ),
    ]
    return f'<div class="stream plain" dir="auto">{"".join(parts) or f"<i>{empty}</i>"}</div>'


def _verdict(view: TurnView, *, is_recorded: bool) -> str:
    record = None if view.tokens is None else view.tokens.record
    if record is not None:
        inner = "".join(_record(record))
    elif view.why_context is not None:
        inner = f'<p><span class="chip">not learned from</span></p><p class="note">{shown_html(view.why_context)}</p>'
    elif is_recorded:
        inner = '<p class="note">Recorded; <code>agentic-opd distill</code> judges it later.</p>'
    elif view.is_judged_now:
        inner = '<p><span class="chip">being judged</span></p>'
    elif not view.next_state:
        inner = '<p><span class="chip">waits</span> for its next state</p>'
    else:
        inner = '<p><span class="chip">not judged yet</span></p>'
    return f'<aside class="verdict" aria-label="What the judge said of turn {view.number}">{inner}</aside>'


def _record(record: TurnRecord) -> Iterator[str]:
    by = ", ".join(EVIDENCE[kind] for kind in record.evidence)
    outcome = record.outcome
    yield f'<p><span class="chip o-{outcome.value}">{outcome.value.replace("_", " ")}</span>'
    yield f"{f' judged by {escape(by)}' if by else ''}</p>"
    yield f'<p class="note">{escape(WHY[outcome])}</p>'
    if record.error:
        yield f'<p class="error">{_cut(record.error)}</p>'
    if record.hint is not None:
        yield f'<blockquote class="hint"><p class="who">hint</p>{_cut(record.hint)}</blockquote>'
    if record.votes:
        accepted = sum(vote.decision == 1 for vote in record.votes)
        kinds = {1: "for a hint", -1: "against", None: "unreadable"}
        votes = "".join(
            f'<div><p class="who">{kinds[vote.decision]}</p><pre>{_cut(vote.text)}</pre></div>' for vote in record.votes
        )
        summary = f"{accepted} of {_count(len(record.votes), 'vote')} for a hint"
        yield f'<details class="votes"><summary>{summary}</summary>{votes}</details>'


def _next_state(view: TurnView) -> str:
    if not view.next_state:
        return ""
    roles = ", ".join(dict.fromkeys(str(message["role"]) for message in view.next_state))
    text = "\n".join(map(_message_text, view.next_state))
    first = shown_html(" ".join(text[:60].split())) + ("…" if len(text) > 60 else "")
    summary = f'next state: {shown_html(roles)} <span class="first">{first}</span>'
    return f'<details class="votes next"><summary>{summary}</summary><pre>{_cut(text)}</pre></details>'


def _feedback(view: TurnView, row: SessionRow, login: Login | None) -> str:
    earlier = "" if view.feedback is None else _feedback_text(view.feedback)
    if login is None or not view.is_ratable:
        return earlier
    turn_id, number = view.turn.turn_id, view.number
    action = f"/ui/sessions/{escape(row.session_id)}/turns/{turn_id}/feedback"
    choices = "".join(
        f'<label class="thumb"><input type="radio" name="reward" value="{value}">{_thumb(value)} {word}</label>'
        for value, word in ((1, "good"), (-1, "bad"))
    )
    return (
        f'{earlier}<details class="rate"><summary>Feedback</summary><form method="post" action="{action}">'
        f'{_form_token(login)}<fieldset><legend class="unseen">Turn {number} was</legend>{choices}</fieldset>'
        f'<label for="text-{turn_id}">What should it have done?</label>'
        f'<textarea id="text-{turn_id}" name="text" rows="2" maxlength="10000"></textarea>'
        f"<button>Send</button></form></details>"
    )


def _feedback_text(feedback: Feedback) -> str:
    thumb = "" if feedback.reward is None else f"{_thumb(feedback.reward)} {_rated(feedback.reward)} "
    text = "" if not feedback.text else f"<q>{_cut(feedback.text)}</q>"
    return f'<p class="given">{thumb}{text}</p>'


def _rated(reward: float) -> str:
    return {1.0: "good", -1.0: "bad"}.get(reward, f"{reward:g}")


def _thumb(reward: float) -> str:
    direction = "up" if reward > 0 else "down"
    return f'<svg class="thumb-{direction}" viewBox="0 0 20 20" aria-hidden="true"><path d="{_THUMB}"/></svg>'


# --------------------------------------------------------------------------------------------------------------- parts


def _form_token(login: Login) -> str:
    return f'<input type="hidden" name="form_token" value="{login.form_token}">'


def _live(identifier: str, inner: str) -> str:
    """Return a part that the script replaces when it has changed."""
    return f'<div id="{identifier}" data-mark="{_mark(inner)}">{inner}</div>'


def _mark(html: str) -> str:
    return sha256(html.encode()).hexdigest()[:16]


def _text(text: str) -> str:
    body = f"<pre>{_cut(text)}</pre>"
    if len(text) <= _LONG:
        return body
    return f"<details><summary>{_count(len(text), 'character')}</summary>{body}</details>"


def _cut(text: str) -> str:
    """Return a text as HTML, without its middle if it is very long."""
    if len(text) <= _MOST_CHARS:
        return shown_html(text)
    half = _MOST_CHARS // 2
    left_out = f'<b class="mark">⟨{len(text) - 2 * half:,} more characters, which the download has⟩</b>'
    return f"{shown_html(text[:half])}{left_out}{shown_html(text[-half:])}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
