"""Curves by what the policy sampled for them: interpolated rates, and the page's tables."""

import json
from pathlib import Path
from typing import Any

import pytest
from learning.break_even import LearnedPoint, learning_rows, learning_tables, rate_at, read_learned, read_rows
from learning.costs import Cost


def points(rates: tuple[float, float], sampled: int, continued: int = 0) -> tuple[list[Any], list[Any]]:
    curve = [[0, rates[0], 4], [64, rates[1], 4]]
    return curve, [[0, 0, 0], [64, 64, 500, None, sampled, 30 if continued else 0, continued, 3 if continued else 0]]


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    """A world whose policy samples three times as much with proofs as without, and a rival with more rollouts."""
    curves = {"opd": points((0.2, 0.5), 4000), "proof": points((0.2, 0.6), 2000, 4000)}
    rivals = {"grpo": points((0.2, 0.8), 8000)}
    for kind, modes in (("curves", curves), ("rivals", rivals)):
        (folder := tmp_path / kind / "sql").mkdir(parents=True)
        for name, column in (("results.json", 0), ("costs.json", 1)):
            (folder / name).write_text(json.dumps({mode: {"0": both[column]} for mode, both in modes.items()}))
    return tmp_path


def test_a_curve_is_read_between_its_points_and_not_beyond_them() -> None:
    curve = [LearnedPoint(rate, Cost(0, 0, 0, None, tokens)) for rate, tokens in ((0.2, 0), (0.4, 100), (0.8, 200))]
    assert [rate_at(curve, tokens) for tokens in (0, 50, 150, 200, 201)] == pytest.approx([0.2, 0.3, 0.6, 0.8, None])


def test_the_rivals_of_proofs_are_compared_at_as_many_sampled_tokens(curves: Path) -> None:
    learned = read_learned([curves / "curves", curves / "rivals"])
    assert read_rows(learning_rows(learned)) == learned
    lines = [*learning_tables(learned)]
    assert "| sql | proof | 1 | 64 | 30 | 10.0 | 6000 | 500 | 60.0% (60) |" in lines
    assert lines[-1] == "| sql | proof, seed 0 | 6000 | 60.0% | 50.0% at its end, 4000 (seed 0) | 65.0% |"


def test_a_rival_of_another_seed_is_named_and_a_missing_one_is_said(curves: Path) -> None:
    learned = read_learned([curves / "curves", curves / "rivals"])
    seeds = learned["sql"]["proof"]
    learned["sql"] = {"proof": {"1": seeds["0"]}, "grpo, 64 rollouts": learned["sql"]["grpo, 64 rollouts"]}
    assert [*learning_tables(learned)][-1] == "| sql | proof, seed 1 | 6000 | 60.0% | no curve | 65.0% (seed 0) |"
