"""The person of `scripts/learn --world person`: the rules, what is said of each, and the settings of that world."""

from random import Random

import pytest
from learning.__main__ import parse_args
from learning.person import CONTENT, MEASURED, TRAINED, person_tasks, questions, reply, score

QUESTION = "What does a bee do all day?"
SHORT = "Bees collect nectar. They make honey from it."


@pytest.mark.parametrize(
    ("answer", "kept", "said"),
    [
        (SHORT, 4, CONTENT),
        (f"{SHORT} " * 6, 3, "short"),
        (f"{SHORT}\n\nThey live in hives.", 3, "plain"),
        ("**Bees** collect nectar.", 3, "plain"),
        ('They say "bee."', 4, CONTENT),
        ("Bees collect nectar and", 3, "sentence"),
        ("1. Bees\n" * 50, 1, "short"),
        ("The sea is salty.", 3, "my question"),
    ],
)
def test_a_rule_that_is_broken_is_named_and_costs_a_quarter(answer: str, kept: int, said: str) -> None:
    assert score(answer, QUESTION) == kept / 4
    assert all(said in reply(answer, QUESTION, Random(seed)) for seed in range(9))


def test_no_measured_question_is_asked_in_a_session() -> None:
    asked, measured = questions(TRAINED), questions(MEASURED)
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
