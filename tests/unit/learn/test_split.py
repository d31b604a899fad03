"""What is held out: whole projects, or the latest conversations; never both parts of one project."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.learn.split import LoggedConversation, Split, split


def conversation(name: str, answers: int = 1, project: str = "", hour: int | None = 0) -> LoggedConversation:
    time = "" if hour is None else f"2026-01-{1 + hour // 24:02d}T{hour % 24:02d}:00:00Z"
    return LoggedConversation(name, (), (), answers, project, time)


def held_out(parts: Split) -> list[str]:
    return [conversation.name for conversation in parts.held_out]


def test_the_projects_that_began_last_are_held_out() -> None:
    rows = [
        conversation(f"{project}{i}", 2, project, 10 * start + i) for start, project in enumerate("cab") for i in (0, 1)
    ]
    rows += [conversation(f"big{i}", 4, "big", i) for i in range(3)]
    parts = split(rows, 0.2)
    assert held_out(parts) == ["b0", "b1"]
    assert parts.held_out_projects == ["b"]


def test_a_project_that_is_too_large_is_passed_over() -> None:
    parts = split([conversation("old", 2, "old", 0), conversation("new", 98, "new", 9)], 0.2)
    assert held_out(parts) == ["old"]


def test_one_project_is_split_by_time_and_branches_of_a_session_stay_together() -> None:
    rows = [conversation(f"{hour}{branch}", 1, "p", hour) for hour in range(9, -1, -1) for branch in "ab"]
    parts = split(rows, 0.2)
    assert sorted(held_out(parts)) == ["8a", "8b", "9a", "9b"]
    assert parts.held_out_projects == []


def test_without_times_the_order_of_the_conversations_counts() -> None:
    assert held_out(split([conversation(str(i), hour=None) for i in range(5)], 0.2)) == ["4"]


def test_a_single_conversation_is_trained_on() -> None:
    assert held_out(split([conversation("only")], 0.2)) == []


SESSIONS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcde"), st.integers(0, 99)), min_size=1, max_size=30)


@given(SESSIONS, st.floats(0.05, 0.9))
def test_both_parts_together_are_all_and_no_project_is_in_both(sessions: list[Any], share: float) -> None:
    rows = [conversation(str(i), answers, project, hour) for i, (answers, project, hour) in enumerate(sessions)]
    parts = split(rows, share)
    assert sorted([*parts.training, *parts.held_out], key=lambda row: int(row.name)) == rows
    projects = [{row.project for row in part} for part in (parts.training, parts.held_out)]
    if len({row.project for row in rows}) > 1:
        assert not projects[0] & projects[1]
        assert all(projects)
    elif parts.held_out:
        assert max(row.time for row in parts.training) < min(row.time for row in parts.held_out)


def test_a_conversation_is_stored_with_masked_secrets_and_the_weights_of_its_answers() -> None:
    messages = [
        {"role": "user", "content": "The key is sk-ant-api03-" + "a1B2" * 20},
        {"role": "assistant", "content": "Noted.", "weight": 0},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "No."},
    ]
    read = LoggedConversation.of("s", {"messages": messages, "project": "/p", "time": "2026-01-01T00:00:00Z"})
    assert (read.answers, read.project, read.time) == (1, "/p", "2026-01-01T00:00:00Z")
    assert "a1B2" not in str(read.row())
    again = LoggedConversation.of("s", read.row())
    assert (again.messages, again.answers) == (read.messages, 1)


@pytest.mark.parametrize("field", ["project", "time"])
def test_an_origin_that_is_no_text_is_unknown(field: str) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes."}], field: 3}
    assert getattr(LoggedConversation.of("s", fields), field) == ""
