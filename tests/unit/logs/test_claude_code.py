"""Claude Code's transcripts: sub-agents, compactions, rewinds, answers in pieces, what is left out."""

from collections import Counter
from typing import Any

from agentic_opd.logs.claude_code import is_claude_code, sessions
from agentic_opd.logs.messages import NOT_LEARNED, LogNote, read_log
from agentic_opd.logs.session import LeftOut, Session

from .samples import claude_code


def record(kind: str, name: str, parent: str | None, content: Any, **more: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content, **more.pop("message", {})}
    return {"type": kind, "uuid": name, "parentUuid": parent, "sessionId": "s", "message": message, **more}


def texts(session: Session) -> list[str]:
    return [message["content"] for message in read_log(session.fields(), ()).messages]


def read(*records: dict[str, Any]) -> tuple[list[Session], Counter[str]]:
    counts = Counter[str]()
    return list(sessions(records, counts)), counts


def test_a_sub_agents_records_are_a_conversation_of_their_own() -> None:
    """With the name of the agent, or in older versions by the record before."""
    own = [record("user", "a", None, "Go."), record("assistant", "d", "a", "Done.")]
    for names in ({"agentId": "x"}, {}):
        side = {"isSidechain": True, **names}
        agent = [record("user", "b", None, "Look.", **side), record("assistant", "c", "b", "Seen.", **side)]
        (first, second), _ = read(own[0], *agent, own[1])
        assert texts(first) == ["Go.", "Done."]
        assert texts(second) == ["Look.", "Seen."]
        assert second.label == ("x" if names else "sidechain b")


def test_parallel_calls_and_their_results_in_any_order_are_one_answer() -> None:
    def use(name: str) -> list[dict[str, Any]]:
        return [{"type": "tool_use", "id": name, "name": "bash", "input": {}}]

    def result(name: str) -> list[dict[str, Any]]:
        return [{"type": "tool_result", "tool_use_id": name, "content": name}]

    one = {"message": {"id": "msg"}}
    (session,), _ = read(
        record("user", "a", None, "Go."),
        record("assistant", "b", "a", use("1"), **one),
        record("user", "c", "b", result("1")),
        record("assistant", "d", "b", use("2"), message={"id": "msg"}),
        record("user", "e", "d", result("2")),
        record("assistant", "f", "e", "Done.", message={"id": "next"}),
    )
    log = read_log(session.fields(), ())
    assert [message["role"] for message in log.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert len(log.messages[1]["tool_calls"]) == 2
    assert not +log.notes


def test_thinking_stays_apart_from_the_text_and_encrypted_thinking_is_counted() -> None:
    blocks = [
        {"type": "thinking", "thinking": "First, the files.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
    ]
    answer = [record("assistant", f"b{i}", "a", [block], message={"id": "msg"}) for i, block in enumerate(blocks)]
    (session,), counts = read(record("user", "a", None, "Go."), *answer)
    message = read_log(session.fields(), ()).messages[1]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "First, the files.")
    assert +counts == {LeftOut.HIDDEN_REASONING: 1}


def test_a_result_in_parts_is_the_text_of_its_parts_and_a_picture_in_it_is_not_learned_from() -> None:
    parts = [{"type": "text", "text": "a.py"}, {"type": "text", "text": "b.py"}]
    use = {"type": "tool_use", "id": "c", "name": "bash", "input": {}}
    for further in ([], [{"type": "image", "source": {"type": "base64", "data": "x"}}]):
        result = {"type": "tool_result", "tool_use_id": "c", "content": [*parts, *further]}
        (session,), _ = read(
            record("user", "a", None, "Go."),
            record("assistant", "b", "a", [use]),
            record("user", "c", "b", [result]),
            record("assistant", "d", "c", "Two."),
        )
        log = read_log(session.fields(), ())
        assert log.messages[2]["content"].startswith("a.py")
        assert "b.py" in log.messages[2]["content"]
        assert log.context == ({3: LogNote.ANSWERS_MEDIA} if further else {})


def test_a_person_who_went_back_leaves_two_conversations() -> None:
    (first, second), _ = read(
        record("user", "a", None, "Go."),
        record("assistant", "b", "a", "Left.", message={"id": "1"}),
        record("user", "c", "b", "Why?"),
        record("assistant", "d", "c", "So.", message={"id": "2"}),
        record("user", "e", "b", "Rather right."),
        record("assistant", "f", "e", "Right.", message={"id": "3"}),
    )
    assert texts(first) == ["Go.", "Left.", "Why?", "So."]
    assert texts(second) == ["Go.", "Left.", "Rather right.", "Right."]


def test_a_compaction_ends_a_conversation_and_its_summary_begins_the_next() -> None:
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "x", "parentUuid": None}
    (first, second), _ = read(
        record("user", "a", None, "Go."),
        record("assistant", "b", "a", "Done."),
        boundary,
        record("user", "c", "x", "Summary.", isCompactSummary=True, isVisibleInTranscriptOnly=True),
        record("user", "d", "c", "On."),
        record("assistant", "e", "d", "More."),
    )
    assert texts(first) == ["Go.", "Done."]
    assert texts(second) == ["Summary.", "On.", "More."]


def test_what_is_no_answer_of_the_model_is_counted() -> None:
    picture = [{"type": "image", "source": {}}, {"type": "text", "text": "This?"}]
    (session,), counts = read(
        record("user", "a", None, picture),
        record("assistant", "b", "a", "API Error", isApiErrorMessage=True),
        record("assistant", "c", "b", "Seen."),
        record("assistant", "c", "b", "Seen."),
        record("user", "d", "c", "[Request interrupted by user]"),
        {"type": "file-history-snapshot", "snapshot": {}},
        {"type": "hologram"},
    )
    assert counts == {
        LeftOut.NOTICE: 1,
        LeftOut.DUPLICATE_RECORD: 1,
        LeftOut.BOOKKEEPING: 1,
        "records of unknown type 'hologram'": 1,
    }
    log = read_log(session.fields(), ())
    assert log.context == {1: LogNote.STOPPED}
    assert log.notes[LogNote.MEDIA_LEFT_OUT] == 1
    assert "This?" in log.messages[0]["content"]


def test_an_answer_to_a_picture_is_read_and_not_learned() -> None:
    (session,), _ = read(
        record("user", "a", None, [{"type": "image", "source": {}}]),
        record("assistant", "b", "a", "A cat.", message={"id": "1"}),
        record("user", "c", "b", "No."),
        record("assistant", "d", "c", "A dog.", message={"id": "2"}),
    )
    assert read_log(session.fields(), ()).context == {1: LogNote.ANSWERS_MEDIA}


def test_the_web_clients_export_and_the_stream_are_read() -> None:
    lines = claude_code()
    assert is_claude_code([{"loglines": lines}])
    (exported,), _ = read({"loglines": lines})
    (session,), _ = read(*lines)
    assert exported == session
    stream = [
        {"type": "system", "subtype": "init", "session_id": "s", "tools": ["Bash"]},
        *(
            {"type": line["type"], "session_id": "s", "parent_tool_use_id": None, "message": line["message"]}
            for line in lines[1:]
        ),
    ]
    assert is_claude_code(stream)
    (streamed,), _ = read(*stream)
    assert streamed.messages == session.messages


def test_an_answer_at_the_limit_of_tokens_is_not_learned() -> None:
    cut = record("assistant", "b", "a", "I l", message={"stop_reason": "max_tokens"})
    (session,), _ = read(record("user", "a", None, "Go."), cut)
    assert session.messages[1][NOT_LEARNED] is LogNote.STOPPED
