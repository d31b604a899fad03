"""Decode a picture's file, as the server reads it and as the trainer must. Without vLLM."""

import io

from PIL import Image

from agentic_opd.serving.errors import RouteError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 2**25
"""Largest number of pixels of a picture, checked before it is decoded."""


def decoded(data: bytes) -> Image.Image:
    """Decode a picture to RGB; transparent parts become white.

    Raises:
        RouteError: the data is not a complete picture of a known format, is animated, or has too many pixels.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise Image.DecompressionBombError
            if getattr(image, "is_animated", False):
                raise RouteError(None, "the picture is animated; send one frame")
            image.load()
            if not image.has_transparency_data:
                return image.convert("RGB")
            opaque = Image.new("RGB", image.size, "white")
            opaque.paste(image, mask=image.convert("RGBA").getchannel("A"))
            return opaque
    except RouteError:
        raise
    except Image.DecompressionBombError as error:
        raise RouteError(None, f"the picture has more than {MOST_PIXELS} pixels", 413) from error
    except Exception as error:
        message = f"the picture can't be decoded ({type(error).__name__}); it must be a whole {', '.join(FORMATS)}"
        raise RouteError(None, message) from error
