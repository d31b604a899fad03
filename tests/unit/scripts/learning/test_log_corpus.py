"""The corpus of `scripts/learning/study_logs`: its sessions are read as they were said; the person as their judge."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from learning.log_corpus import LoggedSession, draw_sessions, shuffled, wishes_of, write_corpus
from learning.log_person import ALL_CORRECTIONS, CORRECTIONS, Demand, Wish, judge, read_wishes, wish_key
from learning.log_study import CORPORA, END, START, results, write_corpora, write_page

from agentic_opd.core.types import Evidence, HindsightPair
from agentic_opd.distill.evidence import message_text
from agentic_opd.distill.hints import Questions, parse_step_vote, parse_vote
from agentic_opd.distill.prompts import JUDGE_SYSTEM_PROMPT
from agentic_opd.learn.split import LoggedConversation, split
from agentic_opd.learn.stages import write_json
from agentic_opd.logs.files import find_logs
from agentic_opd.logs.messages import read_log
from agentic_opd_environments.replay import GRADE_PROMPT, GRADE_QUESTION

SESSIONS, SEED = 12, 1


@pytest.fixture(scope="module")
def sessions() -> list[LoggedSession]:
    return draw_sessions(SESSIONS, SEED)


def words(sessions: Sequence[LoggedSession]) -> list[list[str]]:
    """The texts of each session, whose order in a folder is that of names."""
    return sorted([said.text for said in session.messages if said.text] for session in sessions)


def test_every_session_is_read_and_nothing_but_bookkeeping_is_left_out(
    sessions: list[LoggedSession], tmp_path: Path
) -> None:
    logs = find_logs([write_corpus(sessions, tmp_path)])
    assert {*logs.tallies} == {"Claude Code", "Codex", "OpenClaw"}
    assert not logs.skipped
    assert {kind for tally in logs.tallies.values() for kind in tally.left_out} == {
        "records without a part of the conversation"
    }
    read = [[*read_log(named.session.fields(), ()).messages] for named in logs.sessions]
    said = sorted(
        [text for message in messages if message["role"] != "tool" and (text := message_text(message))]
        for messages in read
    )
    assert said == words(sessions)
    calls = [call for messages in read for message in messages for call in message.get("tool_calls") or ()]
    results_read = [message for messages in read for message in messages if message["role"] == "tool"]
    assert (
        len(calls)
        == len(results_read)
        == sum(said.call is not None for session in sessions for said in session.messages)
    )
    assert {call["function"]["name"] for call in calls} >= {"schema", "query", "patch", "timer"}
    held_out = split([LoggedConversation.of(named.name, named.session.fields()) for named in logs.sessions], 0.25)
    assert held_out.held_out_projects


@pytest.mark.slow
def test_equal_seeds_give_equal_files_and_a_study_starts_again_with_them(
    sessions: list[LoggedSession], tmp_path: Path
) -> None:
    logs, out = write_corpus(sessions, tmp_path / "again"), tmp_path / "study"
    write_corpora(out, SESSIONS, SEED)
    files = {path.relative_to(logs): path.read_bytes() for path in logs.rglob("*.jsonl")}
    for name in CORPORA:
        again = {path.relative_to(out / name / "logs"): path.read_bytes() for path in (out / name).rglob("*.jsonl")}
        assert (len(again), again.keys()) == (SESSIONS, files.keys())
        assert (again == files) is (name == "kept")
    write_corpora(out, SESSIONS, SEED)
    with pytest.raises(SystemExit, match="choose another --out"):
        write_corpora(out, SESSIONS + 1, SEED)
    assert results(out)["corpus"]["sessions"] == SESSIONS


def test_a_share_of_the_answers_is_corrected_and_the_next_answer_does_what_was_wanted(
    sessions: list[LoggedSession],
) -> None:
    corrected = [
        (before, said, after)
        for session in sessions
        for before, said, after in zip(session.messages, session.messages[1:], session.messages[2:], strict=False)
        if said.correction is not None
    ]
    assert 0.08 < len(corrected) / sum(session.answers for session in sessions) < 0.25
    for before, said, after in corrected:
        assert before.demand == after.demand
        assert before.demand is not None
        assert said.text in CORRECTIONS[before.demand.wish]
        assert not before.demand.is_met(before.text)
        assert before.demand.is_met(after.text)


def test_shuffled_corrections_fit_no_turn_and_nothing_else_changes(sessions: list[LoggedSession]) -> None:
    changed = shuffled(sessions, SEED)
    pairs = [
        (old, new)
        for before, after in zip(sessions, changed, strict=True)
        for old, new in zip(before.messages, after.messages, strict=True)
    ]
    assert all(old == new for old, new in pairs if old.correction is None)
    assert all(old.correction != new.correction for old, new in pairs if old.correction is not None)
    assert sorted(old.text for old, _ in pairs) == sorted(new.text for _, new in pairs)


@pytest.mark.parametrize(
    ("demand", "answer", "is_met"),
    [
        (Demand(Wish.FIGURE, "23.4167"), "The average is 23.42.", True),
        (Demand(Wish.FIGURE, "7"), "The query returns the number of books.", False),
        (Demand(Wish.FIGURE, "7"), "[query]\nsql: SELECT 7", False),
        (Demand(Wish.VALUE, "25"), "TIMEOUT is 25 now.", True),
        (Demand(Wish.VALUE, "25"), "TIMEOUT is 250 now.", False),
        (Demand(Wish.BRIEF, "cache"), "A cache keeps results.", True),
        (Demand(Wish.BRIEF, "cache"), "It keeps results.", False),
        (Demand(Wish.BRIEF, "cache"), "A cache keeps\nresults.", False),
    ],
)
def test_a_wish_is_met_by_the_answer_alone(demand: Demand, answer: str, *, is_met: bool) -> None:
    assert demand.is_met(answer) is is_met


def test_the_person_repeats_its_direct_correction_as_a_hint() -> None:
    correction = next(iter(ALL_CORRECTIONS))
    later = (Evidence("tool", "7"), Evidence("later", correction, 1))
    for evidence, hint in (
        ((Evidence("user", correction),), correction),
        (later, None),
        ((Evidence("user", "Thanks."),), None),
    ):
        question = Questions(b"secret").question(HindsightPair(0, "How many?", "The query ran.", evidence))
        assert parse_vote(judge(question, JUDGE_SYSTEM_PROMPT, {})).hint == hint


def test_grades_are_of_what_the_person_wanted_and_not_of_what_the_log_says(
    sessions: list[LoggedSession], tmp_path: Path
) -> None:
    write_corpus(shuffled(sessions, SEED), tmp_path)
    wishes = read_wishes(tmp_path / "wishes.json")
    assert json.loads((tmp_path / "wishes.json").read_text()) == {
        key: [*wish] for key, wish in wishes_of(shuffled(sessions, SEED)).items()
    }
    request, wrong = next(
        (session.messages[index - 1].text, said.text)
        for session in sessions
        for index, said in enumerate(session.messages)
        if said.demand and said.demand.wish is Wish.BRIEF and session.messages[index - 1].role == "user"
    )
    demand = wishes[wish_key(request, wrong)]
    questions = Questions(b"secret", step_prompt=GRADE_PROMPT, template=GRADE_QUESTION)
    evidence = (Evidence("user", "Say the number that the query returned."),)
    for answer, vote in ((f"It is the {demand.fact}.", 1), ("7", -1)):
        pair = HindsightPair(0, f"{request}\n\n[earlier turn]\n{wrong}", answer, evidence)
        assert parse_step_vote(judge(questions.question(pair), GRADE_PROMPT, wishes)) == vote
    pair = HindsightPair(0, "Hello.\n\n[earlier turn]\nHi.", "Hi.", evidence)
    assert parse_step_vote(judge(questions.question(pair), GRADE_PROMPT, wishes)) == 0


def test_the_page_gets_the_rows_of_the_corpora_that_are_done(tmp_path: Path) -> None:
    out, page = tmp_path / "study", tmp_path / "page"
    row = {
        "verdict": "refused",
        "turns": {"training": 90},
        "hints": {"training": 14},
        "guards": {"length": {"fell": True}},
    }
    shares = {"before": [0.5, 0.4, 0.6, 30], "after": [0.25, 0.1, 0.4, 30], "difference": [-0.25, -0.4, -0.1]}
    write_json(out / "corpus.json", {"sessions": 12})
    write_json(out / "shuffled/run/result.json", {**row, "corrections": shares})
    write_json(out / "results.json", results(out))
    write_json(page / "README.md", {})
    with pytest.raises(SystemExit, match="has no table"):
        write_page(out, page)
    (page / "README.md").write_text(f"Before.\n{START}\nold\n{END}\nAfter.\n")
    write_page(out, page)
    lines = (page / "README.md").read_text().splitlines()
    assert lines[-3:] == ["", END, "After."]
    assert (
        "| shuffled | refused | 90, 14 | 50% (40% to 60%) | 25% (10% to 40%) | -25% (-40% to -10%) | length |" in lines
    )
    assert "old" not in lines
