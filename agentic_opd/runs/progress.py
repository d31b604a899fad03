"""Start screen and progress line of a run."""

from collections.abc import Mapping

from rich.text import Text

from agentic_opd import __version__
from agentic_opd.wire.counts import RunCounts


def start_screen(what: str, places: Mapping[str, str]) -> Text:
    """Return the start screen: the run in words, then a line per entry of `places` (name -> server or file)."""
    width = max(map(len, places))
    lines = [f"agentic_opd {__version__}: {what}", *(f"  {name:<{width}}  {text}" for name, text in places.items())]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


def counts_line(counts: RunCounts) -> str:
    """Return the counts so far as one line."""
    total = counts.total
    text = f"{total.rollouts} rollouts"
    if total.rollouts:
        text += f", {100 * total.passed / total.rollouts:.0f}% passed"
    if counts.distilled:
        text += f", {total.records.hints} hints, {total.records.scored} of {total.assistant_turns} turns scored"
    return text
