"""`validate --server` on a server whose weights are a table: which turns are compared, and with what."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentic_opd import __version__
from agentic_opd.cli.validate import _check_on, _parser
from agentic_opd.core.errors import OutputError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import TurnOutcome
from agentic_opd.distill.insertion import insert_hint
from agentic_opd.distill.records import build_arrays, written_rows
from agentic_opd.distill.rows import overlap, rounded, with_support
from agentic_opd.runs.rescore import Deviation, compare
from agentic_opd.wire.group import HintReading, ScoredGroup, ScoredRollout, TurnRecord
from tests.unit.distill.fakes import (
    HINT,
    TURNS,
    VERSION,
    VOCAB,
    Script,
    make_trace,
    named_rows,
    plugin,
    served,
    table_rows,
)

NEWER = VERSION + 1
INFO = {"model": "m", "max_model_len": 1000, "max_logprobs": 64, "vocab_size": VOCAB, "plugin_version": __version__}
INFO |= {"logprobs_mode": "raw_logprobs"}


def group(scored_by: int = VERSION, **fields: Any) -> ScoredGroup:
    """The episode, of whose turns the first was sampled by `VERSION` and scored by `scored_by`."""
    trace, turn, hint_ids = make_trace(), TURNS[0], (70, 71)
    rows = table_rows(insert_hint(trace, turn, 3, hint_ids), 5, scored_by)
    versions = {"weight_version": VERSION, "scored_version": scored_by}
    about = {"hint": HINT, "hint_token_ids": hint_ids, "insert_at": 3, **versions, **fields}
    turns = (
        TurnRecord((turn.start, turn.end), TurnOutcome.SCORED, "tool", **about),
        TurnRecord((TURNS[1].start, TURNS[1].end), TurnOutcome.VOTE_FAILED, "verdict"),
    )
    written = written_rows(turn.start, trace.tokens_T[turn.start : turn.end], rows, 5)
    arrays = build_arrays(trace.tokens_T, trace.masks_T, trace.logprobs_T, [written], 5)
    rollout = ScoredRollout(trace.tokens_T, trace.masks_T, trace.logprobs_T, 0.5, rows=arrays, turns=turns)
    whole = ScoredGroup((rollout,), weight_version=VERSION)
    return ScoredGroup.from_wire(json.loads(json.dumps(whole.to_wire())))


def plain_reading(version: int) -> tuple[float, ...]:
    """What weights of this version say of the first turn without its hint."""
    request = insert_hint(make_trace(), TURNS[0], 3, ())
    return tuple(rounded(table_rows(request, 1, version).actual_R).tolist())


def recomputed(
    version: int,
    *groups: ScoredGroup,
    teacher: str = "live",
    base: int = VERSION,
    named_ids: bool = False,
    max_model_len: int = 1000,
) -> Deviation:
    """Compare with a server that has these weights; those of its base are the version `base`."""

    def score(body: dict[str, Any]) -> dict[str, Any]:
        return {**plugin(body, base if body.get("read_by") == "base" else version), "weight_version": version}

    async def run() -> Deviation:
        routes = {
            "/v1/opd/info": Script(
                {**INFO, "weight_version": version, "named_ids": named_ids, "max_model_len": max_model_len}
            ),
            "/v1/opd/score": Script(score),
        }
        async with served(routes) as url:
            client = JsonClient(url, retry_s=0.2)
            try:
                return await compare(groups, client, 9, teacher=teacher)
            finally:
                await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("versions", [{}, {"weight_version": VERSION, "scored_version": VERSION}])
def test_rows_and_sampling_logprobs_of_the_same_weights_are_compared(versions: dict[str, int]) -> None:
    found = recomputed(VERSION, group(**versions))
    assert (found.turns, found.rows, found.missing) == (1, 3, 0)
    assert found.in_rows.largest < 1e-4
    assert found.without_hint is not None
    assert found.without_hint.largest < 1e-4


def test_a_baseline_is_compared_and_the_sampling_logprobs_of_other_weights_are_not() -> None:
    versions = {"weight_version": VERSION, "scored_version": NEWER}
    good = group(NEWER, baseline_logprobs=plain_reading(NEWER), **versions)
    found = recomputed(NEWER, good, group())
    assert (found.turns, found.in_rows.largest < 1e-4) == (1, True)  # The other group is of older weights.
    assert found.without_hint is not None
    assert found.without_hint.largest < 1e-4
    wrong = recomputed(NEWER, group(NEWER, baseline_logprobs=plain_reading(VERSION), **versions))
    assert wrong.without_hint is not None
    assert wrong.without_hint.largest > 0.1
    assert recomputed(NEWER, group(NEWER, **versions)).without_hint is None


def test_a_separate_teachers_own_reading_is_compared_where_it_is_not_the_baseline() -> None:
    versions = {"weight_version": VERSION, "scored_version": NEWER}
    found = recomputed(NEWER, group(NEWER, unhinted_logprobs=plain_reading(NEWER), **versions))
    assert found.without_hint is not None
    assert found.without_hint.largest < 1e-4


def test_rows_of_compared_hints_are_read_under_the_chosen_hint() -> None:
    trace, turn, ids = make_trace(), TURNS[0], ((70, 71), (72,))
    plain = table_rows(insert_hint(trace, turn, 3, ()), 5)
    read = [table_rows(insert_hint(trace, turn, 3, one), 5) for one in ids]
    mean = [float(overlap(one, plain, trace.tokens_T[5:8]).mean()) for one in read]
    hints = tuple(HintReading(f"{HINT} {n}", ids[n], 3, mean[n], 0.0, 1.0) for n in range(2))
    one = group(hints=hints, hint=hints[1].hint, hint_token_ids=ids[1])
    written = written_rows(5, trace.tokens_T[5:8], read[1], 5)
    arrays = build_arrays(trace.tokens_T, trace.masks_T, trace.logprobs_T, [written], 5)
    rollout = replace(one.rollouts[0], rows=arrays)
    found = recomputed(VERSION, replace(one, rollouts=(rollout,)))
    assert (found.rows, found.missing, found.in_rows.largest < 1e-4) == (3, 0, True)
    assert found.in_overlaps is not None
    assert found.in_overlaps.largest < 1e-6


@pytest.mark.parametrize("named_ids", [False, True])
def test_rows_of_the_students_tokens_are_compared_at_their_ids(named_ids: bool) -> None:
    trace, request = make_trace(), insert_hint(make_trace(), TURNS[0], 3, (70, 71))
    student = table_rows(insert_hint(trace, TURNS[0], 3, ()), 5)
    hinted = table_rows(request, 10)
    if named_ids:
        hinted = named_rows(hinted, request, student.top_ids_RK)
    rows = with_support(hinted, trace.tokens_T[5:8], student=student, support="student", top_k=5)
    one = group(support="student")
    arrays = build_arrays(
        *(trace.tokens_T, trace.masks_T, trace.logprobs_T), [written_rows(5, trace.tokens_T[5:8], rows, 5)], 5
    )
    one = replace(one, rollouts=(replace(one.rollouts[0], rows=arrays),))
    found = recomputed(VERSION, one, named_ids=named_ids)
    assert (found.missing, found.in_rows.largest < 1e-4) == (0, True)


def test_a_server_that_reads_too_few_tokens_is_refused() -> None:
    with pytest.raises(ServerMismatchError, match="10 tokens, the teacher reads at most 9"):
        recomputed(VERSION, group(), max_model_len=10)
    hints = tuple(HintReading(f"{HINT} {n}", ids, 3, 0.5, 0.0, 1.0) for n, ids in enumerate(((70, 71), (72,))))
    several = group(hints=hints, hint=hints[1].hint, hint_token_ids=(72,))
    with pytest.raises(ServerMismatchError, match="reads too few tokens"):
        recomputed(VERSION, several, max_model_len=10)


def test_a_turn_scored_without_a_hint_is_read_without_one() -> None:
    one = group(hint_token_ids=(), insert_at=None)
    assert recomputed(VERSION, one).in_rows.largest > 0.1  # Its rows are those of a hint.


def test_a_server_of_other_weights_is_refused() -> None:
    with pytest.raises(ServerMismatchError, match="weights of version 8, but the file was scored with 7"):
        recomputed(NEWER, group())


def test_a_file_without_a_scored_turn_is_an_error() -> None:
    with pytest.raises(OutputError, match="no turn that this teacher scored"):
        recomputed(VERSION)


def test_a_separate_teachers_turns_are_computed_again_whatever_version_it_has() -> None:
    versions = {"weight_version": VERSION, "scored_version": VERSION}
    found = recomputed(NEWER, group(NEWER, unhinted_logprobs=plain_reading(NEWER), **versions), teacher="separate")
    assert (found.turns, found.in_rows.largest < 1e-4) == (1, True)


def test_a_frozen_teachers_rows_are_the_bases_whatever_version_the_policy_has() -> None:
    base = NEWER + 1
    versions = {"weight_version": VERSION, "scored_version": VERSION}
    frozen = group(base, unhinted_logprobs=plain_reading(base), **versions)
    found = recomputed(NEWER, frozen, teacher="frozen", base=base)
    assert (found.turns, found.in_rows.largest < 1e-4) == (1, True)
    assert found.without_hint is not None
    assert found.without_hint.largest < 1e-4
    assert recomputed(NEWER, frozen, teacher="frozen", base=VERSION).in_rows.largest > 0.1


@pytest.mark.parametrize("teacher", ["ema", "server"])
def test_weights_that_no_server_holds_are_not_compared(teacher: str) -> None:
    with pytest.raises(ServerMismatchError, match=f"scored by the teacher '{teacher}'"):
        recomputed(VERSION, group(), teacher=teacher)


@pytest.mark.parametrize(
    ("served_in", "scored_in", "options", "code"),
    [
        ("float32", None, (), 1),
        ("bfloat16", None, (), 0),
        ("float32", "bfloat16", (), 0),
        ("bfloat16", "bfloat16", ("--tolerance", "0.01"), 1),
        ("float32", None, ("--tolerance", "0.5"), 0),
    ],
)
def test_what_a_difference_may_be_follows_the_precision_that_server_and_file_name(
    served_in: str,
    scored_in: str | None,
    options: tuple[str, ...],
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows that are 0.07 nats away from the server's."""
    one = group().to_wire()
    rows = one["distill_logprobs"][0]
    one["distill_logprobs"][0] = [[round(logprob - 0.07, 4) for logprob in row] for row in rows]
    one["group_overrides"]["opd"] = {"distill_topk": 5} | ({"precision": scored_in} if scored_in else {})
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps(one) + "\n")

    async def run() -> int:
        routes = {
            "/v1/opd/info": Script({**INFO, "weight_version": VERSION, "dtype": served_in}),
            "/v1/opd/score": Script(lambda body: plugin(body, VERSION)),
        }
        async with served(routes) as url:
            return await _check_on(path, _parser().parse_args([str(path), "--server", url, *options]))

    assert asyncio.run(run()) == code
    said = capsys.readouterr().out
    assert served_in in said
    assert "0.07 nats (root mean square), 0.07 at most in the rows" in said
