"""Settings of distillation: votes, hints, judge and teacher."""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agentic_opd.core.names import HINT_SOURCES
from agentic_opd.distill.prompts import (
    QUESTION_FIELDS,
    STEP_PROTOCOL,
    TRAJECTORY_FIELDS,
    TRAJECTORY_PROTOCOL,
    VOTE_PROTOCOL,
    template_problems,
)
from agentic_opd.settings.fields import DISTILLATION, FIRST, HINT, JUDGE, RUN_ONLY, TEACHER, Kinds, Section, Url
from agentic_opd.settings.old_names import RootSettings


def _names(value: object) -> object:
    """Split comma-separated names (`sibling,judge`) into a list."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class TeacherServer(Section):
    """A server that scores the tasks of one kind."""

    base_url: Url
    model_name: str | None = None
    api_key: SecretStr | None = None


class SeparateTeacher(NamedTuple):
    """A server beside the policy's that scores turns."""

    server: TeacherServer
    kind: str | None = None
    """Kind of the tasks that it scores; None: all kinds without a server of their own."""

    @property
    def key_setting(self) -> str:
        """The setting of its API key."""
        return "env.teacher.api_key" if self.kind is None else f"env.teacher.by_kind: {self.kind}: api_key"

    def named(self, text: str) -> str:
        """Return the text that names the kind of tasks that it scores."""
        return text if self.kind is None else f"{self.kind}: {text}"


class ProofConfig(Section):
    """Whether a hint must be proven before it is scored."""

    setting_group: ClassVar = HINT

    type: Any = Field(
        description="Test of a hint before it is scored: none, or replay (the episode starts again at the turn, and "
        "only a hint with which the policy passes more often, beyond chance, is scored; docs/proof.md).",
    )


class NoProof(ProofConfig):
    """Hints are scored as they are."""

    type: Literal["none"] = "none"


class ReplayProof(ProofConfig):
    """Proof by continuations of the hinted turn."""

    type: Literal["replay"] = "replay"
    pairs: int = Field(
        default=16,
        ge=4,
        description="Largest number of continuations of a turn with its hint, and of those without it.",
    )
    rollouts: int = Field(
        default=64,
        ge=8,
        description="Largest number of continuations for all hints of an episode; further hints are unproven.",
    )
    join: int = Field(
        default=0,
        ge=0,
        description="Largest number of continuations without a hint, from first turns, that join their group as "
        "rollouts of their own, for a trainer that compares rewards. They are not judged.",
    )
    refuted: Literal["drop", "contrast"] = Field(
        default="drop",
        description="Treatment of a refuted hint: drop, or contrast (its turn is scored without a hint, and the "
        "refuted hint is its control, so that a trainer with loss.contrast moves against it; needs hint.control).",
    )


class HintConfig(Section):
    """Where hints come from, which one is used, and how the teacher reads it."""

    setting_group: ClassVar = HINT

    source: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        default=("judge",),
        min_length=1,
        description="Sources of the teacher's hint, of which the first with a hint for a turn is used ([sibling, "
        "judge]): judge (the hint that the judge wrote), feedback (what came after the turn, verbatim; SDPO), "
        "sibling (what a passing rollout of the group did, for the turn that caused the failure; group_size above "
        "1), reference (the task's own solution; OPSD), or a function as FILE.py:NAME or package.module:NAME "
        "(docs/judge.md). feedback, sibling and reference never ask the judge, not even for judge.step_votes; hints "
        "with data of hidden tests are dropped as leaked.",
    )
    vote_rule: Literal["majority", "any"] = Field(
        default="majority",
        description="Rule by which a hint is accepted: more than half of all votes are positive (majority), or at "
        "least one is (any, as in OpenClaw-RL).",
    )
    selection: Literal["longest", "shortest", "overlap"] = Field(
        default="longest",
        description="Choice among the positive votes' hints: the longest, the shortest, or the one whose teacher "
        "overlaps most with the same weights without a hint (overlap, after OpenClaw-RL). overlap scores all of a "
        "turn's distinct accepted hints, and where there are several also the turn without a hint, in one request.",
    )
    placement: Literal["end", "last_user"] = Field(
        default="end",
        description="Position of the hint in the teacher's prompt: a user message before the assistant's opening "
        "(end), or appended to the last user message (last_user).",
    )
    control: Literal["none", "neutral", "other", "same_task"] = Field(
        default="none",
        description="Score each turn also under a control hint in the same request, at about twice the scoring "
        "time, and record the logprobs: neutral (hint.neutral), other (an accepted hint of another task), "
        "or same_task (another accepted hint of this task). The neutral hint is used while none of the others fits.",
    )
    proof: Annotated[ProofConfig, Kinds.of(none=NoProof, replay=ReplayProof)] = NoProof()
    neutral: str = Field(
        default="Take your time and think about the next step.",
        min_length=11,
        description="Control hint without information about any task.",
    )

    @property
    def asks_judge(self) -> bool:
        """Whether any hint source may ask the judge, as a user's may."""
        return any(name not in ("feedback", "sibling", "reference") for name in self.source)

    @model_validator(mode="after")
    def _check_proof(self) -> "HintConfig":
        if self.proof.type != "none" and self.selection == "overlap":
            raise ValueError("proof replay proves a turn's hint before the teacher reads it: set another selection")
        if isinstance(self.proof, ReplayProof) and self.proof.refuted == "contrast" and self.control == "none":
            raise ValueError(
                "proof.refuted contrast is for a trainer with loss.contrast, which needs a control for every turn: set "
                "hint.control, to neutral for example"
            )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> "HintConfig":
        names = self.source
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"source names {' and '.join(twice)} twice")
        if unknown := [name for name in names if name not in HINT_SOURCES and ":" not in name]:
            expected = ", ".join(HINT_SOURCES)
            raise ValueError(f"source {unknown[0]}: expected {expected}, FILE.py:NAME or package.module:NAME")
        return self


class EvidenceConfig(Section):
    """What the judge reads about a turn."""

    setting_group: ClassVar = HINT

    evidence: Literal["delayed", "next_state"] = Field(
        default="delayed",
        description="Evidence by which a turn is judged. delayed: its next state, whether it repeats the turn before, "
        "what later turns showed about its changes, and the verdict if any of its changes remain in the judged files; "
        "next_state (the published method): only its next state, and for the last turn the verdict.",
    )
    max_turns: int = Field(
        default=4, ge=0, description="delayed: maximum number of later turns whose results are evidence about a turn."
    )
    max_chars: int = Field(
        default=2000,
        ge=0,
        description="delayed: maximum number of characters of all these later results together, the earliest first.",
    )


class JudgeConfig(Section):
    """The judge, which votes on turns and writes hints."""

    setting_group: ClassVar = JUDGE

    base_url: Annotated[Url | None, FIRST] = Field(
        default=None,
        description="OpenAI-compatible endpoint of the judge, such as http://127.0.0.1:8002/v1. Its query is part of "
        "each request; with api-version in it (Azure), the key is sent as api-key. Unset: the policy server.",
    )
    model_name: Annotated[str | None, FIRST] = Field(
        default=None, description="Model of the judge. Unset: the policy's model."
    )
    api_key: SecretStr | None = Field(default=None, description="API key for base_url.")
    scope: Annotated[Literal["turn", "trajectory"], FIRST] = Field(
        default="turn",
        description="Subject of a question to the judge. turn: each turn with a next state is asked about by "
        "itself; trajectory: the whole rollout is asked about once, and the answer names the turns at fault, each with "
        "a hint (docs/judge.md). prm_votes answers are asked for either way. Rollouts are then judged at their end.",
    )
    when: Literal["always", "failed"] = Field(
        default="always",
        description="Rollouts that the judge reads: all of them (always), or only those that failed: a verdict "
        "below full, a reward of 0 or less, or, without either, a user who said something after a turn. Turns of the "
        "others end as not_judged.",
    )
    max_turns: int = Field(
        default=3, ge=1, le=64, description="scope trajectory: maximum number of turns that one answer may name."
    )
    max_question_chars: int | None = Field(
        default=None,
        ge=2000,
        description="scope trajectory: maximum number of characters of one question. A longer rollout is asked about "
        "in several windows, each with the task, the verdict, an outline of the other turns, and its turns in full. "
        "Unset: what the judge's context holds, or 48000 if its endpoint does not name it.",
    )
    temperature: float = Field(default=0.7, ge=0.0, le=2.0, description="Sampling temperature of the votes.")
    max_tokens: int = Field(default=512, ge=16, description="Maximum number of tokens of one vote.")
    timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds without any answer from the judge after which pending requests are cancelled. They are "
        "retried a quarter at a time; a request that is not answered even alone ends its turn as judge_error.",
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict,
        description="Additional fields of the judge request, for example {chat_template_kwargs: {enable_thinking: "
        "false}}.",
    )
    reads_reasoning: bool = Field(
        default=False,
        description="Show the judge a turn's reasoning before its answer, cut in the middle to "
        "hint_max_next_state_chars.",
    )
    system_prompt: str | None = Field(
        default=None,
        description="System prompt of the judge, which must name the protocol: \\boxed{1}, \\boxed{-1}, "
        "[HINT_START] and [HINT_END]. Unset: the text in docs/judge.md.",
    )
    question: str | None = Field(
        default=None,
        description="Template of the question, with {mark}, {task}, {turn} and {evidence}. Unset: the template in "
        "docs/judge.md.",
    )
    step_votes: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Number of votes on a second question: did the turn do what was wanted (1, 0, -1)? The result "
        "is recorded as the turn's step_score, which a trainer may use as a reward; 0: the question is not asked.",
    )
    step_prompt: str | None = Field(
        default=None,
        description="System prompt of the judge for the second question (step_votes), which must name \\boxed{1} "
        "and \\boxed{-1}. Unset: the text in docs/judge.md.",
    )
    trajectory_prompt: str | None = Field(
        default=None,
        description="System prompt of the judge for scope trajectory, which must name the protocol: \\boxed{N}, "
        "\\boxed{-1}, [HINT_START] and [HINT_END]; {max_turns} in it is replaced by that setting. Unset: the text in "
        "docs/judge.md.",
    )
    trajectory_question: str | None = Field(
        default=None,
        description="Template of the question for scope trajectory, with {mark}, {task}, {turns} and {verdict}. Unset: "
        "the template in docs/judge.md.",
    )
    max_concurrent: Annotated[int, RUN_ONLY] = Field(
        default=64,
        ge=1,
        description="Number of judge requests in flight at the same time, reduced if the judge is too slow.",
    )

    @field_validator("system_prompt", "step_prompt", "trajectory_prompt")
    @classmethod
    def _check_prompt(cls, prompt: str | None, info: ValidationInfo) -> str | None:
        words = _PROTOCOLS[info.field_name or ""]
        if missing := [word for word in words if prompt is not None and word not in prompt]:
            raise ValueError(f"it must name {' and '.join(missing)}: without them no answer can be read")
        return prompt

    @field_validator("question", "trajectory_question")
    @classmethod
    def _check_question(cls, template: str | None, info: ValidationInfo) -> str | None:
        fields = QUESTION_FIELDS if info.field_name == "question" else TRAJECTORY_FIELDS
        if template is not None and (problems := template_problems(template, fields)):
            raise ValueError("; ".join(problems))
        return template

    @property
    def judges_early(self) -> bool:
        """Whether a turn can be judged before its rollout has ended."""
        return self.scope == "turn" and self.when == "always"

    @model_validator(mode="after")
    def _check_key(self) -> "JudgeConfig":
        if self.api_key is not None and self.base_url is None:
            raise ValueError("api_key is set, but base_url is not")
        return self

    @model_validator(mode="after")
    def _check_scope(self) -> "JudgeConfig":
        if self.scope == "trajectory" and self.step_votes:
            raise ValueError("step_votes asks about single turns: set scope to turn, or step_votes to 0")
        return self


_PROTOCOLS = {
    "system_prompt": VOTE_PROTOCOL,
    "step_prompt": STEP_PROTOCOL,
    "trajectory_prompt": TRAJECTORY_PROTOCOL,
}
"""Setting of a prompt -> the strings that it must contain."""


class TeacherConfig(Section):
    """The teacher, which scores turns, and the rows that it writes."""

    setting_group: ClassVar = TEACHER

    weights: Annotated[Literal["live", "frozen", "ema"], FIRST] = Field(
        default="live",
        description="Weights of the policy's server that score the turns: live (those that sampled them; "
        "for short runs), frozen (those that the server started with), or ema (the moving average of the trainer, its "
        "ema_decay). frozen and ema need a policy that is trained with adapters (docs/closing_the_loop.md); "
        "base_url selects another server.",
    )
    base_url: Annotated[Url | None, FIRST] = Field(
        default=None,
        description="Separate vLLM server, ending in /v1, that scores the turns; it must have the policy's "
        "vocabulary. Unset: the policy server.",
    )
    model_name: str | None = Field(
        default=None, description="Model of the teacher. Unset: the model that its server serves."
    )
    api_key: SecretStr | None = Field(default=None, description="API key for base_url.")
    by_kind: dict[str, TeacherServer] = Field(
        default_factory=dict,
        description="Servers that score the tasks of one kind, by the tasks' `kind` (the dataset's column of that "
        "name, or world.dataset_fields): {sql: {base_url: http://127.0.0.1:8001/v1, model_name: ..., api_key: ...}}, "
        "with model_name and api_key as here. Tasks of all other kinds are scored by the usual teacher.",
    )
    gap_baseline: Literal["student", "teacher"] = Field(
        default="student",
        description="Reading without the hint from which gaps are measured, if base_url or by_kind name "
        "another model: the policy's (student), or the teacher's own. Without another model, both are the same.",
    )
    support: Literal["teacher", "student", "union"] = Field(
        default="teacher",
        description="Tokens of a scored row beside the sampled one: the teacher's most likely (teacher), the "
        "student's (student: those of the weights that sample, without the hint), or the most likely of both (union). "
        "student and union need a reading without the hint and twice the logprobs a row; on a server whose model "
        "runner takes no named ids (vLLM's V1), the student's tokens beyond them are replaced by the teacher's next.",
    )
    score_reasoning: Literal["all", "answer"] = Field(
        default="all",
        description="Scored tokens of a turn with reasoning: all tokens, or only those after the reasoning (answer).",
    )
    max_concurrent: Annotated[int, RUN_ONLY] = Field(
        default=32, ge=1, description="Number of scoring requests in flight at the same time."
    )

    @property
    def separate(self) -> tuple[SeparateTeacher, ...]:
        """The servers beside the policy's, the usual teacher first if it has one."""
        of_kinds = [SeparateTeacher(server, kind) for kind, server in self.by_kind.items()]
        if self.base_url is None:
            return tuple(of_kinds)
        usual = TeacherServer(base_url=self.base_url, model_name=self.model_name, api_key=self.api_key)
        return (SeparateTeacher(usual), *of_kinds)

    @model_validator(mode="after")
    def _check_server(self) -> "TeacherConfig":
        if self.api_key is not None and self.base_url is None:
            raise ValueError("api_key is set, but base_url is not")
        if self.weights != "live" and self.base_url is not None:
            raise ValueError(f"weights are {self.weights}, those of the policy's server, but base_url is set")
        return self


class DistillConfig(RootSettings):
    """Settings for finding hints and scoring turns."""

    setting_group: ClassVar = DISTILLATION

    opd_enabled: Annotated[bool, FIRST] = Field(
        default=True,
        description="Distill from hindsight. Off: the judge is not asked and no distillation fields are written.",
    )
    distill_topk: Annotated[int, FIRST] = Field(
        default=50,
        ge=1,
        le=1000,
        description="Number of entries in a scored row: the sampled token and the teacher's most likely other tokens.",
    )
    prm_votes: Annotated[int, FIRST] = Field(default=3, ge=1, le=64, description="Number of judge votes on each turn.")
    hint_max_next_state_chars: int = Field(
        default=4000,
        ge=100,
        description="Maximum number of characters of a next state that the judge reads; "
        "longer ones are cut in the middle.",
    )

    hint: HintConfig = HintConfig()
    hindsight: EvidenceConfig = EvidenceConfig()
    judge: JudgeConfig = JudgeConfig()
    teacher: TeacherConfig = TeacherConfig()

    @property
    def logprobs_asked(self) -> int:
        """Maximum of logprobs requested per position from the teacher."""
        is_plain = self.hint.control == "none" and self.teacher.support == "teacher"
        return self.distill_topk if is_plain else self.wide_topk

    @property
    def wide_topk(self) -> int:
        """Logprobs requested per position of which most ids of another reading's rows should be found."""
        return 1 if self.distill_topk == 1 else 2 * self.distill_topk

    @model_validator(mode="after")
    def _check_support(self) -> "DistillConfig":
        support = self.teacher.support
        if support != "teacher" and self.distill_topk == 1:
            raise ValueError(f"teacher.support {support} chooses no token: distill_topk is 1")
        return self
