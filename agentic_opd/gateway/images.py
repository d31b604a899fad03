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

from agentic_opd.core.attachments.files import MEDIA_TYPES, ImageFolder, digest_of, kind_of
from agentic_opd.core.attachments.messages import IMAGE_MARK
from agentic_opd.core.attachments.prompts import AttachmentTokens
from agentic_opd.core.errors import PlaceError, ServerRequestError
from agentic_opd.core.types import Message
from agentic_opd.gateway.errors import ClientError, as_refusal
from agentic_opd.gateway.request import ChatInput, Request, SentImage
from agentic_opd.plugin.client import PluginClient

MOST_IMAGES = 128
"""Largest number of pictures in a request."""
_URI = re.compile(r"data:image/([a-z0-9.+-]{1,20});base64,", re.IGNORECASE)
_KINDS = ", ".join(f"image/{kind}" for kind in MEDIA_TYPES.values())
_NOT_IN_TEXT = "\ufffd"
"""Replaces a mark that a client's text spells out."""


class ImageUri(NamedTuple):
    """A picture as a client sends it, and the name of its field."""

    uri: str
    field_name: str


class RequestImages:
    """The pictures of one request, collected while its messages are read. Pure."""

    def __init__(self) -> None:
        self._images: dict[str, SentImage] = {}
        self._count = 0

    @property
    def images(self) -> tuple[SentImage, ...]:
        """The pictures, each once."""
        return tuple(self._images.values())

    def content(self, role: str, parts: Sequence[str | ImageUri], separator: str = "") -> Message:
        """Return the fields of a message for its texts and pictures.

        Raises:
            ClientError: 400, a picture is not in the request, can't be read, or is in a message of another role.
        """
        uris = [part for part in parts if isinstance(part, ImageUri)]
        if not uris:
            return {"content": separator.join(part for part in parts if isinstance(part, str))}
        if role not in ("user", "tool"):
            name = uris[0].field_name
            raise ClientError(400, f"{name}: a message of the {role} has no pictures", name)
        texts = [IMAGE_MARK if isinstance(part, ImageUri) else part.replace(IMAGE_MARK, _NOT_IN_TEXT) for part in parts]
        return {"content": separator.join(texts), "images": [self._add(uri) for uri in uris]}

    def _add(self, image: ImageUri) -> str:
        self._count += 1
        if self._count > MOST_IMAGES:
            name = image.field_name
            raise ClientError(400, f"{name}: a request has at most {MOST_IMAGES} pictures", name)
        data = _decoded(image)
        digest = digest_of(data)
        self._images.setdefault(digest, SentImage(digest, data, image.field_name))
        return digest


def _decoded(image: ImageUri) -> bytes:
    """Return the file in a data URI; raise ClientError (400) unless it holds one of the declared kind."""
    name, match = image.field_name, _URI.match(image.uri)
    if match is None:
        raise ClientError(
            400, f"{name}: expected data:image/png;base64,... ({_KINDS}); pictures are not fetched from elsewhere", name
        )
    try:
        data = base64.b64decode(image.uri[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ClientError(400, f"{name}: the picture's base64 can't be read", name) from error
    declared, kind = match[1].lower().replace("jpg", "jpeg"), kind_of(data)
    if kind is None:
        raise ClientError(400, f"{name}: the data is not a picture of a known kind ({_KINDS})", name)
    if kind != declared:
        raise ClientError(400, f"{name}: declared as image/{declared}, but the data is image/{kind}", name)
    return data


async def image_tokens(
    request: Request, chat: ChatInput, server: PluginClient, folder: ImageFolder | None
) -> AttachmentTokens | None:
    """Send the pictures of `chat` to the policy's server, and store those that it takes; None without pictures.

    Raises:
        ClientError: there is no folder, the policy reads text only, or its server does not take a picture.
        OutputError, ServerError: the disk or the server failed.
    """
    digests, field_name = chat.image_digests(), request.field_name
    if not digests:
        return None
    if folder is None:
        raise ClientError(400, f"{field_name}: pictures are not read here", field_name, "no_images")
    sent = {image.digest: image for image in request.images}
    if server.info.placeholder is None:
        name = request.images[0].field_name if request.images else field_name
        raise ClientError(400, f"{name}: the policy {server.info.model} reads text only", name, "no_images")
    tokens: dict[str, Sequence[int]] = {}
    for digest in digests:
        image = sent.get(digest)
        try:
            tokens[digest] = await server.attached.tokens(digest, image and image.data)
        except ServerRequestError as error:
            refusal = as_refusal(error)
            if isinstance(refusal, ClientError):
                name = image.field_name if image else field_name
                raise ClientError(refusal.status, f"{name}: {refusal.message}", name, "bad_image") from error
            raise refusal from error
        except PlaceError as error:
            problem = f"{field_name}: a picture of the conversation is no longer stored"
            raise ClientError(400, problem, field_name) from error
        if image is not None:
            await asyncio.to_thread(folder.add, image.data)
    return AttachmentTokens(server.info.placeholder, tokens)
