"""Every format is recognised by its content, read as the same conversation, and survives what is no such log."""

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import AlignmentError
from agentic_opd.logs import FORMAT_NAMES
from agentic_opd.logs.detect import FORMATS, format_of
from agentic_opd.logs.messages import read_log
from agentic_opd.logs.session import Session, without_repeats
from agentic_opd.logs.tools import plain_tools

from .samples import FILES, chat

NAMES = {log_format.name: log_format for log_format in FORMATS}


def sessions(name: str, records: list[Any]) -> tuple[list[Session], Counter[str]]:
    """Read records with the reader of a format; requests and branches repeat each other."""
    counts = Counter[str]()
    read = list(NAMES[name.rstrip(" 12")].sessions(records, counts))
    return [session for session in without_repeats(read) if session is not None], +counts


def words(session: Session) -> list[tuple[str, str, str]]:
    """Role, text and calls of the messages, as the policy's renderer gets them; the system prompt is left out."""
    log = read_log(session.fields(), plain_tools(session.fields()))
    return [
        (
            message["role"],
            message["content"],
            ", ".join(
                f"{one['function']['name']} {json.loads(one['function']['arguments'])}"
                for one in message.get("tool_calls", ())
            ),
        )
        for message in log.messages
        if message["role"] != "system"
    ]


EXPECTED = words(Session(tuple(chat())))


@pytest.mark.parametrize("name", FILES)
def test_a_format_is_recognised_and_read_as_the_same_conversation(name: str) -> None:
    log_format = format_of(FILES[name])
    assert log_format is not None
    assert log_format.name == name.rstrip(" 12")
    (session,), _ = sessions(name, FILES[name])
    read = words(session)
    assert read[-len(EXPECTED) :] == EXPECTED
    assert len(read) == len(EXPECTED) + (2 if name == "SWE-agent" else 0)


@pytest.mark.parametrize("name", FILES)
def test_results_have_the_id_of_their_call(name: str) -> None:
    (session,), _ = sessions(name, FILES[name])
    notes = read_log(session.fields(), ()).notes
    assert not +notes


@pytest.mark.parametrize("name", ["OpenHands", "OpenHands 1", "ATIF", "inspect", "verifiers", "requests"])
def test_tools_are_read_where_the_log_has_them(name: str) -> None:
    (session,), _ = sessions(name, FILES[name])
    (tool,) = plain_tools(session.fields())
    assert tool["function"]["name"] == "bash"
    assert tool["function"]["parameters"]["properties"] == {"command": {"type": "string"}}


JUNK: tuple[Any, ...] = (None, 3, True, "", "x", [], {}, [[]], [None, 3], {"type": 3}, {"role": []}, [{"type": "text"}])


def changed(value: Any, junk: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yield copies of JSON with junk in place of each value, and without each key."""
    if isinstance(value, dict):
        for key in value:
            for inner in (*changed(value[key], junk), *junk()):
                yield {**value, key: inner}
            yield {other: value[other] for other in value if other != key}
    if isinstance(value, list):
        for index, element in enumerate(value):
            for inner in (*changed(element, junk), *junk()):
                yield [*value[:index], inner, *value[index + 1 :]]
            yield value[:index] + value[index + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_no_value_of_a_wrong_type_raises(name: str, pytestconfig: pytest.Config) -> None:
    """Each value is replaced by four others in turn, with --all by all. What cannot be read is an empty conversation, a
    count, or a named refusal.
    """
    before, others = copy.deepcopy(FILES[name]), cycle(JUNK)
    count = len(JUNK) if pytestconfig.getoption("--all") else 4
    for records in changed(FILES[name], lambda: islice(others, count)):
        objects = [record for record in records if isinstance(record, dict)]
        format_of(objects)
        for session in sessions(name, objects)[0]:
            json.dumps(session.fields())
            with suppress(AlignmentError):
                read_log(session.fields(), plain_tools(session.fields()))
    assert FILES[name] == before


@pytest.mark.parametrize("name", FILES)
def test_records_of_unknown_type_are_counted(name: str) -> None:
    if len(FILES[name]) == 1:
        return
    strange = {"type": "hologram", "kind": "Hologram", "uuid": "h", "role": "hologram"}
    (session,), counts = sessions(name, [*FILES[name], strange])
    assert words(session) == words(sessions(name, FILES[name])[0][0])
    assert any("hologram" in kind.lower() for kind in counts), counts


def test_the_formats_have_different_names() -> None:
    assert tuple(NAMES) == FORMAT_NAMES == tuple(log_format.name for log_format in FORMATS)


def test_the_documentation_names_every_format() -> None:
    page = Path(__file__).parents[3].joinpath("docs/distill.md").read_text()
    for log_format in FORMATS:
        assert f"| {log_format.name} | {log_format.written_as} |" in page
