"""Messages with pictures. Pure.

Such a message has `images`, the sha256 of each picture's file, and one `IMAGE_MARK` in its content for each of them, in
order.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import IGNORED, Attachments, Message

KIND = "pictures"
"""What attachments are, in messages to users."""
ON_WIRE = "images"
"""Name of a sequence's attachments in the wire format."""
UNIT = "picture"
"""What one of them is called in the location of a problem."""
IMAGE_MARK = "\ufffc"
"""Placeholder character of a picture in the content of a message with `images`."""


def digests_of(message: Message) -> Sequence[str]:
    """Return the digests of a message's attachments, in order."""
    return message.get("images", ())


def content_in_words(message: Message) -> str:
    """Return the content of a message, a text, with a word in place of each attachment."""
    content: str = message["content"]
    return content.replace(IMAGE_MARK, "[picture]") if message.get("images") else content


def drop_empty_digests(message: Message) -> None:
    """Remove an empty list of attachments from a message."""
    if not message.get("images"):
        message.pop("images", None)


def refuse_column(columns: Mapping[str, Any]) -> None:
    """Refuse a group that has attachments in Atropos' column for them, which names no position.

    Raises:
        AlignmentError: it has.
    """
    if any(image is not None for image in columns.get("images") or ()):
        raise AlignmentError("images: the policy saw images, which the teacher would not see")


def problems_of(
    attachments: Attachments, masks_T: Sequence[int], insertions: Sequence[int], messages: Sequence[Message] | None
) -> Iterator[tuple[str, str]]:
    """Yield the location and text of each problem of the attachments of a sequence of any origin.

    `insertions` are the positions of its hints. Pictures must not overlap, be sampled or hold a hint, and must be those
    that the messages name.
    """
    end = 0
    for index, image in enumerate(attachments):
        where, span = f", picture {index}", f"[{image.offset}, {image.end})"
        if image.offset < end or image.end > len(masks_T):
            yield where, f"its tokens {span} overlap others, or are not in the sequence"
        elif any(mask != IGNORED for mask in masks_T[image.offset : image.end]):
            yield where, f"its tokens {span} are sampled ones"
        end = max(end, image.end)
        for insert_at in insertions:
            if image.offset < insert_at < image.end:
                yield where, f"a hint's insert_at {insert_at} is inside of its tokens {span}"
    digests: list[Any] = []
    for index, message in enumerate(messages or ()):
        images, content = cast(Any, message.get("images")), message["content"]
        if images is None:
            continue
        if not isinstance(images, list) or not images or str(content).count(IMAGE_MARK) != len(cast(list[Any], images)):
            yield f", message {index}", f"images: expected one digest for each {IMAGE_MARK!r} of the content"
        else:
            digests += cast(list[Any], images)
    placed = [image.digest for image in attachments]
    if messages is not None and digests[: len(placed)] != placed:
        yield "", f"opd images: {len(placed)}, which are not those that the messages name"
