"""A report of 200 rollouts of 4,000 tokens, and two runs of 100 compared: size, how soon it is there, scrolling."""

import json
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser
from transformers import AutoTokenizer

from agentic_opd.report.page import ShownRun, write_report
from agentic_opd.report.read import read_run
from tests.support.browser import opened
from tests.support.places import MODEL, ROOT

from .conftest import DemoRun

pytestmark = [pytest.mark.vllm, pytest.mark.alone]

ROLLOUTS, TOKENS = 200, 4000


def varied(value: Any, random: Random) -> Any:
    """Other numbers of the same kind, so that what is repeated packs no better than what is not."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        others = [other for other in random.sample(range(1500), len(value)) if other != value[0]]
        return [value[0], *others[: len(value) - 1]]
    if isinstance(value, list):
        factor = random.uniform(1, 1.3)
        return [round(logprob * factor, 4) for logprob in value]
    return value if value > 0 else value * random.uniform(0.7, 1.3)


def grows(group: dict[str, Any], index: int) -> bool:
    """Whether what is repeated is short enough to come near to TOKENS."""
    return len(group["tokens"][index]) - group["overrides"][index]["opd"]["turns"][0]["span"][0] < 0.3 * TOKENS


def scored_share(group: dict[str, Any], index: int) -> float:
    rows = group["distill_token_ids"][index]
    return sum(map(bool, rows)) / len(rows)


def grown(group: dict[str, Any], index: int, random: Random) -> dict[str, Any]:
    """One rollout of the group, as a group, whose turns and what lies between them are repeated up to TOKENS tokens."""
    names = ("tokens", "masks", "inference_logprobs", "distill_token_ids", "distill_logprobs")
    arrays = {name: list(group[name][index]) for name in names}
    turns = list(group["overrides"][index]["opd"]["turns"])
    messages = list(group["messages"][index])
    first = turns[0]["span"][0]
    body, repeated = {name: arrays[name][first:] for name in names}, list(turns)
    said = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    again = messages[said:]
    while len(arrays["tokens"]) + len(body["tokens"]) <= TOKENS:
        shift = len(arrays["tokens"]) - first
        for turn in repeated:
            place = None if turn["insert_at"] is None else turn["insert_at"] + shift
            turns.append({**turn, "span": [position + shift for position in turn["span"]], "insert_at": place})
        messages += again
        for name in names:
            arrays[name] += body[name]
    for name in ("inference_logprobs", "distill_logprobs", "distill_token_ids"):
        arrays[name] = [varied(value, random) for value in arrays[name]]
    one = {name: [values] for name, values in arrays.items()}
    overrides = {**group["overrides"][index], "opd": {"turns": turns}}
    counted = {**group["group_overrides"]["opd"], "outcomes": Counter(turn["outcome"] for turn in turns)}
    return {
        **{**group, **one, "scores": [group["scores"][index]], "messages": [messages], "overrides": [overrides]},
        "group_overrides": {**group["group_overrides"], "opd": counted},
    }


@pytest.fixture(scope="module")
def large_file(demo: DemoRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    # Chance decides how much of a run is scored; one with little of it had nine rollouts with any.
    rollouts = sorted(
        ((group, at) for group in demo.groups for at in range(len(group["tokens"])) if grows(group, at)),
        key=lambda one: -scored_share(*one),
    )[:8]
    path = folder / "groups.jsonl"
    with path.open("w") as file:
        for place in range(ROLLOUTS):
            file.write(json.dumps(grown(*rollouts[place % len(rollouts)], Random(place))) + "\n")
    return path


@pytest.fixture(scope="module")
def large(large_file: Path) -> Path:
    path = large_file
    run = read_run(path)
    assert run.left_out == ()
    lengths = [len(rollout.tokens_T) for rollout in run.rollouts]
    assert len(lengths) == ROLLOUTS
    assert min(lengths) > 0.7 * TOKENS
    scored = sum(int(rollout.is_scored_S.sum()) for rollout in run.rollouts)
    assert scored > 0.2 * sum(lengths)
    write_report([ShownRun(run, AutoTokenizer.from_pretrained(ROOT / MODEL))], path.with_suffix(".html"))
    return path.with_suffix(".html")


class Pace(NamedTuple):
    """Seconds and milliseconds that a person waits."""

    open_s: float
    rollout_s: float
    median_frame_ms: float
    slow_frame_ms: float


def pace_of(large: Path, browser: Browser) -> Pace:
    start = time.monotonic()
    with opened(browser, large) as report:
        report.page.locator("#overview .fact").first.wait_for()
        open_s = time.monotonic() - start
        assert report.page.locator("#list li").count() == ROLLOUTS
        start = time.monotonic()
        report.go("#r=7.0")
        report.page.locator("#turn-0 .t").first.wait_for()
        rollout_s = time.monotonic() - start
        frames = report.page.evaluate(
            """async () => {
              const times = [];
              let last = performance.now();
              for (let i = 0; i < 60; i++) {
                window.scrollBy(0, 300);
                await new Promise(requestAnimationFrame);
                times.push(performance.now() - last);
                last = performance.now();
              }
              return times.sort((a, b) => a - b);
            }"""
        )
        assert report.page.evaluate("scrollY") > 5000
    return Pace(open_s, rollout_s, frames[30], frames[57])


def test_it_is_small_opens_at_once_and_scrolls(large: Path, browser: Browser) -> None:
    """The best of some tabs: what else the machine does can only add to the times."""
    assert large.stat().st_size < 25e6
    limits = Pace(open_s=3, rollout_s=1.5, median_frame_ms=50, slow_frame_ms=200)
    best = pace_of(large, browser)
    for _ in range(9):
        if all(own < limit for own, limit in zip(best, limits, strict=True)):
            break
        best = Pace(*map(min, best, pace_of(large, browser)))
    assert all(own < limit for own, limit in zip(best, limits, strict=True)), best


def test_two_runs_of_a_hundred_are_compared_at_once(large_file: Path, browser: Browser, tmp_path: Path) -> None:
    """From opening the file to the drawn comparison; the best of some tabs, as above."""
    lines = large_file.read_text().splitlines(keepends=True)
    runs: list[ShownRun] = []
    for name, part in (("before", lines[: ROLLOUTS // 2]), ("after", lines[ROLLOUTS // 2 :])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(part))
        runs.append(ShownRun(read_run(path), AutoTokenizer.from_pretrained(ROOT / MODEL)))
    page = tmp_path / "compared.html"
    write_report(runs, page)
    best = float("inf")
    for _ in range(10):
        start = time.monotonic()
        with opened(browser, page) as report:
            report.page.locator("[aria-label='Tasks side by side'] tbody tr").first.wait_for()
            best = min(best, time.monotonic() - start)
        if best < 2:
            break
    assert best < 2
