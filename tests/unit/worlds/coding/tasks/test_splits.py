import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.core.types import Task
from agentic_opd.worlds.split import split_position, split_tasks

IDS = st.lists(st.text(min_size=1).filter(str.strip), unique=True, max_size=30)


def tasks(ids: list[str]) -> list[Task]:
    return [Task(task_id, "p", "assert f(1)") for task_id in ids]


def ids(some: list[Task]) -> list[str]:
    return [task.task_id for task in some]


@given(IDS, st.floats(0, 1), st.integers(0, 5), st.randoms(use_true_random=False))
def test_every_task_is_on_one_side_whatever_is_beside_it(given_ids: list[str], fraction: float, seed: int, rng) -> None:
    train, evaluation = split_tasks(tasks(given_ids), fraction, seed)
    assert sorted(ids(train) + ids(evaluation)) == sorted(given_ids)
    fewer = rng.sample(given_ids, len(given_ids) // 2)
    fewer_train, fewer_evaluation = split_tasks(tasks(fewer), fraction, seed)
    assert ids(fewer_train) == [one for one in fewer if one in ids(train)]
    assert ids(fewer_evaluation) == [one for one in fewer if one in ids(evaluation)]


@given(IDS, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_only_adds(given_ids: list[str], one: float, other: float) -> None:
    small, large = (split_tasks(tasks(given_ids), fraction, 0)[1] for fraction in sorted((one, other)))
    assert set(ids(small)) <= set(ids(large))


def test_the_ends_hold_out_nothing_and_everything() -> None:
    some = tasks([str(number) for number in range(1000)])
    assert split_tasks(some, 0.0, 0) == (some, [])
    assert split_tasks(some, 1.0, 0) == ([], some)


@pytest.mark.slow
def test_the_share_is_what_was_asked_for() -> None:
    some = tasks([f"HumanEval/{number}" for number in range(20_000)])
    for fraction in (0.1, 0.5):
        share = len(split_tasks(some, fraction, 3)[1]) / len(some)
        assert abs(share - fraction) < 0.01


def test_seeds_draw_different_lines() -> None:
    some = tasks([str(number) for number in range(1000)])
    both = set(ids(split_tasks(some, 0.5, 0)[1])) & set(ids(split_tasks(some, 0.5, 1)[1]))
    assert 200 < len(both) < 300


def test_positions_are_the_same_on_every_machine() -> None:
    """Literals: a change here would move tasks that a running experiment trained on into its evaluation."""
    assert [round(split_position(task_id, seed), 6) for task_id, seed in (("a", 0), ("a", 1), ("é/2", 0))] == [
        0.716968,
        0.661802,
        0.710935,
    ]
