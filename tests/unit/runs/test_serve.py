"""How many groups `serve` has under way: batches of 32 sequences, groups of 4, so 24 groups are 3 batches ahead."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.atropos.api import QueueStatus
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.serve import ServeCounts, most_pending

PLAN = RunConfig(group_size=4, max_batches_offpolicy=3)
PROMISED = RunConfig(group_size=4, max_batches_offpolicy=3, min_batch_allocation=0.25)


def most(plan: RunConfig = PLAN, finished: int = 0, share: float = 1.0, **status: float) -> int:
    status = {"current_step": 0, "queue_size": 0, **status}
    return most_pending(plan, QueueStatus.model_validate(status), batch_size=32, finished=finished, share=share)


def changed(**settings: int) -> RunConfig:
    return PLAN.model_copy(update=settings)


def test_alone_it_makes_as_many_as_it_may_until_the_queue_is_full() -> None:
    assert most() == 8
    assert most(queue_size=20) == 4
    assert most(queue_size=20, finished=3) == 1
    assert most(queue_size=24) == 0
    assert most(queue_size=30) < 0


def test_no_more_are_under_way_than_the_trainer_takes() -> None:
    assert most(changed(max_concurrent_groups=100)) == 24
    assert most(changed(max_concurrent_groups=100, max_batches_offpolicy=1)) == 8


def test_without_a_batch_ahead_one_batch_is_made() -> None:
    assert most(changed(max_batches_offpolicy=0)) == 8
    assert most(changed(max_batches_offpolicy=0), queue_size=8) == 0


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.1, 1), (0.5, 4)])
def test_an_evaluation_takes_its_share(share: float, expected: int) -> None:
    assert most(share=share) == expected


def test_environments_share_by_weight() -> None:
    assert most(env_weight=0.5) == 4
    assert most(env_weight=0.01) == 1


def test_what_was_promised_is_made_though_others_fill_the_queue() -> None:
    assert most(PROMISED, env_weight=0.01, queue_size=24, self_queue_size=5) == 1
    assert most(PROMISED, env_weight=0.01, queue_size=24, self_queue_size=6) == 0
    assert most(PROMISED, env_weight=0.01, queue_size=0) == 2


def test_what_others_were_promised_is_left_to_them() -> None:
    assert most(unallocated_fraction=0.25) == 2
    assert most(unallocated_fraction=0.25, queue_size=6, self_queue_size=6) == 0
    assert most(unallocated_fraction=0.0) == 1


@given(
    queued=st.integers(0, 40),
    own=st.floats(0, 1),
    finished=st.integers(0, 10),
    weight=st.floats(0.01, 1),
    unallocated=st.floats(0, 1),
)
def test_the_queue_never_grows_beyond_the_batches_ahead(
    queued: int, own: float, finished: int, weight: float, unallocated: float
) -> None:
    status = {"self_queue_size": int(queued * own), "env_weight": weight, "unallocated_fraction": unallocated}
    made = max(0, most(finished=finished, queue_size=queued, **status))
    assert queued + finished + made <= max(24, queued + finished)


@given(weight=st.floats(0.01, 1), unallocated=st.floats(0, 1))
def test_nobody_starves(weight: float, unallocated: float) -> None:
    assert most(env_weight=weight, unallocated_fraction=unallocated) >= 1


def test_the_progress_counts_groups() -> None:
    counts = ServeCounts(sent=12, skipped=Counter(equal_scores=2), failed=1)
    assert counts.progress(pending=4, queued=6) == "12 groups sent, 2 skipped, 4 under way, 6 queued"
    assert ServeCounts().progress(0, 0) == "0 groups sent, 0 under way, 0 queued"
    assert str(counts) == "12 groups sent (0 twice), 2 skipped (equal_scores), 1 failed, 0 unsent"
