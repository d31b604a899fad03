"""The person of `scripts/learn --world person`: the rules, what is said of each, and the settings of that world."""

from random import Random

import pytest
from learning.__main__ import parse_args
from learning.person import ASKED, CONTENT, MEASURED, person_tasks, questions, reply, score

SHORT = "Bees collect nectar. They make honey from it."


@pytest.mark.parametrize(
    ("answer", "kept", "said"),
    [
        (SHORT, 3, CONTENT),
        (f"{SHORT} " * 6, 2, "short"),
        (f"{SHORT}\n\nThey live in hives.", 2, "plain"),
        ("**Bees** collect nectar.", 2, "plain"),
        ('They say "buzz."', 3, CONTENT),
        ("Bees collect nectar and", 2, "sentence"),
        ("1. Bees\n" * 50, 0, "short"),
    ],
)
def test_a_rule_that_is_broken_is_named_and_costs_a_third(answer: str, kept: int, said: str) -> None:
    assert score(answer) == pytest.approx(kept / 3)
    assert all(said in reply(answer, Random(seed)) for seed in range(9))


def test_no_measured_question_is_asked_in_a_session() -> None:
    asked, measured = questions(ASKED), questions(MEASURED)
    assert (len({*asked}), len({*measured})) == (36, 40)
    assert not {*asked} & {*measured}
    assert [task.prompt for task in person_tasks()] == asked


def test_the_world_of_a_person_has_its_own_defaults_and_modes(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_args(["--world", "person", "--model", "."])
    assert (args.talk, args.modes) == (True, ["opd", "binary", "combined", "no-hint"])
    assert (args.rollouts, args.points, [size for _, size, _ in args.settings]) == (36, [0, 12, 24, 36], [4])
    assert parse_args(["--world", "person", "--model", ".", "--seeds", "7"]).seeds == [7]
    with pytest.raises(SystemExit):
        parse_args(["--world", "person", "--model", ".", "--modes", "grpo"])
    assert "only opd binary combined no-hint" in capsys.readouterr().err
