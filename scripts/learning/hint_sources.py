"""Sources of hints that show what a run learns without the judge's content, and examples of `env.hint.source`.

agentic-opd process --env.hint.source scripts/learning/hint_sources.py:wrong_hint ...
"""

from agentic_opd.distill.sources import Hints, SourceTurn

_NOT_ACCEPTED = "the judge accepted no hint"


async def wrong_hint(turn: SourceTurn) -> Hints | str:
    """Return, in place of the judge's hint, an accepted one of another task."""
    accepted = await turn.judged()
    if not accepted:
        return _NOT_ACCEPTED
    hint = turn.pool.of_other_task(*accepted)
    return Hints("", [hint.text], hint.task_id) if hint else "no other task has an accepted hint yet"


async def no_hint(turn: SourceTurn) -> Hints | str:
    """Let the teacher read no hint where the judge accepted one."""
    return Hints("", [""]) if await turn.judged() else _NOT_ACCEPTED
