"""Pictures in requests: data URIs -> files by their digests, and the tokens that the policy reads of them.

The gateway fetches nothing: a picture that is not in the request itself is refused. Pictures are decoded by the
policy's server, in a thread and after a look at their size; the gateway only compares the declared kind with the file's
first bytes.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence
from typing import NamedTuple

from agentic_opd.core.errors import PlaceError, ServerRequestError
from agentic_opd.core.types import IMAGE_MARK, Message
from agentic_opd.gateway.errors import ClientError, as_refusal
from agentic_opd.gateway.request import Asked, GivenImage
from agentic_opd.plugin.client import PluginClient
from agentic_opd.rollout.chat_format import ImageTokens
from agentic_opd.wire.images import MEDIA_TYPES, ImageFolder, digest_of, kind_of

MOST_IMAGES = 128
"""Largest number of pictures in a request."""
_URI = re.compile(r"data:image/([a-z0-9.+-]{1,20});base64,", re.IGNORECASE)
_KINDS = ", ".join(f"image/{kind}" for kind in MEDIA_TYPES.values())
_NOT_IN_TEXT = "\ufffd"
"""Replaces a mark that a client's text spells out."""


class ImageUri(NamedTuple):
    """A picture as a client sends it, and the name of its field."""

    uri: str
    at: str


class RequestImages:
    """The pictures of one request, collected while its messages are read. Pure."""

    def __init__(self) -> None:
        self._given: dict[str, GivenImage] = {}
        self._count = 0

    @property
    def given(self) -> tuple[GivenImage, ...]:
        """The pictures, each once."""
        return tuple(self._given.values())

    def content(self, role: str, parts: Sequence[str | ImageUri], separator: str = "") -> Message:
        """Return the fields of a message for its texts and pictures.

        Raises:
            ClientError: 400, a picture is not in the request, can't be read, or is in a message of another role.
        """
        uris = [part for part in parts if isinstance(part, ImageUri)]
        if not uris:
            return {"content": separator.join(part for part in parts if isinstance(part, str))}
        if role not in ("user", "tool"):
            raise ClientError(400, f"{uris[0].at}: a message of the {role} has no pictures", uris[0].at)
        texts = [IMAGE_MARK if isinstance(part, ImageUri) else part.replace(IMAGE_MARK, _NOT_IN_TEXT) for part in parts]
        return {"content": separator.join(texts), "images": [self._add(one) for one in uris]}

    def _add(self, image: ImageUri) -> str:
        self._count += 1
        if self._count > MOST_IMAGES:
            raise ClientError(400, f"{image.at}: a request has at most {MOST_IMAGES} pictures", image.at)
        data = _decoded(image)
        digest = digest_of(data)
        self._given.setdefault(digest, GivenImage(digest, data, image.at))
        return digest


def _decoded(image: ImageUri) -> bytes:
    """Return the file in a data URI; raise ClientError (400) unless it holds one of the declared kind."""
    at = image.at
    found = _URI.match(image.uri)
    if found is None:
        raise ClientError(
            400, f"{at}: expected data:image/png;base64,... ({_KINDS}); pictures are not fetched from elsewhere", at
        )
    try:
        data = base64.b64decode(image.uri[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ClientError(400, f"{at}: the picture's base64 can't be read", at) from error
    declared, kind = found[1].lower().replace("jpg", "jpeg"), kind_of(data)
    if kind is None:
        raise ClientError(400, f"{at}: the data is no picture of a known kind ({_KINDS})", at)
    if kind != declared:
        raise ClientError(400, f"{at}: declared as image/{declared}, but the data is image/{kind}", at)
    return data


def image_digests(asked: Asked) -> list[str]:
    """Return the digests of all pictures in a request's conversation, each once."""
    return list(dict.fromkeys(digest for message in asked.messages for digest in message.get("images", ())))


async def image_tokens(asked: Asked, server: PluginClient, folder: ImageFolder) -> ImageTokens | None:
    """Send the pictures of a request to the policy's server, and store those that it takes; None without pictures.

    Raises:
        ClientError: the policy reads text only, or its server does not take a picture.
        OutputError, ServerError: the disk or the server failed.
    """
    digests = image_digests(asked)
    if not digests:
        return None
    given = {image.digest: image for image in asked.images}
    if server.info.image_placeholder is None:
        at = asked.images[0].at if asked.images else asked.at
        raise ClientError(400, f"{at}: the policy {server.info.model} reads text only", at, "no_images")
    tokens: dict[str, Sequence[int]] = {}
    for digest in digests:
        image = given.get(digest)
        try:
            tokens[digest] = await server.image_tokens(digest, image and image.data)
        except ServerRequestError as error:
            refused = as_refusal(error)
            if isinstance(refused, ClientError):
                at = image.at if image else asked.at
                raise ClientError(refused.status, f"{at}: {refused.message}", at, "bad_image") from error
            raise refused from error
        except PlaceError as error:
            raise ClientError(
                400, f"{asked.at}: a picture of the conversation is not kept any more", asked.at
            ) from error
        if image is not None:
            await asyncio.to_thread(folder.add, image.data)
    return ImageTokens(server.info.image_placeholder, tokens)
