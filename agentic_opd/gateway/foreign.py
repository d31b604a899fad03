"""A turn of a foreign model, recorded as text (`env.upstream`). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentic_opd.core.types import Message
from agentic_opd.gateway.request import TurnType
from agentic_opd.gateway.turns import ClientReply


@dataclass(frozen=True, slots=True)
class ForeignTurn:
    """One answer of a foreign model, with the messages since its parent turn. It has no token ids."""

    turn_id: int
    """Id that increases in order of completion."""
    parent: int | None
    """Id of the turn that it continues; None: its history was not recorded."""
    messages: tuple[Message, ...]
    """Messages after the parent's. The last one is the answer."""
    message_index: int
    """Index of the answer, counted from the start of its branch."""
    turn_type: TurnType
    tools: tuple[dict[str, Any], ...]
    model: str
    """The model that the upstream names."""
    finish_reason: str
    """Why the answer ended, in the upstream's word; empty if it broke off."""
    is_whole: bool
    """Whether the model ended the answer itself. An answer that was cut off, or that broke off, is context."""
    usage: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tokens of the prompt and the answer (`input`, `output`) as the upstream counted them."""
    follows: ClientReply | None = None
    """The earlier turn that the request answers, if it changed its history; None if there is none."""
    answer_id: str = ""
    """Id of the answer that the client received."""
    num_instructions: int = 0
    """Number of first messages that belong to the request, and not to the conversation that a later one continues."""
    left_out: tuple[str, ...] = ()
    """Kinds of the parts of `messages` that are not text, such as `image`; each is `[picture]` or `[file]` there."""
    kind: Literal["foreign"] = "foreign"

    @property
    def template(self) -> Mapping[str, Any]:
        """Options of a chat template: none, because no prompt is rendered."""
        return {}
