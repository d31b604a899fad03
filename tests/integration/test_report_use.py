"""The report of a real run, in a real browser: finding one's way, by mouse, keys and links, in any colours."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from transformers import AutoTokenizer

from agentic_opd.report.read import MOVED
from tests.support.browser import Report, opened
from tests.support.places import MODEL, ROOT
from tests.support.report_facts import Scored, fixed, furthest_scored, place, sampled_before, wide

from .conftest import DemoRun

pytestmark = pytest.mark.vllm


def judged(turn: dict[str, Any]) -> str:
    return "\n".join([turn["hint"] or "", *(vote["text"] for vote in turn["votes"])])


def test_rollouts_are_filtered_sorted_and_searched(
    report: Report, groups: list[dict[str, Any]], tokens: list[Scored]
) -> None:
    page = report.page
    report.go("#rollouts")
    rollouts = [
        (group["group_overrides"]["task_id"], score, overrides)
        for group in groups
        for score, overrides in zip(group["scores"], group["overrides"], strict=True)
    ]
    assert len(report.texts("#list li")) == len(rollouts) == 32
    page.select_option("#filter-task", "builtin/fizzbuzz")
    shown = page.locator("#list .task").evaluate_all("elements => elements.map(e => e.textContent)")
    assert shown == ["builtin/fizzbuzz"] * 4
    page.select_option("#filter-task", "")
    page.select_option("#filter-hint", "yes")
    hinted = [one for one in rollouts if any(turn["hint"] for turn in one[2]["opd"]["turns"])]
    assert len(report.texts("#list li")) == len(hinted)
    assert report.texts("#list-count") == [f"{len(hinted)} of 32 rollouts"]
    page.select_option("#filter-hint", "any")
    page.select_option("#filter-outcome", "vote_failed")
    failed = [one for one in rollouts if any(turn["outcome"] == "vote_failed" for turn in one[2]["opd"]["turns"])]
    assert len(report.texts("#list li")) == len(failed)
    page.select_option("#filter-outcome", "")
    page.select_option("#filter-score", "passed")
    assert len(report.texts("#list li")) == sum(
        one[2]["verification"]["passed"] == one[2]["verification"]["total"] for one in rollouts
    )
    page.select_option("#filter-score", "any")
    page.select_option("#sort", "score")
    assert page.locator("#list .score").all_text_contents() == [
        fixed(score, 2) for score in sorted(one[1] for one in rollouts)
    ]
    page.select_option("#sort", "largest")
    # Rollouts that are word for word the same may share the largest gap, but for the engine's noise.
    largest = {f"{one.line}.{one.index}" for one in tokens if abs(one.gap) > abs(tokens[0].gap) - 1e-4}
    assert report.texts("#list .sub")[0].split()[0] in largest
    records = [turn for one in hinted for turn in one[2]["opd"]["turns"]]
    hint = next(turn["hint"] for turn in records if turn["hint"] and "\n" not in turn["hint"])
    page.fill("#search", hint.upper())
    said = ["\n".join(judged(turn) for turn in one[2]["opd"]["turns"]) for one in rollouts]
    saying = [text for text in said if hint.lower() in text.lower()]
    report.wait_until(f"document.querySelectorAll('#list li').length === {len(saying)}")


def test_a_link_comes_back_to_the_token(
    report: Report, browser: Browser, groups: list[dict[str, Any]], tokens: list[Scored]
) -> None:
    _, token, other_token, *_ = wide(tokens, groups, AutoTokenizer.from_pretrained(ROOT / MODEL).decode)
    report.go(f"#r={token.line}.{token.index}")
    at = sampled_before(groups[token.line - 1], token)
    report.page.locator(f'.t[data-at="{at}"]').click()
    assert report.place() == place(token)
    numbers = report.texts("#detail dd")
    with opened(browser, Path(report.url.removeprefix("file://")), place(token)) as other:
        other.page.wait_for_selector("#detail:not([hidden])")
        assert other.texts("#detail dd") == numbers
        assert other.page.evaluate("document.activeElement.dataset.at") == str(at)
        box = other.page.locator(f'.t[data-at="{at}"]').bounding_box()
        assert box is not None
        assert 0 < box["y"] < 860
        other.page.evaluate(f"location.hash = '{place(other_token)}'")
        other.wait_until(
            f"document.querySelector('#detail .note').textContent.includes('position {other_token.position},')"
        )


def test_everything_can_be_done_with_keys(report: Report, groups: list[dict[str, Any]]) -> None:
    page = report.page
    report.go("#r=1.3")
    for key, name in (
        ("k", "1.2"),
        ("k", "1.1"),
        ("k", "1.0"),
        ("k", "1.0"),
        ("j", "1.1"),
        ("ArrowRight", "1.2"),
        ("k", "1.1"),
        ("ArrowLeft", "1.0"),
    ):
        page.keyboard.press(key)
        report.wait_until(f"document.title.includes('{name}')")
    page.locator("#turn-0 .t").first.wait_for()
    page.locator("#turn-0 .t").first.focus()
    start = groups[0]["overrides"][0]["opd"]["turns"][0]["span"][0]
    for key, position in (("ArrowRight", start + 1), ("ArrowRight", start + 2), ("ArrowLeft", start + 1)):
        page.keyboard.press(key)
        assert report.place() == f"#r=1.0&p={position}"
        assert f"position {position}," in report.texts("#detail .note")[0]
    page.keyboard.press("Escape")
    assert page.locator("#detail").is_hidden()
    scored = furthest_scored(groups)
    report.go(f"#r={scored.line}.{scored.index}")
    page.wait_for_selector(f"#turn-{scored.turn} .t")
    page.evaluate("scrollTo(0, 0)")
    for _ in range(scored.nth):
        page.keyboard.press("n")
    assert 0 < page.locator(f"#turn-{scored.turn}").bounding_box()["y"] < 430
    page.keyboard.press("/")
    report.wait_until("document.activeElement.id === 'search'")
    page.keyboard.type("jk?")
    assert page.input_value("#search") == "jk?"
    page.locator("#help-open").click()
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()


def test_the_list_opens_with_the_rollout_that_has_most_to_show(
    report: Report, browser: Browser, demo: DemoRun, tokens: list[Scored]
) -> None:
    """That is the largest sum of gaps that moved a token; on a narrow screen the list stands alone."""
    sums: dict[str, float] = {}
    for token in tokens:
        name = f"{token.line}.{token.index}"
        sums[name] = sums.get(name, 0.0) + (abs(token.gap) if abs(token.gap) >= MOVED else 0.0)
    best = {name for name, total in sums.items() if total > max(sums.values()) - 1e-3}
    report.page.locator("#nav-rollouts").click()
    report.wait_until("document.querySelector('#list [aria-current]') !== null")
    assert report.texts("#list [aria-current] .sub")[0].split()[0] in best
    assert report.page.locator("#rollout-pane .turn").count() > 0
    with opened(browser, demo.path.with_suffix(".html"), "#rollouts", width=400) as narrow:
        assert narrow.page.locator("#rollout-pane").is_hidden()
        assert narrow.page.locator("#list").is_visible()


@pytest.mark.parametrize("view", ["", "#rollouts"])
def test_a_phone_starts_with_a_short_page(browser: Browser, demo: DemoRun, view: str) -> None:
    with opened(browser, demo.path.with_suffix(".html"), view, width=400) as report:
        assert report.page.evaluate("document.documentElement.scrollHeight") <= 3000
        assert report.page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(browser: Browser, demo: DemoRun, scheme: Any) -> None:
    def brightness(report: Report) -> int:
        colour = report.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) // 3

    with opened(browser, demo.path.with_suffix(".html"), color_scheme=scheme) as report:
        before = brightness(report)
        report.page.locator("#theme").click()
        after = brightness(report)
    assert (before > 200, after > 200) == ((True, False) if scheme == "light" else (False, True))
    assert min(before, after) < 60


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_nothing_keeps_anyone_out(
    browser: Browser, demo: DemoRun, tokens: list[Scored], scheme: Any, width: int
) -> None:
    """axe-core, in every view; and nothing is wider than the screen."""
    path = demo.path.with_suffix(".html")
    for view in ("#overview", "#rollouts", f"#r={tokens[0].line}.{tokens[0].index}", place(tokens[0])):
        with opened(browser, path, view, width=width, color_scheme=scheme) as report:
            if view.startswith("#r="):
                report.page.locator("#turn-0 .t").first.wait_for()
            assert report.violations() == [], view
            assert report.page.evaluate("document.documentElement.scrollWidth") <= width, view
