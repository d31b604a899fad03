"""The pool of accepted hints, and the choice of a turn's control."""

from hypothesis import given
from hypothesis import strategies as st

from agentic_opd.distill.config import DistillConfig, HintConfig
from agentic_opd.distill.hints import Hint
from agentic_opd.distill.pool import AcceptedHint, HintPool
from agentic_opd.distill.scoring import control_hints

from .fakes import OTHER, THIRD, pool_of

NEUTRAL = "Take your time and think about the next step."
OWN = AcceptedHint("fizzbuzz", "Check divisibility by 15 first.")
SAME = AcceptedHint("fizzbuzz", "Return str(n) for all others.")


def choices(kind: str, pool: HintPool, read: AcceptedHint = OWN) -> list[tuple[str, str]]:
    config, hint = DistillConfig(hint=HintConfig(control=kind)), Hint(OWN, read, "judge")  # type: ignore[arg-type]
    return [*control_hints(config, pool, hint)]


def test_each_kind_of_control_and_what_stands_in_for_it() -> None:
    pool = pool_of(OWN, SAME, OTHER)
    assert choices("neutral", pool) == [("neutral", NEUTRAL)]
    assert choices("other", pool) == [("other", OTHER.text), ("neutral", NEUTRAL)]
    assert choices("same_task", pool) == [("same_task", SAME.text), ("neutral", NEUTRAL)]
    for kind in ("other", "same_task"):
        assert choices(kind, pool_of(OWN)) == [("neutral", NEUTRAL)]


def test_a_wrong_hint_is_never_its_own_control() -> None:
    """The teacher reads a hint of another task: the control is of a third one, or another one of the turn's own."""
    repeated = AcceptedHint("lru", OTHER.text)
    assert choices("other", pool_of(OWN, OTHER, repeated), read=OTHER) == [("neutral", NEUTRAL)]
    assert choices("other", pool_of(OWN, OTHER, THIRD), read=OTHER)[0] == ("other", THIRD.text)
    assert choices("same_task", pool_of(OWN, OTHER, SAME), read=OTHER)[0] == ("same_task", SAME.text)
    assert choices("same_task", pool_of(OWN, OTHER), read=OTHER) == [("neutral", NEUTRAL)]
    assert choices("neutral", pool_of(), read=AcceptedHint("lru", NEUTRAL.upper())) == []


HINTS = st.lists(st.builds(AcceptedHint, st.sampled_from("abcd"), st.sampled_from(("x y", "X  y", "z", "w", "v u"))))


@given(HINTS, st.lists(st.builds(AcceptedHint, st.sampled_from("abcd"), st.sampled_from(("x y", "z"))), min_size=1))
def test_what_is_drawn_fits_if_anything_does(hints: list[AcceptedHint], known: list[AcceptedHint]) -> None:
    pool, texts, tasks = pool_of(*hints), {hint.words for hint in known}, {hint.task_id for hint in known}
    other = pool.of_other_task(*known)
    fitting = [hint for hint in hints if hint.words not in texts and hint.task_id not in tasks]
    assert other in fitting if fitting else other is None
    same = pool.of_same_task("a", *known)
    fitting = [hint for hint in hints if hint.words not in texts and hint.task_id == "a"]
    assert same in fitting if fitting else same is None


def test_a_seed_draws_the_same_again_and_every_hint_comes_up() -> None:
    hints = [AcceptedHint(task, f"{task} {n}") for task in "bcd" for n in range(3)]
    first, second = HintPool(3), HintPool(3)
    for hint in hints:
        first.add(hint)
        second.add(hint)
    drawn = [first.of_other_task(OWN) for _ in range(200)]
    assert drawn == [second.of_other_task(OWN) for _ in range(200)]
    assert set(drawn) == set(hints)


def test_the_pool_keeps_the_latest_and_no_more() -> None:
    pool = HintPool()
    for n in range(HintPool.KEPT_HINTS + 1):
        pool.add(AcceptedHint("a", f"hint {n}"))
        pool.add(AcceptedHint("a", "hint 0"))  # It stays the latest.
    kept = {pool.of_same_task("a") for _ in range(3000)}
    assert len(kept) == HintPool.KEPT_HINTS
    assert AcceptedHint("a", "hint 0") in kept
    assert AcceptedHint("a", "hint 1") not in kept
    for n in range(HintPool.KEPT_TASKS):
        pool.add(AcceptedHint(f"task {n}", "a hint"))
    assert pool.of_same_task("a") is None
    assert pool.of_same_task("task 0") is not None
