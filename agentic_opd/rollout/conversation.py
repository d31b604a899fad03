"""One conversation as token ids: sampled ids never change, and new ids are appended to them.

In: the first messages, then alternately a policy's `Completion` and the messages that answered it. Out: the ids of the
next turn's prompt, and the traces. If the chat template rewrites earlier messages,
`branching_prompt` starts another sequence, rendered from the first message.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from agentic_opd.core.errors import RewrittenError
from agentic_opd.core.types import (
    IGNORED,
    PROMPT_LOGPROB,
    Attachments,
    Completion,
    ContextTurn,
    Message,
    Recording,
    Trace,
    Turn,
    attached_before,
)
from agentic_opd.rollout.chat_format import ChatFormat, ParsedTurn, Prompt


class Conversation:
    """A conversation that grows in place: `prompt`, then `add` its completion, then `answer`, and so on.

    `messages` and `turns` (those of the current sequence) are read-only for callers. The cost of each step is
    proportional to what it adds, except for the renderer's work on the whole prompt and the request that sends it.
    """

    def __init__(self, chat: ChatFormat, messages: Sequence[Message]) -> None:
        """Start with the messages before the first turn; nothing is rendered yet."""
        self.chat = chat
        self.messages: list[Message] = list(messages)
        self.turns: list[Turn] = []
        self.earlier: list[Trace] = []
        """Sequences before the current one; see `branching_prompt`."""
        self._tokens: list[int] = []
        self._masks: list[int] = []
        self._logprobs: list[float] = []
        self._attachments: Attachments = ()
        self._prompt: Prompt | None = None
        """Prompt whose ids are at the end of `_tokens`; masks and logprobs are extended when its turn is added."""

    @classmethod
    def restored(cls, chat: ChatFormat, trace: Trace) -> "Conversation":
        """Return a conversation that continues `trace`, whose last message and tokens are those of its last turn."""
        conversation = cls(chat, trace.messages)
        conversation.turns = list(trace.turns)
        conversation._tokens, conversation._masks = list(trace.tokens_T), list(trace.masks_T)
        conversation._logprobs, conversation._attachments = list(trace.logprobs_T), trace.attachments
        return conversation

    @classmethod
    def before_turn(cls, chat: ChatFormat, recording: Recording, turn_index: int) -> "Conversation":
        """Return the conversation before a recorded turn; the ids of its prompt are the recorded ones.

        `turn_index` counts the turns of all traces, from 0.
        """
        firsts = [*accumulate((len(trace.turns) for trace in recording.traces), initial=0)]
        number = bisect_right(firsts, turn_index) - 1
        trace, turn_number = recording.traces[number], turn_index - firsts[number]
        turn, end = trace.turns[turn_number], trace.turns[turn_number - 1].end if turn_number else 0
        conversation = cls(chat, trace.messages[: turn.message_index])
        conversation.earlier = list(recording.traces[:number])
        conversation.turns = list(trace.turns[:turn_number])
        conversation._tokens, conversation._masks = list(trace.tokens_T[: turn.start]), list(trace.masks_T[:end])
        conversation._logprobs = list(trace.logprobs_T[:end])
        conversation._attachments = attached_before(trace.attachments, turn.start)
        conversation._prompt = Prompt(trace.tokens_T[end : turn.start], turn.assistant_open, turn.last_user_end)
        return conversation

    @property
    def num_turns(self) -> int:
        """Number of turns in all sequences of the conversation."""
        return sum(len(trace.turns) for trace in self.earlier) + len(self.turns)

    def prompt(self) -> list[int]:
        """Return the ids of the next turn's prompt. The list is not a copy: it grows with the conversation.

        Raises:
            RewrittenError: the chat template changes earlier ids.
            RendererError: the messages can't be rendered.
        """
        if self._prompt is None:
            if self.turns:
                last = self.turns[-1]
                history, new = self.messages[: last.message_index + 1], self.messages[last.message_index + 1 :]
                prompt = self.chat.next_prompt(
                    self._tokens, last.start, last.last_user_end, history, new, sampled_from=self.turns[0].message_index
                )
            else:
                prompt = self.chat.first_prompt(self.messages)
            self._tokens += prompt.token_ids
            self._attachments += prompt.attachments
            self._prompt = prompt
        return self._tokens

    @property
    def attachments(self) -> Attachments:
        """The attachments in `prompt()`, in order."""
        return self._attachments

    def branching_prompt(self) -> list[int]:
        """Return `prompt()`; if the chat template changes earlier ids, start another sequence with the changed ids.

        Sampled tokens stay in their sequence. In the new sequence the earlier turns are context.
        """
        try:
            return self.prompt()
        except RewrittenError:
            self.branch()
            return self.prompt()

    def branch(self) -> None:
        """End the current sequence; the next prompt begins another, rendered from the first message."""
        if self.turns:
            self.earlier.append(self.trace())
        self.turns, self._tokens, self._masks, self._logprobs = [], [], [], []
        self._attachments, self._prompt = (), None

    def add(self, completion: Completion, parsed: ParsedTurn | None = None) -> ParsedTurn:
        """Add the turn that was sampled from `prompt()` to `turns`; without its message `parsed`, it is parsed here.

        Raises:
            RendererError: the completion can't be parsed; the conversation does not change.
        """
        tokens, prompt = self.prompt(), self._prompt
        assert prompt is not None
        ids, start, index = completion.token_ids, len(tokens), len(self.messages)
        cut_off = completion.finish_reason == "length"
        parsed = parsed or self.chat.parse(tokens, ids, index)
        turn = Turn(
            start=start,
            end=start + len(ids),
            assistant_open=prompt.assistant_open,
            last_user_end=prompt.last_user_end,
            message_index=index,
            truncated=cut_off,
            weight_version=completion.weight_version,
            sampling=completion.sampling,
            reasoning_tokens=self.chat.reasoning_tokens(ids, parsed.message),
        )
        self._tokens += ids
        self._masks += [IGNORED] * len(prompt.token_ids) + list(ids)
        self._logprobs += [PROMPT_LOGPROB] * len(prompt.token_ids) + list(completion.logprobs)
        self._prompt = None
        self.turns.append(turn)
        self.messages.append(parsed.message)
        return parsed

    def answer(self, messages: Sequence[Message]) -> None:
        """Add the answers to the last turn: tool results, or a user message."""
        del self._tokens[len(self._masks) :]  # Drops a rendered prompt without a turn.
        self._attachments = attached_before(self._attachments, len(self._masks))
        self._prompt = None
        self.messages += messages

    def fork(self) -> "Conversation":
        """Return an independent conversation that continues from this point."""
        fork = Conversation(self.chat, self.messages)
        fork.earlier, fork.turns, fork._prompt = self.earlier[:], self.turns[:], self._prompt
        fork._tokens, fork._masks, fork._logprobs = self._tokens[:], self._masks[:], self._logprobs[:]
        fork._attachments = self._attachments
        return fork

    def traces(self) -> tuple[Trace, ...]:
        """Return all sequences; a current one without a turn is left out if there are earlier ones.

        In each of them, assistant messages of other sequences are context, as are those that were not sampled.
        """
        traces = [*self.earlier, *([self.trace()] if self.turns or not self.earlier else [])]
        sampled = {turn.message_index for trace in traces for turn in trace.turns}
        return tuple(replace(trace, context_turns=_context_turns(trace, sampled)) for trace in traces)

    def trace(self) -> Trace:
        """Return all messages, and the current sequence up to the end of its last turn."""
        end = len(self._masks)
        return Trace(
            messages=tuple(self.messages),
            tokens_T=tuple(self._tokens[:end]),
            masks_T=tuple(self._masks),
            logprobs_T=tuple(self._logprobs),
            turns=tuple(self.turns),
            attachments=attached_before(self._attachments, end),
        )


def _context_turns(trace: Trace, sampled: Collection[int]) -> tuple[ContextTurn, ...]:
    """Return the assistant messages without a turn in `trace`; `sampled` are the message indices of all turns."""
    sampled_here = {turn.message_index for turn in trace.turns}
    return tuple(
        ContextTurn(index, "shared" if index in sampled else "not_sampled")
        for index, message in enumerate(trace.messages)
        if message["role"] == "assistant" and index not in sampled_here
    )
