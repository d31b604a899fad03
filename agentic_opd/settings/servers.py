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
        description="The server's address, with or without /v1; several, with "
        "commas between them: servers that are alike otherwise.",
    )
    model_name: str = Field(
        default="default", description="The model by the name it is served under; default: what the server says."
    )
    api_key: str | None = Field(default="", description="The server's key. Unset: the variable VLLM_API_KEY, or none.")
    tokenizer_name: str = Field(
        default="none", description="Its tokenizer, where env.tokenizer_name is unset; none: model_name."
    )
    timeout: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=1200, ge=1, description="Seconds one request may take."
    )
    num_max_requests_at_once: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=512, ge=1, description="Sampling requests under way at the same time."
    )
    num_requests_for_eval: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=64, ge=1, description="Sampling requests of an evaluation under way at the same time."
    )
    rolling_buffer_length: Annotated[int, POLICY_SERVER_LIMITS] = Field(
        default=1000, ge=1, description="How many of the latest requests train/sample_s is measured over."
    )
