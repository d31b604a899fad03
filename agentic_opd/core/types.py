"""What crosses each arrow of the flow, as frozen dataclasses whose lengths are checked on construction.

    Task -> Episode -> HindsightPair -> Verdict -> TeacherRequest -> TeacherRows -> DistillArrays -> ScoredDataGroup

Shape suffixes: `_T` positions of a sequence, `_R` rows of one turn (its sampled tokens), `_K` top-k entries.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import AlignmentError

Message = dict[str, Any]
"""A chat message as OpenAI writes it: `role`, `content` (always there), `tool_calls`, `tool_call_id`, `name`."""

IGNORED = -100
"""The mask value of positions that the policy did not sample."""

PROMPT_LOGPROB = 1.0
"""What `inference_logprobs` holds at positions that the policy did not sample, as ManagedServer writes it."""

MOST_NATS = 1000.0
"""Largest size of a logprob. Engines write -9999 where they have none."""

MOST_SCORE = 1e6
"""Largest size of a score and of a reward; a group's statistics stay finite in float32."""


def check_lengths(what: str, **lengths: int) -> None:
    """Raise AlignmentError unless all `lengths` are equal; the message holds every one of them."""
    if len(set(lengths.values())) > 1:
        pairs = ", ".join(f"{name}={length}" for name, length in lengths.items())
        raise AlignmentError(f"{what}: lengths differ ({pairs})")


# --------------------------------------------------------------------------------------------------------- rollout


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent is asked to do.

    `files` (path -> text) lie in the agent's sandbox from the start; `hidden_tests` are only ever seen by the verifier.
    They are None where nothing verifies what comes of it: a conversation that happened. `kind` chooses its teacher
    where there is one for each kind (`DistillConfig.teachers`). `examples` are messages before the prompt that show how
    such a task is done: user, assistant, tool. They are context, and never trained on. What OpenAI's form needs beside
    roles, texts, and the calls' names and arguments may be left out.
    """

    task_id: str
    prompt: str
    hidden_tests: str | None
    entry_point: str | None = None
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    reference_solution: str | None = None
    kind: str | None = None
    examples: Sequence[Message] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", _complete_examples(self.task_id, self.examples))
        needed = {"task_id": self.task_id}
        if self.hidden_tests is not None:
            needed |= {"prompt": self.prompt, "hidden_tests": self.hidden_tests}
        for name, text in needed.items():
            if not text.strip():
                raise AlignmentError(f"task {self.task_id!r}: {name} is empty")


def _complete_examples(task_id: str, examples: Sequence[Any]) -> tuple[Message, ...]:
    """The examples as whole messages: ids of calls, arguments as JSON, a content everywhere."""
    done: list[Message] = []
    open_calls: list[dict[str, Any]] = []
    for index, one in enumerate(examples):
        try:
            message: Message = {"content": "", **{key: value for key, value in one.items() if value is not None}}
            role = message["role"]
            if role == "assistant" and message.get("tool_calls"):
                calls = [_complete_call(call, f"call_{index}_{n}") for n, call in enumerate(message["tool_calls"])]
                message["tool_calls"], open_calls = calls, calls[:]
            elif role == "tool":
                call = open_calls.pop(0)
                message = {"tool_call_id": call["id"], "name": call["function"]["name"], **message}
            elif role not in ("user", "assistant"):
                raise ValueError(f"role {role!r}, expected user, assistant or tool")
            if not isinstance(message["content"], str):
                raise TypeError(f"content {message['content']!r}, expected a text")
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            what = "answers no call" if isinstance(error, IndexError) else f"is not a message ({error!s})"
            raise AlignmentError(f"task {task_id!r}: examples[{index}] {what}: {str(one)[:200]}") from error
        done.append(message)
    if done and done[-1]["role"] == "user":
        raise AlignmentError(f"task {task_id!r}: examples end with a user's message, which nothing answers")
    return tuple(done)


def _complete_call(call: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    function = call.get("function", call)
    name, arguments = function["name"], function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(dict(arguments), ensure_ascii=False)
    return {"id": call.get("id", call_id), "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a turn, as parsed from the sampled tokens.

    `arguments` is None exactly when the call could not be parsed; `error` then says why, for the model to read.
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
    """What a tool gave back, as the model reads it; `is_error` counts into the tool-usage reward."""

    content: str
    is_error: bool = False
    is_change: bool = False
    """The call changed what the verdict will be about."""


class StopReason(StrEnum):
    """Why an episode ended."""

    FINISHED = "finished"
    """The model ended a turn without calling a tool."""
    MAX_TURNS = "max_turns"
    """`max_turns` assistant turns were sampled."""
    CONTEXT_FULL = "context_full"
    """No room was left for another turn within `max_token_length`."""
    RENDER_ERROR = "render_error"
    """A turn could not be parsed, or the prompt after it not be rendered."""
    SANDBOX_DIED = "sandbox_died"
    """The sandbox of its tools or of its hidden tests ended early; a fresh one works, so the episode earns nothing."""
    SERVER_ERROR = "server_error"
    """The policy server failed; the episode is not training data."""
    AGENT_FAILED = "agent_failed"
    """The program of `agent_command` ended with an exit code other than 0, or was stopped for one of its limits."""
    AGENT_TIMEOUT = "agent_timeout"
    """The program of `agent_command` had not ended after `agent_timeout_s`."""
    CLOSED = "closed"
    """A conversation: the client said that it is over."""
    IDLE = "idle"
    """A conversation: nothing was said in it for as long as it may be idle."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: where its sampled tokens lie, and the two places where a hint may enter its prompt.

    All are indices into the episode's tokens. `tokens[:start]` is the prompt the turn was sampled from,
    `tokens[start:end]` what was sampled. `assistant_open <= start` is where the assistant's opening begins;
    `last_user_end <= assistant_open` is where the content of the last user message ends.
    `message_index` is the assistant message's place in the episode's messages.
    """

    start: int
    end: int
    assistant_open: int
    last_user_end: int
    message_index: int
    truncated: bool = False
    """The turn was cut off (token limit) before the model ended it."""
    weight_version: int | None = None
    """Of the weights that sampled it; None if the server does not say."""
    reasoning_tokens: int = 0
    """How many of its first sampled tokens are reasoning, the closing tag included."""
    branch: int = 0
    """Which of the episode's sequences its places are indices of; see `Episode.earlier`."""

    def __post_init__(self) -> None:
        if not 0 <= self.reasoning_tokens <= self.end - self.start:
            raise AlignmentError(f"turn: {self.reasoning_tokens} reasoning tokens of {self.end - self.start}")
        if not 0 < self.last_user_end <= self.assistant_open <= self.start < self.end:
            raise AlignmentError(
                "turn: expected 0 < last_user_end <= assistant_open <= start < end, got "
                f"{self.last_user_end}, {self.assistant_open}, {self.start}, {self.end}"
            )


WhyContext = Literal["not_sampled", "shared", "side", "altered_sampling"]
"""Why an assistant's message is read and not learned from: the client wrote it, or wrote it back otherwise than it was
sampled; it is learned from in another sequence of the group; it was asked for as a side turn; or it was sampled from a
changed distribution."""


@dataclass(frozen=True, slots=True)
class ContextTurn:
    """An assistant's message of a conversation that is context only."""

    message_index: int
    """Its place in the episode's messages."""
    why: WhyContext
    altered: tuple[str, ...] = ()
    """The sampling parameters that changed the distribution, with `altered_sampling`."""


StoppedFor = Literal["time", "output", "memory", "disk"]
"""A limit that a program is stopped for."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """How the program of `agent_command` ended, and what it sampled beside the episode's sequence."""

    exit_code: int
    """128 + n if signal n ended it."""
    stopped: StoppedFor | None
    """None: it ended by itself."""
    output: str
    """What it printed, cut in the middle."""
    other_sequences: int = 0
    """Further sequences that could have been learned from."""
    other_tokens: int = 0
    """Sampled tokens in these."""


class VerifyOutcome(StrEnum):
    """How the hidden tests ended."""

    RAN = "ran"
    """All of them ran to their end; some may have failed."""
    NO_SOLUTION = "no_solution"
    """The agent left no solution file."""
    CRASHED = "crashed"
    """The solution could not be imported, left early, raised outside of a check, or took too much memory or disk."""
    TIMEOUT = "timeout"
    """A check took too long, or all of them together did."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The hidden tests' verdict; `report` is for whoever may know the tests."""

    outcome: VerifyOutcome
    passed: int
    total: int
    report: str
    judge_report: str
    """What the judge reads: which checks failed and how, with no value of the tests and no input not shown."""
    in_process: bool = False
    """Tests and solution shared a process, because the tests need the solution's own classes: easier to cheat."""
    made_by: frozenset[int] | None = None
    """The episode's changes of what was judged (`Episode.changes`, all of them counted from 0) of which something was
    left in it. None: not known."""

    def __post_init__(self) -> None:
        if not (self.total > 0 and 0 <= self.passed <= self.total):
            raise AlignmentError(f"verification: expected 0 <= passed <= total > 0, got {self.passed} of {self.total}")

    @property
    def correctness(self) -> float:
        """Share of checks that passed, in [0, 1]."""
        return self.passed / self.total


@dataclass(frozen=True, slots=True)
class Reward:
    """The parts of the reward, each in [0, 1], and their weighted sum."""

    correctness: float
    efficiency: float
    tool_usage: float
    total: float


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One sequence: `masks_T` holds the token at sampled positions and -100 elsewhere, `logprobs_T` (nats) the
    engine's logprob at sampled positions and 1.0 elsewhere.
    """

    tokens_T: tuple[int, ...] = ()
    masks_T: tuple[int, ...] = ()
    logprobs_T: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_lengths("episode", tokens=len(self.tokens_T), masks=len(self.masks_T), logprobs=len(self.logprobs_T))


@dataclass(frozen=True, slots=True)
class Episode:
    """One rollout: what was sampled, what it was sampled from, and what came of it.

    `tokens_T`, `masks_T` and `logprobs_T` are the sequence that it ended in; see `TokenRecord`. A chat template that
    rewrites earlier messages makes a rollout of several sequences; `branches` has one episode for each.
    """

    task: Task
    messages: tuple[Message, ...]
    tokens_T: tuple[int, ...]
    masks_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    tool_calls: int = 0
    tool_errors: int = 0
    broken_turns: int = 0
    """Turns in which a call came back as an error."""
    error: Exception | None = None
    """What the server failed with; given exactly if `stop_reason` is SERVER_ERROR."""
    verification: Verification | None = None
    reward: Reward | None = None
    weight_version: int | None = None
    """The oldest of the policy's weights that sampled it; None if the server does not say."""
    changes: tuple[frozenset[int], ...] = ()
    """For each turn, which of its tool calls (counted from 0) changed what the verdict is about. Empty: not known."""
    context_turns: tuple[ContextTurn, ...] = ()
    """The assistant's messages that are none of `turns`."""
    requests: int = 0
    """What its program asked of the policy, in this sequence and others; 0 without a program."""
    program: ProgramRun | None = None
    """The program that held the conversation; None: the package's own loop, or a client of a gateway."""
    earlier: tuple[TokenRecord, ...] = ()
    """The sequences before the one that it ended in, each up to its last turn."""

    def __post_init__(self) -> None:
        if self.changes:
            check_lengths("episode", turns=len(self.turns), changes=len(self.changes))
        if (self.stop_reason is StopReason.SERVER_ERROR) != (self.error is not None):
            raise AlignmentError(f"episode: stop reason {self.stop_reason!r} with error {self.error!r}")
        sequences = self.sequences
        for turn in self.turns:
            if turn.branch >= len(sequences):
                raise AlignmentError(f"episode: a turn of sequence {turn.branch}, but there are {len(sequences)}")
            tokens_T, masks_T = sequences[turn.branch].tokens_T, sequences[turn.branch].masks_T
            if turn.end > len(tokens_T):
                raise AlignmentError(f"episode: turn ends at {turn.end}, but there are {len(tokens_T)} tokens")
            if masks_T[turn.start : turn.end] != tokens_T[turn.start : turn.end]:
                raise AlignmentError(f"episode: the mask does not cover the turn [{turn.start}, {turn.end})")
            if self.messages[turn.message_index].get("role") != "assistant":
                raise AlignmentError(f"episode: message {turn.message_index} is not the assistant's")

    @property
    def sequences(self) -> tuple[TokenRecord, ...]:
        """All its sequences, the one that it ended in last."""
        return (*self.earlier, TokenRecord(self.tokens_T, self.masks_T, self.logprobs_T))

    def branches(self) -> "list[Episode]":
        """Each of its sequences as an episode: its own turns, and the messages up to what answered the last of them.

        Turns of the other sequences are context in it, so that each sampled token is learned from once.

            u a1 u a2        the template dropped the reasoning of a1 when the user spoke again:
            u a1' u a2       (u a1 u) has the turn a1; in (u a1' u a2) a1' is context, and a2 the turn
        """
        if not self.earlier:
            return [self]
        first = {turn.branch: turn.message_index for turn in reversed(self.turns)}
        found: list[Episode] = []
        for branch, sequence in enumerate(self.sequences):
            own = [index for index, turn in enumerate(self.turns) if turn.branch == branch]
            messages = self.messages[: first.get(branch + 1)]
            others = (turn.message_index for turn in self.turns if turn.branch != branch)
            shared = [ContextTurn(index, "shared") for index in others if index < len(messages)]
            found.append(
                replace(
                    self,
                    messages=messages,
                    tokens_T=sequence.tokens_T,
                    masks_T=sequence.masks_T,
                    logprobs_T=sequence.logprobs_T,
                    turns=tuple(replace(self.turns[index], branch=0) for index in own),
                    changes=tuple(self.changes[index] for index in own) if self.changes else (),
                    context_turns=(*self.context_turns, *shared),
                    earlier=(),
                )
            )
        return found


# ------------------------------------------------------------------------------------------------------------- world


class Session(Protocol):
    """One episode's place in a world: where its tool calls act."""

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Run one call; whatever the model does wrong is in the result.

        Raises:
            SandboxError: the world itself does not work.
        """
        ...

    async def user_reply(self, messages: Sequence[Message]) -> str | None:
        """What a user says to the last of the messages, a turn without tool calls; None: nobody says anything."""
        ...

    async def collect(self) -> Any:
        """What the agent leaves behind, for the world's own `verify`."""
        ...


class World(Protocol):
    """What an agent acts in: how it is told of its task, its tools, and the verdict on what it leaves behind."""

    @property
    def system_prompt(self) -> str:
        """What the agent is told before its task."""
        ...

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The tools as OpenAI writes them, for the chat template."""
        ...

    def session(self, task: Task) -> AbstractAsyncContextManager[Session]:
        """A fresh place for one episode, with what the task starts from; gone when it is left."""
        ...

    async def train_and_eval_tasks(self) -> tuple[list[Task], list[Task]]:
        """The tasks to train on and those to evaluate on; one list for both where there are few.

        Raises:
            DatasetError, WorldError: there are none, or they are broken.
        """
        ...

    async def verify(self, task: Task, left: Any) -> Verification:
        """Judge what `Session.collect` gave, apart from the session that it was made in; None: nothing is left.

        Raises:
            SandboxError: the verifier itself does not work.
        """
        ...

    async def check(self) -> None:
        """Raise SandboxError, saying why and what to do, unless sessions work on this machine."""
        ...


# -------------------------------------------------------------------------------------------------------- distilling


class TurnOutcome(StrEnum):
    """What became of a turn; every turn ends in exactly one."""

    SCORED = "scored"
    """It had a hint, and the teacher's rows are written."""
    NO_NEXT_STATE = "no_next_state"
    """Nothing answered the turn."""
    VOTE_FAILED = "vote_failed"
    """Too few votes said that the next state shows what the turn should have done."""
    JUDGE_ERROR = "judge_error"
    """The judge gave no answer, or no vote that could be read."""
    LEAKED = "leaked"
    """The hint repeated hidden test code."""
    TOO_LONG = "too_long"
    """The hint and the turn together do not fit the teacher's context."""
    SCORING_ERROR = "scoring_error"
    """The teacher gave no rows, or rows that do not fit the turn."""


EvidenceKind = Literal["tool", "user", "later", "verdict"]
"""What shows how a turn was: its own tool results, the user's reply to it, what came of it later, the verdict."""

StepScore = Literal[1, 0, -1]
"""Whether a turn did what was wanted: yes, it can't be told, no."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One thing that came after a turn, as text for the judge."""

    kind: EvidenceKind
    text: str
    later_turn: int | None = None
    """Which turn it answered, for kind `later`; counted from 0."""


@dataclass(frozen=True, slots=True)
class HindsightPair:
    """A turn and what came after it, both as text for the judge. Without evidence there is nothing to judge it by."""

    turn_index: int
    task_text: str
    turn_text: str
    evidence: tuple[Evidence, ...]

    @property
    def kinds(self) -> tuple[EvidenceKind, ...]:
        """The kinds of evidence, each once, in their order."""
        return tuple(dict.fromkeys(one.kind for one in self.evidence))

    @property
    def next_state_role(self) -> Literal["tool", "user", "verdict"] | None:
        """Who said the last thing that answered it; where only later turns show how it was, that is a tool's word."""
        kinds: list[Literal["tool", "user", "verdict"]] = [kind for kind in self.kinds if kind != "later"]
        if kinds:
            return kinds[-1]
        return "tool" if self.evidence else None


@dataclass(frozen=True, slots=True)
class Vote:
    """One answer of the judge. `decision` is None if it could not be read: the vote abstains."""

    decision: Literal[1, -1] | None
    hint: str | None
    text: str

    def __post_init__(self) -> None:
        if (self.decision == 1) != (self.hint is not None):
            raise AlignmentError(f"vote: a hint belongs to decision 1 and to no other, got {self.decision!r}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """All votes on one pair and what follows: an accepted hint, or the outcome that ends the turn here."""

    votes: tuple[Vote, ...]
    hint: str | None
    outcome: TurnOutcome | None

    def __post_init__(self) -> None:
        if (self.hint is None) == (self.outcome is None):
            raise AlignmentError("verdict: exactly one of hint and outcome must be given")


@dataclass(frozen=True, slots=True)
class TeacherRequest:
    """The ids that the teacher reads, `tokens[:insert_at] + hint_token_ids + tokens[insert_at:end]`.

    Their last `num_scored` entries are the turn's sampled tokens.
    """

    token_ids: tuple[int, ...]
    num_scored: int
    insert_at: int
    hint_token_ids: tuple[int, ...]
    weight_version: int | None = None
    """The weights that sampled the turn, if that is known: while the server keeps them, they read it."""

    def __post_init__(self) -> None:
        if not 0 < self.num_scored < len(self.token_ids):
            raise AlignmentError(f"teacher request: {self.num_scored} of {len(self.token_ids)} tokens to score")


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """The teacher's logprobs (nats) for one turn.

    `actual_R` [R] of the sampled tokens; `top_ids_RK` [R, K] and `top_logprobs_RK` [R, K] of its most likely tokens,
    most likely first.
    """

    actual_R: NDArray[np.float32]
    top_ids_RK: NDArray[np.int32]
    top_logprobs_RK: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.top_ids_RK.ndim != 2 or self.top_ids_RK.shape != self.top_logprobs_RK.shape:
            raise AlignmentError(
                f"teacher rows: ids of shape {self.top_ids_RK.shape}, logprobs of shape {self.top_logprobs_RK.shape}"
            )
        check_lengths("teacher rows", actual=len(self.actual_R), top=len(self.top_ids_RK))


@dataclass(frozen=True, slots=True)
class DistillArrays:
    """The distillation rows of one sequence, one entry per position; unscored rows are empty (see the wire format)."""

    token_ids_TK: Sequence[Sequence[int]]
    logprobs_TK: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        check_lengths("distill arrays", token_ids=len(self.token_ids_TK), logprobs=len(self.logprobs_TK))
        if list(map(len, self.token_ids_TK)) == list(map(len, self.logprobs_TK)):
            return
        for position, (ids, logprobs) in enumerate(zip(self.token_ids_TK, self.logprobs_TK, strict=True)):
            check_lengths(f"distill row {position}", token_ids=len(ids), logprobs=len(logprobs))
