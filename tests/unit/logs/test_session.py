"""Where and when a session began, and the bound on its branches."""

from collections import Counter
from typing import Any

import pytest

from agentic_opd.logs.detect import FORMATS
from agentic_opd.logs.session import Draft, LeftOut, iso_time

from .samples import FILES

TIME = "2026-05-01T10:00:00Z"


@pytest.mark.parametrize(
    ("time", "iso"),
    [
        ("2026-05-01T10:00:00.123Z", TIME),
        ("2026-05-01T12:00:00+02:00", TIME),
        ("2026-05-01T10:00:00", TIME),
        (1777629600123, TIME),
        ("yesterday", ""),
        (10**30, ""),
        (float("nan"), ""),
        (True, ""),
        (None, ""),
    ],
)
def test_times_of_any_form_are_iso_8601(time: Any, iso: str) -> None:
    assert iso_time(time) == iso


def test_a_session_says_where_and_when_it_began() -> None:
    """The first record that has them says so."""
    place = {
        "Claude Code": [{"cwd": "/w", "timestamp": TIME}],
        "Codex": [{"timestamp": TIME}],
        "OpenClaw": [{"timestamp": TIME}],
        "OpenCode": [{"info": {"directory": "/w", "time": {"created": 1777629600000}}}],
    }
    for log_format in FORMATS:
        if log_format.name in place:
            first, *rest = FILES[log_format.name]
            (more,) = place[log_format.name]
            first = {**first, **({"info": first["info"] | more["info"]} if "info" in more else more)}
            (session,) = log_format.sessions([first, *rest], Counter())
            assert (session.project, session.time) == ("/w", TIME)


def test_branches_beyond_a_bound_are_counted() -> None:
    draft = Draft(Counter())
    draft.add({"role": "user", "content": "Go."}, "root")
    sessions = 0
    for number in range(300):
        sessions += len(list(draft.goes_back_to("root")))
        draft.add({"role": "assistant", "content": f"{number}"}, f"{number}")
    assert sessions == 256
    assert draft.counts == {LeftOut.BRANCH: 299 - 256}
