"""The report of a real run, in a real browser: what it shows is what stands in the file."""

import math
import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.browser import Report
from tests.support.places import MODEL, ROOT
from tests.support.report_facts import Scored, fixed, peak_x, place, sampled_before, signed, wide

from .conftest import DemoRun

pytestmark = pytest.mark.vllm


def number(text: str) -> float:
    return float(text.replace("+", ""))


def test_a_run_ends_with_its_report(demo: DemoRun) -> None:
    assert f"report: {demo.path.with_suffix('.html')}" in " ".join(demo.said.split())
    assert demo.path.with_suffix(".html").stat().st_size < 2 * demo.path.stat().st_size


def test_the_overview_counts_what_the_file_holds(
    report: Report, groups: list[dict[str, Any]], tokens: list[Scored]
) -> None:
    turns = [turn for group in groups for overrides in group["overrides"] for turn in overrides["opd"]["turns"]]
    hints = sum(turn["hint"] is not None for turn in turns)
    facts = dict(zip(report.texts(".fact dt"), report.texts(".fact dd"), strict=True))
    assert facts["rollouts"] == "32 in 8 groups"
    said = re.match(rf"{hints} on ([0-9.]+)% of {len(turns)} turns", facts["hints"])
    assert said is not None
    assert float(said[1]) == pytest.approx(100 * hints / len(turns), abs=0.0501)  # Ties are rounded either way.
    assert facts["mean gap"].split()[0] == signed(sum(token.gap for token in tokens) / len(tokens), 3)
    stages = dict(zip(report.texts(".funnel .name"), report.texts(".funnel .value"), strict=True))
    scored = sum(turn["outcome"] == "scored" for turn in turns)
    assert (stages["all turns"], stages["scored"]) == (str(len(turns)), str(scored))
    assert len(report.texts("#overview tbody tr")) == 8 + len({turn["hint"] for turn in turns} - {None})
    assert "scripts/demo_policy/policy" in report.texts(".settings dd")


def test_a_token_shows_the_numbers_of_the_line(
    report: Report, groups: list[dict[str, Any]], tokens: list[Scored]
) -> None:
    decode = AutoTokenizer.from_pretrained(ROOT / MODEL).decode
    choice = wide(tokens, groups, decode)
    for token in (choice[0], choice[len(choice) // 20], choice[-1]):
        group = groups[token.line - 1]
        ids, logprobs = (group[f"distill_{name}"][token.index][token.position] for name in ("token_ids", "logprobs"))
        report.go(f"#r={token.line}.{token.index}")
        report.page.locator(f'.t[data-at="{sampled_before(group, token)}"]').hover()
        shown = dict(zip(report.texts("#detail .numbers dt"), report.texts("#detail .numbers dd"), strict=True))
        student = group["inference_logprobs"][token.index][token.position]
        assert number(shown["student"].split()[1]) == pytest.approx(student, abs=5.1e-5)
        assert shown["teacher"].split()[1] == fixed(logprobs[0], 4)
        assert number(shown["gap"].split()[0]) == pytest.approx(logprobs[0] - student, abs=5.1e-5)
        assert f"id {ids[0]}, position {token.position}" in report.texts("#detail .note")[0]
        rows = report.texts("#detail .teacher li")
        expected = sorted(zip(logprobs[: len(rows)], ids, strict=False), key=lambda entry: -entry[0])
        assert [row.split()[-1] for row in rows] == [fixed(logprob, 4) for logprob, _ in expected]
        for row, (logprob, token_id) in zip(rows, expected, strict=True):
            text = decode([token_id]).replace(" ", "·").replace("\n", "↵")
            assert row.startswith(text)
            assert percent(row.split()[-2]) == pytest.approx(100 * math.exp(logprob), abs=0.051)


def percent(text: str) -> float:
    return 0.005 if text == "<0.01%" else float(text.removesuffix("%"))


def test_colours_are_the_sign_and_size_of_the_gap(
    report: Report, groups: list[dict[str, Any]], tokens: list[Scored]
) -> None:
    token = next(token for token in tokens if token.gap < 0)
    report.go(f"#r={token.line}.{token.index}")
    element = report.page.locator(f'.t[data-at="{sampled_before(groups[token.line - 1], token)}"]')
    assert "n8" in (element.get_attribute("class") or "").split()
    report.page.locator("#limit").fill("1.3")
    widest = round(8 * min(1, -token.gap / 20))
    assert (f"n{widest}" if widest else "z") in (element.get_attribute("class") or "").split()
    assert report.texts(".scale output") == ["±20 nats"]
    card = report.page.locator(".turn", has=element)
    card.locator(".strip").click(position={"x": peak_x(card, groups[token.line - 1], token), "y": 5})
    assert report.place() == place(token)
    report.page.locator("h1").last.click()
    assert report.page.locator("#detail").is_hidden()
    group = groups[token.line - 1]
    scored = sum(1 for row in group["distill_token_ids"][token.index] if row)
    sampled = sum(mask != -100 for mask in group["masks"][token.index])
    report.wait_until(f"document.querySelectorAll('.t').length === {sampled}")
    assert report.page.locator(".t.u").count() == sampled - scored


def test_what_the_model_saw_and_said_is_all_there(report: Report, groups: list[dict[str, Any]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / MODEL)
    line, index, answer = next(
        (line, index, answers[0])
        for line, group in enumerate(groups, start=1)
        for index, messages in enumerate(group["messages"])
        for answers in [[message["content"] for message in messages if message["role"] == "tool"]]
        for text in [tokenizer.decode(group["tokens"][index])]
        if answers and all(answer.strip() and answer.strip() in text for answer in answers)
        if group["overrides"][index]["opd"]["turns"][0]["votes"]
    )
    group = groups[line - 1]
    report.go(f"#r={line}.{index}")
    first = group["overrides"][index]["opd"]["turns"][0]
    report.page.locator("#turn-0 .t").first.wait_for()
    said = report.page.locator("#turn-0 .stream").evaluate("element => element.textContent")
    assert said == tokenizer.decode(group["tokens"][index][slice(*first["span"])])
    assert report.texts("#turn-0 .verdict .chip") == [first["outcome"].replace("_", " ")]
    shown = report.page.locator(".r-tool pre").first.evaluate("element => element.textContent")
    assert answer.rstrip("\n") in shown
    votes = report.page.locator("#turn-0 .votes")
    votes.locator("summary").click()
    assert votes.locator("pre").all_text_contents() == [vote["text"] for vote in first["votes"]]
