import json
from dataclasses import replace
from typing import Any

import pytest

from agentic_opd.core.types import IGNORED, HindsightPair, Message, Recording, Trace, Turn
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import hindsight_pairs, message_text, shown_text, turn_text

from .fakes import TASK, VERDICT, call, make_recording, messages


def tool(text: str | None, name: str = "terminal") -> Message:
    return {"role": "tool", "tool_call_id": "call_0", "name": name, "content": text}


def pairs_of(recording: Recording, **settings: Any) -> list[HindsightPair]:
    return hindsight_pairs(recording, DistillConfig(**settings))


def shown(pair: HindsightPair) -> list[tuple[str, str]]:
    return [(one.kind, one.text) for one in pair.evidence]


def test_each_turn_is_paired_with_what_answered_it() -> None:
    first, last = pairs_of(make_recording(), hindsight={"evidence": "next_state"})
    assert first.task_text == TASK.prompt
    assert first.turn_text == "I write it.\n\n[write_file]\npath: solution.py"
    assert shown(first) == [("tool", "wrote 2 lines to solution.py")]
    assert last.turn_text == "Done."
    assert shown(last) == [("verdict", VERDICT.judge_report)]
    assert (first.next_state_role, last.next_state_role) == ("tool", "verdict")
    assert (first.turn_index, last.turn_index) == (0, 1)


def test_the_judge_never_reads_the_report_that_holds_test_data() -> None:
    for pair in pairs_of(make_recording()):
        assert "fizzbuzz(30)" not in str(pair)


def test_last_turn_that_was_cut_off_while_working_gets_its_results_and_then_the_verdict() -> None:
    last = pairs_of(
        make_recording([*messages(), tool("3 of 5 examples passed")]), hindsight={"evidence": "next_state"}
    )[-1]
    assert shown(last) == [("tool", "3 of 5 examples passed"), ("verdict", VERDICT.judge_report)]
    assert last.next_state_role == "verdict"


def test_without_verification_the_last_turn_has_no_evidence() -> None:
    last = pairs_of(make_recording(verification=None))[-1]
    assert (last.evidence, last.next_state_role) == ((), None)


def test_results_of_parallel_calls_are_joined_and_named() -> None:
    chat = messages()
    chat[2]["tool_calls"] = [call("write_file", "{}", "a"), call("terminal", "{}", "b"), call("", "{", "c")]
    chat[3:4] = [
        {"role": "tool", "tool_call_id": "a", "content": "wrote 8 lines to solution.py"},
        {"role": "tool", "tool_call_id": "b", "name": "terminal", "content": "ok   f(1)"},
        {"role": "tool", "tool_call_id": "c", "content": "Error: not valid JSON"},
    ]
    assert pairs_of(make_recording(chat))[0].evidence[0].text == (
        "[write_file]\nwrote 8 lines to solution.py\n\n[terminal]\nok   f(1)\n\n"
        "[broken tool call]\nError: not valid JSON"
    )


def test_user_replies_follow_tool_results_and_give_the_role() -> None:
    chat = messages()
    chat.insert(4, {"role": "user", "content": "Now handle 0."})
    chat.append({"role": "user", "content": "Thanks."})
    first, last = pairs_of(make_recording(chat, verification=None), hindsight={"evidence": "next_state"})
    assert shown(first) == [("tool", "wrote 2 lines to solution.py"), ("user", "Now handle 0.")]
    assert shown(last) == [("user", "Thanks.")]
    assert (first.next_state_role, last.next_state_role) == ("user", "user")
    delayed, _ = pairs_of(make_recording(chat, verification=None))
    assert delayed.kinds == ("tool", "user", "later")
    assert delayed.next_state_role == "user", "what came later did not answer it"


def test_identical_turns_keep_their_own_next_states() -> None:
    chat = messages()
    chat[4] = {**chat[2]}
    chat.append(tool("Error: disk full", "write_file"))
    first, last = pairs_of(make_recording(chat, verification=None))
    assert first.turn_text == last.turn_text
    assert (shown(first), shown(last)) == ([("tool", "wrote 2 lines to solution.py")], [("tool", "Error: disk full")])


def test_long_next_state_is_cut_in_the_middle() -> None:
    chat = messages()
    chat[3]["content"] = "head" + "x" * 500 + "tail"
    state = pairs_of(make_recording(chat), hint_max_next_state_chars=100)[0].evidence[0].text
    assert state.startswith("headxxx")
    assert "[... 408 characters cut ...]" in state
    assert state.endswith("xxxtail")


@pytest.mark.parametrize("content", [None, "", "  \n"])
def test_an_empty_answer_is_no_evidence(content: str | None) -> None:
    chat = messages()
    chat[3]["content"] = content
    assert pairs_of(make_recording(chat, verification=None))[0].evidence == ()


# ----------------------------------------------------------------------------------------------------- later evidence

Turns = list[tuple[list[str], set[int], list[str]]]
"""Of each turn: the names of its calls, which of them changed the judged files, and the answers of tools and user."""


def recording_of(turns: Turns, passed: int = 1) -> Recording:
    """A conversation of such turns, each of one sampled token."""
    chat: list[Message] = [{"role": "user", "content": TASK.prompt}]
    tokens, masks, spans = [1, 9], [IGNORED, IGNORED], list[Turn]()
    for names, _, answers in turns:
        calls = [call(name, "{}", f"call_{i}") for i, name in enumerate(names)]
        spans.append(Turn(len(tokens), len(tokens) + 1, len(tokens) - 1, 1, len(chat)))
        chat.append({"role": "assistant", "content": "" if names else "Done.", "tool_calls": calls})
        tools, users = answers[: len(names)], answers[len(names) :]
        chat += [{**tool(text, names[i]), "tool_call_id": f"call_{i}"} for i, text in enumerate(tools)]
        chat += [{"role": "user", "content": text} for text in users]
        tokens += [5, 9]
        masks += [5, IGNORED]
    logprobs = tuple(1.0 if mask == IGNORED else -1.0 for mask in masks)
    return Recording(
        name=TASK.task_id,
        traces=(Trace(tuple(chat), tuple(tokens), tuple(masks), logprobs, tuple(spans)),),
        task=TASK,
        verification=replace(VERDICT, passed=passed),
        changes=tuple(frozenset(changed) for _, changed, _ in turns),
    )


WRITE, RUN, BOTH = ["write_file"], ["terminal"], ["write_file", "terminal"]
COUNT = VERDICT.judge_report.partition("\n")[0]


def kinds(turns: Turns, passed: int = 1, **bounds: Any) -> list[list[tuple[str, str]]]:
    return [shown(pair) for pair in pairs_of(recording_of(turns, passed), **bounds)]


def test_where_nobody_says_what_changed_a_complaint_is_about_what_was_called_last() -> None:
    """write, "Done.", patch, "Mended.": each closing turn is answered by a complaint."""
    turns: Turns = [
        (WRITE, set(), ["wrote"]),
        ([], set(), ["It fails for 0."]),
        (RUN, set(), ["patched"]),
        ([], set(), ["It fails for 1."]),
    ]
    recording = replace(recording_of(turns), changes=(), verification=None)
    write, done, mend, mended = (shown(pair) for pair in pairs_of(recording))
    assert write == [("tool", "wrote"), ("later", "It fails for 0.")]
    assert done == [("user", "It fails for 0.")]
    assert mend == [("tool", "patched"), ("later", "It fails for 1.")]
    assert mended == [("user", "It fails for 1.")]


def test_a_solution_is_judged_by_the_run_that_follows_and_by_the_verdict() -> None:
    first, run, last = kinds([(WRITE, {0}, ["wrote"]), (RUN, set(), ["FAIL f(1)"]), ([], set(), [])])
    assert first == [("tool", "wrote"), ("later", "FAIL f(1)"), ("verdict", VERDICT.judge_report)]
    assert run == [("tool", "FAIL f(1)")]
    assert last == [("verdict", COUNT)], "only what refutes its claim"


def test_the_next_change_ends_what_is_shown_of_a_turn() -> None:
    turns: Turns = [
        (WRITE, {0}, ["wrote"]),
        (["terminal", "patch", "terminal"], {1}, ["FAIL f(1)", "patched", "ok f(1)"]),
        (RUN, set(), ["ok f(2)"]),
        ([], set(), []),
    ]
    first, second, *_ = kinds(turns)
    assert first == [("tool", "wrote"), ("later", "[terminal]\nFAIL f(1)")], "what ran before the change"
    assert [kind for kind, _ in second] == ["tool", "later", "verdict"]
    assert second[1] == ("later", "ok f(2)")


@pytest.mark.parametrize(
    ("made_by", "judged"),
    [(None, [2]), ({0, 1}, [0, 2]), ({0}, [0]), ({1}, [2]), (set[int](), [2])],
    ids=["not known", "both", "the second changed nothing that is left", "the first was replaced", "nothing is left"],
)
def test_each_turn_of_which_something_is_left_is_shown_the_verdict(made_by: set[int] | None, judged: list[int]) -> None:
    turns: Turns = [(WRITE, {0}, ["wrote"]), (RUN, set(), ["FAIL"]), (BOTH, {1}, ["ok", "wrote"]), ([], set(), [])]
    recording = recording_of(turns)
    assert recording.verification is not None
    left = None if made_by is None else frozenset(made_by)
    recording = replace(recording, verification=replace(recording.verification, made_by=left))
    pairs = pairs_of(recording)
    reports = [("verdict", VERDICT.judge_report) in shown(pair) for pair in pairs]
    assert [index for index, is_shown in enumerate(reports) if is_shown] == judged
    assert shown(pairs[-1]) == [("verdict", COUNT)]


def test_a_verdict_that_all_tests_passed_says_nothing_of_the_closing_turn() -> None:
    first, last = kinds([(BOTH, {0}, ["wrote", "ok f(1)"]), ([], set(), [])], passed=2)
    assert [kind for kind, _ in first] == ["tool", "verdict"]
    assert last == []


def test_an_end_without_a_solution_is_judged_by_the_verdict() -> None:
    (only,) = kinds([([], set(), [])])
    assert only == [("verdict", VERDICT.judge_report)]


def test_a_users_complaint_comes_back_to_the_turn_that_wrote() -> None:
    turns: Turns = [(WRITE, {0}, ["wrote"]), ([], set(), ["f(1) is wrong."]), (WRITE, {0}, ["wrote"]), ([], set(), [])]
    first, closing, repair, last = kinds(turns)
    assert first == [("tool", "wrote"), ("later", "f(1) is wrong.")]
    assert closing == [("user", "f(1) is wrong.")]
    assert repair == [("tool", "wrote"), ("verdict", VERDICT.judge_report)]
    assert last == [("verdict", COUNT)]


def test_bounds_on_later_evidence() -> None:
    turns: Turns = [(WRITE, {0}, ["wrote"]), *[(RUN, set(), [f"result {i} " + "x" * 40]) for i in range(4)]]
    later = [text for kind, text in kinds(turns, hindsight={"max_turns": 2})[0] if kind == "later"]
    assert [text[:8] for text in later] == ["result 0", "result 1"]
    later = [text for kind, text in kinds(turns, hindsight={"max_chars": 60})[0] if kind == "later"]
    assert later[0] == "result 0 " + "x" * 40
    assert "characters cut" in later[1]
    assert len(later) == 2
    assert [kind for kind, _ in kinds(turns, hindsight={"max_turns": 0})[0]] == ["tool", "verdict"]


def test_a_judged_turn_says_which_turn_a_later_result_answered() -> None:
    pair = pairs_of(recording_of([(WRITE, {0}, ["wrote"]), (RUN, set(), ["ok"]), ([], set(), [])]))[0]
    assert [one.later_turn for one in pair.evidence] == [None, 1, None]


def test_turn_text_writes_arguments_line_by_line() -> None:
    arguments = {"path": "lösung.py", "content": "def f():\n    return '漢'\n", "mode": 0o644, "flags": ["ä", None]}
    message = {"role": "assistant", "content": "", "tool_calls": [call("write_file", json.dumps(arguments))]}
    assert turn_text(message) == (
        "[write_file]\npath: lösung.py\ncontent:\ndef f():\n    return '漢'\n\nmode: 420\nflags: [\"ä\", null]"
    )


@pytest.mark.parametrize(
    ("name", "raw"), [("write_file", '{"path": "a'), ("write_file", "[1]"), ("", "{}"), ("write_file", "")]
)
def test_turn_text_shows_a_broken_call_raw(name: str, raw: str) -> None:
    assert turn_text({"role": "assistant", "content": "x", "tool_calls": [call(name, raw)]}) == (
        f"x\n\n[broken tool call]\n{raw}"
    )


def test_reasoning_is_not_shown_to_the_judge() -> None:
    assert turn_text({"role": "assistant", "content": "Done.", "reasoning_content": "Is it done?"}) == "Done."


def test_turn_without_anything_has_a_text() -> None:
    assert turn_text({"role": "assistant", "content": None}) == "[empty turn]"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": "é"}, "é"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]}, "ab"),
    ],
)
def test_message_text_takes_every_form_of_content(message: dict[str, Any], text: str) -> None:
    assert message_text(message) == text


def test_shown_text_holds_what_the_agent_saw_and_not_the_hidden_tests() -> None:
    shown = shown_text(make_recording())
    assert TASK.prompt in shown
    assert "wrote 2 lines" in shown
    assert "path: solution.py" in shown
    assert TASK.hidden_tests.strip() not in shown


# -------------------------------------------------------------------------------------------------- repeated evidence


def repetitions(turns: Turns, **settings: Any) -> list[str]:
    """What each turn's evidence says of equal turns before it."""
    recording = replace(recording_of(turns), verification=None)
    said = [[text for kind, text in shown(pair) if kind == "repeated"] for pair in pairs_of(recording, **settings)]
    return [" ".join(texts) for texts in said]


MISSING = (RUN, set[int](), ["no such file"])
ONCE = "The turn before made the same calls and got the same results."


def test_a_turn_that_repeats_the_ones_before_it_says_how_many() -> None:
    twice = "The 2 turns before made the same calls and got the same results."
    assert repetitions([MISSING, MISSING, MISSING]) == ["", ONCE, twice]
    assert repetitions([MISSING, MISSING], hindsight={"evidence": "next_state"}) == ["", ""]


@pytest.mark.parametrize(
    "between",
    [
        (RUN, set[int](), ["no such file", "Try again."]),
        (RUN, set[int](), ["found"]),
        (BOTH, set[int](), ["wrote", "no such file"]),
        ([], set[int](), []),
    ],
)
def test_a_turn_after_a_reply_a_change_or_another_result_repeats_nothing(between: Any) -> None:
    assert repetitions([MISSING, between, MISSING])[2] == ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"content": "Clicked. \ufffc", "images": ["a" * 64]}, {"content": "Clicked. \ufffc", "images": ["b" * 64]}),
        (
            {"content": [{"type": "text", "text": "Clicked."}, {"type": "image_url", "image_url": {"url": "a"}}]},
            {"content": [{"type": "text", "text": "Clicked."}, {"type": "image_url", "image_url": {"url": "b"}}]},
        ),
    ],
)
def test_equal_words_with_another_picture_are_another_result(first: Message, second: Message) -> None:
    recording = replace(recording_of([MISSING, MISSING]), verification=None)
    for answers, said in (((first, second), 0), ((first, first), 1)):
        chat = list(recording.messages)
        for position, answer in zip((2, 4), answers, strict=True):
            chat[position] = {**chat[position], **answer}
        shots = replace(recording, traces=(replace(recording.traces[0], messages=tuple(chat)),))
        assert [kind for kind, _ in shown(pairs_of(shots)[1])].count("repeated") == said


def test_a_repetition_is_no_answer_and_only_stands_beside_one() -> None:
    turns: Turns = [MISSING, MISSING, (RUN, set(), [])]
    _, again, unanswered = pairs_of(replace(recording_of(turns), verification=None))
    assert (again.kinds, again.next_state_role) == (("tool", "repeated"), "tool")
    assert (unanswered.kinds, unanswered.next_state_role) == ((), None)
