"""The settings of distillation that depend on each other."""

from typing import Any

import pytest
from pydantic import ValidationError

from agentic_opd.distill.config import DistillConfig, HintConfig
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.gateway.config import GatewayConfig


@pytest.mark.parametrize(
    ("given", "sources"),
    [
        ("judge", ("judge",)),
        ("sibling,judge", ("sibling", "judge")),
        (" sibling , reference", ("sibling", "reference")),
        (["feedback", "judge"], ("feedback", "judge")),
        ("judge,sources.py:mine", ("judge", "sources.py:mine")),
    ],
)
def test_hint_source_is_one_name_or_an_order_of_preference(given: Any, sources: tuple[str, ...]) -> None:
    assert DistillConfig(hint=HintConfig(source=given)).hint.source == sources
    assert DistillConfig().hint.source == ("judge",)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "source : expected judge, feedback"),
        ([], "at least 1 item"),
        ("sibling,brother", "source brother: expected judge, feedback, sibling, reference, FILE.py:NAME"),
        ("judge,sibling,judge", "names judge twice"),
    ],
)
def test_what_is_no_order_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        DistillConfig(hint=HintConfig(source=given))


def test_one_rollout_has_no_siblings() -> None:
    with pytest.raises(ValidationError, match="set group_size above 1"):
        AgenticOPDEnvConfig(hint=HintConfig(source="sibling,judge"), group_size=1)


@pytest.mark.parametrize("source", ["sibling", "reference"])
def test_a_conversation_has_neither_siblings_nor_a_solution(source: str) -> None:
    with pytest.raises(ValidationError, match=f"hint.source {source}: a conversation has none"):
        GatewayConfig(hint=HintConfig(source=f"{source},judge"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"selection": "overlap", "proof": {"type": "replay"}}, "set another selection"),
        ({"proof": {"type": "replay", "refuted": "contrast"}}, "set hint.control, to neutral for example"),
    ],
)
def test_settings_that_proofs_can_not_do_with_are_refused(settings: Any, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        HintConfig.model_validate(settings)
