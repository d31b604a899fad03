"""Data passed between the stages of the flow, as frozen dataclasses whose lengths are checked on construction.

    Task -> Episode -> HindsightPair -> Hint -> TeacherRequest -> TeacherRows -> DistillArrays -> ScoredGroup

Shape suffixes: `_T` positions of a sequence, `_R` rows of one turn (its sampled tokens), `_K` top-k entries.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import not_
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentic_opd.core.columnar import is_null, unpadded_messages, unpadded_tools
from agentic_opd.core.errors import AlignmentError

Message = dict[str, Any]
"""A chat message in OpenAI's format: `role`, `content` (always present), `tool_calls`, `tool_call_id`, `name`.

The content is a text; see `attachments.messages` for a message with pictures.
"""

IGNORED = -100
"""Mask value of positions that the policy did not sample."""

PROMPT_LOGPROB = 1.0
"""Value of `inference_logprobs` at positions that the policy did not sample, as in Atropos' ManagedServer."""

MOST_NATS = 1000.0
"""Largest absolute value of a logprob. Engines write -9999 for missing ones."""

MOST_SCORE = 1e6
"""Largest absolute value of a score or reward; keeps a group's statistics finite in float32."""

MOST_ID = 2**63 - 1

Index = Annotated[int, Field(strict=True, ge=0, le=MOST_ID)]
"""A position, a count or a token id, as pydantic reads it from JSON."""


def check_lengths(subject: str, **lengths: int) -> None:
    """Raise AlignmentError unless all `lengths` are equal; the message holds each length."""
    if len(set(lengths.values())) > 1:
        pairs = ", ".join(f"{name}={length}" for name, length in lengths.items())
        raise AlignmentError(f"{subject}: lengths differ ({pairs})")


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common beginning of two sequences or texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def sampled_spans(masks_T: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs `[start, end)` of sampled positions, in order."""
    is_sampled = np.concatenate(([False], np.asarray(masks_T) != IGNORED, [False]))
    edges: list[int] = np.flatnonzero(np.diff(is_sampled)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


# --------------------------------------------------------------------------------------------------------- rollout


LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower temperature above 0 to this one."""

_IF_GIVEN = Field(exclude_if=lambda value: value is None)
"""Mark of a field that is written only if it is not None."""


@dataclass(frozen=True, slots=True)
class SamplingDistribution:
    """The distribution from which the tokens of a turn were sampled, relative to the policy's own.

    Its logits are the policy's divided by `temperature`. At 0 the most likely token is taken. The other fields cut or
    change the distribution, so that its logprobs can't be computed from the policy's.
    """

    temperature: Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
    top_p: Annotated[Annotated[float, Field(strict=True, gt=0, le=1)] | None, _IF_GIVEN] = None
    """None: not cut by probability."""
    top_k: Annotated[Annotated[int, Field(strict=True, ge=1, le=MOST_ID)] | None, _IF_GIVEN] = None
    """None: not cut by number."""
    altered: Annotated[tuple[str, ...], Field(exclude_if=not_)] = ()
    """Other parameters that changed the distribution, such as `min_p` or `logit_bias`."""

    @classmethod
    def of_parameters(cls, parameters: Mapping[str, Any], altered: Sequence[str] = ()) -> "SamplingDistribution":
        """Return the distribution of a request with vLLM's sampling parameters; a missing one has vLLM's default.

        `altered` names the request's parameters that change the distribution.
        """
        temperature, top_p = parameters.get("temperature"), parameters.get("top_p")
        temperature = 1.0 if temperature is None else float(temperature)
        top_k = parameters.get("top_k") or 0
        return cls(
            temperature=max(temperature, LOWEST_TEMPERATURE) if temperature else 0.0,
            top_p=None if top_p is None or top_p >= 1 else float(top_p),
            top_k=top_k if top_k > 0 else None,
            altered=tuple(name for name in altered if name not in ("temperature", "top_p", "top_k")),
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether more than the temperature separates it from the policy's own distribution."""
        return self.top_p not in (None, 1) or self.top_k is not None or bool(self.altered)


TASK_LIMITS = ("max_turns", "tool_timeout_s", "agent_timeout_s", "sandbox_memory_mb")
"""Settings that a task may replace for itself."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task for the agent.

    `files` (path -> text) are in the agent's sandbox from the start. Only the verifier sees `hidden_tests`; they are
    None if nothing verifies the result, as in recorded conversations. Tasks may be of several kinds (`kind`).
    `examples` are messages before the prompt that demonstrate such a task: user, assistant, tool. They are context and
    never trained on. They need only roles, texts, and the calls' names and arguments; the other fields of OpenAI's
    format may be missing. Padding of columnar files is removed (see `columnar`), and the results of parallel calls are
    put in the order of the calls.

    `messages`, if given, are the whole conversation before the first turn: they replace system prompt (if they have
    one), examples and prompt, and end with a user's message or a tool result. An empty `prompt` becomes their last
    user message. `tools` are the schemas of the functions of this task in OpenAI's format; None: those of the world.
    `data` is for the world's hooks alone. `limits` (see `TASK_LIMITS`) replace the settings of the same names, `image`
    replaces `sandbox.image`. With `needs_no_call`, no tool call is right, and metrics count those that are made.
    """

    task_id: str
    prompt: str = ""
    hidden_tests: str | None = None
    entry_point: str | None = None
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    reference_solution: str | None = None
    kind: str | None = None
    examples: Sequence[Message] = ()
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] | None = None
    data: Any = None
    limits: Mapping[str, float] = field(default_factory=dict[str, float])
    image: str | None = None
    needs_no_call: bool = False

    def __post_init__(self) -> None:
        task_id: Any = self.task_id
        if not isinstance(task_id, str):
            raise AlignmentError(f"task {task_id!r}: its id is of type {type(task_id).__name__}, expected a text")
        if self.tools is not None:
            object.__setattr__(self, "tools", unpadded_tools(self.tools))
        for name in ("examples", "messages"):
            messages = unpadded_messages(getattr(self, name), self.tools)
            object.__setattr__(self, name, _complete_messages(self.task_id, name, messages))
        user_texts = [message["content"] for message in self.messages if message["role"] == "user"]
        object.__setattr__(self, "prompt", self.prompt or (user_texts[-1] if user_texts else ""))
        for name, value in self.limits.items():
            if name not in TASK_LIMITS or isinstance(value, bool) or not value > 0:
                names = ", ".join(TASK_LIMITS)
                raise AlignmentError(
                    f"task {self.task_id!r}: limit {name}={value!r}, expected a positive one of {names}"
                )
        needed = {"task_id": self.task_id}
        if self.hidden_tests is not None:
            needed |= {"prompt": self.prompt, "hidden_tests": self.hidden_tests}
        for name, text in needed.items():
            if not text.strip():
                raise AlignmentError(f"task {self.task_id!r}: {name} is empty")


def _complete_messages(task_id: str, field: str, messages: Sequence[Any]) -> tuple[Message, ...]:
    """Return examples or messages in full: call ids, arguments as JSON text, and a content everywhere."""
    complete: list[Message] = []
    open_calls: list[dict[str, Any]] = []
    for index, raw in enumerate(messages):
        try:
            message: Message = {"content": "", **{key: value for key, value in raw.items() if not is_null(value)}}
            role = message["role"]
            if role == "assistant" and message.get("tool_calls"):
                calls = [_complete_call(call, f"call_{index}_{n}") for n, call in enumerate(message["tool_calls"])]
                message["tool_calls"], open_calls = calls, calls[:]
            elif role == "tool":
                call_id = message.get("tool_call_id")
                call = next((call for call in open_calls if call["id"] == call_id), None) or open_calls[0]
                open_calls.remove(call)
                message = {"tool_call_id": call["id"], "name": call["function"]["name"], **message}
            elif role not in ("user", "assistant") and not (role == "system" and field == "messages" and index == 0):
                raise ValueError(f"role {role!r}, expected user, assistant or tool")
            if not isinstance(message["content"], str):
                raise TypeError(f"content {message['content']!r}, expected a text")
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            why = "answers no call" if isinstance(error, IndexError) else f"is not a message ({error!s})"
            raise AlignmentError(f"task {task_id!r}: {field}[{index}] {why}: {str(raw)[:200]}") from error
        complete.append(message)
    complete = _results_in_order(complete)
    if field == "examples" and complete and complete[-1]["role"] == "user":
        raise AlignmentError(f"task {task_id!r}: examples end with a user's message, which nothing answers")
    if field == "messages" and complete and complete[-1]["role"] not in ("user", "tool"):
        raise AlignmentError(
            f"task {task_id!r}: messages end with role {complete[-1]['role']!r}, expected user or tool"
        )
    return tuple(complete)


def _results_in_order(messages: Sequence[Message]) -> list[Message]:
    """Return complete messages with the results of each turn's calls in the order of the calls."""
    order: dict[str, int] = {}
    numbers: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            numbers.append((numbers[-1][0], order.get(message["tool_call_id"], len(order))))
        else:
            order = {call["id"]: number for number, call in enumerate(message.get("tool_calls") or (), start=1)}
            numbers.append((index, 0))
    return [messages[index] for index in sorted(range(len(messages)), key=numbers.__getitem__)]


def _complete_call(call: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    function = call.get("function", call)
    name, arguments = function["name"], function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(dict(arguments), ensure_ascii=False)
    return {"id": call.get("id", call_id), "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn: ids (including the stop token), their logprobs in nats, and the reason why sampling stopped."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = "stop"
    """`length` if the turn was cut off at its token limit."""
    weight_version: int | None = None
    """Version of the weights that sampled the turn; None if the server does not report it."""
    sampling: Annotated[SamplingDistribution | None, _IF_GIVEN] = None
    """None: not known here."""

    def __post_init__(self) -> None:
        check_lengths("completion", token_ids=len(self.token_ids), logprobs=len(self.logprobs))
        if not self.token_ids:
            raise AlignmentError("completion: no token was sampled")
        if sum(map(abs, self.logprobs)) <= MOST_NATS:  # So is each, and none is NaN.
            return
        if (
            index := next((i for i, logprob in enumerate(self.logprobs) if not abs(logprob) <= MOST_NATS), None)
        ) is not None:
            raise AlignmentError(
                f"completion: token {index} has the logprob {self.logprobs[index]!r}, expected a finite number: check "
                "the model's weights"
            )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a turn, as parsed from the sampled tokens.

    `arguments` is None if and only if the call could not be parsed; `error` then tells the model why.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.arguments is None) != (self.error is not None):
            raise AlignmentError(f"tool call {self.id!r}: exactly one of arguments and error must be given")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, as the model reads it; errors lower the tool-usage reward."""

    content: str
    is_error: bool = False
    is_change: bool = False
    """Whether the call changed the content that the verdict judges."""


class StopReason(StrEnum):
    FINISHED = "finished"
    """The model ended a turn without calling a tool."""
    TERMINATED = "terminated"
    """The environment ended the episode after a tool call."""
    MAX_TURNS = "max_turns"
    """`max_turns` assistant turns were sampled."""
    CONTEXT_FULL = "context_full"
    """`max_token_length` left no room for another turn."""
    RENDER_ERROR = "render_error"
    """A turn could not be parsed, or the prompt after it could not be rendered."""
    SANDBOX_DIED = "sandbox_died"
    """The sandbox of the tools or hidden tests ended early, while a fresh one works; the episode gets reward 0."""
    SERVER_ERROR = "server_error"
    """The policy server failed; the episode is not training data."""
    AGENT_FAILED = "agent_failed"
    """The program of `agent.command` ended with a nonzero exit code, or was stopped at one of its limits."""
    AGENT_TIMEOUT = "agent_timeout"
    """The program of `agent.command` had not ended after `agent.timeout_s`."""
    CLOSED = "closed"
    """A conversation that the client closed."""
    IDLE = "idle"
    """A conversation without a new message for its idle time limit."""
    OPEN = "open"
    """A part of a conversation that is still open."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: the span of its sampled tokens, and the two places where a hint may enter its prompt.

    All are indices into the trace's tokens. `tokens[:start]` is the turn's prompt, `tokens[start:end]` its sampled
    tokens. `assistant_open <= start` is the start of the assistant's opening; `last_user_end <= assistant_open` is the
    end of the last user message's content. `message_index` is the index of the assistant message.
    """

    start: int
    end: int
    assistant_open: int
    last_user_end: int
    message_index: int
    truncated: bool = False
    """Whether the token limit cut the turn off."""
    weight_version: int | None = None
    """Version of the weights that sampled the turn; None if the server does not report it."""
    reasoning_tokens: int = 0
    """Number of leading sampled tokens that are reasoning, including the closing tag."""
    under_grammar: bool = False
    """Whether a grammar constrained the sampling. Then vLLM's logprobs are not the weights' but those of the allowed
    tokens."""
    sampling: Annotated[SamplingDistribution | None, _IF_GIVEN] = None
    """None: not known."""

    def __post_init__(self) -> None:
        if not 0 <= self.reasoning_tokens <= self.end - self.start:
            raise AlignmentError(f"turn: {self.reasoning_tokens} reasoning tokens of {self.end - self.start}")
        if not 0 < self.last_user_end <= self.assistant_open <= self.start < self.end:
            raise AlignmentError(
                "turn: expected 0 < last_user_end <= assistant_open <= start < end, got "
                f"{self.last_user_end}, {self.assistant_open}, {self.start}, {self.end}"
            )


WhyContext = Literal["not_sampled", "shared", "side", "altered_sampling"]
"""Why an assistant message is context only, not a training target: the client wrote it, or returned it changed; another
sequence of the group trains on it; it was requested as a side turn; or its sampling distribution was altered."""


@dataclass(frozen=True, slots=True)
class ContextTurn:
    """An assistant message of a conversation that is context only; the annotations are its form on the wire."""

    message_index: Annotated[Index, Field(alias="message")]
    why: WhyContext
    altered: Annotated[tuple[str, ...], Field(exclude_if=not_)] = ()
    """Sampling parameters that changed the distribution, if `why` is `altered_sampling`."""


StoppedFor = Literal["time", "output", "memory", "disk"]
"""A limit at which a program is stopped."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """Exit of the program of `agent.command`, and the tokens it sampled outside the episode's sequence."""

    exit_code: int
    """Exit code; 128 + n if signal n ended the program."""
    stopped: StoppedFor | None
    """The limit that stopped the program; None if it ended by itself."""
    output: str
    """Output of the program, cut in the middle."""
    other_sequences: int = 0
    """Number of further sequences that could be trained on."""
    other_tokens: int = 0
    """Number of sampled tokens in these sequences."""


class VerifyOutcome(StrEnum):
    RAN = "ran"
    """All tests completed; some may have failed."""
    NO_SOLUTION = "no_solution"
    """The agent left no solution file."""
    CRASHED = "crashed"
    """The solution could not be imported, exited early, raised outside of a check, or used too much memory or disk."""
    TIMEOUT = "timeout"
    """One check, or all of them together, exceeded the time limit."""
    NO_VERDICT = "no_verdict"
    """The tests themselves could not run or gave no result, so nothing is known about the solution."""


class NoVerdict(StrEnum):
    """Why tests gave no verdict."""

    NOT_RUN = "not_run"
    """A command of the tests was not found or could not be executed."""
    TIMEOUT = "timeout"
    """The tests exceeded their time limit."""
    MEMORY = "memory"
    """The tests exceeded the memory."""
    DISK = "disk"
    """The tests exceeded the disk space."""
    OUTPUT = "output"
    """The tests printed too much."""
    KILLED = "killed"
    """A signal ended the tests."""
    CONTAINER_ENDED = "container_ended"
    """The container was ended during the tests, for its use of memory or disk space."""
    UNHEALTHY = "unhealthy"
    """The health check of the container failed before the tests."""
    NO_REWARD = "no_reward"
    """The tests write a reward, but wrote none this time."""
    UNREADABLE_REWARD = "unreadable_reward"
    """The reward that the tests wrote is not a finite number."""


PASSING_SCORE = 1 - 1e-9
"""A score passes from this number on: sums of weights such as 0.7 + 0.2 + 0.1 are not exactly 1."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of the hidden tests; `report` is only for readers who may know the tests."""

    outcome: VerifyOutcome
    passed: int
    total: int
    report: str
    judge_report: str
    """Report for the judge: which checks failed and how, without the tests' values or undisclosed inputs."""
    in_process: bool = False
    """Whether tests and solution shared a process, because the tests need the solution's classes: easier to cheat."""
    made_by: frozenset[int] | None = None
    """Changes to the judged content (`Episode.changes`, counted from 0 over all turns) of which something was left.
    None: unknown."""
    score: float | None = None
    """Score in [0, 1], if the verification gave a number: beside counts, or in place of them, as one check that passes
    from `PASSING_SCORE` on."""
    no_verdict: NoVerdict | None = None
    """Given if and only if `outcome` is NO_VERDICT."""

    def __post_init__(self) -> None:
        if not (self.total > 0 and 0 <= self.passed <= self.total):
            raise AlignmentError(f"verification: expected 0 <= passed <= total > 0, got {self.passed} of {self.total}")
        if self.score is not None and not 0 <= self.score <= 1:
            raise AlignmentError(f"verification: expected a score in [0, 1], got {self.score}")
        if (self.outcome is VerifyOutcome.NO_VERDICT) != (self.no_verdict is not None):
            raise AlignmentError(f"verification: outcome {self.outcome} with no_verdict {self.no_verdict}")

    @classmethod
    def of_score(
        cls, score: float, report: str, judge_report: str, *, made_by: frozenset[int] | None = None
    ) -> "Verification":
        """Return the result of tests that gave a number in [0, 1]."""
        passed = int(score >= PASSING_SCORE)
        return cls(VerifyOutcome.RAN, passed, 1, report, judge_report, made_by=made_by, score=score)

    @property
    def correctness(self) -> float:
        """The score, or the share of checks that passed, in [0, 1]."""
        return self.passed / self.total if self.score is None else self.score

    @property
    def all_passed(self) -> bool:
        """Whether all checks passed."""
        return self.passed == self.total


@dataclass(frozen=True, slots=True)
class Reward:
    """The parts of the reward and their weighted sum, each in [0, 1]."""

    correctness: float
    efficiency: float
    tool_usage: float
    total: float

    def __post_init__(self) -> None:
        for name in ("correctness", "efficiency", "tool_usage", "total"):
            if not 0 <= getattr(self, name) <= 1 + 1e-6:  # NaN too; the weights add up to 1 up to rounding.
                raise AlignmentError(f"reward: {name} is {getattr(self, name)!r}, expected 0 to 1")


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """A picture among the tokens of a sequence: the sha256 of its file, and the positions of its tokens.

    The annotations are its form on the wire.
    """

    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    offset: Index
    length: Annotated[Index, Field(ge=1)]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.offset + self.length


Attachments = tuple[PlacedImage, ...]
"""The parts of a sequence that are not text, in order of their tokens.

A sequence carries its attachments, and these functions cut and move them with its tokens. They are pictures, which
only `core.attachments`, `gateway`, `serving` and `training` know.
"""


def attached_before(attachments: Iterable[PlacedImage], end: int) -> Attachments:
    """Return the attachments that begin before position `end`."""
    return tuple(image for image in attachments if image.offset < end)


def moved_attachments(attachments: Attachments, end: int, insert_at: int, added: int) -> Attachments:
    """Return the attachments before position `end` after `added` tokens were inserted at `insert_at`.

    Raises:
        AlignmentError: the insertion, or the end, is inside a picture.
    """
    for image in attachments:
        if image.offset < end < image.end or (added and image.offset < insert_at < image.end):
            position = end if image.offset < end < image.end else insert_at
            raise AlignmentError(f"picture at [{image.offset}, {image.end}): position {position} is inside of it")
    return tuple(
        replace(image, offset=image.offset + added) if image.offset >= insert_at else image
        for image in attached_before(attachments, end)
    )


class TokenSequence(Protocol):
    """Tokens with their attachments, such as a `Trace`."""

    @property
    def tokens_T(self) -> Sequence[int]: ...
    @property
    def attachments(self) -> Attachments: ...


@dataclass(frozen=True, slots=True)
class Trace:
    """One sequence of sampled and other tokens, the conversation that it renders, and the turns to learn from.

    `masks_T` holds the token at positions to learn from and -100 elsewhere; `logprobs_T` (nats) the engine's logprob
    at these positions and 1.0 elsewhere. `messages` may continue after the last token: the answer to the last turn.
    """

    messages: tuple[Message, ...]
    tokens_T: tuple[int, ...] = ()
    masks_T: tuple[int, ...] = ()
    logprobs_T: tuple[float, ...] = ()
    turns: tuple[Turn, ...] = ()
    context_turns: tuple[ContextTurn, ...] = ()
    """Assistant messages that are not in `turns`, in order."""
    attachments: Attachments = ()

    def __post_init__(self) -> None:
        check_lengths("trace", tokens=len(self.tokens_T), masks=len(self.masks_T), logprobs=len(self.logprobs_T))
        for turn in self.turns:
            if turn.end > len(self.tokens_T):
                raise AlignmentError(f"trace: turn ends at {turn.end}, but there are {len(self.tokens_T)} tokens")
            if self.masks_T[turn.start : turn.end] != self.tokens_T[turn.start : turn.end]:
                raise AlignmentError(f"trace: the mask does not cover the turn [{turn.start}, {turn.end})")
            if self.messages[turn.message_index].get("role") != "assistant":
                raise AlignmentError(f"trace: message {turn.message_index} is not the assistant's")

    @property
    def weight_version(self) -> int | None:
        """Oldest version of the weights that sampled a turn; None if no server reports it."""
        return min((turn.weight_version for turn in self.turns if turn.weight_version is not None), default=None)

    def learning_from(self, turns: Sequence[Turn], context_turns: Sequence[ContextTurn]) -> "Trace":
        """Return the trace with only some of its `turns`; all other positions become context."""
        masks, logprobs = [IGNORED] * len(self.tokens_T), [PROMPT_LOGPROB] * len(self.tokens_T)
        for span in (slice(turn.start, turn.end) for turn in turns):
            masks[span], logprobs[span] = self.masks_T[span], self.logprobs_T[span]
        return replace(
            self,
            masks_T=tuple(masks),
            logprobs_T=tuple(logprobs),
            turns=tuple(turns),
            context_turns=tuple(context_turns),
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation as the distiller reads it: its traces in order, and data beyond the messages.

    The messages of each trace are the first ones of the next trace; each turn to learn from is in one trace. A
    conversation recorded elsewhere has no task, changes or verification.
    """

    name: str
    """Id of the task or of the conversation: hints of the same name are hints for the same task."""
    traces: tuple[Trace, ...]
    task: Task | None = None
    changes: tuple[frozenset[int], ...] = ()
    """See `Episode.changes`."""
    verification: Verification | None = None
    failed: bool | None = None
    """Whether the rollout failed, by its reward or counts; None: by `verification`, else see `distill.evidence`."""
    turns: tuple[Turn, ...] = field(init=False, repr=False)
    """The turns of all traces, in order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", tuple(turn for trace in self.traces for turn in trace.turns))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the whole conversation."""
        return self.traces[-1].messages if self.traces else ()


@dataclass(frozen=True, slots=True)
class Episode:
    """One rollout of a task: its traces, why it ended, and its verification and reward.

    It has several traces if the chat template rewrites earlier messages. Turns of the other traces are context in a
    trace, so that each sampled token is learned from once:

        u a1 u a2        the template dropped the reasoning of a1 when the user spoke again:
        u a1' u a2       (u a1 u) has the turn a1; in (u a1' u a2) a1' is context, and a2 the turn
    """

    task: Task
    traces: tuple[Trace, ...]
    stop_reason: StopReason
    tool_calls: int = 0
    tool_errors: int = 0
    broken_turns: int = 0
    """Number of turns with a call that returned an error."""
    error: Exception | None = None
    """Error of the policy server; given if and only if `stop_reason` is SERVER_ERROR."""
    verification: Verification | None = None
    reward: Reward | None = None
    """None without a verdict."""
    changes: tuple[frozenset[int], ...] = ()
    """For each turn, the tool calls (counted from 0) that changed the judged content. Empty: unknown."""
    requests: int = 0
    """Number of requests to the policy from the episode's program, over all its sequences; 0 without a program."""
    program: ProgramRun | None = None
    """Exit of the program that held the conversation; None for the built-in loop."""

    def __post_init__(self) -> None:
        if self.changes:
            check_lengths("episode", turns=len(self.turns), changes=len(self.changes))
        if (self.stop_reason is StopReason.SERVER_ERROR) != (self.error is not None):
            raise AlignmentError(f"episode: stop reason {self.stop_reason!r} with error {self.error!r}")

    @property
    def no_verdict(self) -> NoVerdict | None:
        """Why the tests gave no verdict; None if they gave one, or did not run because the policy server failed."""
        return None if self.verification is None else self.verification.no_verdict

    @property
    def recording(self) -> Recording:
        return Recording(self.task.task_id, self.traces, self.task, self.changes, self.verification)

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.recording.messages

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.recording.turns

    @property
    def weight_version(self) -> int | None:
        """Oldest version of the weights that sampled a turn; None if no server reports it."""
        versions = (trace.weight_version for trace in self.traces)
        return min((version for version in versions if version is not None), default=None)


# ------------------------------------------------------------------------------------------------------------- world


class WorldSession(Protocol):
    """State of one episode in a world; its tool calls act on this state."""

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Run one call; report the model's mistakes in the result.

        Raises:
            SandboxError: the world itself does not work.
        """
        ...

    async def is_over(self, messages: Sequence[Message]) -> bool:
        """Return whether the episode ends with the tool results at the end of `messages`."""
        ...

    async def user_reply(self, messages: Sequence[Message]) -> str | None:
        """Return the user's reply to the last message, a turn without tool calls; None if the user is silent."""
        ...

    async def collect(self, messages: Sequence[Message] = ()) -> Any:
        """Return the final state of the episode, for the world's `verify`; `messages` are the whole conversation."""
        ...


class World(Protocol):
    """An environment for agents: system prompt, tools, sessions, tasks, and verification."""

    @property
    def system_prompt(self) -> str:
        """System prompt of the agent."""
        ...

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Tool specifications in OpenAI's format, for the chat template."""
        ...

    def session(self, task: Task) -> AbstractAsyncContextManager[WorldSession]:
        """Return a fresh session in the task's initial state; leaving the context deletes it."""
        ...

    async def train_and_eval_tasks(self) -> tuple[list[Task], list[Task]]:
        """Return the tasks for training and for evaluation; both are the same list if there are few tasks.

        Raises:
            DatasetError, WorldError: there are no tasks, or they are invalid.
        """
        ...

    async def verify(self, task: Task, left: Any) -> Verification:
        """Judge the result of `WorldSession.collect`, outside of that session; None means that nothing is left.

        Raises:
            SandboxError: the verifier itself does not work.
        """
        ...

    async def check(self) -> None:
        """Check that sessions work on this machine; otherwise raise SandboxError with the cause and the remedy."""
        ...


class ReplayableWorld(World, Protocol):
    """A world whose recorded episodes can be replayed, if `replayable` is True; see `rollout.replay`."""

    @property
    def replayable(self) -> bool:
        """Whether the calls of a recorded episode give the same results in a fresh session; see `rollout.replay`."""
        ...

    def comparable(self, text: str) -> str:
        """Return a tool result without what differs between two runs of the same call, such as a duration."""
        ...


# -------------------------------------------------------------------------------------------------------- distilling


class TurnOutcome(StrEnum):
    """Result of distilling a turn; every turn has exactly one."""

    SCORED = "scored"
    """The turn had a hint, and the teacher's rows were written."""
    NO_NEXT_STATE = "no_next_state"
    """The turn has no next state."""
    VOTE_FAILED = "vote_failed"
    """Too few votes accepted the next state as evidence of what the turn should have done."""
    JUDGE_ERROR = "judge_error"
    """The judge returned no answer, or no readable vote."""
    LEAKED = "leaked"
    """The hint repeated code of the hidden tests."""
    TOO_LONG = "too_long"
    """Hint and turn together do not fit the teacher's context."""
    SCORING_ERROR = "scoring_error"
    """The teacher returned no rows, or rows that do not fit the turn."""
    NOT_JUDGED = "not_judged"
    """The judge was not asked, because the rollout did not fail (`judge.when: failed`)."""
    REFUTED = "refuted"
    """Replayed from the turn, the policy passes less often with the hint (`hint.proof`)."""
    UNPROVEN = "unproven"
    """Replays did not show that the hint helps, or the turn can't be replayed (`hint.proof`)."""


class ProofVerdict(StrEnum):
    """Result of the continuations of a turn with and without its hint."""

    PROVEN = "proven"
    """The policy passes more often with the hint, beyond chance."""
    REFUTED = "refuted"
    """The policy passes less often with the hint, beyond chance."""
    OPEN = "open"
    """Neither is shown by as many continuations as were allowed."""


EvidenceKind = Literal["tool", "user", "repeated", "later", "verdict"]
"""Source of evidence about a turn: its tool results, the user's reply, equal turns before it, later turns, or the
verdict."""

StepScore = Literal[1, 0, -1]
"""Whether a turn did what the user wanted: 1 yes, 0 unclear, -1 no."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation about a turn, as text for the judge."""

    kind: EvidenceKind
    text: str
    later_turn: int | None = None
    """Index of the turn that it answered, for kind `later`; counted from 0."""


@dataclass(frozen=True, slots=True)
class HindsightPair:
    """A turn and the evidence after it, as text for the judge. Without evidence the turn cannot be judged."""

    turn_index: int
    task_text: str
    turn_text: str
    evidence: tuple[Evidence, ...]

    @property
    def kinds(self) -> tuple[EvidenceKind, ...]:
        """Distinct kinds of evidence, in order."""
        return tuple(dict.fromkeys(part.kind for part in self.evidence))

    @property
    def next_state_role(self) -> Literal["tool", "user", "verdict"] | None:
        """Role of the last direct answer to the turn; `tool` if there is only later evidence, None without evidence."""
        for kind in reversed(self.kinds):
            if kind in ("tool", "user", "verdict"):
                return kind
        return "tool" if self.evidence else None


@dataclass(frozen=True, slots=True)
class Vote:
    """One answer of the judge. `decision` is None (abstention) if the answer could not be parsed."""

    decision: Literal[1, -1] | None
    hint: str | None
    text: str

    def __post_init__(self) -> None:
        if (self.decision == 1) != (self.hint is not None):
            raise AlignmentError(f"vote: a hint belongs to decision 1 and to no other, got {self.decision!r}")


class TrajectoryVoteKind(StrEnum):
    """What an answer of the judge about a trajectory says, or how it violates the protocol, so that it abstains."""

    NAMED = "named"
    """It names turns at fault, each with a hint."""
    NONE = "none"
    """It says that no turn is at fault."""
    CONTEXT_TURN = "context_turn"
    """It names an assistant message that is context only, which is left out; its other turns count."""
    UNREADABLE = "unreadable"
    """It has no decision, or one that can't be read: prose or JSON alone, an open hint, two numbers in a box."""
    UNKNOWN_TURN = "unknown_turn"
    """It names a turn that does not exist or is not shown in full."""
    REPEATED_TURN = "repeated_turn"
    """It has two hints for a turn."""
    HINT_WITHOUT_TURN = "hint_without_turn"
    """It has a hint without a turn."""
    TURN_WITHOUT_HINT = "turn_without_hint"
    """It names a turn without a hint, or with one that is too short."""
    TOO_MANY_TURNS = "too_many_turns"
    """It names more than `judge.max_turns` turns."""
    EVERY_TURN = "every_turn"
    """It names every turn, and these are more than `judge.max_turns`."""

    @property
    def is_readable(self) -> bool:
        """Whether the answer is a vote; otherwise it abstains."""
        return self in (TrajectoryVoteKind.NAMED, TrajectoryVoteKind.NONE, TrajectoryVoteKind.CONTEXT_TURN)


@dataclass(frozen=True, slots=True)
class TrajectoryVote:
    """One answer of the judge about a trajectory, with the numbers of the turns that it names, counted from 1."""

    kind: TrajectoryVoteKind
    turns: tuple[Index, ...]
    text: str


@dataclass(frozen=True, slots=True)
class JudgeTokens:
    """Tokens of the judge's answers to a question, as its endpoint counts them."""

    read: Index
    """Tokens of the prompts: once for all votes of one request, and once for each request."""
    sampled: Index

    @classmethod
    def total(cls, answers: "Iterable[JudgeTokens | None]") -> "JudgeTokens | None":
        """Return the sum over answers; None if the tokens of an answer are not known, or there is no answer."""
        tokens = list(answers)
        counted = [answer for answer in tokens if answer is not None]
        if not counted or len(counted) < len(tokens):
            return None
        return cls(sum(answer.read for answer in counted), sum(answer.sampled for answer in counted))


@dataclass(frozen=True, slots=True)
class TeacherRequest:
    """Ids of a teacher's input, `tokens[:insert_at] + hint_token_ids + tokens[insert_at:end]`.

    The last `num_scored` entries are the turn's sampled tokens.
    """

    token_ids: tuple[int, ...]
    num_scored: int
    insert_at: int
    hint_token_ids: tuple[int, ...]
    weight_version: int | None = None
    """Version of the weights that sampled the turn, if known; they score it while the server keeps them."""
    under_grammar: bool = False
    """As in `Turn`: the logprobs without a hint are read in any case."""
    attachments: Attachments = ()

    def __post_init__(self) -> None:
        if not 0 < self.num_scored < len(self.token_ids):
            raise AlignmentError(
                f"teacher request: {self.num_scored} of {len(self.token_ids)} tokens to score, expected at least one, "
                "and one before them"
            )

    @classmethod
    def of(
        cls,
        sequence: TokenSequence,
        span: tuple[int, int],
        insert_at: int,
        hint_token_ids: tuple[int, ...] = (),
        weight_version: int | None = None,
        *,
        under_grammar: bool = False,
    ) -> "TeacherRequest":
        """Return the request that scores the tokens `span` of a sequence, with a hint's tokens at index `insert_at`.

        Raises:
            AlignmentError: the hint, or the end, is inside an attachment; or there is no token before the span.
        """
        tokens, (start, end) = sequence.tokens_T, span
        return cls(
            token_ids=(*tokens[:insert_at], *hint_token_ids, *tokens[insert_at:end]),
            num_scored=end - start,
            insert_at=insert_at,
            hint_token_ids=hint_token_ids,
            weight_version=weight_version,
            under_grammar=under_grammar,
            attachments=moved_attachments(sequence.attachments, end, insert_at, len(hint_token_ids)),
        )


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """The teacher's logprobs (nats) for one turn.

    `actual_R` [R]: of the sampled tokens. `top_ids_RK` [R, K] and `top_logprobs_RK` [R, K]: the most likely tokens,
    most likely first. `named_ids_RN` and `named_logprobs_RN` [R, N]: tokens that the request named, if any; an id may
    occur twice.
    """

    actual_R: NDArray[np.float32]
    top_ids_RK: NDArray[np.int32]
    top_logprobs_RK: NDArray[np.float32]
    named_ids_RN: NDArray[np.int32] | None = None
    named_logprobs_RN: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if self.top_ids_RK.ndim != 2 or self.top_ids_RK.shape != self.top_logprobs_RK.shape:
            raise AlignmentError(
                f"teacher rows: ids of shape {self.top_ids_RK.shape}, logprobs of shape {self.top_logprobs_RK.shape}"
            )
        check_lengths("teacher rows", actual=len(self.actual_R), top=len(self.top_ids_RK))


@dataclass(frozen=True, slots=True)
class DistillArrays:
    """Distillation rows of one sequence, one per position; unscored rows are empty (see the wire format)."""

    token_ids_TK: Sequence[Sequence[int]]
    logprobs_TK: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        check_lengths("distill arrays", token_ids=len(self.token_ids_TK), logprobs=len(self.logprobs_TK))
        if list(map(len, self.token_ids_TK)) == list(map(len, self.logprobs_TK)):
            return
        for position, (ids, logprobs) in enumerate(zip(self.token_ids_TK, self.logprobs_TK, strict=True)):
            check_lengths(f"distill row {position}", token_ids=len(ids), logprobs=len(logprobs))
