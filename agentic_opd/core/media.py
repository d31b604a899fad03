"""Parts of a message's content that are not text, in the formats of the APIs. Pure."""

_WORDS = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_file"), "[picture]"),
    **dict.fromkeys(("audio", "input_audio", "output_audio"), "[sound]"),
    **dict.fromkeys(("video", "video_url", "input_video"), "[video]"),
    **dict.fromkeys(("document", "file", "input_file"), "[file]"),
}


def media_word(kind: object) -> str | None:
    """Return the text that replaces a part of this type for a reader of text; None: the type is not a medium's."""
    return _WORDS.get(kind) if isinstance(kind, str) else None
