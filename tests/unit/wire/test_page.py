"""docs/wire_format.md: its eight tokens and the turn's record are a group without a violation; its gaps follow."""

import json
import re
from typing import Any, get_args

import pytest

from agentic_opd.core.types import ProgramRun, StoppedFor, WhyContext
from agentic_opd.proof.statistics import Passes, effect
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import HintReading, ProofRecord, ScoredGroup, TurnRecord
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "wire_format.md").read_text()


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text)]


def line_of(name: str) -> str:
    found = re.search(rf"(?m)^{re.escape(name)} {{2,}}(.*)$", PAGE)
    assert found is not None, name
    return found[1]


def rows_of(name: str) -> list[list[float]]:
    """A row a position: the page writes empty ones at the four positions before the turn and the one behind it."""
    return [numbers(cell) for cell in re.findall(r"\[([^\]]*)\]", line_of(name))]


def record() -> dict[str, Any]:
    return examples()[0]


def examples() -> list[dict[str, Any]]:
    """A record, the fields of one with several hints, and a message with a picture."""
    return [json.loads(found) for found in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]


def group() -> dict[str, Any]:
    ids = [[int(token) for token in row] for row in rows_of("distill_token_ids")]
    opd = {"distill_topk": 3, "hint_placement": "end", "outcomes": {"scored": 1}, "noise_floor": 2e-6}
    return {
        "tokens": [[int(token) for token in line_of("tokens").split()]],
        "masks": [[int(token) for token in line_of("masks").split()]],
        "scores": [1.0],
        "inference_logprobs": [[float(number) for number in line_of("inference_logprobs").split()]],
        "overrides": [{"opd": {"turns": [record()]}}],
        "group_overrides": {"opd": {**opd, "gap_baseline": "student", "hint_source": "judge"}},
        "distill_token_ids": [ids],
        "distill_logprobs": [rows_of("distill_logprobs")],
    }


def test_the_page_shows_a_group_without_a_violation() -> None:
    assert GroupChecker().read(group()).problems == []
    assert ScoredGroup.from_wire(group()).to_wire() == group()


def test_its_compared_hints_are_those_of_a_record() -> None:
    _, several, *_ = examples()
    one = group()
    one["overrides"][0]["opd"]["turns"][0] |= several
    assert GroupChecker().read(one).problems == []
    assert several["hints"][0].keys() == HintReading.__dataclass_fields__.keys()
    table = PAGE.partition("| field of a hint | what it holds |")[2].partition("\n\n")[0]
    named = {name for row in re.findall(r"(?m)^\| (`.*?) \|", table) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(HintReading.__dataclass_fields__)


def test_its_proof_is_that_of_a_record() -> None:
    _, _, proof, _ = examples()
    one = group()
    one["overrides"][0]["opd"]["turns"][0]["proof"] = proof
    assert GroupChecker().read(one).problems == []
    change = effect(Passes(*proof["with_hint"]), Passes(*proof["without_hint"]), 0, 3)
    assert change is not None
    assert [round(bound, 6) for bound in change] == [proof["effect"], *proof["interval"]]
    table = PAGE.partition("| field of a proof | what it holds |")[2].partition("\n\n")[0]
    named = {name for row in re.findall(r"(?m)^\| (`.*?) \|", table) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(ProofRecord.__dataclass_fields__)


def test_its_pictures_are_those_of_a_message() -> None:
    *_, message = examples()
    one = group()
    answers = [{"role": "assistant", "content": ""} for _ in one["overrides"][0]["opd"]["turns"]]
    one["messages"] = [[message, *answers]]
    one["overrides"][0]["opd"]["images"] = [{"digest": message["images"][0], "offset": 1, "length": 2}]
    assert GroupChecker().read(one).problems == []


def test_its_gaps_follow_from_its_numbers() -> None:
    (one,) = ScoredGroup.from_wire(group()).rollouts
    assert one.rows is not None
    assert one.turns is not None
    control = one.turns[0].control
    assert control is not None
    sampled = [row[0] for row in one.rows.logprobs_TK[4:7]]
    gaps = [teacher - plain for teacher, plain in zip(sampled, one.baseline_T[4:7], strict=True)]
    beside = [teacher - row[0] for teacher, row in zip(sampled, control.logprobs_RK, strict=True) if row[0] is not None]
    assert numbers(line_of("gap: row - baseline"))[:3] == pytest.approx(gaps, abs=1e-9)
    assert numbers(line_of("row - control"))[:3] == pytest.approx(beside, abs=1e-9)


def test_it_names_every_field_of_a_record() -> None:
    table = PAGE.partition("| field | what it holds |")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"(?m)^\| (`.*?) \|", table) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(TurnRecord.__dataclass_fields__)


def test_it_names_every_reason_for_which_a_turn_is_context() -> None:
    table = PAGE.partition("| `why` | the message |")[2].partition("\n## ")[0]
    assert re.findall(r"(?m)^\| `(\w+)`", table) == list(get_args(WhyContext))


def test_it_names_every_field_of_a_program() -> None:
    section = PAGE.partition("## A program's episode")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"(?m)^\| (`.*?) \|", section) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(ProgramRun.__dataclass_fields__)
    limits = re.search(r"stopped for: (.*?);", section)
    assert limits is not None
    assert tuple(re.findall(r"`(\w+)`", limits[1])) == get_args(StoppedFor)
