"""The environments' settings against Atropos' own, which they are declared without."""

from enum import Enum
from typing import Any, get_args

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, EvalHandlingEnum
from pydantic import BaseModel, PrivateAttr

from agentic_opd.env.config import AgentEnvConfig, AgenticOPDEnvConfig
from agentic_opd.runs.config import EvalHandling
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.fields import line_settings as settings_of_lines

OTHER_DEFAULTS = {
    "max_token_length": (2048, 8192),
    "eval_handling": ("STOP_TRAIN", "LIMIT_TRAIN"),
    "tokenizer_name": ("NousResearch/DeepHermes-3-Llama-3-3B-Preview", ""),
    "use_wandb": (True, False),
    "rollout_server_url": ("http://localhost:8000", "http://127.0.0.1:8001"),
    "total_steps": (1000, -1),
    "ensure_scores_are_not_same": (True, False),
    "include_messages": (False, True),
    "server_type": ("openai", "vllm"),
    "base_url": ("", "http://127.0.0.1:8000/v1"),
    "health_check": (True, False),
}
"""What Atropos' default is, and ours."""


def plain(value: Any) -> Any:
    """An enum, or a member of one, by its values."""
    if isinstance(value, type) and issubclass(value, Enum):
        return [member.value for member in value]
    return value.value if isinstance(value, Enum) else value


@pytest.mark.parametrize(
    ("ours", "atropos"),
    [(AgentEnvConfig, BaseEnvConfig), (AgenticOPDEnvConfig, BaseEnvConfig), (PolicyServerConfig, APIServerConfig)],
)
def test_each_setting_of_atropos_is_there_with_its_type_and_default(
    ours: type[BaseModel], atropos: type[BaseModel]
) -> None:
    for name, info in atropos.model_fields.items():
        here = ours.model_fields[name]
        types = [
            plain(field.annotation) if get_args(field.annotation) == () else field.annotation for field in (info, here)
        ]
        assert types[0] == types[1], name
        defaults = (plain(info.default), plain(here.default))
        assert defaults[0] == defaults[1] or defaults == OTHER_DEFAULTS.get(name), name


def test_the_pairs_above_are_settings_of_atropos() -> None:
    assert OTHER_DEFAULTS.keys() <= {*BaseEnvConfig.model_fields, *APIServerConfig.model_fields}


class Mine(AgenticOPDEnvConfig):
    mine: int = 3
    resume: bool = True
    _kept: list[int] = PrivateAttr(default_factory=list[int])


def test_a_field_that_a_subclass_overrides_keeps_its_marks() -> None:
    assert {"mine", "seed"} <= settings_of_lines(Mine()).keys()
    assert not {"resume", "judge_api_key"} & settings_of_lines(Mine()).keys()


def test_a_member_of_atropos_own_enum_is_taken() -> None:
    config = AgenticOPDEnvConfig(eval_handling=EvalHandlingEnum.NONE)  # type: ignore[arg-type]
    assert config.eval_handling is EvalHandling.NONE
