"""Settings of a rollout: how the policy is prompted and sampled, when an episode ends, and what it is rewarded for."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from agentic_opd.settings.fields import AGENT, MOST_USED, REWARD


class RendererConfig(BaseModel):
    """Settings of the renderer."""

    setting_group: ClassVar = AGENT

    renderer: Annotated[str, MOST_USED] = Field(
        default="auto",
        description="Renderer of the `renderers` package: auto, qwen3, llama-3, glm-4.5, ...; default (the "
        "tokenizer's chat template); or a class as package.module:CLASS or FILE.py:CLASS. Name it for a fine-tune or a "
        "local path: auto knows exact model names only.",
    )
    renderer_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of that renderer, for example {enable_thinking: false}. With default: the template's "
        "variables, and tool_parser, which reads tool calls (hermes, llama3_json, mistral, pythonic, ...).",
    )
    tool_format: Literal["template", "text"] = Field(
        default="template",
        description="Who tells the model of its tools: its chat template, or (text) the system prompt, for a template "
        "that knows no tools. See docs/models.md.",
    )
    stop_tokens: tuple[str, ...] = Field(
        default=(),
        description="Tokens that end a turn. Unset: those of the model's generation_config.json and tokenizer. The "
        "token with which the chat template closes a turn is always one.",
    )


class RolloutConfig(RendererConfig):
    """Settings of sampling and reward that are common to all worlds."""

    setting_group: ClassVar = AGENT

    system_prompt: str | None = Field(default=None, description="Replaces the agent's system prompt.")
    max_turns: Annotated[int, MOST_USED] = Field(
        default=8, ge=1, le=1000, description="Assistant turns an episode may take."
    )
    max_token_length: Annotated[int, MOST_USED] = Field(
        default=8192, ge=16, description="Tokens of a whole episode, prompt and tool results included."
    )
    max_tokens_per_turn: Annotated[int, MOST_USED] = Field(
        default=1024, ge=1, description="Tokens one assistant turn may sample."
    )
    temperature: Annotated[float, MOST_USED] = Field(
        default=1.0, ge=0.0, le=2.0, description="Sampling temperature of training rollouts."
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling, in training and evaluation.")
    agent_command: Annotated[str | None, MOST_USED] = Field(
        default=None,
        description="Shell command of a program that takes the place of the package's own loop: it runs in the "
        "sandbox, in the work directory, is told of the task by the variable TASK and the file TASK_FILE, and asks the "
        "policy at OPENAI_BASE_URL with OPENAI_API_KEY. Needs the extra [gateway].",
    )
    agent_timeout_s: float = Field(default=300.0, gt=0, description="Seconds that program may take for an episode.")
    agent_mounts: tuple[Path, ...] = Field(
        default=(),
        description="Files and folders of this machine that the program needs, such as its virtual environment: the "
        "sandbox sees them at the same place, and can't change them.",
    )
    agent_variables: dict[str, str] = Field(
        default_factory=dict, description="Further environment variables of that program."
    )
    correctness_weight: Annotated[float, REWARD] = Field(
        default=0.7, ge=0, le=1, description="Weight of hidden tests passed."
    )
    efficiency_weight: Annotated[float, REWARD] = Field(
        default=0.15, ge=0, le=1, description="Weight of turns saved, times the tests passed."
    )
    tool_usage_weight: Annotated[float, REWARD] = Field(
        default=0.15, ge=0, le=1, description="Weight of turns without a broken tool call, times the tests passed."
    )

    @model_validator(mode="after")
    def _check_mounts(self) -> "RolloutConfig":
        if missing := [str(path) for path in self.agent_mounts if not path.exists()]:
            raise ValueError(f"agent_mounts names what is not there: {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> "RolloutConfig":
        total = self.correctness_weight + self.efficiency_weight + self.tool_usage_weight
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"correctness_weight, efficiency_weight and tool_usage_weight must add up to 1, got {total:g}"
            )
        return self
