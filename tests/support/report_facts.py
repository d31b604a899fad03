"""What stands in a file of scored groups, recounted for the tests of the report."""

from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple


class Scored(NamedTuple):
    """A scored token of the file: where it stands, and its gap."""

    line: int
    index: int
    position: int
    gap: float


def scored_tokens(groups: list[dict[str, Any]]) -> list[Scored]:
    """All scored tokens, the largest gap first."""
    found = [
        Scored(line, index, position, row[0] - group["inference_logprobs"][index][position])
        for line, group in enumerate(groups, start=1)
        for index, rows in enumerate(group["distill_logprobs"])
        for position, row in enumerate(rows)
        if row
    ]
    return sorted(found, key=lambda token: -abs(token.gap))


def wide(tokens: list[Scored], groups: list[dict[str, Any]], decode: Callable[[list[int]], str]) -> list[Scored]:
    """Those that a mouse can point at: a line break alone has no width."""
    return [t for t in tokens if decode([groups[t.line - 1]["tokens"][t.index][t.position]]).strip("\n")]


def fixed(value: float, digits: int) -> str:
    """A number as a browser writes it, ties away from 0 (Python: to the even digit); and without "-0.00"."""
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return str(rounded if rounded else abs(rounded))


def signed(value: float, digits: int) -> str:
    return ("+" if value > 0 else "") + fixed(value, digits)


def place(token: Scored) -> str:
    return f"#r={token.line}.{token.index}&p={token.position}"


def sampled_before(group: dict[str, Any], token: Scored) -> int:
    return sum(mask != -100 for mask in group["masks"][token.index][: token.position])


class ScoredTurn(NamedTuple):
    line: int
    index: int
    turn: int
    nth: int
    """How many scored turns its rollout has up to it, itself counted."""


def furthest_scored(groups: list[dict[str, Any]]) -> ScoredTurn:
    """The scored turn before which its rollout has the most turns."""
    return max(
        (
            ScoredTurn(line, index, turn, outcomes[: turn + 1].count("scored"))
            for line, group in enumerate(groups, start=1)
            for index, overrides in enumerate(group["overrides"])
            for outcomes in [[turn["outcome"] for turn in overrides["opd"]["turns"]]]
            for turn, outcome in enumerate(outcomes)
            if outcome == "scored"
        ),
        key=lambda scored: scored.turn,
    )


def peak_x(card: Any, group: dict[str, Any], token: Scored) -> float:
    """Where on the strip of its turn a token is, in pixels: the middle of its bar, of which there are 120 at most."""
    spans = (turn["span"] for turn in group["overrides"][token.index]["opd"]["turns"])
    start, end = next(span for span in spans if span[0] <= token.position < span[1])
    box = card.locator(".strip").bounding_box()
    bars = min(120, end - start)
    bar = next(bar for bar in range(bars) if (bar + 1) * (end - start) // bars > token.position - start)
    return box["width"] * (bar + 0.5) / bars
