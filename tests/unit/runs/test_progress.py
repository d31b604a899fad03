import io
from pathlib import Path

from rich.console import Console

from agentic_opd.core.console import start_screen
from agentic_opd.runs.process import RunProgress, RunSummary, closing_lines, counts_line
from agentic_opd.wire.counts import RunCounts
from agentic_opd.wire.group import ScoredGroup
from tests.support.groups import group, rollout


def one(passed: int, hint: str | None = None) -> ScoredGroup:
    return group(rollout(hint, passed=passed))


def counts_of(*groups: ScoredGroup) -> RunCounts:
    counts = RunCounts()
    for each in groups:
        counts.add(each)
    return counts


def test_a_run_that_was_stopped_says_how_to_go_on_and_how_to_look() -> None:
    path = Path("groups.jsonl")
    whole, begun = RunSummary(8, written=8), RunSummary(8, written=3, stopped=KeyboardInterrupt())
    assert closing_lines(whole, path) == ["8 of 8 groups in groups.jsonl"]
    assert closing_lines(begun, path) == [
        "3 of 8 groups in groups.jsonl",
        "stopped early: interrupted",
        "finished groups are on disk; run again with --env.resume to complete it",
        "to look at it now: agentic-opd report groups.jsonl",
    ]
    assert len(closing_lines(RunSummary(8, stopped=KeyboardInterrupt()), path)) == 3  # There is nothing to look at.


def test_counts_on_one_line() -> None:
    assert counts_line(RunCounts()) == "0 rollouts"
    assert counts_line(counts_of(one(2, "h"), one(1))) == "2 rollouts, 50% passed, 1 hints, 1 of 2 turns scored"


def test_without_a_terminal_each_group_is_a_line() -> None:
    text = io.StringIO()
    counts = counts_of(one(2))
    with RunProgress(2, 1, counts, Console(file=text, width=40)) as progress:
        progress.group_done("t#0", [0.5])
    assert text.getvalue().splitlines() == [
        "group 2/2 t#0: scores 0.50 (all so far: 1 rollouts, 100% passed, 0 hints, 0 of 1 turns scored)"
    ]


def test_the_start_screen_says_what_runs_where_and_what_is_written() -> None:
    assert start_screen("2 groups", {"policy": "m at http://h", "groups": "out.jsonl"}).plain.splitlines()[1:] == [
        "  policy  m at http://h",
        "  groups  out.jsonl",
    ]
