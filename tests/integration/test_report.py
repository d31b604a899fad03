"""The report of a real run, in a real browser: what it shows is what stands in the file."""

import math
import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentic_opd.report.read import MOVED
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
    sampled = sum(mask != -100 for group in groups for masks in group["masks"] for mask in masks)
    assert facts["tokens scored"].split("% ")[1] == f"{len(tokens):,} of {sampled:,} sampled"
    assert facts["tokens moved"].split("% ")[1].startswith(f"{sum(abs(token.gap) >= MOVED for token in tokens):,} of")
    assert len(report.texts("[aria-label='By task'] tbody tr")) == 8
    assert "scripts/demo_policy/policy" in report.texts(".settings dd")


def test_hints_are_listed_by_what_they_moved(
    report: Report, groups: list[dict[str, Any]], tokens: list[Scored]
) -> None:
    """Every hint once, sorted by a click; a row leads to the turn with the largest gap."""
    moved: dict[str, list[float]] = {}
    for line, group in enumerate(groups, start=1):
        for index, overrides in enumerate(group["overrides"]):
            for turn in overrides["opd"]["turns"]:
                if turn["hint"] is not None:
                    own = (t for t in tokens if (t.line, t.index) == (line, index))
                    sizes = [abs(t.gap) for t in own if turn["span"][0] <= t.position < turn["span"][1]]
                    spelled = " ".join(turn["hint"].casefold().split()).rstrip(" .!")
                    moved.setdefault(spelled, []).extend(size for size in sizes if size >= MOVED)
    table = "#overview [aria-label='Hints']"
    report.page.locator(f"{table} + .more").evaluate_all("buttons => buttons.forEach(button => button.click())")
    assert len(report.texts(f"{table} tbody tr")) == len(moved)
    report.page.locator(f"{table} .sort", has_text="largest").click()
    largest = sorted((max(sizes, default=-1) for sizes in moved.values()), reverse=True)
    shown = [
        number(text) if text[0].isdigit() else -1 for text in report.texts(f"{table} td[data-label='largest |gap|']")
    ]
    assert shown == pytest.approx(largest, abs=0.0051)
    assert report.page.locator(f"{table} th[aria-sort]").get_attribute("aria-sort") == "descending"
    report.page.locator(f"{table} tbody a").first.click()
    report.wait_until("document.activeElement.dataset.at !== undefined")
    card = report.page.locator(".turn", has=report.page.locator(".t.on"))
    gaps = [abs(number(text)) for text in card.locator(".moved .value").all_text_contents()]
    assert gaps[0] == pytest.approx(largest[0], abs=0.0051)
    assert gaps == sorted(gaps, reverse=True)


def test_beside_a_moved_token_stand_the_hint_and_what_the_teacher_wanted(
    report: Report, groups: list[dict[str, Any]], tokens: list[Scored]
) -> None:
    decode = AutoTokenizer.from_pretrained(ROOT / MODEL).decode
    token = next(token for token in wide(tokens, groups, decode) if token.gap < 0)
    group = groups[token.line - 1]
    ids, logprobs = (group[f"distill_{name}"][token.index][token.position] for name in ("token_ids", "logprobs"))
    assert logprobs[1] > logprobs[0]  # A token that a hint moves down most is not what the teacher would have said.
    wanted = decode([ids[1]]).replace(" ", "·").replace("\n", "↵")
    report.go(place(token))
    element = report.page.locator(f'.t[data-at="{sampled_before(group, token)}"]')
    assert element.get_attribute("data-wants") == wanted[:24]
    records = group["overrides"][token.index]["opd"]["turns"]
    hint = next(turn["hint"] for turn in records if turn["span"][0] <= token.position < turn["span"][1])
    said = report.texts("#detail .hint")[0]
    assert " ".join(hint.split())[:200] in said
    assert f"The teacher wanted {wanted} instead" in said
    gap = next(i for i in report.page.locator(".t:not(.u)").all() if i.get_attribute("data-wants") is None)
    assert gap.evaluate("token => getComputedStyle(token, '::after').content") in ("none", "normal")


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
    read, votes = report.page.locator("#turn-0 .votes").all()
    read.locator("summary").click()
    assert read.locator("pre").all_text_contents() == [first["question"]]
    votes.locator("summary").click()
    assert votes.locator("pre").all_text_contents() == [vote["text"] for vote in first["votes"]]
