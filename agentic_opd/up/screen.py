"""What a person sees of a loop: in a terminal one table that is drawn anew, elsewhere the log lines alone."""

import asyncio
import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentic_opd.up.supervisor import State

_STYLES = {"waits": "dim", "starts": "yellow", "runs": "green", "done": "bold green", "ended": "dim"}
_REDRAWN_S = 0.5


async def show(states: Iterable[State], console: Console) -> None:
    """Draw until cancelled."""
    if not console.is_terminal:
        return
    with Live(table(states), console=console, auto_refresh=False) as live:
        try:
            while True:
                await asyncio.sleep(_REDRAWN_S)
                live.update(table(states), refresh=True)
        finally:
            live.update(table(states), refresh=True)


def table(states: Iterable[State]) -> Table:
    """A row for each part: how it is, for how long, how often it was started, and what it said last."""
    shown = Table(box=None, pad_edge=False, expand=True)
    for title in ("part", "is", "for", "starts"):
        shown.add_column(title, no_wrap=True)
    shown.add_column("says", no_wrap=True, overflow="ellipsis", ratio=1)
    for state in states:
        seconds = int(time.monotonic() - state.since)
        shown.add_row(
            state.part.name,
            Text(state.status, _STYLES[state.status]),
            f"{seconds // 60}:{seconds % 60:02}",
            str(state.starts),
            Text(state.last_line),
        )
    return shown
