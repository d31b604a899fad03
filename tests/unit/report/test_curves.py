import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import PlaceError
from agentic_opd.core.intervals import difference, mean_of_tasks
from agentic_opd.report.curves import read_curves


def written(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data))
    return path


def test_a_curve_is_the_mean_over_seeds(tmp_path: Path) -> None:
    """A seed that went further than the others ends where these do."""
    seeds = {"0": [[0, 0.5, 128], [64, 0.75, 128], [128, 1.0, 128]], "1": [[0, 0.25, 128], [64, 0.75, 128]]}
    (curve,) = read_curves(written(tmp_path, {"opd": seeds, "grpo": {}}))
    assert curve.mode == "opd"
    assert [(point.rollouts, point.mean.value, point.seeds) for point in curve.points] == [
        (0, 0.375, (0.5, 0.25)),
        (64, 0.75, (0.75, 0.75)),
    ]
    assert curve.points[0].mean == mean_of_tasks([0.5, 0.25], 128)
    assert curve.change == difference(curve.points[0].mean, curve.points[1].mean)


@pytest.mark.parametrize("data", [{}, {"opd": {}}, {"opd": {"0": []}}, [], {"opd": {"0": [[0, 0.5]]}}, {"a": 1}, "x"])
def test_a_file_without_curves_is_one_clear_error(tmp_path: Path, data: Any) -> None:
    with pytest.raises(PlaceError, match="holds no learning curve"):
        read_curves(written(tmp_path, data))


def test_what_scripts_learn_wrote_is_read() -> None:
    curves = read_curves(Path(__file__).parents[3] / "docs" / "learning" / "results.json")
    assert [curve.mode for curve in curves][:2] == ["opd", "grpo"]
    assert all(0 <= point.mean.low <= point.mean.value <= point.mean.high <= 1 for c in curves for point in c.points)
