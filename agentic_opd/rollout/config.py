"""Settings of a rollout: how the policy is prompted and sampled, when an episode ends, and its reward."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from agentic_opd.settings.fields import AGENT, FIRST, RENDERER, REWARD, Section
from agentic_opd.settings.old_names import RootSettings


class RendererConfig(Section):
    """How messages become prompts, and how calls are read from what the policy samples."""

    setting_group: ClassVar = RENDERER

    name: Annotated[str, FIRST] = Field(
        default="auto",
        description="Renderer of the `renderers` package (auto, qwen3, llama-3, glm-4.5, ...), default (the "
        "tokenizer's chat template), or a class as package.module:CLASS or FILE.py:CLASS. Name it for a fine-tuned "
        "or local model: auto recognises exact model names only.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the renderer, for example {enable_thinking: false}. With the renderer default: the "
        "template's variables, and tool_parser, the parser of tool calls (hermes, llama3_json, mistral, pythonic, "
        "...).",
    )
    tool_format: Literal["template", "text", "prompt"] = Field(
        default="template",
        description="Place where the model's tools are described: its chat template (template), or the system "
        "prompt (text), for a template without support for tools, or the task's own messages (prompt), with calls and "
        "results as with text. See docs/models.md.",
    )
    stop_tokens: tuple[str, ...] = Field(
        default=(),
        description="Tokens that end a turn, in addition to the token with which the chat template closes a turn. "
        "Unset: the stop tokens of the model's generation_config.json and tokenizer.",
    )

    @field_validator("options")
    @classmethod
    def _check_names(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            before, colon, after = name.partition(":")
            if colon:
                raise ValueError(f"{name!r} has no space behind its colon; write {{{before}: {after.strip()}}}")
        return options


class AgentConfig(Section):
    """A program that replaces the package's agent loop."""

    setting_group: ClassVar = AGENT

    command: Annotated[str | None, FIRST] = Field(
        default=None,
        description="Shell command of a program that replaces the package's agent loop (needs the extra [gateway]). "
        "It runs in the sandbox's work directory, reads the task from the variable TASK or from the file that "
        "TASK_FILE names, and calls the policy at OPENAI_BASE_URL with OPENAI_API_KEY.",
    )
    timeout_s: float = Field(default=300.0, gt=0, description="Time limit of command for one episode, in seconds.")
    mounts: tuple[Path, ...] = Field(
        default=(),
        description="Files and folders of this machine that command needs, such as its virtual environment. "
        "The sandbox mounts them read-only at the same path.",
    )
    variables: dict[str, str] = Field(default_factory=dict, description="Additional environment variables of command.")

    @field_validator("mounts")
    @classmethod
    def _check_mounts(cls, mounts: tuple[Path, ...]) -> tuple[Path, ...]:
        if missing := [str(path) for path in mounts if not path.exists()]:
            raise ValueError(f"there is no {', '.join(missing)}")
        return mounts


class RewardConfig(Section):
    """Weights of the reward's parts."""

    setting_group: ClassVar = REWARD

    correctness: float = Field(
        default=0.7, ge=0, le=1, description="Reward weight of the share of hidden tests passed."
    )
    efficiency: float = Field(
        default=0.15,
        ge=0,
        le=1,
        description="Reward weight of the share of turns saved, times the share of tests passed.",
    )
    tool_usage: float = Field(
        default=0.15,
        ge=0,
        le=1,
        description="Reward weight of the share of turns without a broken tool call, times the share of tests passed.",
    )

    @model_validator(mode="after")
    def _check_sum(self) -> "RewardConfig":
        total = self.correctness + self.efficiency + self.tool_usage
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"correctness, efficiency and tool_usage must add up to 1, got {total:g}")
        return self


class RolloutConfig(RootSettings):
    """Settings of sampling and reward that are common to all worlds."""

    setting_group: ClassVar = AGENT

    renderer: RendererConfig = RendererConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()

    system_prompt: str | None = Field(default=None, description="System prompt that replaces the agent's default one.")
    max_turns: Annotated[int, FIRST] = Field(
        default=8, ge=1, le=1000, description="Maximum number of assistant turns in an episode."
    )
    max_token_length: Annotated[int, FIRST] = Field(
        default=8192,
        ge=16,
        description="Maximum number of tokens in an episode, including the prompt and tool results.",
    )
    max_tokens_per_turn: Annotated[int, FIRST] = Field(
        default=1024, ge=1, description="Maximum number of tokens sampled in one assistant turn."
    )
    temperature: Annotated[float, FIRST] = Field(
        default=1.0, ge=0.0, le=2.0, description="Sampling temperature of training rollouts."
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling, in training and evaluation.")
