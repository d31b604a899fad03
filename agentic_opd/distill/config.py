"""Settings of distillation: the votes, the hint, the judge and the teacher."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, SecretStr, model_validator

from agentic_opd.settings.fields import CONCURRENCY, DISTILLATION, JUDGE, RUN_ONLY, TEACHER, Url


class DistillConfig(BaseModel):
    """How hints are found and turns are scored."""

    setting_group: ClassVar = DISTILLATION

    opd_enabled: bool = Field(
        default=True, description="Distill from hindsight. Off: no judge is asked and no distillation field is written."
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

    judge_base_url: Annotated[Url | None, JUDGE] = Field(
        default=None, description="OpenAI-compatible endpoint of the judge, ending in /v1. Unset: the policy server."
    )
    judge_model_name: Annotated[str | None, JUDGE] = Field(
        default=None, description="The judge's model. Unset: the policy's."
    )
    judge_api_key: Annotated[SecretStr | None, JUDGE] = Field(default=None, description="Key for judge_base_url.")
    judge_temperature: Annotated[float, JUDGE] = Field(
        default=0.7, ge=0.0, le=2.0, description="Sampling temperature of the votes."
    )
    judge_max_tokens: Annotated[int, JUDGE] = Field(default=512, ge=16, description="Tokens one vote may take.")
    judge_timeout_s: Annotated[float, JUDGE] = Field(
        default=120.0, gt=0, description="Seconds one judge request may take."
    )
    judge_extra_body: Annotated[dict[str, Any], JUDGE] = Field(
        default_factory=dict,
        description="Further fields of the judge request, for example "
        "{chat_template_kwargs: {enable_thinking: false}}.",
    )

    teacher_base_url: Annotated[Url | None, TEACHER] = Field(
        default=None,
        description="A separate vLLM server, ending in /v1, that scores the turns. It must have the policy's "
        "vocabulary. Unset: the policy server.",
    )
    teacher_model_name: Annotated[str | None, TEACHER] = Field(
        default=None, description="The teacher's model. Unset: what it serves."
    )
    teacher_api_key: Annotated[SecretStr | None, TEACHER] = Field(default=None, description="Key for teacher_base_url.")
    max_concurrent_judgements: Annotated[int, CONCURRENCY, RUN_ONLY] = Field(
        default=64, ge=1, description="Judge requests under way at the same time."
    )
    max_concurrent_scores: Annotated[int, CONCURRENCY, RUN_ONLY] = Field(
        default=32, ge=1, description="Scoring requests under way at the same time."
    )

    @model_validator(mode="after")
    def _check_keys(self) -> "DistillConfig":
        for who in ("judge", "teacher"):
            if getattr(self, f"{who}_api_key") is not None and getattr(self, f"{who}_base_url") is None:
                raise ValueError(f"{who}_api_key is set, but {who}_base_url is not")
        return self
