"""Pictures in the plugin: decoded within bounds, kept by digest, and placed where the prompt says."""

import asyncio
import io
from hashlib import sha256
from typing import Any

import pytest
from PIL import Image

from tests.support.pictures import png, png_of

from .fakes import RouteError, TableEngine, client_of

from agentic_opd.serving import images as held_images  # isort: skip - vLLM is imported by the fakes
from agentic_opd.serving.decoding import decoded  # isort: skip
from agentic_opd.serving.images import HeldImages, ImageRef  # isort: skip

A, B = png(2, 1), png(3, 1)
DIGESTS = [sha256(one).hexdigest() for one in (A, B)]
MARK = 7
"""The token that stands for a picture, and that vLLM repeats once for each pixel of its width."""


class Renderer:
    """vLLM's, as far as pictures go."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def render_cmpl_async(self, prompts: list[dict[str, Any]], *, skip_mm_cache: bool) -> list[dict[str, Any]]:
        (prompt,) = prompts
        self.prompts.append(prompt["prompt_token_ids"])
        rest, ids = iter(prompt["multi_modal_data"]["image"]), list[int]()
        for token in prompt["prompt_token_ids"]:
            ids += [MARK] * next(rest).width if token == MARK else [token]
        return [{"prompt_token_ids": ids, "digests": prompt["multi_modal_uuids"]["image"]}]


def engine() -> TableEngine:
    return TableEngine(renderer=Renderer())  # type: ignore[arg-type]


async def holding(at: TableEngine, *data: bytes) -> HeldImages:
    images = HeldImages("<image>", [MARK])
    for one in data:
        await images.hold(at, one)
    return images


def saved(kind: str, image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pictures_of_all_kinds_are_decoded(kind: str) -> None:
    image = decoded(saved(kind, Image.new("RGB", (5, 4), "red")))
    assert (image.mode, image.size) == ("RGB", (5, 4))


def test_transparent_parts_become_white() -> None:
    image = decoded(saved("PNG", Image.new("RGBA", (1, 1), (255, 0, 0, 0))))
    assert image.getpixel((0, 0)) == (255, 255, 255)


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    for width in (6_000, 60_000):
        with pytest.raises(RouteError, match="more than 33554432 pixels") as refused:
            decoded(png_of(width, 6_000, b""))
        assert refused.value.status == 413


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "can't be decoded"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "can't be decoded"),
        (png(64, 64)[:60], "can't be decoded"),
        (png_of(50, 50, b"\0"), "can't be decoded"),
        (saved("BMP", Image.new("RGB", (2, 2))), "can't be decoded"),
        (
            saved("GIF", Image.new("RGB", (2, 2), "red"), save_all=True, append_images=[Image.new("RGB", (2, 2))]),
            "animated",
        ),
    ],
)
def test_what_is_no_whole_picture_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(RouteError, match=says):
        decoded(data)


def test_a_prompt_keeps_its_ids_and_only_its_pictures_are_placeholders() -> None:
    async def made() -> Any:
        images = await holding(at, A, B)
        ids = [1, MARK, MARK, 2, MARK, 3, MARK, MARK, MARK]  # The fifth was sampled: it is no picture.
        placed = (ImageRef(DIGESTS[0], 1), ImageRef(DIGESTS[1], 6))
        return ids, await images.engine_input(at, "images", ids, placed)

    at = engine()
    ids, prompt = asyncio.run(made())
    assert prompt == {"prompt_token_ids": ids, "digests": DIGESTS}
    assert at.renderer.prompts[-1] == [0, MARK, 0, 0, 0, MARK]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("placed", "field", "status"),
    [
        ([("0" * 64, 1)], "images[0]", 404),
        ([(DIGESTS[0], 0)], "images[0]", 400),
        ([(DIGESTS[1], 1)], "images[0]", 400),
        ([(DIGESTS[0], 90)], "images[0]", 400),
        ([(DIGESTS[0], 1), (DIGESTS[0], 1)], "images[1]", 400),
    ],
)
def test_a_picture_that_is_not_where_the_prompt_says_is_refused(
    placed: list[tuple[str, int]], field: str, status: int
) -> None:
    async def made() -> None:
        images = await holding(at, A, B)
        await images.engine_input(at, "images", [1, MARK, MARK, 2], [ImageRef(*one) for one in placed])

    at = engine()
    with pytest.raises(RouteError) as refused:
        asyncio.run(made())
    assert (refused.value.field, refused.value.status) == (field, status)


def test_the_least_recently_used_picture_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def made() -> None:
        images = await holding(at, A)
        await images.hold(at, B)
        await images.engine_input(at, "images", [MARK] * 3, [ImageRef(DIGESTS[1], 0)])
        await images.engine_input(at, "images", [MARK] * 2, [ImageRef(DIGESTS[0], 0)])

    at = engine()
    monkeypatch.setattr(held_images, "MOST_BYTES", 3 * 4)
    with pytest.raises(RouteError, match="there is no picture"):
        asyncio.run(made())


def test_a_model_of_text_takes_no_pictures() -> None:
    with client_of(TableEngine()) as client:
        answer = client.post("/v1/opd/images", content=A, headers={"Content-Type": "application/octet-stream"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            "the model reads text only: it takes no pictures",
        )
        assert client.get("/v1/opd/info").json()["image_placeholder"] is None
        body = {"prompt": {"prompt_token_ids": [1, 2], "images": [[DIGESTS[0], 0]]}}
        assert client.post("/generate", json=body).json()["error"]["field"] == "prompt.images[0]"
        body = {"sequences": [{"token_ids": [1, 2], "num_scored": 1, "images": [[DIGESTS[0], 0]]}], "top_k": 1}
        assert client.post("/v1/opd/score", json=body).json()["error"]["field"] == "sequences[0].images[0]"
