"""Small pictures, as files and as data URIs, made without an image library."""

import base64
import struct
import zlib


def png(width: int = 8, height: int = 8, shade: int = 0) -> bytes:
    """A PNG whose pixels differ in place and, by `shade`, from another's."""
    rows = b"".join(
        b"\0" + bytes((17 * x + shade + colour * 80) % 256 for x in range(width) for colour in range(3))
        for _ in range(height)
    )
    return png_of(width, height, rows)


def png_of(width: int, height: int, rows: bytes) -> bytes:
    """A PNG of RGB that says it has this size, whatever its rows hold."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64_of(data)}"
