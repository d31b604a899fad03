from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import DistillArrays, TeacherRequest, TeacherRows
from agentic_opd.distill.insertion import insert_hint
from agentic_opd.distill.records import build_arrays, logprobs_of, num_agreed, written_rows
from agentic_opd.distill.rows import LOGPROB_DECIMALS, ComparedHint, HintRequest, choose, overlap, rounded, with_support
from agentic_opd.distill.scoring import gaps
from agentic_opd.plugin.scoring import check_rows

from .fakes import MASKS, TOKENS, TURNS, VOCAB, make_trace, table_rows


def rows(actual: list[float], ids: list[list[int]], logprobs: list[list[float]]) -> TeacherRows:
    return TeacherRows(np.array(actual, np.float32), np.array(ids, np.int32), np.array(logprobs, np.float32))


def arrays_of(scored: Mapping[int, TeacherRows], top_k: int) -> DistillArrays:
    """The arrays with these rows of the turns with these indices."""
    trace = make_trace()
    written = [
        written_rows(TURNS[i].start, TOKENS[TURNS[i].start : TURNS[i].end], one, top_k) for i, one in scored.items()
    ]
    arrays = build_arrays(trace.tokens_T, trace.masks_T, trace.logprobs_T, written, top_k)
    return DistillArrays([[*row] for row in arrays.token_ids_TK], [[*row] for row in arrays.logprobs_TK])


TWO_ROWS = rows([-1.0, -4.0], [[7, 40, 8], [7, 8, 9]], [[-0.6, -1.0, -3.0], [-0.2, -2.5, -3.5]])
"""For the turn [11, 13), sampled 40 41: once the second most likely, once not among the top 3."""


def test_sampled_token_comes_first_then_the_others_by_rank() -> None:
    arrays = arrays_of({1: TWO_ROWS}, 3)
    assert arrays.token_ids_TK[11:] == [[40, 7, 8], [41, 7, 8]]
    assert arrays.logprobs_TK[11:] == [[-1.0, -0.6, -3.0], [-4.0, -0.2, -2.5]]
    assert arrays.token_ids_TK[:11] == [[]] * 11
    assert arrays.logprobs_TK[:11] == [[]] * 11


def test_the_teacher_agrees_with_a_token_if_no_other_is_likelier() -> None:
    assert num_agreed(TWO_ROWS) == 0
    assert num_agreed(rows([-0.6, -4.0], [[40, 7], [7, 8]], [[-0.6, -1.0], [-0.2, -2.5]])) == 1
    assert num_agreed(rows([-0.7, -0.69999], [[7], [8]], [[-0.7], [-0.7]])) == 2, "as likely, for K = 1 too"


def test_without_a_scored_turn_all_rows_are_empty() -> None:
    arrays = arrays_of({}, 3)
    assert arrays.token_ids_TK == arrays.logprobs_TK == [[]] * len(TOKENS)


def test_k_1_is_rectangular() -> None:
    """
    position   0..4      5 6 7        8..10     11   12
    logprob    0.0       student's    0.0       teacher's
    """
    one = rows([-1.0, -4.0], [[7], [7]], [[-0.5], [-0.1]])
    arrays = arrays_of({1: one}, 1)
    assert arrays.token_ids_TK == [[token] for token in TOKENS]
    student = [[logprob] for logprob in make_trace().logprobs_T[5:8]]
    assert arrays.logprobs_TK == [[0.0]] * 5 + student + [[0.0]] * 3 + [[-1.0], [-4.0]]


def test_written_logprobs_are_short_at_most_0_and_never_minus_0() -> None:
    almost_certain = rows([1e-7, -1e-9], [[40, 1], [41, 2]], [[1e-7, -17.123456789], [-1e-9, -20.0]])
    arrays = arrays_of({1: almost_certain}, 2)
    short = round(-17.123456789, LOGPROB_DECIMALS)
    assert repr(arrays.logprobs_TK[11:]) == f"[[0.0, {short}], [0.0, -20.0]]"


def test_rows_must_be_as_many_as_the_turns_tokens() -> None:
    with pytest.raises(AlignmentError, match=r"turn at 5: lengths differ \(tokens=3, rows=2\)"):
        arrays_of({0: TWO_ROWS}, 3)


def test_rows_must_hold_k_entries() -> None:
    with pytest.raises(AlignmentError, match="hold 3 entries, expected at least 4"):
        arrays_of({1: TWO_ROWS}, 4)


def test_gap_is_teacher_minus_baseline() -> None:
    assert gaps([-3.0, -3.5], TWO_ROWS).tolist() == [2.0, -0.5]
    with pytest.raises(AlignmentError, match="baseline=1, rows=2"):
        gaps([-3.0], TWO_ROWS)


def test_other_rows_ids_are_looked_up_and_the_sampled_one_is_always_there() -> None:
    """Row 0 sampled 40, row 1 sampled 41; the rows know the sampled ones and their top three."""
    sampled = rounded(TWO_ROWS.actual_R).tolist()
    top_ids, top = TWO_ROWS.top_ids_RK.tolist(), rounded(TWO_ROWS.top_logprobs_RK).tolist()
    ids = [[40, top_ids[0][2], 500], [41, 500, top_ids[1][0]]]
    assert logprobs_of(ids, TWO_ROWS) == ((sampled[0], top[0][2], None), (sampled[1], None, top[1][0]))
    assert logprobs_of([[40], [41]], TWO_ROWS) == ((sampled[0],), (sampled[1],))
    with pytest.raises(AlignmentError, match="ids=1, rows=2"):
        logprobs_of([[40]], TWO_ROWS)


REQUEST = insert_hint(make_trace(), TURNS[1], 10, (70,))


def test_good_rows_pass() -> None:
    check_rows(TWO_ROWS, REQUEST, 3, VOCAB)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rows([-1.0], [[7]], [[-0.5]]), r"got=1, expected=2"),
        (
            rows([-1.0, -4.0], [[7, 40], [7, 8]], [[-0.5, -1.0], [-0.1, -2.5]]),
            r"top-k: lengths differ \(got=2, expected=3",
        ),
        (rows([np.nan, -4.0], [[7, 1, 8], [7, 8, 9]], [[-1, -2, -3]] * 2), "1 actual logprobs are not finite"),
        (rows([-1, -4], [[7, 1, 8], [7, 8, 9]], [[-1, -2, -np.inf]] * 2), "2 top logprobs are not finite"),
        (rows([0.01, -4], [[7, 1, 8], [7, 8, 9]], [[-1, -2, -3]] * 2), "actual logprob 0.01, expected at most 0"),
        (
            rows([-9999, -4], [[7, 1, 8], [7, 8, 9]], [[-1, -2, -3]] * 2),
            "actual logprob -9999, expected at least -1000",
        ),
        (
            rows([-1, -4], [[7, 1, 8], [7, 8, 9]], [[-1, -2, -1e30]] * 2),
            "top logprob -1e\\+30, expected at least -1000",
        ),
        (rows([-1, -4], [[7, 1, VOCAB], [7, 8, 9]], [[-1, -2, -3]] * 2), "ids from 1 to 512, expected 0 to 511"),
        (rows([-1, -4], [[7, 1, -1], [7, 8, 9]], [[-1, -2, -3]] * 2), "ids from -1 to 9"),
        (rows([-1, -4], [[7, 1, 7], [7, 8, 9]], [[-1, -2, -3]] * 2), "an id occurs twice"),
        (
            rows([-1, -4], [[7, 40, 8], [7, 8, 9]], [[-1, -1.5, -3]] * 2),
            "two logprobs of one sampled token differ by 0.5",
        ),
        (rows([-1, -0.5], [[7, 1, 8], [7, 8, 9]], [[-0.5, -2, -3]] * 2), "sum to 1.39"),
    ],
)
def test_rows_that_do_not_fit_are_refused(bad: TeacherRows, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        check_rows(bad, REQUEST, 3, VOCAB)


@given(st.integers(2, 40), st.sets(st.sampled_from([0, 1])), st.lists(st.integers(0, VOCAB - 1), max_size=3))
def test_invariants_hold_for_any_teacher(top_k: int, scored: set[int], hint: list[int]) -> None:
    requests = {i: insert_hint(make_trace(), TURNS[i], TURNS[i].assistant_open, tuple(hint)) for i in scored}
    teacher = {i: table_rows(request, top_k) for i, request in requests.items()}
    for i, request in requests.items():
        check_rows(teacher[i], request, top_k, VOCAB)
    arrays = arrays_of(teacher, top_k)
    spans = {p for i in scored for p in range(TURNS[i].start, TURNS[i].end)}
    for p, (ids, logprobs) in enumerate(zip(arrays.token_ids_TK, arrays.logprobs_TK, strict=True)):
        if p not in spans:
            assert list(ids) == list(logprobs) == []
            continue
        assert MASKS[p] != -100
        assert ids[0] == TOKENS[p]
        assert len(ids) == len(set(ids)) == len(logprobs) == top_k
        assert all(np.isfinite(logprob) and logprob <= 0 for logprob in logprobs)
        assert sum(np.exp(logprobs)) <= 1 + 1e-3
        assert list(logprobs[1:]) == sorted(logprobs[1:], reverse=True)


def test_row_holds_the_teachers_own_numbers() -> None:
    request: TeacherRequest = insert_hint(make_trace(), TURNS[0], 4, (70, 71))
    teacher = table_rows(request, 5)
    arrays = arrays_of({0: teacher}, 5)
    for r, p in enumerate(range(5, 8)):
        by_id = dict(zip(teacher.top_ids_RK[r].tolist(), teacher.top_logprobs_RK[r].tolist(), strict=True))
        by_id[TOKENS[p]] = float(teacher.actual_R[r])
        for token, logprob in zip(arrays.token_ids_TK[p], arrays.logprobs_TK[p], strict=True):
            assert logprob == pytest.approx(by_id[token], abs=10**-LOGPROB_DECIMALS)


def of_masses(actual: list[float], ids: list[list[int]], masses: list[list[float]]) -> TeacherRows:
    return rows(np.log(actual).tolist(), ids, np.log(masses).tolist())


PLAIN = of_masses(
    [0.6, 0.04, 0.05],
    [[40, 9, 8], [8, 7, 5], [7, 8, 5]],
    [[0.6, 0.2, 0.15], [0.5, 0.2, 0.1], [0.6, 0.2, 0.1]],
)
"""Without a hint; the sampled tokens are 40, 41, 42."""
NEAR = of_masses(
    [0.3, 0.02, 0.5],
    [[7, 40, 8], [7, 8, 9], [42, 7, 8]],
    [[0.5, 0.3, 0.1], [0.7, 0.1, 0.05], [0.5, 0.3, 0.1]],
)
FAR = of_masses(
    [0.6, 0.01, 0.01],
    [[40, 9, 8], [1, 2, 3], [1, 2, 3]],
    [[0.6, 0.2, 0.15], [0.9, 0.02, 0.01], [0.9, 0.02, 0.01]],
)


def test_the_overlap_is_the_mass_of_shared_ids_and_of_the_sampled_token() -> None:
    # 40 and 8; then 7, 8 and the sampled 41, which is in neither top 3; then 7, 8 and 42, which is in one of them.
    assert overlap(NEAR, PLAIN, [40, 41, 42]) == pytest.approx([0.3 + 0.1, 0.2 + 0.1 + 0.02, 0.3 + 0.1 + 0.05])
    assert overlap(FAR, PLAIN, [40, 41, 42]) == pytest.approx([0.95, 0.01, 0.01])
    assert overlap(PLAIN, NEAR, [40, 41, 42]) == pytest.approx(overlap(NEAR, PLAIN, [40, 41, 42]))
    with pytest.raises(AlignmentError, match="overlap"):
        overlap(NEAR, PLAIN, [40, 41])


def test_the_hint_with_the_largest_mean_overlap_is_chosen() -> None:
    far, near = (
        ComparedHint(HintRequest("x", TeacherRequest((1, 2, 3), 1, 1, (2,))), rows, overlap(rows, PLAIN, [40, 41, 42]))
        for rows in (FAR, NEAR)
    )
    chosen = choose((far, near))
    assert (chosen.index, chosen.rows) == (1, NEAR)
    assert [hint.overlap_R.mean() for hint in chosen.hints] == pytest.approx([0.97 / 3, 1.17 / 3])
    assert choose((near, near)).index == 0, "the first of equals"


def test_tokens_of_a_row_are_chosen_by_the_student_or_by_the_likelier_of_both() -> None:
    hinted = TeacherRows(
        np.log(np.float32([0.05])), np.int32([[1, 2, 3, 4]]), np.log(np.float32([[0.5, 0.2, 0.1, 0.02]]))
    )
    student = TeacherRows(np.log(np.float32([0.1])), np.int32([[7, 4, 9]]), np.log(np.float32([[0.4, 0.3, 0.2]])))
    rows = with_support(hinted, [9], student=student, support="student", top_k=3)
    assert rows.top_ids_RK.tolist() == [[9, 1, 4]], "7 is unknown to the teacher, whose next token takes its place"
    assert np.exp(rows.top_logprobs_RK[0]) == pytest.approx([0.05, 0.5, 0.02], abs=1e-4)
    named = replace(
        hinted, named_ids_RN=np.int32([[7, 4, 9]]), named_logprobs_RN=np.log(np.float32([[0.01, 0.02, 0.05]]))
    )
    rows = with_support(named, [9], student=student, support="student", top_k=3)
    assert rows.top_ids_RK.tolist() == [[9, 4, 7]]
    rows = with_support(named, [9], student=student, support="union", top_k=4)
    assert rows.top_ids_RK.tolist() == [[9, 1, 4, 7]], "0.5, 0.3 and 0.4 by the likelier of both"
