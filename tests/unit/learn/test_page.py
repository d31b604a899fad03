"""The report: ten pairs side by side, those that got worse among them, and no text becomes markup."""

import re
from typing import Any

import pytest

from agentic_opd.learn.figures import Guard, LearnResult
from agentic_opd.learn.page import ShownPair, report_page, shown_pairs

HOSTILE = "<script>alert(1)</script>&amp;\"'"


def pair(name: str, before: float | None = 0.0, after: float | None = 1.0, text: str = "new") -> ShownPair:
    said: list[Any] = [{"role": "assistant", "content": words} for words in ("log", "old", text)]
    history, reply = [{"role": "user", "content": f"Q {name}"}], [{"role": "user", "content": "No."}]
    return ShownPair(name, history, said[0], reply, (said[1], said[2]), (before, after))


def result(**changes: Any) -> LearnResult:
    counts = {"training": 80, "held_out": 20}
    costs = {"seconds": {"hints": 3.0}, "judge_tokens": None, "trained_tokens": 12345, "steps": 6}
    return LearnResult("adapter", "fewer corrections", counts, counts, costs, **changes)


def test_five_that_got_worse_are_shown_beside_those_that_got_better() -> None:
    pairs = [pair(f"better {i}") for i in range(9)] + [pair(f"worse {i}", 1.0, 0.0) for i in range(9)]
    pairs += [pair(f"equal {i}", 1.0, 1.0) for i in range(9)]
    kinds = [shown.name.split()[0] for shown in shown_pairs(pairs, 0)]
    assert kinds == ["worse"] * 5 + ["better"] * 5
    assert shown_pairs(pairs, 0) == shown_pairs(pairs, 0) != shown_pairs(pairs, 1)


def test_all_kinds_fill_the_page_and_equal_answers_come_last() -> None:
    pairs = [pair("better"), *(pair(f"worse {i}", 1.0, 0.0) for i in range(20))]
    assert [shown.change for shown in shown_pairs(pairs, 0)] == [-1] * 9 + [1]
    pairs = [pair("not graded", None, 0.0), pair("the same", 1.0, 1.0, "old"), pair("other", 1.0, 1.0)]
    assert [shown.name for shown in shown_pairs(pairs, 0)][-1] == "the same"


def test_the_page_has_the_figures_and_the_pairs() -> None:
    corrections = {"before": [0.5, 0.3, 0.7, 20], "after": [0.1, 0.0, 0.3, 20], "difference": [-0.4, -0.6, -0.1]}
    guards = {"logprob": Guard(-0.5, -0.51, 0.05, fell=False), "calls_parse": Guard(None, None, 0.05, fell=False)}
    page = report_page("m", result(corrections=corrections, guards=guards), [pair("s/1"), pair("s/2", None)])
    for text in ("-0.600 to -0.100", "0.500", "-0.510", "s/1", "not graded", "graded 1.00", "(corrected)", "12,345"):
        assert text in page
    refused = report_page("m", result(), [])
    assert "corrected answers that" not in refused


@pytest.mark.parametrize("name", ["model", "reason", "name", "answer"])
def test_no_text_becomes_markup(name: str) -> None:
    shown = pair(HOSTILE if name == "name" else "s", text=HOSTILE if name == "answer" else "new")
    reason = HOSTILE if name == "reason" else "r"
    counts = {"training": 1, "held_out": 1}
    costs = {"seconds": {}, "judge_tokens": None, "trained_tokens": 0, "steps": 0}
    page = report_page(
        HOSTILE if name == "model" else "m", LearnResult("refused", reason, counts, counts, costs), [shown]
    )
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")


def test_a_pair_is_stored_with_the_last_message_before_it() -> None:
    shown = pair("s")
    assert ShownPair.from_json(shown.to_json()) == shown
