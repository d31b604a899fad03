"""Settings of a rollout: how the policy is prompted and sampled, when an episode ends, and what it is rewarded for."""

from typing import Any

from pydantic import BaseModel, Field, model_validator


class RolloutConfig(BaseModel):
    """How episodes are sampled and rewarded, whatever their world."""

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
    correctness_weight: float = Field(default=0.7, ge=0, le=1, description="Weight of hidden tests passed.")
    efficiency_weight: float = Field(default=0.15, ge=0, le=1, description="Weight of turns saved.")
    tool_usage_weight: float = Field(default=0.15, ge=0, le=1, description="Weight of tool calls that worked.")

    @model_validator(mode="after")
    def _check_weights(self) -> "RolloutConfig":
        total = self.correctness_weight + self.efficiency_weight + self.tool_usage_weight
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"correctness_weight, efficiency_weight and tool_usage_weight must add up to 1, got {total:g}"
            )
        return self
