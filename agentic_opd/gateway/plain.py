"""Prompts that the client rendered itself, as text or token ids: a `ChatFormat` that leaves them as they are. Pure.

A prompt that ends with the template's opening of an assistant's turn has a place for hints, in front of the opening.
"""

from collections.abc import Sequence
from typing import Any

from renderers import Renderer

from agentic_opd.core.errors import RendererError
from agentic_opd.core.types import Message
from agentic_opd.rollout.chat_format import ChatFormat, ParsedTurn, Prompt


class PlainFormat(ChatFormat):
    """The prompt of one request. Its answers are text without tool calls."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        super().__init__(renderer, tokenizer, ())
        self.given: list[int] | None = None
        """The whole prompt's token ids; None: the prompt is the text of the messages."""
        rendered = super().first_prompt([{"role": "user", "content": "u"}])
        self._opening = list(rendered.token_ids[rendered.assistant_open :])
        """The ids that open an assistant's turn."""

    def first_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Return the given ids, or those of the text."""
        return self._at([], self.given or self.tokenizer.encode(messages[-1]["content"]))

    def next_prompt(
        self,
        known_ids: list[int],
        start: int,
        last_user_end: int,
        history: Sequence[Message],
        new: Sequence[Message],
        sampled_from: int = 0,
    ) -> Prompt:
        """Return the ids behind the known ones.

        Raises:
            RendererError: the given ids do not begin with the known ones, or the text leaves out a sampled stop token.
        """
        known = len(known_ids)
        if self.given is not None:
            if self.given[:known] != known_ids:
                raise RendererError("the prompt does not begin with the tokens that were read and sampled")
            return self._at(known_ids, self.given[known:])
        ids: list[int] = self.tokenizer.encode(new[0]["content"], add_special_tokens=False)
        if known_ids[-1] in self.stop_token_ids:  # The answer's text did not show it.
            if ids[:1] != known_ids[-1:]:
                raise RendererError("the prompt continues without the sampled stop token")
            ids = ids[1:]
        return self._at(known_ids, ids)

    def parse(self, prompt_ids: list[int], completion_ids: Sequence[int], message_index: int) -> ParsedTurn:
        return self.unparsed(completion_ids)

    def has_place(self, prompt: Sequence[int]) -> bool:
        """Return whether a hint has a place in a prompt: it ends with the opening of an assistant's turn."""
        return len(prompt) > len(self._opening) and [*prompt[-len(self._opening) :]] == self._opening

    def _at(self, known_ids: list[int], ids: list[int]) -> Prompt:
        whole = known_ids + ids
        if not self.has_place(whole):
            return Prompt(tuple(ids), len(whole), len(whole))
        opening = len(whole) - len(self._opening)
        closed = (at for at in range(opening - 1, 0, -1) if whole[at] in self.stop_token_ids)
        return Prompt(tuple(ids), opening, next(closed, opening))
