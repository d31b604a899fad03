"""Settings of Atropos without effect here. They are accepted, so that YAML files for other environments load.

Settings of Atropos with an effect are declared in env/config.py. A test compares both with atroposlib's models, which
are not imported here because their import takes seconds.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from agentic_opd.settings.fields import NO_EFFECT


class IdleEnvSettings(BaseModel):
    """Fields of atroposlib's BaseEnvConfig."""

    setting_group: ClassVar = NO_EFFECT

    max_num_workers: int = -1
    max_eval_workers: int = 16
    max_num_workers_per_node: int = 8
    batch_size: int = -1
    worker_timeout: float = 600
    min_items_sent_before_logging: int = 2
    thinking_mode: bool = False
    reasoning_effort: str | None = Field(default=None, pattern="^(none|minimal|low|medium|high|xhigh)$")
    max_reasoning_tokens: int | None = Field(default=None, ge=1024, le=32000)
    custom_thinking_prompt: str | None = None


class IdleServerSettings(BaseModel):
    """Fields of atroposlib's APIServerConfig."""

    setting_group: ClassVar = NO_EFFECT

    server_type: Literal["openai", "trl", "sglang", "vllm"] = "vllm"
    n_kwarg_is_ignored: bool = False
    health_check: bool = False
