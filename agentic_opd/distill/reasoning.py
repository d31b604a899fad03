r"""A judge's text -> the answer after its reasoning, by the marks of any model family. Pure.

Endpoints without a reader for a model's reasoning return both as one text: `<think>..</think>\boxed{1}`, gpt-oss'
channels, Granite's `Here is my response:`.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator

from agentic_opd.distill.protocol import words

_MARK = re.compile(
    r"(?:[<\[]|\u25c1|\u27e8|\u3010|\{(?=/))\s?(?:[|\uff5c]?/)?\s?[|\uff5c\w\u2581:.\-]{1,48}\s?(?:[>\]}]|\u25b7|\u27e9|\u3011)"
)
"""Matches a tag or a control token: `</think>`, `[/THINK]`, `<|END_THINKING|>`, `<channel|>`, and others."""
_IS_ABOUT_REASONING = re.compile(
    r"think|thought|reason|analy[sz]|reflect|scratch_?pad|monologue|deliberat|rationale|ponder|inner_|chain_?of|\bcot\b|"
    r"channel\|>$|\u601d\u8003|\u63a8\u7406|\u53cd\u601d",  # Also Chinese for thought, reasoning and reflection.
    re.IGNORECASE,
)
_END_WORDS = frozenset(("end", "close", "stop", "suffix"))
_SPELLED_ENDS = re.compile(
    r"<\|channel\|>\s*final[^<\n]{0,40}(?:<\|constrain\|>\w{1,20})?<\|message\|>"  # gpt-oss
    r"|<\|close\|>\s*think\s*<\|sep\|>"  # Kimi K3
    r"|<\|content_text\|>"  # Inkling
    r"|<\|begin\|>assistant<\|content\|>"  # Solar
    r"|<unused95>|\[unused17\]"  # MedGemma, Pangu
    r"|\bassistantfinal(?=\W)"  # gpt-oss without its control tokens
    r"|\.\.\. ?done thinking\."  # Ollama
    r"|^[ #*_=\-]{0,8}end of (?:my )?(?:reasoning|thinking|thoughts?|analysis)\b[^\n]{0,20}$",
    re.IGNORECASE | re.MULTILINE,
)
_SPELLED_STARTS = re.compile(
    r"\s*(?:(?:<\|start\|>assistant)?<\|channel\|?>\s*(?:analysis|commentary|thought)|<\|open\|>\s*think|<unused94>|\[unused16\]"
    r"|<\|content_thinking\|>)"
)
_GRANITE = re.compile(r"\s*Here(?:'s|\u2019s| is) my thought process:", re.IGNORECASE)
_GRANITE_END = re.compile(r"Here(?:'s|\u2019s| is) my response:", re.IGNORECASE)
_ANSWER = re.compile(
    r"<\|?(?:start_|begin_of_)?(?:final_?)?(?:answer|response|solution|output|verdict|vote|final)\|?>"
    r"|^[ >*_#-]{0,8}(?:(?:my|the|so) ){0,2}(?:final |conclusive )?(?:answer|response|vote|verdict|decision|conclusion)"
    r"[ *_]{0,4}[:\n]",
    re.IGNORECASE | re.MULTILINE,
)
_BLOCK = re.compile(r"\s*(?:<([\w:.\-]{1,48})>|\[([\w:.\-]{1,48})\])")


def answers(text: str) -> Iterator[str]:
    r"""Yield the readings of a judge's text, the most likely first; none if it is reasoning without an end.

    1. What follows the last mark that ends reasoning, or the whole text without one. Marks inside of a hint belong to
       the hint.
    2. That without the blocks of any name before it (`<musing>...</musing>`).
    3. What follows the last mark or heading of an answer in it, such as `<answer>` or `Final answer:`.
    """
    starts, hint_ends = _hint_spans(text)

    def is_in_hint(position: int) -> bool:
        index = bisect_left(starts, position) - 1
        return index >= 0 and position <= hint_ends[index]

    ends = [end for end in _reasoning_ends(text) if not is_in_hint(end)]
    if not ends and _begins_reasoning(text):
        return
    answer = text[max(ends, default=0) :]
    yield answer
    without_blocks = _without_blocks(answer)
    if without_blocks != answer:
        yield without_blocks
    answer_starts = [match.end() for match in _ANSWER.finditer(without_blocks)]
    if answer_starts:
        yield without_blocks[answer_starts[-1] :]


def _hint_spans(text: str) -> tuple[list[int], list[int]]:
    """Return the positions of the marks around the hints in a text: the starts, and the ends."""
    starts, ends, start = list[int](), list[int](), -1
    for word in words(text):
        if word.kind == "start":
            start = word.start
        elif word.kind == "end" and start >= 0:
            starts.append(start)
            ends.append(word.start)
            start = -1
    return starts, ends


def _reasoning_ends(text: str) -> list[int]:
    """Return the position after each mark that ends reasoning."""
    ends = [match.end() for match in _SPELLED_ENDS.finditer(text)]
    ends += [
        match.end() for match in _MARK.finditer(text) if _IS_ABOUT_REASONING.search(match[0]) and _closes(match[0])
    ]
    if _GRANITE.match(text):
        ends += [match.end() for match in _GRANITE_END.finditer(text)]
    return ends


def _closes(mark: str) -> bool:
    """Return whether a mark ends something: by a slash, by a word, or as Gemma's `<channel|>` does."""
    words = re.split(r"[\W_\u2581]+", mark.lower())
    is_gemma = mark.endswith("|>") and not mark.startswith("<|")
    return "/" in mark[:4] or is_gemma or not _END_WORDS.isdisjoint(words)


def _begins_reasoning(text: str) -> bool:
    """Return whether a text without an end of reasoning begins with reasoning."""
    if _SPELLED_STARTS.match(text) or _GRANITE.match(text):
        return True
    mark = _MARK.match(text.lstrip())
    return mark is not None and _IS_ABOUT_REASONING.search(mark[0]) is not None


def _without_blocks(answer: str) -> str:
    """Return an answer without the blocks of any name before it, as long as a box follows them."""
    while (opening := _BLOCK.match(answer)) is not None and not _ANSWER.match(opening[0].strip()):
        closing = f"</{opening[1]}>" if opening[1] else f"[/{opening[2]}]"
        end = answer.find(closing, opening.end())
        if end < 0 or "\\boxed" not in answer[end:]:
            break
        answer = answer[end + len(closing) :]
    return answer
