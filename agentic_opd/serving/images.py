"""Pictures in prompts: `POST /v1/opd/images` keeps one, and prompts name those they contain by digest and position.

A prompt contains each picture's own tokens, as the model's processor writes them. vLLM expands one placeholder per
picture, so each picture's tokens are replaced by the placeholder for vLLM's processor, and the positions that it
returns must be those of the prompt. The given ids themselves are never changed.

    given     u <img> p p p p </img> u u     the picture's tokens at offset 1
    rendered  . <image>                . .   other tokens are neutral: a sampled placeholder is no picture
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, TypedDict, cast

import msgspec
from msgspec import Meta
from PIL import Image
from vllm.engine.protocol import EngineClient
from vllm.inputs import EngineInput, tokens_input
from vllm.model_executor.model_loader import get_model_cls

from agentic_opd.serving.decoding import decoded
from agentic_opd.serving.errors import RouteError

MOST_BYTES = 2**29
"""Bytes of decoded pictures that are kept; the least recently used ones are dropped, and clients send them again."""
MOST_IMAGES = 256
"""Largest number of pictures in a prompt."""


class ImageRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A picture of a prompt: `[digest, offset]`, where `offset` is the index of its first token."""

    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    offset: Annotated[int, Meta(ge=0)]


ImageRefs = Annotated[tuple[ImageRef, ...], Meta(max_length=MOST_IMAGES)]


class ImageAnswer(TypedDict):
    """The response of `POST /v1/opd/images`."""

    digest: str
    """sha256 of the body."""
    token_ids: list[int]
    """The picture's tokens in a prompt."""
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class HeldImage:
    """A decoded picture, and its tokens in a prompt."""

    pixels: Image.Image
    token_ids: list[int]


@dataclass(slots=True)
class HeldImages:
    """The pictures that the server keeps, by digest."""

    placeholder: str | None = None
    """Placeholder text of a picture in a prompt; None: the model reads text only, or has no such text."""
    _placeholder_ids: list[int] = field(default_factory=list[int])
    _by_digest: OrderedDict[str, HeldImage] = field(default_factory=OrderedDict[str, HeldImage])
    _bytes: int = 0
    _decoder: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "agentic-opd-images"))

    @classmethod
    def of_engine(cls, engine: EngineClient) -> "HeldImages":
        """Find out whether and how the engine's model reads pictures."""
        config = engine.model_config
        if not config.is_multimodal_model:
            return cls()
        try:
            placeholder = cast(Any, get_model_cls(config)).get_placeholder_str("image", 1)
            tokenizer = engine.renderer.get_tokenizer()
        except (AttributeError, ValueError):
            return cls()
        return cls(placeholder, tokenizer.encode(placeholder, add_special_tokens=False)) if placeholder else cls()

    async def hold(self, engine: EngineClient, data: bytes) -> ImageAnswer:
        """Decode a picture and keep it.

        Raises:
            RouteError: the model reads text only, or does not take this picture.
        """
        if self.placeholder is None:
            raise RouteError(None, "the model reads text only: it takes no pictures")
        digest = sha256(data).hexdigest()
        if digest not in self._by_digest:
            pixels = await asyncio.get_running_loop().run_in_executor(self._decoder, decoded, data)
            rendered = await self._rendered(engine, self._placeholder_ids, [digest], [pixels])
            self._keep(digest, HeldImage(pixels, list(rendered["prompt_token_ids"])))
        image = self._named("", digest)
        width, height = image.pixels.width, image.pixels.height
        return ImageAnswer(digest=digest, token_ids=image.token_ids, width=width, height=height)

    async def engine_input(
        self, engine: EngineClient, name: str, token_ids: list[int], refs: Sequence[ImageRef]
    ) -> EngineInput:
        """Return the engine's input of a prompt with pictures in order of their offsets; `name` is the prompt's field.

        Raises:
            RouteError: 404, a picture is not kept here: send it again. 400, a picture's tokens are not at its offset.
        """
        if not refs:
            return tokens_input(token_ids)
        images = [self._named(f"{name}[{index}]", ref.digest) for index, ref in enumerate(refs)]
        special = {*self._placeholder_ids, *(token for image in images for token in image.token_ids)}
        neutral = next(token for token in range(len(special) + 1) if token not in special)
        prompt, end = list[int](), 0
        for index, (ref, image) in enumerate(zip(refs, images, strict=True)):
            stop = ref.offset + len(image.token_ids)
            if ref.offset < end or token_ids[ref.offset : stop] != image.token_ids:
                raise RouteError(f"{name}[{index}]", f"the picture's tokens are not at {ref.offset}, or not in order")
            prompt += [neutral] * (ref.offset - end) + self._placeholder_ids
            end = stop
        prompt += [neutral] * (len(token_ids) - end)
        digests, pixels = [ref.digest for ref in refs], [image.pixels for image in images]
        rendered = await self._rendered(engine, prompt, digests, pixels)
        if len(rendered["prompt_token_ids"]) != len(token_ids):
            raise RouteError(name, "the model's processor writes these pictures differently when they are together")
        rendered["prompt_token_ids"] = token_ids
        return rendered

    def _named(self, name: str, digest: str) -> HeldImage:
        if (image := self._by_digest.get(digest)) is None:
            raise RouteError(name, f"there is no picture {digest} here: send it to /v1/opd/images", 404)
        self._by_digest.move_to_end(digest)
        return image

    def _keep(self, digest: str, image: HeldImage) -> None:
        if digest not in self._by_digest:  # Another request may have sent the same picture meanwhile.
            self._by_digest[digest] = image
            self._bytes += _size(image)
        while self._bytes > MOST_BYTES and len(self._by_digest) > 1:
            self._bytes -= _size(self._by_digest.popitem(last=False)[1])

    async def _rendered(
        self, engine: EngineClient, prompt: Sequence[int], digests: Sequence[str], pixels: Sequence[Image.Image]
    ) -> Any:
        """Return vLLM's input for a prompt with placeholders.

        vLLM's processor cache is used without the engine's copy of it, because requests of this plugin and of vLLM's
        own routes may reach the engine in another order than the processor.
        """
        request = {
            "prompt_token_ids": list(prompt),
            "multi_modal_data": {"image": list(pixels)},
            "multi_modal_uuids": {"image": list(digests)},
        }
        try:
            (rendered,) = await engine.renderer.render_cmpl_async([cast(Any, request)], skip_mm_cache=True)
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            raise RouteError(None, f"the model's processor does not take this picture: {error}") from error
        return rendered


def _size(image: HeldImage) -> int:
    return 3 * image.pixels.width * image.pixels.height
