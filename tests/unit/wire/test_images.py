"""Pictures of a group: where they are, which messages name them, and their files beside the group's."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.cli.validate import validate
from agentic_opd.core.attachments.files import ImageFolder, ImageFolders, digest_of, kind_of
from agentic_opd.core.attachments.messages import IMAGE_MARK
from agentic_opd.core.errors import AlignmentError, PlaceError
from agentic_opd.core.types import PlacedImage, moved_attachments
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import ScoredGroup
from tests.support.pictures import png

from .sample import group

DATA = png()
DIGEST = digest_of(DATA)


def with_picture(offset: int = 0, length: int = 2, **user: Any) -> dict[str, Any]:
    """The sample with a picture in its user's message, in its first sequence."""
    value = deepcopy(group())
    value["overrides"][0]["opd"]["images"] = [{"digest": DIGEST, "offset": offset, "length": length}]
    value["messages"] = deepcopy(value["messages"])
    value["messages"][0] = [dict(message) for message in value["messages"][0]]
    value["messages"][0][1] |= {"content": f"See {IMAGE_MARK}", "images": [DIGEST], **user}
    return value


def test_a_group_with_pictures_is_read_and_written_again() -> None:
    value, checker = with_picture(), GroupChecker()
    read, problems = checker.read(value)
    assert not problems
    assert read is not None
    assert read.rollouts[0].attachments == (PlacedImage(DIGEST, 0, 2),)
    assert checker.counts["pictures"] == 1
    assert ScoredGroup.from_wire(read.to_wire()).to_wire() == read.to_wire()
    assert read.to_wire()["overrides"] == value["overrides"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (with_picture(7), "sequence 0, picture 0: its tokens [7, 9) overlap others, or are not in the sequence"),
        (with_picture(2), "sequence 0, picture 0: its tokens [2, 4) are sampled ones"),
        (with_picture(1), "sequence 0, picture 0: a hint's insert_at 2 is inside of its tokens [1, 3)"),
        (with_picture(images=["0" * 64]), "sequence 0: opd images: 1, which are not those that the messages name"),
        (with_picture(content="See"), "sequence 0, message 1: images: expected one digest for each"),
        (with_picture(images="a"), "sequence 0, message 1: images: expected one digest for each"),
        (with_picture(length=0), "sequence 0, picture 0: length: 0, expected"),
    ],
)
def test_a_picture_in_a_wrong_place_is_named(value: dict[str, Any], says: str) -> None:
    problems = [problem.message_for("") for problem in GroupChecker().read(value).problems]
    assert any(problem.startswith(f", {says}") for problem in problems), problems


def test_a_digest_is_a_digest() -> None:
    value = with_picture()
    value["overrides"][0]["opd"]["images"][0]["digest"] = "../../etc/passwd"
    (problem,) = GroupChecker().read(value).problems
    assert "digest" in problem.message


def test_a_hint_moves_the_pictures_behind_it() -> None:
    images = (PlacedImage("a", 1, 2), PlacedImage("b", 4, 2), PlacedImage("c", 9, 1))
    assert moved_attachments(images, 8, 4, 3) == (PlacedImage("a", 1, 2), PlacedImage("b", 7, 2))
    assert moved_attachments(images, 8, 3, 0) == images[:2]
    for end, insert_at in ((8, 2), (5, 0)):
        with pytest.raises(AlignmentError, match="is inside of it"):
            moved_attachments(images, end, insert_at, 3)


def test_a_folder_keeps_a_picture_once_and_finds_a_change(tmp_path: Path) -> None:
    folder = ImageFolder.beside(tmp_path / "run.jsonl.gz")
    assert folder.add(DATA) == folder.add(DATA) == DIGEST
    (file,) = (tmp_path / "run.images").iterdir()
    assert (file.name, file.stat().st_mode & 0o777, folder.read(DIGEST)) == (f"{DIGEST}.png", 0o600, DATA)
    file.write_bytes(png(shade=1))
    with pytest.raises(PlaceError, match="has changed"):
        folder.read(DIGEST)
    for missing in ("0" * 64, f"../{DIGEST}", "*", ""):
        with pytest.raises(PlaceError, match="there is no picture"):
            folder.read(missing)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (DATA, "png"),
        (b"\xff\xd8\xff\xe0", "jpeg"),
        (b"GIF89a", "gif"),
        (b"RIFF0000WEBPVP8 ", "webp"),
        (b"RIFF0000WAVEfmt ", None),
        (b"", None),
    ],
)
def test_the_kind_of_a_file(data: bytes, kind: str | None) -> None:
    assert kind_of(data) == kind


def test_validate_reads_the_folder_beside_the_file(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl"
    file.write_text(json.dumps(with_picture()) + "\n")
    (shown,) = validate(file).listed
    assert shown == f"line 1, sequence 0: there is no picture {DIGEST!r} in {str(tmp_path / 'groups.images')!r}"
    folder = ImageFolder.beside(file)
    folder.add(DATA)
    assert not validate(file).violations
    (kept,) = folder.path.iterdir()
    kept.write_bytes(png(shade=1))
    (shown,) = validate(file).listed
    assert "has changed since it was recorded" in shown


def test_a_picture_is_read_from_the_folder_that_has_it(tmp_path: Path) -> None:
    first, second = ImageFolder(tmp_path / "first"), ImageFolder(tmp_path / "second")
    second.add(DATA)
    assert ImageFolders([first, second]).read(DIGEST) == DATA
    first.copy([DIGEST, DIGEST], second)
    assert first.read(DIGEST) == DATA
    with pytest.raises(PlaceError, match=f"there is no picture '{'0' * 64}' in .*first.*second"):
        ImageFolders([first, second]).read("0" * 64)
    with pytest.raises(PlaceError, match="in any folder: none is named"):
        ImageFolders([]).read(DIGEST)
