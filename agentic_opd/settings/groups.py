"""Which settings belong together, for --help and docs/configuration.md: the most used first.

A setting of a subclass that no group names is shown in a group of its own, at the end.
"""

from typing import Literal, NamedTuple, get_args

Mode = Literal["serve", "process", "evaluate", "doctor"]


class SettingGroup(NamedTuple):
    """A heading, the settings below it, and the modes in whose help it is shown; every mode takes every setting."""

    title: str
    names: tuple[str, ...]
    modes: tuple[Mode, ...] = get_args(Mode)


_TRAINING: tuple[Mode, ...] = ("serve", "process", "doctor")

ENV_GROUPS = (
    SettingGroup(
        "Most used",
        (
            *("group_size", "total_steps", "dataset_name", "dataset_format", "renderer", "tokenizer_name"),
            *("max_turns", "max_token_length", "max_tokens_per_turn", "temperature"),
            *("data_path_to_save_groups", "resume", "overwrite", "use_wandb"),
        ),
    ),
    SettingGroup(
        "Distillation",
        (
            *("opd_enabled", "distill_topk", "prm_votes", "hint_vote_rule", "hint_selection", "hint_placement"),
            "hint_max_next_state_chars",
        ),
        _TRAINING,
    ),
    SettingGroup(
        "Judge: who writes the hints",
        (
            *("judge_base_url", "judge_model_name", "judge_api_key", "judge_temperature", "judge_max_tokens"),
            *("judge_timeout_s", "judge_extra_body"),
        ),
        _TRAINING,
    ),
    SettingGroup(
        "Teacher: who scores the turns", ("teacher_base_url", "teacher_model_name", "teacher_api_key"), _TRAINING
    ),
    SettingGroup(
        "Trainer",
        (
            *("rollout_server_url", "max_batches_offpolicy", "inference_weight", "min_batch_allocation"),
            *("ensure_scores_are_not_same", "steps_per_eval", "eval_handling", "eval_limit_ratio"),
        ),
        ("serve", "doctor"),
    ),
    SettingGroup(
        "Evaluation",
        ("eval_samples", "eval_temperature", "data_dir_to_save_evals"),
        ("serve", "evaluate"),
    ),
    SettingGroup(
        "Tasks",
        (
            *("dataset_split", "dataset_fields", "dataset_limit", "dataset_skip_broken", "seed"),
            *("eval_fraction", "eval_seed", "eval_dataset_name", "eval_dataset_split", "eval_dataset_format"),
            "eval_dataset_fields",
        ),
    ),
    SettingGroup("Agent", ("system_prompt", "renderer_options", "top_p", "tool_timeout_s", "tool_output_max_chars")),
    SettingGroup(
        "Hidden tests and reward",
        ("verify_timeout_s", "correctness_weight", "efficiency_weight", "tool_usage_weight"),
    ),
    SettingGroup(
        "Sandbox",
        (
            *("sandbox_backend", "sandbox_image", "sandbox_swerex_url", "sandbox_swerex_token"),
            *("sandbox_memory_mb", "sandbox_file_mb", "sandbox_disk_mb"),
        ),
    ),
    SettingGroup(
        "How much at once",
        (
            *("max_concurrent_episodes", "max_concurrent_groups", "max_concurrent_judgements"),
            *("max_concurrent_scores", "server_retry_s"),
        ),
    ),
    SettingGroup(
        "What is logged and sent",
        ("report", "include_messages", "wandb_name", "num_rollouts_to_keep", "num_rollouts_per_group_for_logging"),
        _TRAINING,
    ),
)

SERVER_GROUPS = (
    SettingGroup("Policy server", ("base_url", "model_name", "api_key", "tokenizer_name")),
    SettingGroup(
        "Policy server: limits",
        ("timeout", "num_max_requests_at_once", "num_requests_for_eval", "rolling_buffer_length"),
    ),
)

GROUPS = {"env": ENV_GROUPS, "openai": SERVER_GROUPS}

NO_EFFECT = {
    "env": frozenset(
        {"max_num_workers", "max_eval_workers", "max_num_workers_per_node", "batch_size", "worker_timeout"}
        | {"min_items_sent_before_logging", "thinking_mode", "reasoning_effort", "max_reasoning_tokens"}
        | {"custom_thinking_prompt"}
    ),
    "openai": frozenset({"n_kwarg_is_ignored", "health_check", "server_type"}),
}
"""Settings of Atropos that this package takes, so that its YAML files load, and does nothing with."""
