"""Files that zstd packed, by the standard library from Python 3.14 on and by `backports.zstd` before (I/O)."""

import errno
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import IO, Any

ZSTD_LIBRARY = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
ZSTD_MARK = b"\x28\xb5\x2f\xfd"
"""First bytes of what zstd packed."""


@contextmanager
def open_zstd(file: Any) -> Generator[IO[bytes]]:
    """Open what zstd packed, all of its frames; bytes are unpacked as they are read.

    Raises:
        OSError: the library is missing.
        EOFError: what was read breaks off, or is damaged.
    """
    try:
        library = import_module(ZSTD_LIBRARY)
    except ModuleNotFoundError as error:
        raise OSError(errno.ENOENT, "packed with zstd: `pip install backports.zstd` reads it") from error
    try:
        with library.open(file, "rb") as unpacked:
            yield unpacked
    except library.ZstdError as error:
        raise EOFError(str(error)) from error
