"""The pictures of conversations, one file each, named by the sha256 of the file (I/O)."""

import os
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Protocol

from agentic_opd.core.errors import PlaceError
from agentic_opd.core.files import check_regular

if TYPE_CHECKING:  # numpy is not imported for a command's --help.
    from agentic_opd.core.types import Attachments, PlacedImage

MEDIA_TYPES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""The first bytes of a file -> the kind of picture."""

_TRIED_BYTES = 2**16


def kind_of(data: bytes) -> str | None:
    """Return `png`, `jpeg`, `gif` or `webp` by the first bytes of a file; None for other formats."""
    kind = next((kind for start, kind in MEDIA_TYPES.items() if data.startswith(start)), None)
    return None if kind == "webp" and data[8:12] != b"WEBP" else kind


def digest_of(data: bytes) -> str:
    """Return the name of a picture."""
    return sha256(data).hexdigest()


class AttachedFiles(Protocol):
    """The files of attachments, such as an `ImageFolder`."""

    def read(self, digest: str) -> bytes:
        """Return a file; raise PlaceError if it is missing or has changed."""
        ...


class ImageFolder:
    """A folder of pictures. It is created with the first picture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        """Why the last picture could not be stored; None after the next one that could."""

    @classmethod
    def beside(cls, groups: Path) -> "ImageFolder":
        """Return the folder of the pictures that a file of groups names: `groups.images` for `groups.jsonl`."""
        stem = groups.name.removesuffix(".gz").removesuffix(".jsonl")
        return cls(groups.with_name(f"{stem}.images"))

    def add(self, data: bytes) -> str:
        """Store a picture, readable by the current user only, and return its digest.

        Raises:
            PlaceError: the file can't be written.
        """
        digest = digest_of(data)
        path = self.path / f"{digest}.{kind_of(data) or 'bin'}"
        if not path.exists():
            self._write(data, path)
        return digest

    def try_again(self) -> None:
        """Write a picture's size to the disk and delete it, to see whether the disk takes pictures again."""
        path = self.path / ".try"
        self._write(bytes(_TRIED_BYTES), path)
        path.unlink(missing_ok=True)

    def _write(self, data: bytes, path: Path) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # NamedTemporaryFile creates a file of mode 600.
            with NamedTemporaryFile(dir=self.path, prefix=".", delete=False) as file:
                fresh = Path(file.name)
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    fresh.replace(path)
                except OSError:  # On a full disk the incomplete file would stay.
                    fresh.unlink()
                    raise
        except OSError as error:
            self.problem = error.strerror or str(error)
            raise PlaceError(f"cannot write {str(path)!r}: {self.problem}") from error
        self.problem = None

    def read(self, digest: str) -> bytes:
        """Return a picture's file.

        Raises:
            PlaceError: it is missing or has changed.
        """
        try:
            path = self._path_of(digest)
            check_regular(path)
            data = path.read_bytes()
        except OSError as error:
            raise PlaceError(f"there is no picture {digest!r} in {str(self.path)!r}") from error
        if digest_of(data) != digest:
            raise PlaceError(f"the picture {digest} in {str(self.path)!r} has changed since it was recorded")
        return data

    def has(self, digest: str) -> bool:
        """Return whether there is a file of this picture."""
        try:
            return self._path_of(digest).exists()
        except OSError:
            return False

    def copy(self, digests: Iterable[str], source: AttachedFiles) -> None:
        """Add pictures of another folder to this one; raises as `read` and `add`."""
        for digest in dict.fromkeys(digests):
            self.add(source.read(digest))

    def _path_of(self, digest: str) -> Path:
        if re.fullmatch("[0-9a-f]{64}", digest) is None:
            raise FileNotFoundError(digest)
        path = next(self.path.glob(f"{digest}.*"), None)
        if path is None:
            raise FileNotFoundError(digest)
        return path


class ImageFolders:
    """The pictures of several folders."""

    def __init__(self, folders: Sequence[ImageFolder]) -> None:
        self.folders = folders

    def read(self, digest: str) -> bytes:
        """Return a picture's file from the first folder that has it.

        Raises:
            PlaceError: it is missing or has changed.
        """
        folder = next((folder for folder in self.folders if folder.has(digest)), None)
        if folder is None:
            names = ", ".join(repr(str(folder.path)) for folder in self.folders)
            raise PlaceError(f"there is no picture {digest!r} in {names or 'any folder: none is named'}")
        return folder.read(digest)


class CheckedFiles:
    """Files of attachments that are checked, each once."""

    def __init__(self, files: AttachedFiles) -> None:
        self._files = files
        self._problems: dict[str, str | None] = {}
        """Digest -> the problem of its file."""

    def problems(self, attachments: "Attachments") -> list[str]:
        """Return the problems of the files of a sequence's attachments."""
        problems = (self._problem(digest) for digest in dict.fromkeys(image.digest for image in attachments))
        return [problem for problem in problems if problem is not None]

    def _problem(self, digest: str) -> str | None:
        if digest not in self._problems:
            try:
                self._files.read(digest)
            except PlaceError as error:
                self._problems[digest] = str(error)
            else:
                self._problems[digest] = None
        return self._problems[digest]


def files_beside(groups: Path) -> AttachedFiles:
    """Return the files of the attachments that a file of groups names."""
    return ImageFolder.beside(groups)


def copy_files(attachments: Iterable["PlacedImage"], source: AttachedFiles, groups: Path) -> None:
    """Copy the files of attachments to those that the file `groups` names.

    Raises:
        PlaceError: a file is missing, has changed, or can't be written.
    """
    ImageFolder.beside(groups).copy((image.digest for image in attachments), source)
