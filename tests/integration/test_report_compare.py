"""Two runs compared, and measured hints, in a real browser."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.support import commands
from tests.support.browser import Report, opened
from tests.support.places import MODEL
from tests.support.report_facts import signed

from .conftest import DemoRun

pytestmark = pytest.mark.vllm


def make(*arguments: Path | str) -> None:
    done = commands.run("agentic_opd.report", *map(str, arguments), timeout_s=120)
    assert done.returncode == 0, done


@pytest.fixture(scope="module")
def pair(demo: DemoRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo run as A; as B the same run without its first group, in which every rollout passed."""
    folder = tmp_path_factory.mktemp("pair")
    after = folder / "after.jsonl"
    groups = demo.groups[1:]
    for group in groups:
        for overrides in group["overrides"]:
            overrides["verification"]["passed"] = overrides["verification"]["total"]
    after.write_text("".join(json.dumps(group) + "\n" for group in groups))
    page = folder / "compared.html"
    make(demo.path, after, "-o", page, "--tokenizer", MODEL)
    return page


@pytest.fixture
def compared(browser: Browser, pair: Path) -> Iterator[Report]:
    with opened(browser, pair) as report:
        yield report


def test_two_runs_stand_side_by_side(compared: Report, groups: list[dict[str, Any]]) -> None:
    page = compared.page
    facts = dict(zip(compared.texts(".fact dt"), compared.texts(".fact dd"), strict=True))
    both = [over["verification"] for group in groups[1:] for over in group["overrides"]]
    passed = sum(one["passed"] == one["total"] for one in both)
    assert facts["pass rate"].split(" points")[0].endswith(signed(100 - 100 * passed / len(both), 1))
    assert "B 6" in facts["pass rate"]  # Wilson's for 7 tasks that agree: 64.6% to 100%
    assert f"Rates are over the {len(groups) - 1} tasks of both runs, 1 only in A" in compared.texts(".note")[0]
    rows = compared.texts("[aria-label='Tasks side by side'] tbody tr")
    assert len(rows) == len(groups)
    only = groups[0]["group_overrides"]["task_id"]
    own = next(row for row in rows if row.startswith(only))
    assert own.count("of 4") == 1
    assert all("4 of 4" in row for row in rows if row != own)
    page.locator(f"button:text-is('{only}')").click()
    assert compared.texts("#list-count") == [f"4 of {4 * len(groups) + 4 * (len(groups) - 1)} rollouts"]


def test_both_runs_can_be_looked_at(compared: Report, groups: list[dict[str, Any]]) -> None:
    for letter, count in (("a", len(groups)), ("b", len(groups) - 1)):
        compared.go(f"#overview-{letter}")
        compared.wait_until(f"document.querySelector('h1').textContent.startsWith('Run {letter.upper()}:')")
        facts = dict(zip(compared.texts(".fact dt"), compared.texts(".fact dd"), strict=True))
        assert facts["rollouts"] == f"{4 * count} in {count} groups"
    compared.page.locator("#nav-rollouts").click()
    compared.page.select_option("#filter-run", "1")
    assert compared.texts("#list-count") == [f"{4 * (len(groups) - 1)} of {4 * (2 * len(groups) - 1)} rollouts"]
    compared.page.locator("#list a").first.click()
    compared.wait_until("document.title.includes(' B1.0,')")
    compared.page.locator("#turn-0 .t").first.wait_for()


@pytest.fixture(scope="module")
def measured(demo: DemoRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, int, int, float]]]:
    """The demo run with proofs in its records, from 8 of 8 to 1 of 8 turn by turn: (line, sequence, turn, effect)."""
    file = tmp_path_factory.mktemp("measured") / "groups.jsonl"
    groups, turns = demo.groups, list[tuple[int, int, int, float]]()
    for line, group in enumerate(groups, start=1):
        for index, overrides in enumerate(group["overrides"]):
            for number, turn in enumerate(overrides["opd"]["turns"]):
                if turn["hint"] is None:
                    continue
                passed = 8 - len(turns) % 8
                effect = passed / 8 - 1 / 8
                counts = {"without_hint": [1, 8], "with_hint": [passed, 8], "verdict": "open"}
                turn["proof"] = {**counts, "effect": effect, "interval": [effect - 0.125, min(1, effect + 0.125)]}
                turns.append((line, index, number, effect))
    file.write_text("".join(json.dumps(group) + "\n" for group in groups))
    shutil.copy(demo.path.with_suffix(".run.json"), file.with_suffix(".run.json"))
    make(file, "--tokenizer", MODEL)
    return file.with_suffix(".html"), turns


def test_a_measured_effect_is_the_first_column(browser: Browser, measured: tuple[Path, Any]) -> None:
    path, turns = measured
    with opened(browser, path) as report:
        assert report.texts("[aria-label='Hints'] thead th")[0] == "effect"
        shown = [float(row.split(" points")[0]) for row in report.texts("[aria-label='Hints'] tbody tr")]
        assert shown == sorted(shown, reverse=True)
        line, index, number, effect = turns[0]
        assert shown[0] <= 100 * effect
        report.go(f"#r={line}.{index}")
        report.page.locator(f"#turn-{number} .t").first.wait_for()
        said = report.texts(f"#turn-{number} .verdict")[0]
        assert "played on from here, 8 of 8 passed with it, 1 of 8 without" in said


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_nothing_keeps_anyone_out(
    browser: Browser, pair: Path, measured: tuple[Path, Any], tmp_path: Path, scheme: Any, width: int
) -> None:
    """axe-core on each page; nothing is wider than the screen, and a phone starts with a short page."""
    pages = (pair, ""), (pair, "#overview-b"), (pair, "#rollouts"), (measured[0], "")
    for path, view in pages:
        with opened(browser, path, view, width=width, color_scheme=scheme) as report:
            assert report.violations() == [], (path.name, view)
            assert report.page.evaluate("document.documentElement.scrollWidth") <= width, view
            assert width > 400 or report.page.evaluate("document.documentElement.scrollHeight") <= 3000, view
