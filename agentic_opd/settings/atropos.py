"""Settings of Atropos: those without effect here, accepted so that YAML files for other environments load, and those
of a server.

Settings of an environment that have an effect are declared in env/config.py. A test compares all with atroposlib's
models, which are not imported here because their import takes seconds.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from agentic_opd.settings.fields import FIRST, NO_EFFECT, POLICY_SERVER


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


UNNAMED_MODEL = "default"
"""Value of `openai.model_name` for whatever the server serves."""


class PolicyServerConfig(BaseModel):
    """Settings of one of the policy's vLLM servers; includes each setting of Atropos' APIServerConfig."""

    setting_group: ClassVar = POLICY_SERVER

    base_url: Annotated[str | None, FIRST] = Field(
        default="http://127.0.0.1:8000/v1",
        description="Address of the server, with or without /v1. Several addresses, separated by commas, are "
        "servers with otherwise equal settings.",
    )
    model_name: Annotated[str, FIRST] = Field(
        default=UNNAMED_MODEL,
        description="Name under which the server serves the model; default: the name that the server reports.",
    )
    api_key: Annotated[str | None, FIRST] = Field(
        default="", description="API key of the server. Unset: the variable VLLM_API_KEY, or none."
    )
    tokenizer_name: str = Field(
        default="none", description="Tokenizer if env.tokenizer_name is unset; none: model_name."
    )
    timeout: int = Field(default=1200, ge=1, description="Time limit of one request, in seconds.")
    num_max_requests_at_once: int = Field(
        default=512, ge=1, description="Number of sampling requests in flight at the same time."
    )
    num_requests_for_eval: int = Field(
        default=64, ge=1, description="Number of an evaluation's sampling requests in flight at the same time."
    )
    rolling_buffer_length: int = Field(
        default=1000, ge=1, description="Number of latest requests over which train/sample_s is measured."
    )
    server_type: Annotated[Literal["openai", "trl", "sglang", "vllm"], NO_EFFECT] = "vllm"
    n_kwarg_is_ignored: Annotated[bool, NO_EFFECT] = False
    health_check: Annotated[bool, NO_EFFECT] = False
