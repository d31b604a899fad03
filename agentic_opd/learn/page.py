"""A run's result -> report.html: the verdict, the figures, and pairs of answers side by side. Pure.

All texts are escaped, and a content security policy allows only the page's style.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from random import Random
from typing import Any

from agentic_opd.core.text import cut_middle
from agentic_opd.core.types import Message
from agentic_opd.distill.evidence import message_text, turn_text
from agentic_opd.learn.figures import CORRECTED_BELOW, Guard, LearnResult
from agentic_opd.report.page import content_hash, plain_style

_PAIRS = 10
_MOST_CHARS = 3000
"""Characters of one text on the page."""
_STYLE = """\
main { max-inline-size: 72rem; margin: 0 auto; padding: 1.75rem 1.25rem 4rem; }
table { border-collapse: collapse; margin-block: 1rem; font-variant-numeric: tabular-nums; }
th, td { text-align: start; padding: .3rem 1.2rem .3rem 0; border-block-end: 1px solid var(--line); }
.pair { margin-block-start: 2.25rem; border-block-start: 1px solid var(--line); padding-block-start: 1rem; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; margin-block: .75rem; }
.sides section { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
h3 { font-size: 13px; font-weight: 600; margin: 0 0 .3rem; color: var(--muted); }
"""
GUARD_NAMES = {
    "logprob": "log-probability of answers without a correction, nats a token",
    "calls_parse": "answers whose calls parse, where the log calls",
    "over_calling": "answers that call, where the log does not",
    "repetition": "repeated sequences of four words in an answer",
    "length": "tokens of an answer",
}


@dataclass(frozen=True, slots=True)
class ShownPair:
    """A held-out turn with its answers before and after the training, and their grades."""

    name: str
    history: Sequence[Message]
    logged: Message
    reply: Sequence[Message]
    answers: tuple[Message, Message]
    grades: tuple[float | None, float | None]

    @property
    def change(self) -> int:
        """1 if the judge would correct only the answer before, -1 if only the one after, 0 otherwise."""
        if None in self.grades:
            return 0
        before, after = (grade is not None and grade < CORRECTED_BELOW for grade in self.grades)
        return int(before) - int(after)

    def to_json(self) -> dict[str, Any]:
        """Return what the page shows of it as JSON data."""
        return {**asdict(self), "history": [*self.history[-1:]]}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "ShownPair":
        """Read a pair that `to_json` wrote."""
        pairs: Any = {name: tuple(row[name]) for name in ("answers", "grades")}
        return cls(row["name"], row["history"], row["logged"], row["reply"], **pairs)


def shown_pairs(pairs: Sequence[ShownPair], seed: int) -> list[ShownPair]:
    """Return ten pairs of different answers, drawn by the seed: half of those that changed for the worse, if there are
    so many, then those that changed for the better, then others.
    """
    shuffled = [*pairs]
    Random(seed).shuffle(shuffled)
    shuffled.sort(key=lambda pair: pair.answers[0] == pair.answers[1])
    worse, better, equal = ([pair for pair in shuffled if pair.change == change] for change in (-1, 1, 0))
    first = worse[: max(_PAIRS // 2, _PAIRS - len(better))]
    return [*first, *better, *equal][:_PAIRS]


def report_page(model: str, result: LearnResult, pairs: Sequence[ShownPair]) -> str:
    """Return the page."""
    style = plain_style() + _STYLE
    policy = f"default-src 'none'; style-src '{content_hash(style)}'; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>From your own logs: {result.verdict}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>",
            f"<h1>From your own logs: {result.verdict}</h1>",
            f'<p class="note">{escape(model)}</p>',
            f'<p class="finding">{escape(result.reason[:1].upper() + result.reason[1:])}.</p>',
            *_figures(result),
            *(part for number, pair in enumerate(pairs, start=1) for part in _pair(number, pair)),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _figures(result: LearnResult) -> Iterator[str]:
    turns, hints, costs = result.turns, result.hints, result.costs
    yield _table(
        ("", "answers", "with a hint"),
        [(name.replace("_", " "), f"{turns[name]}", f"{hints[name]}") for name in turns],
    )
    if result.corrections is not None:
        rows: list[tuple[str, ...]] = []
        for name in ("before", "after", "difference"):
            share, low, high, *_ = result.corrections[name]
            rows.append((name, f"{share:.3f}", f"{low:.3f} to {high:.3f}"))
        yield "<h2>Held-out answers that the judge would correct</h2>"
        yield _table(("", "share", "95% interval"), rows)
    if result.guards:
        yield "<h2>Figures without a judge</h2>"
        yield _table(
            ("", "before", "after", "bound", ""), [_guard(name, guard) for name, guard in result.guards.items()]
        )
    seconds = ", ".join(f"{name} {value:,.0f} s" for name, value in costs["seconds"].items())
    yield f'<p class="note">{costs["steps"]} steps over {costs["trained_tokens"]:,} tokens. Time: {escape(seconds)}</p>'


def _guard(name: str, guard: Guard) -> tuple[str, ...]:
    before, after = ("-" if figure is None else f"{figure:.3f}" for figure in (guard.before, guard.after))
    return GUARD_NAMES[name], before, after, f"{guard.bound:g}", "fell" if guard.fell else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<table>", _row("th", head), *(_row("td", row) for row in rows), "</table>"]
    return "\n".join(lines)


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _pair(number: int, pair: ShownPair) -> Iterator[str]:
    yield f'<section class="pair">\n<h2>{number}. {escape(pair.name)}</h2>'
    yield '<div class="sides">'
    yield from _texts(
        ("Before this turn", _conversation_text(pair.history[-1:])), ("The log's answer", turn_text(pair.logged))
    )
    yield from _texts(("What came after it", _conversation_text(pair.reply)))
    yield '</div>\n<div class="sides">'
    titles = (f"{title}: {_grade(grade)}" for title, grade in zip(("Before", "After"), pair.grades, strict=True))
    yield from _texts(*zip(titles, map(turn_text, pair.answers), strict=True))
    yield "</div>\n</section>"


def _texts(*titled: tuple[str, str]) -> Iterator[str]:
    for title, text in titled:
        yield f"<section><h3>{escape(title)}</h3><pre>{escape(cut_middle(text, _MOST_CHARS))}</pre></section>"


def _conversation_text(messages: Sequence[Message]) -> str:
    return "\n\n".join(f"[{message['role']}]\n{message_text(message)}" for message in messages)


def _grade(grade: float | None) -> str:
    return (
        "not graded" if grade is None else f"graded {grade:.2f}" + (" (corrected)" if grade < CORRECTED_BELOW else "")
    )
