"""Pure text helpers that rollouts and distillation share."""


def cut_middle(text: str, max_chars: int) -> str:
    """Return `text` with at most `max_chars` of its characters, the middle replaced by a line that counts what is gone.

    Head and tail are kept in equal parts: a traceback's cause stands at its end, a command's context at its start.
    The mark comes on top of `max_chars`.
    """
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    cut = len(text) - max_chars
    return f"{text[:head]}\n[... {cut} characters cut ...]\n{text[len(text) - tail :]}"
