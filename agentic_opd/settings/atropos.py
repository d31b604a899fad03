"""Settings of Atropos that do nothing here. They are taken, so that YAML files made for other environments load.

Those of Atropos' settings that do something are declared in env/config.py. A test compares both with atroposlib's own
models, which cannot be imported here: that takes seconds.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from agentic_opd.settings.groups import NO_EFFECT


class IdleEnvSettings(BaseModel):
    """Of atroposlib's BaseEnvConfig."""

    max_num_workers: Annotated[int, NO_EFFECT] = -1
    max_eval_workers: Annotated[int, NO_EFFECT] = 16
    max_num_workers_per_node: Annotated[int, NO_EFFECT] = 8
    batch_size: Annotated[int, NO_EFFECT] = -1
    worker_timeout: Annotated[float, NO_EFFECT] = 600
    min_items_sent_before_logging: Annotated[int, NO_EFFECT] = 2
    thinking_mode: Annotated[bool, NO_EFFECT] = False
    reasoning_effort: Annotated[str | None, NO_EFFECT] = Field(
        default=None, pattern="^(none|minimal|low|medium|high|xhigh)$"
    )
    max_reasoning_tokens: Annotated[int | None, NO_EFFECT] = Field(default=None, ge=1024, le=32000)
    custom_thinking_prompt: Annotated[str | None, NO_EFFECT] = None


class IdleServerSettings(BaseModel):
    """Of atroposlib's APIServerConfig."""

    server_type: Annotated[Literal["openai", "trl", "sglang", "vllm"], NO_EFFECT] = "vllm"
    n_kwarg_is_ignored: Annotated[bool, NO_EFFECT] = False
    health_check: Annotated[bool, NO_EFFECT] = False
