"""The gateway's page in a real browser: hostile sessions, keys alone, no script, and a turn that happens meanwhile."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import PATIENCE_S, Report
from tests.support.fake_plugin import fake_plugin
from tests.support.gateway import Served, served
from tests.support.places import MODEL
from tests.support.recording_proxy import recording_proxy
from tests.support.scripted_judge import HINT

EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>\" autofocus onfocus=x <!--"
ODD = "\u202eab\u200f\x1b[31m"
USER = {"role": "user", "content": "Write f."}
HOSTILE = {"role": "user", "content": f"{EVIL}{ODD}{'z' * 1500}"}
MORE = {"role": "user", "content": "It is too long."}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway before a policy that says hostile things, and is its own judge."""
    with (
        fake_plugin(says=lambda prompt, choice: f"I say {EVIL}{ODD}") as policy,
        served(policy.base_url, tmp_path_factory.mktemp("ui")) as gateway,
    ):
        yield gateway


@contextmanager
def visiting(browser: Browser, gateway: Served, learner: str | None = None, **context: Any) -> Generator[Report]:
    """The page, opened with the key; it asks for nothing but the gateway, and complains of nothing."""
    tab = browser.new_context(viewport={"width": context.pop("width", 1280), "height": 860}, **context)
    tab.set_default_timeout(PATIENCE_S * 1000)
    report = Report(tab.new_page(), f"{gateway.url}/ui")
    page = report.page
    page.on("console", lambda message: report.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: report.complaints.append(str(error)))
    page.on("dialog", lambda dialog: report.complaints.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: report.requests.append(request.url))
    page.goto(report.url)
    page.fill("input[name=key]", "a-key")
    if learner is not None:
        page.keyboard.press("Tab")
        page.keyboard.type(learner)
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text('Sessions')")
    yield report
    tab.close()
    # The login form itself is refused what it asks for, and has no name beside its password.
    assert [one for one in report.complaints if "401" not in one and "Password forms" not in one] == []
    assert {url for url in report.requests if not url.startswith(f"{gateway.url}/ui")} == set()
    assert not [url for url in report.requests if "a-key" in url]


def talk(gateway: Served, name: str, *messages: Any) -> list[Any]:
    """Ask once for each message, each behind the answers before it; the conversation."""
    conversation: list[Any] = []
    for message in messages:
        conversation.append(message)
        answer = gateway.chat(*conversation, session=name, max_tokens=200)
        conversation.append({"role": "assistant", "content": answer.choices[0].message.content})
    return conversation


def open_session(page: Page, name: str) -> None:
    page.click(f"tbody a:text-is('{name}')")
    page.wait_for_selector("#turns")


def test_hostile_sessions_are_text_and_their_tokens_are_the_reports(browser: Browser, gateway: Served) -> None:
    talk(gateway, f"h {EVIL}", HOSTILE, MORE, USER)
    with visiting(browser, gateway) as report:
        page = report.page
        page.click("tbody a:has-text('onerror')")
        page.wait_for_selector(".t")
        report.wait_until("document.querySelectorAll('.said .stream:not(.plain)').length === 3")
        assert EVIL in page.locator("h1").inner_text()
        said = page.locator(".said").first.evaluate("element => element.textContent")
        assert f"I say {EVIL}⟨e2 80⟩⟨ae⟩ab⟨e2 80⟩⟨8f⟩⟨ESC⟩[31m" in said, "characters of several tokens"
        context = page.locator(".context").first.evaluate("element => element.textContent")
        assert f"{EVIL}⟨RLO⟩ab⟨RLM⟩⟨ESC⟩[31mz" in context
        page.wait_for_selector(".hint")
        assert HINT in page.locator(".hint").first.evaluate("element => element.textContent")
        page.locator(".turn .t").nth(1).focus()
        page.wait_for_selector("#detail:not([hidden])")
        assert "student" in report.texts("#detail dt")
        assert page.evaluate("window.pwned") is None
        assert page.locator("main img, main script, [onerror], [onfocus]").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_turn_is_reached_opened_and_rated_with_keys_alone(browser: Browser, gateway: Served) -> None:
    talk(gateway, "rated", USER, MORE)
    with visiting(browser, gateway) as report:
        page = report.page

        def tab_to(is_reached: str) -> None:
            for _ in range(400):
                page.keyboard.press("Tab")
                if page.evaluate(f"(({is_reached}))(document.activeElement)"):
                    return
            raise AssertionError(f"never reached: {is_reached}")

        tab_to("element => element.textContent === 'rated'")
        page.keyboard.press("Enter")
        page.wait_for_selector(".said .t")
        page.keyboard.press("n")
        assert page.evaluate("document.activeElement.textContent") == "Turn 1"
        tab_to("element => element.matches('.rate summary')")
        page.keyboard.press("Enter")
        tab_to("element => element.name === 'reward'")
        page.keyboard.press("ArrowRight")  # From the first, good, to the second.
        tab_to("element => element.name === 'text'")
        page.keyboard.type("Shorter, please.")
        tab_to("element => element.textContent === 'Send'")
        page.keyboard.press("Enter")
        page.wait_for_selector(".given")
        assert report.texts(".given") == ["bad Shorter, please."]
        assert "#turn-" in page.url
    group = gateway.end("rated")
    texts = [message["content"] for message in group["messages"][0]]
    assert "Shorter, please.\n(The answer was rated -1.)" in texts


def test_without_a_script_all_can_be_read_and_rated(browser: Browser, gateway: Served) -> None:
    talk(gateway, "plain", USER, MORE)
    with visiting(browser, gateway, java_script_enabled=False, color_scheme="dark") as report:
        page = report.page
        open_session(page, "plain")
        assert page.locator(".turn").count() == 2
        assert f"I say {EVIL}⟨RLO⟩" in page.locator(".said").first.inner_text()
        assert "next state: user" in page.locator(".turn").first.inner_text()
        assert "It is too long." in page.locator(".r-user").last.inner_text()
        page.locator(".rate summary").first.click()
        page.locator(".thumb").first.click()
        page.locator(".rate button").first.click()
        assert page.locator(".given").inner_text().strip() == "good"
        page.goto(report.url)
        page.locator("button:text('Sign out')").click()
        assert page.locator("input[name=key]").count() == 1


def test_what_happens_while_the_page_is_open_appears(browser: Browser, gateway: Served) -> None:
    conversation = talk(gateway, "live", USER)
    with visiting(browser, gateway) as report:
        page = report.page
        report.wait_until("document.documentElement.dataset.live === 'true'")
        talk(gateway, "born meanwhile", USER)
        page.wait_for_selector("tbody a:text-is('born meanwhile')")
        open_session(page, "live")
        report.wait_until("document.documentElement.dataset.live === 'true'")
        page.locator(".rate summary").first.click()
        page.locator(".rate textarea").first.fill("A draft")
        gateway.chat(*conversation, MORE, session="live")
        page.wait_for_selector(".step:nth-child(2) .said .t")
        assert "It is too long." in page.locator(".step").nth(1).inner_text()
        assert page.locator(".rate textarea").first.input_value() == "A draft", "what a reader writes stays"
        page.locator(".rate textarea").first.fill("")
        page.locator("h1").click()
        page.wait_for_selector(".step:first-child .hint")  # Which the form's part had to wait for.


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_nothing_keeps_anyone_out(browser: Browser, gateway: Served, scheme: Any, width: int) -> None:
    """axe-core, in every view; and nothing is wider than the screen."""
    talk(gateway, "seen", HOSTILE, MORE)
    with visiting(browser, gateway, width=width, color_scheme=scheme) as report:
        assert report.violations() == []
        assert report.page.evaluate("document.documentElement.scrollWidth") <= width
        open_session(report.page, "seen")
        report.page.wait_for_selector(".said .t")
        report.page.locator(".rate summary").first.click()
        assert report.violations() == []
        assert report.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_learner_that_the_header_names_opens_its_own_sessions(browser: Browser, tmp_path: Path) -> None:
    flags = ("--env.learners.by", "header", "--env.opd_enabled", "false")
    with fake_plugin() as policy, recording_proxy(policy.base_url) as proxy:
        proxy.info = {"max_adapters": 2, "max_lora_rank": 8}
        with served(proxy.url, tmp_path, *flags) as gateway:
            for learner in ("ada", "bob"):
                headers = {"X-Session-Id": f"of {learner}", "X-Learner": learner}
                gateway.client.chat.completions.create(
                    model=MODEL, messages=[USER], max_tokens=60, extra_headers=headers
                )
            with visiting(browser, gateway, learner="ada") as report:
                page = report.page
                assert report.texts("header .note")[0] == "learner ada"
                assert report.texts("tbody a") == ["of ada"]
                open_session(page, "of ada")
                assert page.locator(".turn").count() == 1
