"""What a person reads of every run: what runs where, and what was made so far."""

from collections.abc import Mapping

from rich.text import Text

from agentic_opd import __version__
from agentic_opd.wire.counts import RunCounts


def start_screen(what: str, places: Mapping[str, str]) -> Text:
    """What a run is, and below it a line for each of `places`: what runs where, and what is written."""
    width = max(map(len, places))
    lines = [f"agentic_opd {__version__}: {what}", *(f"  {name:<{width}}  {text}" for name, text in places.items())]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


def counts_line(counts: RunCounts) -> str:
    """What was made so far, on one line."""
    total = counts.total
    text = f"{total.rollouts} rollouts"
    if total.rollouts:
        text += f", {100 * total.passed / total.rollouts:.0f}% passed"
    if counts.distilled:
        text += f", {total.records.hints} hints, {total.records.scored} of {total.assistant_turns} turns scored"
    return text
