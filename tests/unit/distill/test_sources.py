import asyncio
from pathlib import Path

import pytest

from agentic_opd.core.errors import ConfigError, HintSourceError
from agentic_opd.core.types import TurnOutcome
from agentic_opd.distill.config import DistillConfig, HintConfig
from agentic_opd.distill.evidence import turn_contexts
from agentic_opd.distill.hints import Hint, JudgedBy, NoHint, Questions, SingleTurnJudge, find_hint
from agentic_opd.distill.pool import HintPool
from agentic_opd.distill.sources import source_of

from .fakes import HINT, POSITIVE, ScriptedJudge, make_recording

FILE = """
from agentic_opd.distill.sources import Hints

def plain(turn):
    return Hints("Read this:", [turn.context.pair.turn_text])

async def judged(turn):
    hints = await turn.judged()
    return Hints("", [hint.text.upper() for hint in await turn.judged()]) if hints else "no hint to write in capitals"

def broken(turn):
    return 1 / 0

def wrong(turn):
    return ["a text"]

def bare():
    return "x"
"""


def found(source: str, folder: Path, *answers: str) -> tuple[Hint | NoHint, ScriptedJudge, HintPool]:
    file = folder / "own_sources.py"
    file.write_text(FILE)
    source_of.cache_clear()
    config, judge, pool = (
        DistillConfig(hint=HintConfig(source=f"{file}:{source}")),
        ScriptedJudge({"": answers}),
        HintPool(),
    )
    context = turn_contexts(make_recording(), config)[0]
    judged_by = JudgedBy(judge, Questions(b"secret"), False)  # type: ignore[arg-type]
    return asyncio.run(find_hint(context, SingleTurnJudge(judged_by, config), config, pool)), judge, pool


def test_a_source_of_a_file_needs_no_judge(tmp_path: Path) -> None:
    hint, _, _ = found("plain", tmp_path)
    assert isinstance(hint, Hint)
    assert (hint.source, hint.accepted, hint.judgement.question) == ("plain", hint.read, None)
    assert hint.text.startswith("Read this:\n")


def test_a_source_of_a_file_may_replace_what_the_judge_accepted(tmp_path: Path) -> None:
    hint, _, _ = found("judged", tmp_path, *[POSITIVE] * 3)
    assert isinstance(hint, Hint)
    assert (hint.source, hint.accepted.text, hint.text) == ("judged", HINT, HINT.upper())
    assert len(hint.judgement.votes) == 3, "the judge is asked once"


def test_without_an_accepted_hint_the_judges_outcome_stands(tmp_path: Path) -> None:
    result, _, _ = found("judged", tmp_path, *["\\boxed{-1}"] * 3)
    assert isinstance(result, NoHint)
    assert (result.outcome, len(result.judgement.votes)) == (TurnOutcome.VOTE_FAILED, 3)


def test_a_source_that_raises_or_returns_something_else_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(HintSourceError, match=r"broken raised ZeroDivisionError: division .*own_sources.py:12\)"):
        found("broken", tmp_path)
    with pytest.raises(HintSourceError, match="wrong returned list; expected Hints, or the reason as a text"):
        found("wrong", tmp_path)


@pytest.mark.parametrize("source", ["bare", "absent"])
def test_a_source_with_other_parameters_or_none_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a function of one parameter"):
        found(source, tmp_path)
