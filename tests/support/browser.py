"""Reports in a real browser: the system's Chromium, and pages that remember what they asked for and complained of."""

import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 120.0
"""For what takes a second at most where nothing else runs."""


@contextmanager
def chromium() -> Generator[Browser]:
    """The system's Chromium while the block runs; `scripts/setup --tests` installs it."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed; scripts/setup --tests installs Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=PATIENCE_S * 1000)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Report:
    """One report in one tab; `complaints` holds console errors and exceptions, `requests` all but the file itself."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])

    def go(self, place: str) -> None:
        """Go to the part of the report behind `#`."""
        self.page.goto(f"{self.url}{place}")
        self.page.wait_for_selector("main section:not([hidden]) h1", state="attached")
        if place.startswith("#r="):  # The view before it has a heading too; a rollout is unpacked first.
            name = place.removeprefix("#r=").partition("&")[0]
            self.wait_until(f"document.title.includes(' {name},')")

    def place(self) -> str:
        """The part of the address behind the file, as the tab has it now (`page.url` is a later copy)."""
        return self.page.evaluate("location.href").removeprefix(self.url)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that match, each on one line; painted or not, which `inner_text` depends on."""
        return self.page.locator(selector).evaluate_all(
            """elements => elements.map(element => {
              const texts = [];
              const nodes = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
              while (nodes.nextNode()) texts.push(nodes.currentNode.data);
              return texts.join(' ').split(/\\s+/).filter(Boolean).join(' ');
            })"""
        )

    def wait_until(self, expression: str) -> None:
        """Wait for a JavaScript expression to be true; the page's policy forbids Playwright's own way of waiting."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            self.page.wait_for_timeout(20)

    def violations(self) -> list[str]:
        """Accessibility rules that are broken here, those that axe-core calls serious or critical.

        All is laid out first: axe-core finds what lies behind a text by rectangles, and those of parts whose
        layout the browser has put off (`content-visibility`) lie over what follows them.
        """
        self.page.evaluate(
            """() => {
              const sheet = new CSSStyleSheet();
              sheet.replaceSync('* { content-visibility: visible !important; }');
              document.adoptedStyleSheets.push(sheet);
            }"""
        )
        found = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']} ({len(one['nodes'])}): {one['nodes'][0]['html']}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]


@contextmanager
def opened(browser: Browser, path: Path, place: str = "", width: int = 1280, **context: Any) -> Generator[Report]:
    """The report in a tab of its own; at the end it must have asked for nothing and complained of nothing."""
    tab = browser.new_context(viewport={"width": width, "height": 860}, **context)
    tab.set_default_timeout(PATIENCE_S * 1000)
    report = Report(tab.new_page(), path.as_uri())
    page = report.page
    page.on("console", lambda message: report.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: report.complaints.append(str(error)))
    page.on("dialog", lambda dialog: report.complaints.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: report.requests.append(request.url))
    report.go(place)
    yield report
    tab.close()
    assert report.complaints == []
    assert {url.split("#")[0] for url in report.requests} == {report.url}
