"""Settings, flat and validated: `RolloutConfig` for the agent loop, `DistillConfig` for distillation.

The environments join them with Atropos' own `BaseEnvConfig` (agent_env.py, env.py); this module imports none of it.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SecretStr, model_validator

Url = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]

DatasetFormat = Literal["generic", "humaneval", "mbpp", "apps"]


class RolloutConfig(BaseModel):
    """How tasks are loaded, rolled out, verified and rewarded."""

    dataset_name: str | None = Field(
        default=None,
        description="Where tasks come from: a local .jsonl, .jsonl.gz or .parquet file, a folder (of such files, or "
        "saved by `datasets`), or a name on the hub (OWNER/NAME or OWNER/NAME:CONFIG). Unset: the built-in tasks.",
    )
    dataset_split: str = Field(default="train", description="Split to load, where the dataset has splits.")
    dataset_format: DatasetFormat = Field(
        default="generic",
        description="Preset that says which field of a row holds what; apps is for LiveCodeBench and other sets of "
        "inputs and outputs too.",
    )
    dataset_fields: dict[str, str] = Field(
        default_factory=dict,
        description="Overrides of the preset: our name -> the row's field, for example {prompt: question}.",
    )
    dataset_limit: int | None = Field(default=None, ge=1, description="Use only the first N tasks of a dataset.")
    dataset_skip_broken: bool = Field(
        default=False, description="Leave out rows that cannot become tasks, and say how many, instead of stopping."
    )

    eval_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the dataset's tasks that is held out for evaluation, by a hash of the task's id. The "
        "built-in tasks, being only eight, are used for both.",
    )
    eval_seed: int = Field(default=0, ge=0, description="Seed of that hash: which tasks are held out.")
    eval_dataset_name: str | None = Field(
        default=None, description="A dataset to evaluate on, named as in dataset_name; nothing is held out then."
    )
    eval_dataset_split: str | None = Field(
        default=None,
        description="Split to evaluate on, of eval_dataset_name (unset: dataset_split) or else of dataset_name.",
    )
    eval_dataset_format: Literal["same", DatasetFormat] = Field(
        default="same", description="Preset of the dataset to evaluate on; same: dataset_format and dataset_fields."
    )
    eval_dataset_fields: dict[str, str] = Field(
        default_factory=dict, description="Overrides of that preset, as in dataset_fields."
    )

    seed: int = Field(default=0, ge=0, description="Seed of the order in which tasks are drawn.")

    system_prompt: str | None = Field(default=None, description="Replaces the agent's system prompt.")
    renderer: str = Field(
        default="auto",
        description="Renderer of the `renderers` package: auto, qwen3, llama-3, glm-4.5, ..., or default (the "
        "tokenizer's chat template). Name it for a fine-tune or a local path: auto knows exact model names only.",
    )
    renderer_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of that renderer, for example {enable_thinking: false}."
    )
    max_turns: int = Field(default=8, ge=1, le=1000, description="Assistant turns an episode may take.")
    max_token_length: int = Field(
        default=8192, ge=16, description="Tokens of a whole episode, prompt and tool results included."
    )
    max_tokens_per_turn: int = Field(default=1024, ge=1, description="Tokens one assistant turn may sample.")
    temperature: float = Field(default=1.0, ge=0.0, le=2.0, description="Sampling temperature of training rollouts.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling, in training and evaluation.")

    sandbox_backend: Literal["bubblewrap", "docker", "swerex", "unsafe-local"] = Field(
        default="bubblewrap",
        description="Isolation in which model-written code runs: namespaces of this machine, containers of a Docker "
        "engine (extra [docker]), a SWE-ReX server (extra [swerex]), or, with unsafe-local, none.",
    )
    sandbox_image: str = Field(
        default="python:3.11-slim",
        min_length=1,
        description="Image of sandbox_backend docker, with Python 3.8 or later, a shell, tar and findutils. It is "
        "never pulled.",
    )
    sandbox_swerex_url: Url | None = Field(
        default=None, description="Server of sandbox_backend swerex, for example http://127.0.0.1:8880."
    )
    sandbox_swerex_token: SecretStr | None = Field(
        default=None, description="What that server was given as --auth-token."
    )
    tool_timeout_s: float = Field(default=30.0, gt=0, description="Seconds one tool call may take.")
    tool_output_max_chars: int = Field(
        default=4000, ge=200, description="Characters of a tool result; what is longer is cut in the middle."
    )
    sandbox_memory_mb: int = Field(default=1024, ge=64, description="Address space of each process, in MiB.")
    sandbox_file_mb: int = Field(default=64, ge=1, description="Size of each file a process writes, in MiB.")
    sandbox_disk_mb: int = Field(
        default=512, ge=1, description="Size of all files that a sandbox keeps, in MiB; swerex does not limit it."
    )
    verify_timeout_s: float = Field(default=30.0, gt=0, description="Seconds the hidden tests of one episode may take.")

    correctness_weight: float = Field(default=0.7, ge=0, le=1, description="Weight of hidden tests passed.")
    efficiency_weight: float = Field(default=0.15, ge=0, le=1, description="Weight of turns saved.")
    tool_usage_weight: float = Field(default=0.15, ge=0, le=1, description="Weight of tool calls that worked.")

    eval_samples: int = Field(default=1, ge=1, description="Samples of each task in an evaluation, for pass@k.")
    eval_temperature: float = Field(default=0.0, ge=0.0, le=2.0, description="Sampling temperature of evaluations.")

    max_concurrent_episodes: int = Field(default=64, ge=1, description="Episodes that run at the same time.")
    max_concurrent_groups: int = Field(default=8, ge=1, description="Groups that run at the same time.")
    server_retry_s: float = Field(
        default=60.0, ge=0, description="Seconds to go on asking a server that does not answer before giving up."
    )
    resume: bool = Field(default=False, description="Continue the file of an earlier run; goes before overwrite.")
    overwrite: bool = Field(default=False, description="Replace the file of an earlier run.")

    @model_validator(mode="after")
    def _check_together(self) -> "RolloutConfig":
        total = self.correctness_weight + self.efficiency_weight + self.tool_usage_weight
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"correctness_weight, efficiency_weight and tool_usage_weight must add up to 1, got {total:g}"
            )
        if self.eval_samples > 1 and self.eval_temperature == 0.0:
            raise ValueError(
                "eval_samples above 1 needs an eval_temperature above 0: at temperature 0 all samples are the same"
            )
        if self.eval_dataset_split is not None and self.eval_dataset_name is None and self.dataset_name is None:
            raise ValueError("eval_dataset_split is set, but neither eval_dataset_name nor dataset_name is")
        if self.sandbox_backend == "swerex" and None in (self.sandbox_swerex_url, self.sandbox_swerex_token):
            raise ValueError("sandbox_backend swerex needs sandbox_swerex_url and sandbox_swerex_token")
        return self


class DistillConfig(BaseModel):
    """How hints are found and turns are scored."""

    opd_enabled: bool = Field(
        default=True, description="Distil from hindsight. Off: no judge is asked and no distillation field is written."
    )
    distill_topk: int = Field(
        default=50,
        ge=1,
        le=1000,
        description="Entries of a scored row: the sampled token and the teacher's top others.",
    )
    prm_votes: int = Field(default=3, ge=1, le=64, description="Votes the judge is asked for on each turn.")
    hint_max_next_state_chars: int = Field(
        default=4000, ge=100, description="Characters of a next state shown to the judge; longer is cut in the middle."
    )
    hint_vote_rule: Literal["majority", "any"] = Field(
        default="majority",
        description="When a hint is accepted: more than half of all votes are positive, or any vote is (OpenClaw-RL).",
    )
    hint_selection: Literal["longest", "shortest"] = Field(
        default="longest", description="Which of the positive votes' hints is used."
    )
    hint_placement: Literal["end", "last_user"] = Field(
        default="end",
        description="Where the hint enters the teacher's prompt: a user message before the assistant's opening, or "
        "appended to the last user message.",
    )

    judge_base_url: Url | None = Field(
        default=None, description="OpenAI-compatible endpoint of the judge, ending in /v1. Unset: the policy server."
    )
    judge_model_name: str | None = Field(default=None, description="The judge's model. Unset: the policy's.")
    judge_api_key: SecretStr | None = Field(default=None, description="Key for judge_base_url.")
    judge_temperature: float = Field(default=0.7, ge=0.0, le=2.0, description="Sampling temperature of the votes.")
    judge_max_tokens: int = Field(default=512, ge=16, description="Tokens one vote may take.")
    judge_timeout_s: float = Field(default=120.0, gt=0, description="Seconds one judge request may take.")
    judge_extra_body: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of the judge request, for example "
        "{chat_template_kwargs: {enable_thinking: false}}.",
    )

    teacher_base_url: Url | None = Field(
        default=None,
        description="A separate vLLM server, ending in /v1, that scores the turns. It must have the policy's "
        "vocabulary. Unset: the policy server.",
    )
    teacher_model_name: str | None = Field(default=None, description="The teacher's model. Unset: what it serves.")
    teacher_api_key: SecretStr | None = Field(default=None, description="Key for teacher_base_url.")
    max_concurrent_judgements: int = Field(default=64, ge=1, description="Judge requests under way at the same time.")
    max_concurrent_scores: int = Field(default=32, ge=1, description="Scoring requests under way at the same time.")

    @model_validator(mode="after")
    def _check_keys(self) -> "DistillConfig":
        for who in ("judge", "teacher"):
            if getattr(self, f"{who}_api_key") is not None and getattr(self, f"{who}_base_url") is None:
                raise ValueError(f"{who}_api_key is set, but {who}_base_url is not")
        return self


def default_output_folder(mode: str) -> Path:
    """Where `mode` writes unless told otherwise."""
    return Path("runs") / mode
