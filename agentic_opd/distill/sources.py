"""Sources of hints beside the judge: the package's own, and those of a user's file (I/O there).

A source of a file, `env.hint.source: FILE.py:NAME`, is a function, plain or async, with one parameter, a `SourceTurn`.
It returns `Hints`, or the reason why it has none for the turn.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, cast

from agentic_opd.core.errors import ConfigError, HintSourceError, OPDError
from agentic_opd.core.text import cut_middle
from agentic_opd.core.types import Recording
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import TurnContext, author_turns, changing_calls
from agentic_opd.distill.pool import AcceptedHint, HintPool
from agentic_opd.settings.user_code import error_line, load_named

FEEDBACK = "If you answer as you are about to, this is what comes of it:"
REFERENCE = "This is a right solution of the task:"
SIBLING = "Another attempt at this task, which passed in the end, did this, in this order:"


class Hints(NamedTuple):
    """Hints of a source, each preceded by `intro`; the first one that leaks no hidden test is used.

    For an empty text without `intro` the teacher reads no hint.
    """

    intro: str
    texts: Sequence[str]
    task_id: str | None = None
    """Name of the task for which the texts were written; None: the turn's own."""


@dataclass(frozen=True, slots=True)
class SourceTurn:
    """A turn for which a source has to find hints."""

    context: TurnContext
    config: DistillConfig
    pool: HintPool
    """The accepted hints of other turns."""
    judged: Callable[[], Awaitable[tuple[AcceptedHint, ...]]]
    """Asks the judge; returns the hints that it accepted, often none. A second call costs nothing."""


Source = Callable[[SourceTurn], Hints | str | Awaitable[Hints | str]]


async def hints_of(name: str, turn: SourceTurn) -> Hints | str:
    """Return the hints of a source, or the reason why it has none.

    Raises:
        HintSourceError: the source of a user's file raised, or returned something else.
    """
    source = cast(Callable[[SourceTurn], object], source_of(name))  # A file may return anything.
    try:
        result = source(turn)
        if inspect.isawaitable(result):
            result = await result
    except OPDError:
        raise
    except Exception as error:
        line = error_line(error, {source.__code__.co_filename} if inspect.isfunction(source) else None)
        raise HintSourceError(f"env.hint.source: {name} raised {type(error).__name__}: {error}{line}") from error
    if not isinstance(result, Hints | str):
        raise HintSourceError(
            f"env.hint.source: {name} returned {type(result).__name__}; expected Hints, or the reason as a text"
        )
    return result


@cache
def source_of(name: str) -> Source:
    """Return a source by the name of the package's own, or by `FILE.py:NAME` or `package.module:NAME`.

    Raises:
        ConfigError: there is no such source, its file can't be imported, or it has other parameters.
    """
    if name in _SOURCES:
        return _SOURCES[name]
    source = load_named("env.hint.source", name, "function")
    try:
        inspect.signature(source).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env.hint.source: {name}: {error}; expected a function of one parameter") from error
    return source


def source_name(name: str) -> str:
    """Return the short name of a source for records: NAME of `FILE.py:NAME`."""
    return name.rpartition(":")[2]


# ---------------------------------------------------------------------------------------------------- the package's own


def feedback(turn: SourceTurn) -> Hints | str:
    """Return the turn's evidence verbatim (SDPO)."""
    return Hints(FEEDBACK, ["\n\n".join(evidence.text for evidence in turn.context.pair.evidence)])


def reference(turn: SourceTurn) -> Hints | str:
    """Return the task's reference solution (OPSD)."""
    task = turn.context.recording.task
    solution = ((task and task.reference_solution) or "").strip()
    return Hints(REFERENCE, [solution]) if solution else "the task has no reference solution"


def sibling(turn: SourceTurn) -> Hints | str:
    """Return how sibling rollouts that passed made the judged result; only for turns that made the failed result.

    A text holds all calls of a sibling that changed the judged result, because it is unknown which of them mattered.
    The shortest text comes first.
    """
    if _passed(turn.context.recording):
        return "this rollout passed itself"
    if turn.context.pair.turn_index not in author_turns(turn.context.recording):
        return "the turn did not make what failed"
    passed = ("\n\n".join(changing_calls(rollout)) for rollout in turn.context.siblings if _passed(rollout))
    texts = sorted((text for text in passed if text), key=len)
    if not texts:
        return "no other rollout of the group passed"
    return Hints(SIBLING, [cut_middle(text, turn.config.hint_max_next_state_chars) for text in texts])


def _passed(recording: Recording) -> bool:
    return recording.verification is not None and recording.verification.all_passed


_SOURCES: dict[str, Source] = {"feedback": feedback, "reference": reference, "sibling": sibling}
