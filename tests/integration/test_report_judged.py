"""The report of rollouts that the judge read as a whole, in a real browser."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.support import commands
from tests.support.browser import Report, opened
from tests.unit.report.sample import HINT, in_two_sequences, judged_as_a_whole, write

from .test_report_hostile import EVIL, ODD


def made(tmp_path: Path, *groups: Any) -> Path:
    file = write(tmp_path / "groups.jsonl", *groups)
    done = commands.run("agentic_opd.report", str(file), timeout_s=120)
    assert done.returncode == 0, done
    return file.with_suffix(".html")


def named(report: Report) -> list[str]:
    return report.texts(".named li")


@pytest.mark.parametrize("width", [1280, 390])
def test_named_turns_stand_with_their_votes_and_hints_and_the_question_once(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    with opened(browser, made(tmp_path, judged_as_a_whole(), in_two_sequences()), width=width) as report:
        figures = dict(zip(report.texts(".fact dt"), report.texts(".fact dd"), strict=True))
        assert figures["judge tokens a rollout"] == "360 300 read, 60 sampled; 360 a hint; 3 questions"
        assert "answers about whole rollouts can't be read" in " ".join(report.texts(".findings li"))
        report.go("#r=1.0")
        assert named(report) == [
            f"turn 1 named by 2 of 3 answers scored {HINT}",
            "turn 2 named by 1 of 3 answers vote failed not used: Run the tests before the end.",
        ]
        assert report.texts(".judged summary") == [
            "3 answers about turns 1 to 2, 1 unreadable; 300 tokens read, 60 sampled",
            "what the judge read about turns 1 to 2",
        ]
        assert report.texts(".judged .votes .who") == [
            "names turn 1",
            "names turns 1, 2",
            "abstains: it names a turn that does not exist, or is not shown in full",
        ]
        assert report.texts(".verdict .votes > summary") == ["named by 2 of 3 answers", "named by 1 of 3 answers"]
        report.page.locator(".named button").nth(1).click()
        assert report.page.evaluate("document.activeElement.closest('.turn').id") == "turn-1"
        assert report.violations() == []
        assert report.page.evaluate("document.documentElement.scrollWidth") <= width
        report.go("#r=2.1")
        assert named(report) == [
            "turn 1 named by 1 of 3 answers vote failed not used: Run the tests before the end.",
        ]
        assert "turn 1 here is its turn 2" in report.texts(".judged")[0]
        assert not any("what the judge read" in text for text in report.texts(".judged summary"))


def test_hostile_questions_and_answers_are_text(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, made(tmp_path, judged_as_a_whole(question=EVIL + ODD, said=EVIL + ODD))) as report:
        report.go("#r=1.0")
        assert report.page.evaluate("window.pwned") is None
        assert report.page.locator("img, iframe, object, link, form[action], [onerror]").count() == 0
        texts = report.page.locator(".judged pre").evaluate_all("elements => elements.map(e => e.textContent)")
        assert sum(EVIL in text for text in texts) == 2
