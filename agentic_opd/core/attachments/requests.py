"""Pictures in requests to the engine: their files are sent once, and prompts name them (I/O)."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field

from agentic_opd.core.attachments.files import AttachedFiles
from agentic_opd.core.errors import ServerMismatchError, ServerRequestError
from agentic_opd.core.http import JsonClient, read_answer

if TYPE_CHECKING:  # numpy is not imported for a command's --help.
    from agentic_opd.core.types import Attachments, PlacedImage

AnswerT = TypeVar("AnswerT")

_ROUTE = "/v1/opd/images"
_MOST_KNOWN = 1024
"""Number of pictures whose tokens are remembered."""


class _HeldImage(BaseModel):
    digest: str
    token_ids: list[int] = Field(min_length=1)


def placeholder_of(info: Mapping[str, Any]) -> Any:
    """Return the placeholder of an attachment in prompts, from the plugin's answer about its server."""
    return info.get("image_placeholder")


def request_fields(attachments: "Attachments") -> dict[str, Any]:
    """Return the fields that name the attachments of a prompt beside its token ids; none without attachments."""
    return {"images": [[image.digest, image.offset] for image in attachments]} if attachments else {}


def is_lost(error: ServerRequestError, attachments: Sequence["PlacedImage"]) -> bool:
    """Return whether the server refused a prompt because it does not keep one of its attachments any more."""
    return bool(attachments) and error.status == 404


class AttachmentSender:
    """Sends the files of attachments to one server, and remembers the tokens of those that it was sent."""

    def __init__(self, http: JsonClient, model: str, placeholder: str | None) -> None:
        """`placeholder` is the text of an attachment in a prompt; None: the model reads text only."""
        self._http, self._model, self._placeholder = http, model, placeholder
        self._tokens: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self.files: AttachedFiles | None = None
        """The files of the conversations that are sampled and scored."""

    async def tokens(self, digest: str, data: bytes | None = None) -> tuple[int, ...]:
        """Send a picture to the server, unless it was sent before, and return its tokens in a prompt.

        `data` is its file; None: it is read from `files`.

        Raises:
            PlaceError: the file is missing or has changed.
            ServerMismatchError: the server takes no pictures.
            ServerRequestError: the server does not take this one.
        """
        token_ids = self._tokens.pop(digest, None)
        if token_ids is None:
            url = self._http.base_url
            if self._placeholder is None or self.files is None:
                raise ServerMismatchError(f"{url} (model {self._model!r}) takes no pictures")
            data = data or await asyncio.to_thread(self.files.read, digest)
            answer = await self._http.request("POST", _ROUTE, data, {"Content-Type": "application/octet-stream"})
            image = read_answer(_HeldImage, answer, url + _ROUTE, "the plugin's route for pictures")
            if image.digest != digest:
                raise ServerMismatchError(f"{url}{_ROUTE} keeps the picture {digest} as {image.digest}")
            token_ids = tuple(image.token_ids)
        self._tokens[digest] = token_ids
        if len(self._tokens) > _MOST_KNOWN:
            self._tokens.popitem(last=False)
        return token_ids

    async def answer_of(self, attachments: Sequence["PlacedImage"], ask: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Return what the server answers `ask`, after it was sent the attachments that the question names.

        Raises as `tokens` and `ask`.
        """
        try:
            await self.send(attachments)
            return await ask()
        except ServerRequestError as error:
            if not is_lost(error, attachments):
                raise
        await self.send(attachments, again=True)
        return await ask()

    async def send(self, attachments: Sequence["PlacedImage"], *, again: bool = False) -> None:
        """Send the attachments of a prompt, those that were sent before only if the server lost them (`again`).

        Raises as `tokens`.
        """
        for digest in dict.fromkeys(image.digest for image in attachments):
            if again:
                self._tokens.pop(digest, None)
            await self.tokens(digest)
