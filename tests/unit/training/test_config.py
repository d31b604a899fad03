import pytest

pytest.importorskip("torch", reason="the trainer's settings hold those of its losses")

from agentic_opd.training.config import TrainerConfig


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_rate_rises_over_the_warm_up_and_then_does_what_the_schedule_says(
    schedule: str, expected: list[float]
) -> None:
    config = TrainerConfig.model_validate(
        {"model": "m", "lr": 2.0, "warmup_steps": 3, "total_steps": 7, "lr_schedule": schedule}
    )
    assert [config.lr_at(step) / 2.0 for step in range(7)] == pytest.approx(expected, abs=1e-6)
