"""Distillation of existing data without new rollouts: episodes, rollouts or messages -> rows and records (I/O).

    Episode                   -> distill        -> arrays and records
    ScoredRollout + messages  -> episode_of     -> Episode, its turns located by rendering the messages
    messages                  -> episode_said   -> Episode that this policy did not sample
    ScoredRollout + hints     -> scored_again   -> ScoredRollout with new rows for its recorded hints

See docs/distill.md for usage.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import SecretStr

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import AlignmentError, RendererError, ServerRequestError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import (
    IGNORED,
    PROMPT_LOGPROB,
    ContextTurn,
    DistillArrays,
    Episode,
    Message,
    StopReason,
    Task,
    TeacherRequest,
    TeacherRows,
    TokenRecord,
    Turn,
    TurnOutcome,
)
from agentic_opd.distill.arrays import build_arrays, rounded
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.connect import PolicyEndpoint
from agentic_opd.distill.distiller import DistilledGroup, Distiller
from agentic_opd.distill.pipeline import DistilledEpisode, scored_by, without_hint
from agentic_opd.plugin.client import PluginClient
from agentic_opd.rollout.chat import Chat, ParsedTurn
from agentic_opd.rollout.conversation import Completion, Conversation
from agentic_opd.rollout.renderer import load_policy_tokenizer, load_renderer
from agentic_opd.runs.logs import has_arguments, plain_messages
from agentic_opd.wire.group import ScoredRollout, TurnRecord

__all__ = ["DistillArrays", "DistillConfig", "Episode", "PolicyDistiller", "TurnRecord"]

UNMATCHED = (AlignmentError, RendererError)
"""Errors of `episode_of` and `episode_said` if tokens and messages do not match."""


def sampled_spans(masks_T: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs `[start, end)` of sampled positions, in order."""
    is_sampled = [False, *(mask != IGNORED for mask in masks_T), False]
    edges = [at for at in range(len(masks_T) + 1) if is_sampled[at] != is_sampled[at + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def episode_of(rollout: ScoredRollout, chat: Chat, task_id: str) -> Episode:
    """Convert a rollout of any origin to an episode; its turns are located by rendering its messages.

    If there are fewer sampled spans than assistant messages, the spans belong to the last messages, and the others are
    context. An unsampled repetition of a turn's stop token, as Atropos' ManagedServer writes it, is skipped.

    Raises:
        AlignmentError: the rollout has no messages, or they do not render to its tokens; the error names the position.
        RendererError: the messages can't be rendered.
    """
    kept = [at for at in range(len(rollout.tokens_T)) if not _is_stop_again(rollout, at, chat.stop_token_ids)]
    tokens = tuple(rollout.tokens_T[at] for at in kept)
    messages, spans = _complete(rollout.messages or ()), sampled_spans([rollout.masks_T[at] for at in kept])
    context = {turn.message_index for turn in rollout.context_turns}
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i not in context]
    if not spans or len(spans) > len(said):
        raise AlignmentError(f"{len(spans)} sampled spans for {len(said)} assistant messages")
    said, left_out = said[len(said) - len(spans) :], said[: len(said) - len(spans)]
    talk = Conversation(chat, messages[: said[0]])
    turns: list[Turn] = []
    ends = [*said[1:], len(messages)]
    for number, ((start, end), at, following) in enumerate(zip(spans, said, ends, strict=True), start=1):
        prompt = talk.prompt()
        if tuple(prompt) != tokens[:start]:
            same = next((i for i, (a, b) in enumerate(zip(prompt, tokens, strict=False)) if a != b), len(prompt))
            raise AlignmentError(
                f"turn {number}: its messages render to {len(prompt)} tokens before it, the mask says {start}; they "
                f"are the same up to position {min(same, start)}. Other tools, another renderer or another tokenizer?"
            )
        # Some masks extend beyond the stop token, over tokens that the template adds.
        stop = next((i + 1 for i in range(start, end) if tokens[i] in chat.stop_token_ids), end)
        cut_off = tokens[stop - 1] not in chat.stop_token_ids
        ids = tokens[start:stop]
        sample = talk.add(
            Completion(ids, (0.0,) * len(ids), "length" if cut_off else "stop"), ParsedTurn(messages[at], ())
        )
        turns.append(_moved(replace(sample.turn, end=end, message_index=at), kept))
        talk.answer(messages[at + 1 : following])
    not_sampled = tuple(ContextTurn(index, "not_sampled") for index in left_out)
    return Episode(
        task=Task(task_id, "", None),
        messages=tuple(messages),
        tokens_T=tuple(rollout.tokens_T),
        masks_T=tuple(rollout.masks_T),
        logprobs_T=tuple(rollout.logprobs_T),
        turns=_with_versions(turns, rollout.turns),
        stop_reason=StopReason.CLOSED,
        context_turns=tuple(sorted((*rollout.context_turns, *not_sampled), key=lambda turn: turn.message_index)),
    )


def _is_stop_again(rollout: ScoredRollout, at: int, stop_ids: Sequence[int]) -> bool:
    """Whether the token at `at` is an unsampled repetition of a sampled stop token before it."""
    tokens, masks = rollout.tokens_T, rollout.masks_T
    is_prompt_behind_turn = at > 0 and masks[at] == IGNORED and masks[at - 1] != IGNORED
    return is_prompt_behind_turn and tokens[at] == tokens[at - 1] and tokens[at] in stop_ids


def _moved(turn: Turn, kept: Sequence[int]) -> Turn:
    """Map a turn's positions from indices into `kept` to positions in the sequence."""
    places = {name: kept[getattr(turn, name)] for name in ("start", "assistant_open", "last_user_end")}
    return replace(turn, **places, end=kept[turn.end - 1] + 1)


def _with_versions(turns: Sequence[Turn], records: Sequence[TurnRecord] | None) -> tuple[Turn, ...]:
    """Return the turns with the weight versions from records with the same spans."""
    versions = {record.span: record.weight_version for record in records or ()}
    return tuple(replace(turn, weight_version=versions.get((turn.start, turn.end))) for turn in turns)


def _learned_only(record: TokenRecord, turns: Sequence[Turn]) -> TokenRecord:
    """Return the record with all positions outside of `turns` masked as prompt."""
    learned = {position for turn in turns for position in range(turn.start, turn.end)}
    places = range(len(record.tokens_T))
    return TokenRecord(
        record.tokens_T,
        tuple(record.masks_T[p] if p in learned else IGNORED for p in places),
        tuple(record.logprobs_T[p] if p in learned else PROMPT_LOGPROB for p in places),
    )


def episode_said(messages: Sequence[Message], chat: Chat, task_id: str) -> Episode:
    """Convert a conversation in text to an episode; its ids come from the renderer and were not sampled.

    Assistant messages before the first user message, and turns with a call whose arguments are not a JSON object, are
    context and not trained on. `logprobs_T` is a placeholder of 0.0 at the assistant's tokens; see
    `PolicyDistiller.with_logprobs`.

    Raises:
        AlignmentError: a message can't be read, or no assistant message can be trained on.
        RendererError: the conversation can't be rendered.
    """
    messages = plain_messages(messages)
    first_user = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    said = [i for i in assistants if i > first_user]
    context = {i for i in assistants if i < first_user or not has_arguments(messages[i])}
    if context >= {*said}:
        raise AlignmentError("the assistant says nothing in it that answers a user and can be learned")
    talk = Conversation(chat, messages[: said[0]])
    for at, following in zip(said, [*said[1:], len(messages)], strict=True):
        asked = next(i for i in range(at, 0, -1) if messages[i - 1]["role"] != "assistant")
        ids = chat.written([*messages[:asked], messages[at]])
        talk.branching_prompt()
        talk.add(Completion(ids, (0.0,) * len(ids)), ParsedTurn(messages[at], ()))
        talk.answer(messages[at + 1 : following])
    turns = [turn for turn in talk.turns if turn.message_index not in context]
    *earlier, last = (
        _learned_only(record, [turn for turn in turns if turn.branch == branch])
        for branch, record in enumerate(talk.records())
    )
    return Episode(
        task=Task(task_id, "", None),
        messages=tuple(messages),
        tokens_T=last.tokens_T,
        masks_T=last.masks_T,
        logprobs_T=last.logprobs_T,
        turns=tuple(turns),
        stop_reason=StopReason.CLOSED,
        context_turns=tuple(ContextTurn(index, "not_sampled") for index in sorted(context)),
        earlier=tuple(earlier),
    )


def _complete(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a `content` each; OpenAI omits it beside tool calls."""
    return [{**message, "content": message.get("content") or ""} for message in messages]


def without_rows(rollout: ScoredRollout, top_k: int) -> DistillArrays:
    """Return the arrays of a rollout without scored turns."""
    plain = Episode(
        Task("none", "", None),
        (),
        tuple(rollout.tokens_T),
        tuple(rollout.masks_T),
        tuple(rollout.logprobs_T),
        (),
        StopReason.CLOSED,
    )
    return build_arrays(plain, {}, top_k)


@dataclass(frozen=True, slots=True)
class PolicyDistiller:
    """A policy server with its judge and teacher; created by `connected`."""

    chat: Chat
    """Chat of the policy's renderer, without tools."""
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
        *,
        api_key: str | None = None,
        tokenizer_name: str = "",
        renderer: str = "auto",
        renderer_options: dict[str, Any] | None = None,
        tool_format: Literal["template", "text"] = "template",
        stop_tokens: Sequence[str] = (),
        retry_s: float = 60.0,
        seed: int = 0,
    ) -> "AsyncGenerator[PolicyDistiller]":
        """Connect to the policy and to the configured judge and teacher, as an async context manager.

        Args:
            policy_url: The policy's vLLM server, with or without /v1.
            config: The distillation settings; judge and teacher default to the policy's server.
            api_key: The policy server's key.
            tokenizer_name: A hub name or a folder; "": the tokenizer of the server's model.
            renderer: As the setting `renderer`.
            renderer_options: As the setting `renderer_options`.
            tool_format: As the setting `tool_format`.
            stop_tokens: As the setting `stop_tokens`.
            retry_s: Seconds to retry a server that does not answer.
            seed: Seed for drawing other turns' hints.

        Raises:
            ConfigError: the tokenizer or the renderer can't be loaded.
            RendererError, ServerMismatchError, ServerRequestError, ServerUnreachableError: as `Distiller.connect`.
        """
        client = JsonClient(policy_url, api_key, retry_s=retry_s)
        try:
            policy = await PluginClient.connected(client)
            tokenizer = await load_policy_tokenizer((tokenizer_name,), client)
            written_by = load_renderer(
                tokenizer, renderer, renderer_options or {}, tool_format=tool_format, stop_tokens=stop_tokens
            )
            chat = Chat(written_by, tokenizer, ())
            distiller = Distiller(config, max_token_length=policy.info.max_model_len, retry_s=retry_s, seed=seed)
            try:
                key = SecretStr(api_key) if api_key else None
                endpoint = PolicyEndpoint(client.base_url, policy.info.model, key)
                await distiller.connect(endpoint, chat.renderer, tokenizer)
                yield cls(chat, distiller, policy, client.base_url)
            finally:
                await distiller.close()
        finally:
            await client.close()

    def chat_with(self, tools: Sequence[dict[str, Any]]) -> Chat:
        """Return a chat of the policy's renderer with tools in OpenAI's format."""
        return Chat(self.chat.renderer, self.chat.tokenizer, tools)

    async def distill(self, episode: Episode) -> DistilledEpisode:
        """Judge and score an episode; the result's `arrays` and `records` are the trainer's inputs.

        Raises:
            ServerUnreachableError: the teacher, or a judge that is the policy's server, is unreachable.
        """
        return await self.distiller.distill(episode, self.policy_url)

    async def close_group(self, episodes: Sequence[DistilledEpisode]) -> DistilledGroup:
        """Return a group's distillation metadata and statistics; see `Distiller.close_group`."""
        return await self.distiller.close_group(episodes)

    async def logprobs_of(self, tokens_T: Sequence[int], masks_T: Sequence[int]) -> tuple[float, ...]:
        """Return the policy's logprobs (nats) at sampled positions and 1.0 elsewhere, like `inference_logprobs`.

        Raises:
            AlignmentError: the tokens exceed the policy's context, or the first token is a sampled one.
            ServerError: the policy server failed.
        """
        spans = sampled_spans(masks_T)
        if not spans:
            return (PROMPT_LOGPROB,) * len(masks_T)
        first, end = spans[0][0], spans[-1][1]
        if end >= self.policy.info.max_model_len:
            raise AlignmentError(f"{end} tokens, the policy reads at most {self.policy.info.max_model_len - 1}")
        if first == 0:
            raise AlignmentError("its first token is a sampled one: nothing says what it was sampled from")
        reply = await self.policy.score(TeacherRequest(tuple(tokens_T[:end]), end - first, first, ()), 1)
        read = [*(0.0,) * first, *rounded(reply.rows.actual_R).tolist(), *(0.0,) * (len(tokens_T) - end)]
        return tuple(
            PROMPT_LOGPROB if mask == IGNORED else logprob for logprob, mask in zip(read, masks_T, strict=True)
        )

    async def with_logprobs(self, episode: Episode) -> Episode:
        """Return the episode with the policy's logprobs; see `logprobs_of`."""
        *earlier, last = await gather_all(self.logprobs_of(one.tokens_T, one.masks_T) for one in episode.sequences)
        pairs = zip(episode.earlier, earlier, strict=True)
        return replace(episode, logprobs_T=last, earlier=tuple(replace(one, logprobs_T=read) for one, read in pairs))

    async def scored_again(self, rollout: ScoredRollout, *, reads_hints: bool = True) -> ScoredRollout:
        """Return a rollout with new teacher rows for its recorded hints, without asking the judge.

        Controls are dropped, because they belong to the replaced rows.

        Args:
            rollout: A rollout with records.
            reads_hints: Whether the teacher reads the hints; False for `hint_source: none`.

        Raises:
            AlignmentError: the rollout has no records.
            ServerUnreachableError: the teacher is unreachable.
        """
        if rollout.turns is None:
            raise AlignmentError("it has no records of turns, so there are no hints to keep")
        read = await gather_all(self._read_again(rollout, record, reads_hints) for record in rollout.turns)
        at = {index: rows for index, (_, rows) in enumerate(read) if rows is not None}
        # `build_arrays` uses only the spans.
        turns = [Turn(*record.scored_span, record.span[0], record.span[0], 0) for record in rollout.turns]
        episode = Episode(
            Task("none", "", None),
            ({"role": "assistant", "content": ""},),
            tuple(rollout.tokens_T),
            tuple(rollout.masks_T),
            tuple(rollout.logprobs_T),
            tuple(turns),
            StopReason.CLOSED,
        )
        arrays = build_arrays(episode, at, self.distiller.config.distill_topk)
        return replace(rollout, rows=arrays, turns=tuple(record for record, _ in read))

    async def _read_again(
        self, rollout: ScoredRollout, record: TurnRecord, reads_hints: bool
    ) -> tuple[TurnRecord, TeacherRows | None]:
        plain = replace(
            record, control=None, scored_version=None, baseline_logprobs=None, unhinted_logprobs=None, error=None
        )
        place, (start, end) = record.insert_at, record.scored_span
        if not record.hint or (reads_hints and place is None):
            return replace(plain, error=record.error), None
        tokens, ids = tuple(rollout.tokens_T), record.hint_token_ids
        place = record.span[0] if place is None else place
        version = record.weight_version
        request = TeacherRequest(tokens[:place] + ids + tokens[place:end], end - start, place, ids, version)
        config, servers = self.distiller.config, self.distiller.servers_of(self.policy_url)
        limit = servers.teacher.info.max_model_len - 1
        if len(request.token_ids) > limit:
            why = f"{len(request.token_ids)} tokens, the teacher reads at most {limit}"
            return replace(plain, outcome=TurnOutcome.TOO_LONG, error=why), None
        second = without_hint(TeacherRequest(tokens[:end], end - start, start, (), version), servers)
        try:
            reply = await servers.teacher.score(request, config.distill_topk, () if second is None else (second,))
        except (AlignmentError, ServerRequestError) as error:
            return replace(plain, outcome=TurnOutcome.SCORING_ERROR, error=str(error)), None
        read = next((rows for rows in reply.also if rows is not None), None)
        scored = scored_by(replace(plain, outcome=TurnOutcome.SCORED), reply.weight_version, read, servers, config)
        return scored, reply.rows
