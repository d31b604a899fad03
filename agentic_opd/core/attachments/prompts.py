"""Messages with pictures -> prompts with the tokens of each picture. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from agentic_opd.core.attachments.messages import IMAGE_MARK, digests_of
from agentic_opd.core.errors import RendererError
from agentic_opd.core.types import Attachments, Message, PlacedImage, TokenSequence


@dataclass(frozen=True, slots=True)
class AttachmentTokens:
    """How the model reads pictures: the placeholder text, and the tokens that replace it, by digest."""

    placeholder: str
    by_digest: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, sequence: TokenSequence, placeholder: str | None) -> Self | None:
        """Return the tokens of a sequence's attachments; None if it has none, or the model reads text only."""
        if not sequence.attachments or placeholder is None:
            return None
        tokens = sequence.tokens_T
        return cls(placeholder, {image.digest: tokens[image.offset : image.end] for image in sequence.attachments})


def as_template_reads(message: Message, tokens: AttachmentTokens | None) -> Message:
    """Return a message with placeholders in place of its attachments.

    Raises:
        RendererError: the model reads text only (`tokens` is None), or the marks do not fit the attachments.
    """
    if "images" not in message:
        return message
    if tokens is None:
        raise RendererError("a message has pictures, and the model reads text only")
    content, digests = message["content"], message["images"]
    if (marks := content.count(IMAGE_MARK)) != len(digests):
        raise RendererError(f"a message has {len(digests)} pictures, and {marks} marks for them")
    fields = {name: value for name, value in message.items() if name != "images"}
    return {**fields, "content": content.replace(IMAGE_MARK, tokens.placeholder)}


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """Ids of a prompt with the tokens of its attachments, and where positions of the prompt without them are now."""

    token_ids: tuple[int, ...]
    attachments: Attachments
    moved: Callable[[int], int]


def place_attachments(
    prompt_ids: Sequence[int],
    messages: Sequence[Message],
    tokens: AttachmentTokens | None,
    tokenizer: Any,
    offset: int,
) -> PlacedTokens | None:
    """Replace each placeholder in a prompt by the tokens of its picture; None if the messages have no attachments.

    `messages` are those of the prompt, which begins at position `offset` of the conversation.

    Raises:
        RendererError: the chat template wrote another number of placeholders.
    """
    digests = [digest for message in messages for digest in digests_of(message)]
    if not digests or tokens is None:
        return None
    old = list(prompt_ids)
    target: list[int] = tokenizer.encode(tokens.placeholder, add_special_tokens=False)
    starts = [start for start in range(len(old)) if old[start : start + len(target)] == target]
    if len(starts) != len(digests):
        raise RendererError(
            f"the chat template writes {tokens.placeholder!r} {len(starts)} times for {len(digests)} pictures"
        )
    ids, images, end = list[int](), list[PlacedImage](), 0
    for start, digest in zip(starts, digests, strict=True):
        of_image = tokens.by_digest[digest]
        ids += old[end:start]
        images.append(PlacedImage(digest, offset + len(ids), len(of_image)))
        ids += of_image
        end = start + len(target)
    ids += old[end:]

    def moved(position: int) -> int:
        before = [image for start, image in zip(starts, images, strict=True) if offset + start < position]
        inside = [
            offset + start + len(target) - position for start in starts if 0 < position - offset - start < len(target)
        ]
        return position + sum(image.length - len(target) for image in before) + sum(inside)

    return PlacedTokens(tuple(ids), tuple(images), moved)
