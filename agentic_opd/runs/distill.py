"""Distillation of existing data without new rollouts: conversations, rollouts or messages -> rows and records (I/O).

    Recording                 -> distill        -> arrays and records
    ScoredRollout + messages  -> trace_of       -> Trace, its turns located by rendering the messages
    messages                  -> traces_of      -> Traces that this policy did not sample

`rescore` scores the hints of a file again. See docs/distill.md for usage.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from agentic_opd.core.attachments.files import files_beside
from agentic_opd.core.attachments.prompts import AttachmentTokens
from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import AlignmentError, RendererError, RewrittenError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import (
    IGNORED,
    PROMPT_LOGPROB,
    ContextTurn,
    DistillArrays,
    Message,
    Recording,
    Task,
    TeacherRequest,
    Trace,
    Turn,
    attached_before,
    sampled_spans,
    shared_length,
)
from agentic_opd.distill.config import DistillConfig, JudgeConfig
from agentic_opd.distill.connect import PolicyEndpoint
from agentic_opd.distill.distiller import Distiller
from agentic_opd.distill.records import (
    DistilledRecording,
    DistilledTrace,
    WrittenRows,
    build_arrays,
)
from agentic_opd.distill.rows import rounded
from agentic_opd.logs.messages import ConversationLog, LogNote, read_log, says_nothing
from agentic_opd.plugin.client import PluginClient
from agentic_opd.rollout.chat_format import ChatFormat, ParsedTurn
from agentic_opd.rollout.config import RendererConfig
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.renderer import configured_renderer, load_policy_tokenizer
from agentic_opd.runs.transcript import end_of_turn, reader_for, with_turns, without_second_stops
from agentic_opd.wire.group import ScoredRollout

__all__ = ["DistillConfig", "DistilledTrace", "JudgeConfig", "PolicyDistiller", "Recording", "RendererConfig", "Trace"]

UNMATCHED = (AlignmentError, RendererError)
"""Errors of `trace_of` and `traces_of` if tokens and messages do not match."""


def trace_of(rollout: ScoredRollout, chat: ChatFormat) -> Trace:
    """Return the trace of a rollout of any origin; its turns are located by rendering its messages.

    Without an assistant's message, the messages are read from the tokens (see `transcript`). If there are fewer sampled
    spans than assistant messages, the spans belong to the last messages, and the others are context. An unsampled
    repetition of a stop token is skipped. If the template rewrites earlier messages, as Qwen3's drops their reasoning,
    the turns are read from the tokens too, and the other messages are compared.

    Raises:
        AlignmentError: the messages do not render to the rollout's tokens, or none can be read from them; the
            error names the position.
        RendererError: the messages can't be rendered.
    """
    if not has_messages(rollout):
        return _read_trace(rollout, chat)
    try:
        return _rendered_trace(rollout, chat)
    except RewrittenError:
        read = _read_trace(rollout, chat)
        messages = _complete(rollout.messages or ())
        if [*map(_compared, read.messages)] != [*map(_compared, messages)]:
            raise
        return replace(read, messages=tuple(messages))


def _rendered_trace(rollout: ScoredRollout, chat: ChatFormat) -> Trace:
    positions = without_second_stops(rollout, chat.stop_token_ids)
    tokens = tuple(rollout.tokens_T[position] for position in positions)
    spans = sampled_spans([rollout.masks_T[position] for position in positions])
    messages = _complete(rollout.messages or ())
    context = {turn.message_index for turn in rollout.context_turns}
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i not in context]
    if not spans or len(spans) > len(assistants):
        raise AlignmentError(f"{len(spans)} sampled spans for {len(assistants)} assistant messages")
    left_out, assistants = assistants[: -len(spans)], assistants[-len(spans) :]
    conversation = Conversation(chat, messages[: assistants[0]])
    versions = {record.span: record.weight_version for record in rollout.turns or ()}
    turns: list[Turn] = []
    ends = [*assistants[1:], len(messages)]
    for number, ((start, end), assistant, following) in enumerate(zip(spans, assistants, ends, strict=True), start=1):
        prompt = conversation.prompt()
        if tuple(prompt) != tokens[:start]:
            raise AlignmentError(f"turn {number}: {_difference(prompt, tokens[:start], chat.tokenizer)}")
        stop = end_of_turn(tokens, (start, end), chat.stop_token_ids)
        cut_off = tokens[stop - 1] not in chat.stop_token_ids
        ids = tokens[start:stop]
        completion = Completion(ids, (0.0,) * len(ids), "length" if cut_off else "stop")
        conversation.add(completion, ParsedTurn(messages[assistant], ()))
        turn = _moved(replace(conversation.turns[-1], end=end), positions)
        turns.append(replace(turn, message_index=assistant, weight_version=versions.get((turn.start, turn.end))))
        conversation.answer(messages[assistant + 1 : following])
    context_turns = [*rollout.context_turns, *(ContextTurn(index, "not_sampled") for index in left_out)]
    return with_turns(rollout, messages, turns, context_turns)


FROM_TOKENS = "messages_from_tokens"
"""Entry of `overrides[i]` of a rollout whose messages were read from its tokens: they are read again next time."""


def has_messages(rollout: ScoredRollout) -> bool:
    """Return whether the rollout has a conversation. Atropos' `include_messages` writes one user message instead."""
    has_assistant = any(message["role"] == "assistant" for message in rollout.messages or ())
    return has_assistant and not rollout.extra.get(FROM_TOKENS)


def _compared(message: Message) -> tuple[bool, str | None]:
    """Return the part of a message that must equal the one read from the tokens: all but a turn's own text."""
    is_turn = message["role"] == "assistant"
    return is_turn, None if is_turn else str(message["content"]).strip()


def _read_trace(rollout: ScoredRollout, chat: ChatFormat) -> Trace:
    try:
        return reader_for(chat.renderer, chat.tokenizer).trace(rollout)
    except UNMATCHED as error:
        raise AlignmentError(
            f"it has no messages, and they can't be read from its tokens: {error}. {_ADVICE}"
        ) from error


_ADVICE = (
    "Name the renderer of these tokens, or let the environment return each rollout's conversation as 'messages', in a "
    "ScoredDataGroup (one list per rollout) or in each ScoredDataItem"
)

_EXCERPT_TOKENS = 24
"""Number of differing tokens that an error shows as text."""


def _difference(rendered: Sequence[int], recorded: Sequence[int], tokenizer: Any) -> str:
    """Return a sentence about where a turn's rendered and recorded prompt differ, and which setting may fix it."""
    same = shared_length(rendered, recorded)
    rendered_text, recorded_text = (
        tokenizer.decode(list(ids[same : same + _EXCERPT_TOKENS])) for ids in (rendered, recorded)
    )
    advice = "Other tools, another renderer or another tokenizer?"
    if recorded_text.startswith("<think>"):
        advice = "Set env.renderer.options to {enable_thinking: false}: the prompts have an empty think block."
    elif rendered_text.startswith("<think>"):
        advice = "Set env.renderer.options to {enable_thinking: true}: the prompts have no think block."
    return (
        f"its messages render to {len(rendered)} tokens before it, the mask says {len(recorded)}; they are the same "
        f"up to position {same}, then {rendered_text!r} is rendered where {recorded_text!r} is recorded. {advice}"
    )


def _moved(turn: Turn, positions: Sequence[int]) -> Turn:
    """Map a turn's positions from indices into `kept` to positions in the sequence."""
    moved = {name: positions[getattr(turn, name)] for name in ("start", "assistant_open", "last_user_end")}
    return replace(turn, **moved, end=positions[turn.end - 1] + 1)


@dataclass(frozen=True, slots=True)
class RenderedLog:
    """A conversation in text as traces that this policy did not sample.

    `logprobs_T` is a placeholder of 0.0 at the assistant's tokens; see `PolicyDistiller.with_logprobs`.
    """

    traces: tuple[Trace, ...]
    notes: Counter[LogNote]
    """Numbers of changes to the conversation, and of turns that are read and not learned, by reason."""
    problem: str = ""
    """The reason why there is no trace."""


def traces_of(messages: Sequence[Message], chat: ChatFormat) -> tuple[Trace, ...]:
    """Return the traces of a conversation in text; see `rendered_log`.

    Raises:
        AlignmentError: a message can't be read, or no assistant message can be trained on; the error counts the
            reasons.
        RendererError: the conversation can't be rendered.
    """
    rendered = rendered_log(read_log({"messages": messages}, chat.tools), chat)
    if not rendered.traces:
        raise AlignmentError(rendered.problem)
    return rendered.traces


def rendered_log(log: ConversationLog, chat: ChatFormat, context: int | None = None) -> RenderedLog:
    """Render a conversation.

    A turn is learned if the renderer reads it back from its tokens as it was written. Reasoning for which the prompt
    has no place is left out, because a prompt that closes its think block is followed by the answer. Other turns are
    context: those before the first user message, those that the log marks, and those after the first `context` tokens.

    Raises:
        RendererError: the conversation can't be rendered.
    """
    messages = [*log.messages]
    first_user = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answers = [i for i in assistants if i > first_user]
    reasons = {i: LogNote.BEFORE_USER for i in assistants if i < first_user} | dict(log.context)
    notes = Counter(log.notes)
    if not answers:
        return _nothing_learned(notes + Counter(reasons.values()))
    conversation = Conversation(chat, messages[: answers[0]])
    errors = list[RendererError]()
    for index, following in zip(answers, [*answers[1:], len(messages)], strict=True):
        message = {**messages[index], "content": chat.without_stop(messages[index]["content"])}
        if says_nothing(message):
            reasons.setdefault(index, LogNote.EMPTY)
        prompt = conversation.branching_prompt()
        if context is not None and len(prompt) >= context:
            reasons = {i: LogNote.TOO_LONG for i in answers if i >= index} | reasons
            conversation.answer(messages[index:])
            break
        prompt_end = next(i for i in range(index, 0, -1) if messages[i - 1]["role"] != "assistant")
        try:
            turn = _written(chat, prompt, messages[:prompt_end], message)
        except RendererError as error:
            errors.append(error)
            reasons.setdefault(index, LogNote.NOT_READ_BACK)
            conversation.branch()
            conversation.answer(messages[index:following])
            continue
        if turn.problem is not None:
            reasons.setdefault(index, turn.problem)
        notes[LogNote.REASONING] += index not in reasons and turn.message.keys() < message.keys()
        messages[index] = turn.message
        conversation.add(Completion(turn.ids, (0.0,) * len(turn.ids)), ParsedTurn(turn.message, ()))
        conversation.answer(messages[index + 1 : following])
    traces = conversation.traces()
    if context is not None:
        late = [turn.message_index for trace in traces for turn in trace.turns if turn.end >= context]
        reasons = dict.fromkeys(late, LogNote.TOO_LONG) | reasons
        traces = tuple(_within(trace, context) for trace in traces)
    notes += Counter(reasons.values())
    if set(answers) <= reasons.keys():
        return _nothing_learned(notes, errors)
    traces = tuple(_without_turns(trace, reasons) for trace in traces)
    return RenderedLog(tuple(trace for trace in traces if trace.turns), notes)


def _nothing_learned(notes: Counter[LogNote], errors: Sequence[RendererError] = ()) -> RenderedLog:
    reasons = ", ".join(f"{notes[note]} {note}" for note in LogNote if note.is_context and notes[note])
    problem = "the assistant says nothing in it that answers a user and can be learned"
    problem += f" (turns: {reasons})" if reasons else ""
    return RenderedLog((), notes, "; ".join((problem, *map(str, errors[:1]))))


class _WrittenTurn(NamedTuple):
    message: Message
    """The message, without reasoning that is left out."""
    ids: tuple[int, ...]
    problem: LogNote | None
    """The reason why it can't be learned."""


def _written(chat: ChatFormat, prompt: list[int], before: Sequence[Message], message: Message) -> _WrittenTurn:
    """Render a turn after its prompt; without its reasoning, if it is not read back with it."""
    without = {name: value for name, value in message.items() if name != "reasoning_content"}
    has_reasoning = bool((message.get("reasoning_content") or "").strip())
    turn = None
    for written in (message, without) if has_reasoning else (without,):
        try:
            ids = chat.written([*before, written])
            problem = _problem(chat, prompt, ids, written)
        except RendererError:
            if written is without:
                raise
            continue
        turn = _WrittenTurn(written, ids, problem)
        if problem is None:
            return turn
    assert turn is not None
    return turn


def _problem(chat: ChatFormat, prompt: list[int], ids: tuple[int, ...], message: Message) -> LogNote | None:
    """Return the reason why a turn's ids are not what the message says; None if they are."""
    if chat.spells_calls(prompt, ids, message):
        return None
    if chat.spells_control_tokens(message):
        return LogNote.CONTROL_TOKENS
    if chat.reads_back(prompt, ids, message):
        return None
    thoughts = [turn.get("reasoning_content") for turn in (chat.parse(prompt, ids, 0).message, message)]
    return LogNote.NO_REASONING if thoughts[0] and not thoughts[1] else LogNote.NOT_READ_BACK


def _within(trace: Trace, context: int) -> Trace:
    """Return the trace up to the last turn that ends before token `context`."""
    turns = [turn for turn in trace.turns if turn.end < context]
    end = turns[-1].end if turns else 0
    return replace(
        trace,
        tokens_T=trace.tokens_T[:end],
        masks_T=trace.masks_T[:end],
        logprobs_T=trace.logprobs_T[:end],
        turns=tuple(turns),
        attachments=attached_before(trace.attachments, end),
    )


def _without_turns(trace: Trace, context: Collection[int]) -> Trace:
    """Return the trace with the turns of the messages `context` as context."""
    why = {turn.message_index: turn for turn in trace.context_turns}
    why |= {index: ContextTurn(index, "not_sampled") for index in context if index < len(trace.messages)}
    turns = [turn for turn in trace.turns if turn.message_index not in context]
    return trace.learning_from(turns, [why[index] for index in sorted(why)])


def _complete(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a `content` each; OpenAI omits it beside tool calls."""
    return [{**message, "content": message.get("content") or ""} for message in messages]


def arrays_of(rollout: ScoredRollout, rows: Iterable[WrittenRows], top_k: int) -> DistillArrays:
    """Return the distillation arrays of a sequence, with one entry a token and `top_k` entries in each scored row."""
    return build_arrays(rollout.tokens_T, rollout.masks_T, rollout.logprobs_T, rows, top_k)


@dataclass(frozen=True, slots=True)
class PolicyDistiller:
    """A policy server with its judge and teacher; created by `connected`."""

    chat: ChatFormat
    """ChatFormat of the policy's renderer, without tools."""
    distiller: Distiller
    policy: PluginClient
    """Scoring client of the policy's own weights."""
    policy_url: str

    @classmethod
    @asynccontextmanager
    async def connected(
        cls,
        policy_url: str,
        config: DistillConfig,
        rendering: RendererConfig,
        *,
        api_key: str | None = None,
        tokenizer_name: str = "",
        retry_s: float = 60.0,
        seed: int = 0,
        file: Path | None = None,
        tasks: Iterable[Task] = (),
        asks_judge: bool = True,
    ) -> "AsyncGenerator[PolicyDistiller]":
        """Connect to the policy and to the configured judge and teacher, as an async context manager.

        Args:
            policy_url: The policy's vLLM server, with or without /v1.
            config: The distillation settings; judge and teacher default to the policy's server.
            rendering: The policy's renderer.
            api_key: The policy server's key.
            tokenizer_name: A hub name or a folder; "": the tokenizer of the server's model.
            retry_s: Seconds to retry a server that does not answer.
            seed: Seed for drawing other turns' hints.
            file: The file of the groups, beside which the files of their attachments are; None: they have none.
            tasks: The tasks of the recordings, where they have some; `teacher.by_kind` names their kinds.
            asks_judge: Whether the judge is asked; otherwise it is not checked, and may be gone.

        Raises:
            ConfigError: the tokenizer or the renderer can't be loaded.
            RendererError, ServerMismatchError, ServerRequestError, ServerUnreachableError: as `Distiller.connect`.
        """
        async with JsonClient(policy_url, api_key, retry_s=retry_s) as client:
            policy = await PluginClient.connected(client, None if file is None else files_beside(file))
            tokenizer = await load_policy_tokenizer((tokenizer_name,), client)
            chat = ChatFormat(configured_renderer(tokenizer, rendering), tokenizer, ())
            context = policy.info.max_model_len
            distiller = Distiller(config, max_token_length=context, retry_s=retry_s, seed=seed)
            try:
                await distiller.connect(
                    PolicyEndpoint.of(policy), chat.renderer, tokenizer, tasks=tasks, asks_judge=asks_judge
                )
                yield cls(chat, distiller, policy, client.base_url)
            finally:
                await distiller.close()

    def chat_with(self, tools: Sequence[dict[str, Any]]) -> ChatFormat:
        """Return a chat of the policy's renderer with tools in OpenAI's format."""
        return ChatFormat(self.chat.renderer, self.chat.tokenizer, tools)

    def chat_of(self, rollout: ScoredRollout, chat: ChatFormat) -> ChatFormat:
        """Return the chat with the tokens of the attachments that a rollout holds."""
        return chat.with_attachments(AttachmentTokens.of(rollout, self.policy.info.placeholder))

    async def distill(self, recording: Recording) -> DistilledRecording:
        """Judge and score a conversation; the `traces` of the result hold the trainer's inputs.

        Raises:
            ServerUnreachableError: the teacher, or a judge that is the policy's server, is unreachable.
        """
        return await self.distiller.distill(recording, self.policy_url)

    async def logprobs_of(self, sequence: Trace | ScoredRollout) -> tuple[float, ...]:
        """Return the policy's logprobs (nats) at sampled positions and 1.0 elsewhere, like `inference_logprobs`.

        Raises:
            AlignmentError: the tokens exceed the policy's context, or the first token is a sampled one.
            ServerError: the policy server failed.
        """
        masks_T = sequence.masks_T
        spans = sampled_spans(masks_T)
        if not spans:
            return (PROMPT_LOGPROB,) * len(masks_T)
        first, end = spans[0][0], spans[-1][1]
        if end >= self.policy.info.max_model_len:
            raise AlignmentError(f"{end} tokens, the policy reads at most {self.policy.info.max_model_len - 1}")
        if first == 0:
            raise AlignmentError("its first token is a sampled one, so it has no prompt")
        reply = await self.policy.score(TeacherRequest.of(sequence, (first, end), first), 1)
        read = [*(0.0,) * first, *rounded(reply.rows.actual_R).tolist(), *(0.0,) * (len(masks_T) - end)]
        return tuple(
            PROMPT_LOGPROB if mask == IGNORED else logprob for logprob, mask in zip(read, masks_T, strict=True)
        )

    async def with_logprobs(self, traces: Sequence[Trace]) -> tuple[Trace, ...]:
        """Return the traces with the policy's logprobs; see `logprobs_of`."""
        read = await gather_all(map(self.logprobs_of, traces))
        return tuple(replace(trace, logprobs_T=logprobs) for trace, logprobs in zip(traces, read, strict=True))
