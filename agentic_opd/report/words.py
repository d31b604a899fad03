"""What the report and the gateway's page say in the same words, in Python and in their scripts. Pure."""

import json
import re
from collections.abc import Mapping
from html import escape

from agentic_opd.core.types import EvidenceKind, TurnOutcome

CHARACTERS: Mapping[str, str] = {
    **{"\0": "NUL", "\a": "BEL", "\b": "BS", "\v": "VT", "\f": "FF", "\r": "CR", "\x1b": "ESC", "\x7f": "DEL"},
    **{"\xa0": "NBSP", "\xad": "SHY", "\u061c": "ALM", "\u200b": "ZWSP", "\u200c": "ZWNJ", "\u200d": "ZWJ"},
    **{"\u200e": "LRM", "\u200f": "RLM", "\u2028": "LS", "\u2029": "PS", "\u202a": "LRE", "\u202b": "RLE"},
    **{"\u202c": "PDF", "\u202d": "LRO", "\u202e": "RLO", "\u2060": "WJ", "\u2066": "LRI", "\u2067": "RLI"},
    **{"\u2068": "FSI", "\u2069": "PDI", "\ufeff": "BOM", "\ufffe": "U+FFFE", "\uffff": "U+FFFF"},
}
"""Names of characters that can't be seen. Control pictures would be shorter, but many fonts lack them."""
WHY: Mapping[TurnOutcome, str] = {
    TurnOutcome.SCORED: "The teacher read the hint and scored every token of this turn.",
    TurnOutcome.NO_NEXT_STATE: "Nothing answered this turn, so there is nothing to judge it by.",
    TurnOutcome.VOTE_FAILED: "Too few votes said that the answer shows what the turn should have done.",
    TurnOutcome.JUDGE_ERROR: "The judge gave no answer, or no vote that could be read.",
    TurnOutcome.LEAKED: "The hint repeated hidden test code and was dropped.",
    TurnOutcome.TOO_LONG: "Hint and turn together do not fit the teacher's context.",
    TurnOutcome.SCORING_ERROR: "The teacher gave no rows, or rows that do not fit the turn.",
    TurnOutcome.REFUTED: "Replayed from here, the policy passes less often with the hint.",
    TurnOutcome.UNPROVEN: "Replays from here did not show that the hint helps.",
    TurnOutcome.NOT_JUDGED: "The rollout did not fail, and the judge reads failed ones only.",
}
"""What the outcome of a turn means."""
EVIDENCE: Mapping[EvidenceKind, str] = {
    "tool": "tool results",
    "user": "the user's reply",
    "repeated": "an equal turn before",
    "later": "what showed later",
    "verdict": "the hidden tests' verdict",
}
_HIDDEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\xa0\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def script_words() -> str:
    """Return the tables as constants of a script."""
    tables = {"NAMED": CHARACTERS, "WHY": WHY, "EVIDENCE": EVIDENCE}
    return "".join(f"const {name} = {json.dumps(table)};\n" for name, table in tables.items())


def shown_html(text: str) -> str:
    """Return a text as HTML: escaped, with a name in place of each character that can't be seen."""
    return _HIDDEN.sub(_mark, escape(text))


def _mark(match: re.Match[str]) -> str:
    name = CHARACTERS.get(match[0], f"U+{ord(match[0]):04X}")
    return f'<b class="mark">⟨{name}⟩</b>'
