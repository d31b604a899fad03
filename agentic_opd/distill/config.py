"""Settings of distillation: the votes, the hint, the judge and the teacher."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from agentic_opd.distill.prompts import STEP_PROTOCOL, VOTE_PROTOCOL, template_problems
from agentic_opd.settings.fields import CONCURRENCY, DISTILLATION, JUDGE, RUN_ONLY, TEACHER, HintSource, Url


def _names(value: object) -> object:
    """`judge` and `sibling,judge` as lists."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class TeacherServer(BaseModel):
    """A server that scores the turns of one kind of task."""

    model_config = ConfigDict(extra="forbid")

    base_url: Url
    model_name: str | None = None
    api_key: SecretStr | None = None


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
    hindsight: Literal["delayed", "next_state"] = Field(
        default="delayed",
        description="What a turn is judged by. delayed: its next state, what later turns showed about what it changed, "
        "and the verdict if something of it is left in the judged files. next_state (the published method): its next "
        "state alone, and for the last turn the verdict.",
    )
    hindsight_max_turns: int = Field(
        default=4, ge=0, description="delayed: later turns whose results a turn is shown at most."
    )
    hindsight_max_chars: int = Field(
        default=2000, ge=0, description="delayed: characters of all these results together, the earliest first."
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

    score_reasoning: Literal["all", "answer"] = Field(
        default="all",
        description="Which tokens of a turn that thinks are scored: all of them, or those behind its reasoning alone.",
    )

    step_votes: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Votes on a second question: did the turn do what was wanted (1, 0, -1)? Recorded as the turn's "
        "step_score, which a trainer may take as a reward. 0: it is not asked.",
    )
    hint_source: Annotated[tuple[HintSource, ...], BeforeValidator(_names)] = Field(
        default=("judge",),
        min_length=1,
        description="What the teacher reads: one source, or several in their order of preference ([sibling, judge]), "
        "of which the first that has a hint for a turn is taken. judge: the hint that the judge wrote. feedback: what "
        "came after the turn, word for word (SDPO). sibling: what another rollout of the group that passed did, "
        "for the turn that made what failed (group_size above 1). reference: the task's own solution (OPSD). Only"
        " for judge the judge is asked, for step_votes too; what holds hidden tests' data is dropped as leaked. "
        "other_task, none (each alone): where the judge wrote a hint, an accepted one of another task in its "
        "place (until there is one, the turn ends as vote_failed), or nothing; they show what a run learns "
        "without the hint's content.",
    )
    control: Literal["none", "neutral", "other", "same_task"] = Field(
        default="none",
        description="Score each turn under a control hint too, in the same request, and record the logprobs: neutral "
        "(control_neutral_hint), other (an accepted hint of another task), or same_task (another accepted hint of this "
        "task). While none fits, the neutral one stands in. About doubles the scoring time.",
    )
    control_neutral_hint: str = Field(
        default="Take your time and think about the next step.",
        min_length=11,
        description="A control hint that says nothing about any task.",
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
    judge_system_prompt: Annotated[str | None, JUDGE] = Field(
        default=None,
        description="What the judge is told before a question. It must name the protocol: \\boxed{1}, \\boxed{-1}, "
        "[HINT_START] and [HINT_END]. Unset: the text in docs/judge.md.",
    )
    judge_reads_reasoning: Annotated[bool, JUDGE] = Field(
        default=False,
        description="The judge reads a turn's reasoning before what it said, cut in the middle to "
        "hint_max_next_state_chars.",
    )
    judge_step_prompt: Annotated[str | None, JUDGE] = Field(
        default=None,
        description="The same for the second question; it must name \\boxed{1} and \\boxed{-1}. Unset: as in "
        "docs/judge.md.",
    )
    judge_question: Annotated[str | None, JUDGE] = Field(
        default=None,
        description="Template of the question, with {mark}, {task}, {turn} and {evidence}. Unset: as in docs/judge.md.",
    )
    judge_timeout_s: Annotated[float, JUDGE] = Field(
        default=120.0,
        gt=0,
        description="Seconds without an answer of the judge to any request after which those under way are given up: "
        "they are asked again a quarter at a time, and one that is not answered alone ends its turn as judge_error.",
    )
    judge_extra_body: Annotated[dict[str, Any], JUDGE] = Field(
        default_factory=dict,
        description="Further fields of the judge request, for example "
        "{chat_template_kwargs: {enable_thinking: false}}.",
    )

    teacher: Annotated[Literal["live", "frozen", "ema"], TEACHER] = Field(
        default="live",
        description="Which weights of the policy's server score the turns: live, those that sampled them; frozen, "
        "those that the server started with; ema, the moving average that the trainer keeps (its ema_decay). The last "
        "two need a policy that is trained by adapters (docs/closing_the_loop.md). teacher_base_url is another server.",
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
    teachers: Annotated[dict[str, TeacherServer], TEACHER] = Field(
        default_factory=dict,
        description="Servers that score the tasks of one kind, by the tasks' `kind` (a dataset's column of that name, "
        "or dataset_fields): {sql: {base_url: http://127.0.0.1:8001/v1, model_name: ..., api_key: ...}}, the last two "
        "as for teacher_base_url. Tasks of no such kind have the usual teacher.",
    )
    gap_baseline: Annotated[Literal["student", "teacher"], TEACHER] = Field(
        default="student",
        description="Whose reading without the hint gaps are measured from, if teacher_base_url or teachers name "
        "another model: the policy's, or the teacher's own. Without them both are one.",
    )
    max_concurrent_judgements: Annotated[int, CONCURRENCY, RUN_ONLY] = Field(
        default=64, ge=1, description="Judge requests under way at the same time; fewer where the judge is too slow."
    )
    max_concurrent_scores: Annotated[int, CONCURRENCY, RUN_ONLY] = Field(
        default=32, ge=1, description="Scoring requests under way at the same time."
    )

    @property
    def logprobs_asked(self) -> int:
        """Most logprobs a position that the teacher is asked for.

        A control's rows are asked for twice as many as the hinted ones: among them are most of the hinted rows' ids.
        """
        return self.distill_topk if self.control == "none" else self.control_topk

    @property
    def asks_judge(self) -> bool:
        """Whether any source of hints needs the judge."""
        return any(source in ("judge", "other_task", "none") for source in self.hint_source)

    @property
    def control_topk(self) -> int:
        """Logprobs a position that a control is asked for."""
        return 1 if self.distill_topk == 1 else 2 * self.distill_topk

    @property
    def usual_teacher(self) -> TeacherServer | None:
        """The server that scores where `teachers` names no other; None: the policy's own."""
        if self.teacher_base_url is None:
            return None
        return TeacherServer(
            base_url=self.teacher_base_url, model_name=self.teacher_model_name, api_key=self.teacher_api_key
        )

    @model_validator(mode="after")
    def _check_prompts(self) -> "DistillConfig":
        wanted = {"judge_system_prompt": VOTE_PROTOCOL, "judge_step_prompt": STEP_PROTOCOL}
        for name, words in wanted.items():
            prompt = getattr(self, name)
            missing = [word for word in words if prompt is not None and word not in prompt]
            if missing:
                raise ValueError(f"{name} does not say {' and '.join(missing)}, so its answers could not be read")
        problems = [] if self.judge_question is None else template_problems(self.judge_question)
        if problems:
            raise ValueError(f"judge_question: {'; '.join(problems)}")
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> "DistillConfig":
        names = self.hint_source
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"hint_source names {' and '.join(twice)} twice")
        if len(names) > 1 and (alone := [name for name in names if name in ("other_task", "none")]):
            raise ValueError(f"hint_source {alone[0]} is a control, which stands alone: leave out the others, or it")
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> "DistillConfig":
        for who in ("judge", "teacher"):
            if getattr(self, f"{who}_api_key") is not None and getattr(self, f"{who}_base_url") is None:
                raise ValueError(f"{who}_api_key is set, but {who}_base_url is not")
        if self.teacher != "live" and self.teacher_base_url is not None:
            raise ValueError(f"teacher is {self.teacher}, weights of the policy's server, but teacher_base_url is set")
        return self
