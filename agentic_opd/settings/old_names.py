"""Names of settings in earlier versions: the table of renamed and removed settings.

Names are those of the environment and the gateway, without `env.`.
"""

from collections.abc import Container, Mapping
from typing import Any, cast

from pydantic import BaseModel, model_validator

RENAMED: Mapping[str, str] = {
    "builtin_examples": "world.builtin_examples",
    "dataset_fields": "world.dataset_fields",
    "dataset_format": "world.dataset_format",
    "dataset_in_process": "world.in_process",
    "dataset_limit": "world.limit",
    "dataset_name": "world.dataset_name",
    "dataset_skip_broken": "world.skip_broken",
    "dataset_skip_too_long": "skip_too_long",
    "dataset_split": "world.dataset_split",
    "sql_databases": "world.databases",
    "sql_file": "world.file",
    "tasks_dir": "world.folder",
    "tasks_keep_processes": "world.keep_processes",
    "tasks_network": "world.network",
    "tasks_variables": "world.variables",
    "verify_timeout_s": "world.verify_timeout_s",
    "judge_base_url": "judge.base_url",
    "judge_model_name": "judge.model_name",
    "judge_api_key": "judge.api_key",
    "judge_temperature": "judge.temperature",
    "judge_max_tokens": "judge.max_tokens",
    "judge_system_prompt": "judge.system_prompt",
    "judge_reads_reasoning": "judge.reads_reasoning",
    "judge_step_prompt": "judge.step_prompt",
    "judge_question": "judge.question",
    "judge_timeout_s": "judge.timeout_s",
    "judge_extra_body": "judge.extra_body",
    "step_votes": "judge.step_votes",
    "max_concurrent_judgements": "judge.max_concurrent",
    "teacher": "teacher.weights",
    "teacher_base_url": "teacher.base_url",
    "teacher_model_name": "teacher.model_name",
    "teacher_api_key": "teacher.api_key",
    "teachers": "teacher.by_kind",
    "gap_baseline": "teacher.gap_baseline",
    "distill_support": "teacher.support",
    "score_reasoning": "teacher.score_reasoning",
    "max_concurrent_scores": "teacher.max_concurrent",
    "hint_source": "hint.source",
    "hint_vote_rule": "hint.vote_rule",
    "hint_selection": "hint.selection",
    "hint_placement": "hint.placement",
    "control": "hint.control",
    "control_neutral_hint": "hint.neutral",
    "hindsight": "hindsight.evidence",
    "hindsight_max_turns": "hindsight.max_turns",
    "hindsight_max_chars": "hindsight.max_chars",
    "eval_fraction": "eval.fraction",
    "eval_seed": "eval.seed",
    "eval_samples": "eval.samples",
    "eval_temperature": "eval.temperature",
    "eval_dataset_name": "eval.dataset_name",
    "eval_dataset_split": "eval.dataset_split",
    "eval_dataset_format": "eval.dataset_format",
    "eval_dataset_fields": "eval.dataset_fields",
    "agent_command": "agent.command",
    "agent_timeout_s": "agent.timeout_s",
    "agent_mounts": "agent.mounts",
    "agent_variables": "agent.variables",
    "correctness_weight": "reward.correctness",
    "efficiency_weight": "reward.efficiency",
    "tool_usage_weight": "reward.tool_usage",
    "renderer": "renderer.name",
    "renderer_options": "renderer.options",
    "tool_format": "renderer.tool_format",
    "stop_tokens": "renderer.stop_tokens",
    "sandbox_backend": "sandbox.type",
    "sandbox_container_command": "sandbox.container_command",
    "sandbox_image": "sandbox.image",
    "sandbox_memory_mb": "sandbox.memory_mb",
    "sandbox_file_mb": "sandbox.file_mb",
    "sandbox_disk_mb": "sandbox.disk_mb",
    "sandbox_max_concurrent": "sandbox.max_concurrent",
    "sandbox_warm": "sandbox.warm",
}

_SWEREX = "the sandbox is bubblewrap or docker; an engine on another machine is DOCKER_HOST or CONTAINER_HOST"
REMOVED: Mapping[str, str] = {
    "hint_overlap": "hint.selection overlap chooses one hint for a turn, as hint_overlap sequence did",
    "world_options": "its entries are settings of env.world, such as env.world.questions",
    "sandbox_swerex_url": _SWEREX,
    "sandbox_swerex_token": _SWEREX,
    "sandbox_swerex_servers": _SWEREX,
}
"""Removed settings, each with what to do in their place."""


def answer(name: str) -> str | None:
    """Return the end of the sentence about an old name: `is now env.judge.temperature`; None for any other name."""
    if name in RENAMED:
        return f"is now env.{RENAMED[name]}"
    if name in REMOVED:
        return f"was removed: {REMOVED[name]}"
    return None


def refuse(values: Any, names: Container[str]) -> Any:
    """Return the input of a model that has settings of these names.

    Raises:
        ValueError: it has old names; the message says all of today's.
    """
    settings = cast(Mapping[str, Any], values) if isinstance(values, Mapping) else {}
    if sentences := [f"{name} {text}" for name in settings if name not in names and (text := answer(name))]:
        raise ValueError("; ".join(sentences))
    return values


class RootSettings(BaseModel):
    """Settings at the top of the section `env`, where earlier versions had names that are answered, never ignored."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_names(cls, values: Any) -> Any:
        return refuse(values, cls.model_fields)


def current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run file by today's dotted names; removed ones keep theirs."""
    return {RENAMED.get(name, name): value for name, value in settings.items()}
