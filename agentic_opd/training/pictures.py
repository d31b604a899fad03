"""Pictures of conversations as inputs of a transformers model, made by the model's own processor.

    recorded    u <fake> <image> <image> <fake> u s s     ids that vLLM read; the picture is placed at 1, of length 4
    processor       <fake> <image> <image> <fake>         what the model's processor writes for the picture's file

The processor must write the recorded ids, token by token: then its pixels belong to the same tokens as vLLM's. Models
that are not of `FAMILIES` are refused by name.
"""

import logging
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentic_opd.core.attachments.files import ImageFolder, ImageFolders
from agentic_opd.core.errors import AlignmentError, ConfigError, PlaceError
from agentic_opd.core.types import PlacedImage, shared_length
from agentic_opd.serving.decoding import decoded
from agentic_opd.serving.errors import RouteError

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**29
"""Bytes of pixels that are kept between passes; the least recently used pictures are made again."""
_OF_TOKENS = ("input_ids", "attention_mask")
"""What a processor returns for the text."""


class Family(NamedTuple):
    """How models of a family take pictures."""

    placeholder: str
    """Text of a picture in a prompt, which the processor expands."""
    dimension: int
    """Dimension of the pixel tensors along which the pictures of a batch are concatenated."""


FAMILIES = {"idefics3": Family("<image>", 1), "llava": Family("<image>", 0), "smolvlm": Family("<image>", 1)}
"""The families by `model_type` of their config.json."""


class PictureInputs(NamedTuple):
    """What a forward pass of padded sequences with pictures needs beside the attention mask."""

    input_ids_BT: Tensor
    """The tokens; a placeholder without a picture is replaced by another token."""
    pixels: dict[str, Tensor]
    """The model's arguments: `pixel_values`, `pixel_attention_mask`, ..."""
    stray_BT: Tensor
    """bool: placeholders without a picture: a client wrote one, or the policy sampled it."""


@dataclass(frozen=True, slots=True)
class _ReadPicture:
    """A picture as the model's processor reads it."""

    token_ids: tuple[int, ...]
    pixels: dict[str, Tensor]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.pixels.values())


class PictureReader:
    """Makes the inputs of one model for the pictures in some folders (I/O).

    The processor is loaded when it is needed.
    """

    def __init__(self, model: str, folders: Sequence[ImageFolder]) -> None:
        """`model` is a checkpoint: a folder or a name on the hub."""
        self._model = model
        self._folders = ImageFolders(folders)
        self._read: OrderedDict[str, _ReadPicture] = OrderedDict()
        self._bytes = 0

    @classmethod
    def beside(cls, model: str, *files: Path) -> "PictureReader":
        """Return the reader of the pictures that files of groups name."""
        return cls(model, [ImageFolder.beside(file) for file in files])

    @cached_property
    def family(self) -> str:
        """`model_type` of the model.

        Raises:
            ConfigError: its pictures can't be matched with those of vLLM, or its configuration can't be read.
        """
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self._model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the configuration of {self._model!r} can't be read: {error}") from error
        name = config.model_type
        if name == "llava" and config.vision_config.model_type == "pixtral":
            name = "pixtral"
        if name not in FAMILIES:
            raise ConfigError(
                f"the groups have pictures, and the model {self._model!r} is of the family {name!r}: pictures are "
                f"trained with {', '.join(FAMILIES)}, whose processors give the ids that vLLM read. Leave out the "
                "groups with pictures, or train them in a loop of your own (docs/trainers.md)"
            )
        return name

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        family = self.family
        try:
            return AutoProcessor.from_pretrained(self._model)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"the processor of {self._model!r} ({family}) can't be loaded: {error}") from error

    def open(self) -> None:
        """Load the processor.

        Raises:
            ConfigError: pictures of the model's family can't be matched, or its processor can't be loaded.
        """
        _ = self._processor

    def check(self, name: str, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """Check that the processor writes the recorded ids of each picture; `name` is the sequence's, for errors.

        Raises:
            AlignmentError: it writes others; the message names family and position.
            ConfigError, PlaceError: as `open`; a picture's file is missing, has changed or can't be read.
        """
        for image in images:
            recorded = tuple(token_ids[image.offset : image.end])
            written = self._picture(image.digest).token_ids
            if recorded != written:
                shared = shared_length(recorded, written)
                token, of_server = (ids[shared] if shared < len(ids) else "none" for ids in (written, recorded))
                raise AlignmentError(
                    f"{name}, position {image.offset + shared}: the processor of {self.family} writes "
                    f"{len(written)} tokens for the picture {image.digest}, but vLLM wrote {len(recorded)}; token "
                    f"{shared} is {token} here and {of_server} there. Was the server started with other settings of "
                    "the processor (--mm-processor-kwargs), or with another model?"
                )

    def inputs(
        self, tokens_BT: Tensor, attended_BT: Tensor, images_B: Sequence[Sequence[PlacedImage]]
    ) -> PictureInputs:
        """Return the inputs of padded sequences with at least one picture, on the tokens' device.

        Raises:
            AlignmentError, ConfigError, PlaceError: as `check`.
        """
        pictures = list[_ReadPicture]()
        is_picture_BT = torch.zeros(tokens_BT.shape, dtype=torch.bool)
        for i, (row, images) in enumerate(zip(tokens_BT.tolist(), images_B, strict=True)):
            self.check(f"sequence {i}", row, images)
            pictures += [self._picture(image.digest) for image in images]
            for image in images:
                is_picture_BT[i, image.offset : image.end] = True
        placeholder, device = self._processor.image_token_id, tokens_BT.device
        neutral = 0 if placeholder else 1
        input_ids_BT = torch.where(attended_BT, tokens_BT, neutral)
        stray_BT = (input_ids_BT == placeholder) & ~is_picture_BT.to(device)
        dimension = FAMILIES[self.family].dimension
        pixels = {
            name: torch.cat([picture.pixels[name] for picture in pictures], dimension).to(device)
            for name in pictures[0].pixels
        }
        return PictureInputs(torch.where(stray_BT, neutral, input_ids_BT), pixels, stray_BT)

    def _picture(self, digest: str) -> _ReadPicture:
        """Return a picture as the processor reads it."""
        picture = self._read.pop(digest, None)
        if picture is None:
            picture = self._processed(digest)
            self._bytes += picture.size_bytes
        self._read[digest] = picture
        while self._bytes > _MOST_BYTES and len(self._read) > 1:
            self._bytes -= self._read.popitem(last=False)[1].size_bytes
        return picture

    def _processed(self, digest: str) -> _ReadPicture:
        processor, data = self._processor, self._folders.read(digest)
        try:
            image = decoded(data)
        except RouteError as error:
            raise PlaceError(f"the picture {digest}: {error.message}") from error
        text = FAMILIES[self.family].placeholder
        try:
            features = processor(text=[text], images=[image], add_special_tokens=False, return_tensors="pt")
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise AlignmentError(
                f"the processor of {self.family} does not take the picture {digest}: {error}"
            ) from error
        pixels = {name: tensor for name, tensor in features.items() if name not in _OF_TOKENS}
        return _ReadPicture(tuple(features["input_ids"][0].tolist()), pixels)


@contextmanager
def embedded_as(model: Any, tokens_BT: Tensor) -> Generator[None]:
    """Let the model embed these tokens inside the block, whatever ids it is called with.

    A transformers model puts pixels in the place of every placeholder among its `input_ids`; vLLM only in the places
    of pictures, and embeds the others as tokens.
    """

    def replace_ids(_module: torch.nn.Module, _inputs: object) -> tuple[Tensor]:
        return (tokens_BT,)

    hook = model.get_input_embeddings().register_forward_pre_hook(replace_ids)
    try:
        yield
    finally:
        hook.remove()


def freeze_vision(model: Any) -> None:
    """Train the language model and its output head, and nothing of what reads pixels."""
    parts = (model.get_decoder(), model.get_output_embeddings())
    language = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=id(parameter) in language)


def language_matrices(model: Any) -> list[str]:
    """Return the names of the language model's linear layers, without the output head."""
    decoder = {id(module) for module in model.get_decoder().modules()}
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return [name for name, module in linear if id(module) in decoder]
