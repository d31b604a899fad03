"""Settings of one of the policy's vLLM servers."""

from typing import Annotated, ClassVar

from pydantic import Field

from agentic_opd.settings.atropos import IdleServerSettings
from agentic_opd.settings.fields import POLICY_SERVER, POLICY_SERVER_LIMITS


class PolicyServerConfig(IdleServerSettings):
    """Settings of one of the policy's vLLM servers; includes each setting of Atropos' APIServerConfig."""

    setting_group: ClassVar = POLICY_SERVER

    base_url: str | None = Field(
        default="http://127.0.0.1:8000/v1",
        description="Address of the server, with or without /v1. Several addresses, separated by commas, are "
        "servers with otherwise equal settings.",
    )
    model_name: str = Field(
        default="default",
        description="Name under which the server serves the model; default: the name that the server reports.",
    )
    api_key: str | None = Field(
        default="", description="API key of the server. Unset: the variable VLLM_API_KEY, or none."
    )
    tokenizer_name: str = Field(
        default="none", description="Tokenizer if env.tokenizer_name is unset; none: model_name."
    )
    timeout: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=1200, ge=1, description="Time limit of one request, in seconds."
    )
    num_max_requests_at_once: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=512, ge=1, description="Number of sampling requests in flight at the same time."
    )
    num_requests_for_eval: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=64, ge=1, description="Number of an evaluation's sampling requests in flight at the same time."
    )
    rolling_buffer_length: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=1000, ge=1, description="Number of latest requests over which train/sample_s is measured."
    )
