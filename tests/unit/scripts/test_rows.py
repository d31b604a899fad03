"""scripts/checks/rows: what the teacher read is put together from the records, and each written logprob compared."""

import importlib.util
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from typing import Any

import numpy as np
import pytest

from agentic_opd.core.types import DistillArrays, TurnOutcome
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord
from tests.support.places import ROOT


@pytest.fixture
def rows() -> Any:
    """The script as a module."""
    loader = SourceFileLoader("check_of_rows", str(ROOT / "scripts/checks/rows"))
    spec = importlib.util.spec_from_loader("check_of_rows", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_each_written_logprob_is_compared_with_the_pass_over_what_the_teacher_read(rows: Any) -> None:
    arrays = DistillArrays([[], [], [3, 5], [4, 6], [9]], [[], [], [-0.5, -1.0], [-2.0, -0.25], [-1.0]])
    scored = TurnRecord((2, 4), TurnOutcome.SCORED, "tool", hint="h", hint_token_ids=(7, 8), insert_at=1)
    unscored = TurnRecord((4, 5), TurnOutcome.VOTE_FAILED, None)
    masks, logprobs = (-100, -100, 3, 4, 9), (1.0, 1.0, -0.1, -0.1, -0.1)
    rollout = ScoredRollout((1, 2, 3, 4, 9), masks, logprobs, 0.0, rows=arrays, turns=(scored, unscored))
    (turn,) = rows.scored_turns(iter([ScoredGroup((rollout,))]))
    assert turn.token_ids == [1, 7, 8, 2, 3, 4]

    def forward(token_ids: Sequence[int], count: int) -> np.ndarray:
        assert (list(token_ids), count) == ([1, 7, 8, 2, 3, 4], 2)
        logprobs_RV = np.full((2, 10), -9.0)
        logprobs_RV[0, [3, 5]], logprobs_RV[1, [4, 6]] = (-0.5, -1.0001), (-2.0, -0.25 + 3e-4)
        return logprobs_RV

    assert rows.difference(turn, forward) == pytest.approx(3e-4)
