"""`Run` -> what the page is fed: one JSON object for the overview and the list, and a packed block for each rollout.

A block is gzip, in base64, of: the length of its head (uint32, little-endian), the head (JSON, padded with spaces to a
multiple of 4 bytes), and the arrays that `head["arrays"]` describes as [type, offset, length]. The page unpacks the
block of a rollout when it is opened. Pure.
"""

import base64
import gzip
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentic_opd.report.findings import findings
from agentic_opd.report.numbers import GapRow, Overview, overview, turn_gaps
from agentic_opd.report.rollouts import Rollout, Run, TurnView
from agentic_opd.report.tokens import TokenTexts
from agentic_opd.report.transcript import called_names, context_parts, regions, split_messages
from agentic_opd.settings.atropos import IdleEnvSettings

LOGPROB_UNIT = 1e-4
"""Teacher's logprobs are packed in units of this, which is how they are written in the file."""
MAX_TOKEN_CHARS = 2000
_INT32 = np.iinfo(np.int32)
_FLOAT32 = np.finfo(np.float32)


class Packer:
    """Packs rollouts one after the other; `vocab` collects the tokens that they name."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._places: dict[int, int] = {}

    def block(self, rollout: Rollout) -> str:
        """One rollout as the page unpacks it."""
        stretches = split_messages(rollout.messages, len(rollout.turns))
        said = [assistant for assistant, _ in stretches[1:]]
        head = {
            "contexts": list(self._contexts(rollout, stretches)),
            "turns": [
                {**self._turn(rollout, turn), "calls": called_names(message)}
                for turn, message in zip(rollout.turns, said, strict=True)
            ],
        }
        arrays: dict[str, NDArray[Any]] = {
            "student": rollout.student_S.clip(_FLOAT32.min, _FLOAT32.max).astype("<f4"),
            "teacher": _quantised(rollout.teacher.logprobs),
            "tokens": self._indices(rollout.tokens_T[rollout.sampled_S]),
            "others": self._indices(rollout.teacher.ids),
            "counts": rollout.teacher.counts_S,
        }
        return base64.b64encode(gzip.compress(_container(head, arrays), 6, mtime=0)).decode()

    def vocab(self) -> dict[str, Any]:
        """Every token that a packed rollout names: its id and its text; arrays hold places in these lists."""
        texts = (self._texts.shown(token_id) for token_id in self._places)
        return {"ids": list(self._places), "texts": [_cut(text) for text in texts]}

    def _contexts(self, rollout: Rollout, stretches: Sequence[Any]) -> Iterator[list[Any]]:
        starts = [0, *(turn.end for turn in rollout.turns)]
        ends = [*(turn.start for turn in rollout.turns), len(rollout.tokens_T)]
        for start, end, (_, messages) in zip(starts, ends, stretches, strict=True):
            ids = rollout.tokens_T[start:end].tolist()
            if self._texts.has_tokenizer:
                parts = context_parts(self._texts.joined(ids), messages, self._texts.control)
            else:
                parts = [part._replace(unseen=False) for part in context_parts("", messages)]
            yield [list(part) for part in parts]

    def _turn(self, rollout: Rollout, turn: TurnView) -> dict[str, Any]:
        first, behind = np.searchsorted(rollout.sampled_S, [turn.start, turn.end]).tolist()
        gaps = turn_gaps(rollout, turn)
        texts = [self._texts.shown(token_id) for token_id in rollout.tokens_T[turn.start : turn.end].tolist()]
        return {
            "start": turn.start,
            "from": first,
            "to": behind,
            "outcome": turn.outcome,
            "role": turn.next_state_role,
            "votes": [vote._asdict() for vote in turn.votes],
            "hint": turn.hint,
            "hintTokens": len(turn.hint_token_ids),
            "insertAt": turn.insert_at,
            "error": turn.error,
            "scored": len(gaps),
            "meanGap": float(gaps.mean()) if len(gaps) else None,
            "regions": [list(region) for region in regions(texts)] if self._texts.has_tokenizer else [],
        }

    def _indices(self, token_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
        places = (self._places.setdefault(token_id, len(self._places)) for token_id in token_ids.tolist())
        return np.fromiter(places, np.uint32, len(token_ids))


def head(run: Run, texts: TokenTexts, packer: Packer, notes: Sequence[str]) -> dict[str, Any]:
    """What the page reads first: numbers, findings, settings, the list of rollouts, and the tokens' texts.

    Args:
        run: The run, whose rollouts `packer` has packed all.
        texts: Looks up tokens.
        packer: For its vocabulary.
        notes: Further sentences for the top of the overview.
    """
    numbers = overview(run.rollouts)
    return {
        "name": run.name,
        "settings": {k: v for k, v in run.settings.items() if k not in IdleEnvSettings.model_fields},
        "findings": [*notes, *findings(numbers, run.rollouts)],
        "leftOut": list(run.left_out),
        "overview": _overview(numbers, run.rollouts, texts),
        "rollouts": [_row(rollout) for rollout in run.rollouts],
        "vocab": packer.vocab(),
        "unit": LOGPROB_UNIT,
    }


def _overview(numbers: Overview, rollouts: Sequence[Rollout], texts: TokenTexts) -> dict[str, Any]:
    shown = asdict(numbers)
    for name in ("funnel", "distributions", "by_task", "hint_rows"):
        shown[name] = [row._asdict() for row in getattr(numbers, name)]
    shown["gap_rows"] = [_gap_row(row, rollouts[row.rollout], texts) for row in numbers.gap_rows]
    return shown


def _gap_row(row: GapRow, rollout: Rollout, texts: TokenTexts) -> dict[str, Any]:
    position = int(rollout.sampled_S[row.sampled])
    before = texts.joined(rollout.tokens_T[max(0, position - 12) : position].tolist())
    token_id = int(rollout.tokens_T[position])
    return {
        "rollout": row.rollout,
        "position": position,
        "gap": row.gap,
        "text": _cut(texts.shown(token_id)),
        "before": before[-40:],
    }


def _row(rollout: Rollout) -> dict[str, Any]:
    gaps = rollout.gaps
    return {
        "line": rollout.line,
        "index": rollout.index,
        "task": rollout.task_id,
        "score": rollout.score,
        "passed": rollout.passed,
        "total": rollout.total,
        "reward": rollout.reward,
        "stop": rollout.stop_reason,
        "toolErrors": rollout.tool_errors,
        "outcomes": [turn.outcome for turn in rollout.turns],
        "hints": sum(turn.hint is not None for turn in rollout.turns),
        "tokens": len(rollout.tokens_T),
        "sampled": len(rollout.sampled_S),
        "scored": len(gaps),
        "meanGap": float(gaps.mean()) if len(gaps) else None,
        "largestGap": float(np.abs(gaps).max()) if len(gaps) else None,
    }


def _quantised(logprobs: NDArray[np.float64]) -> NDArray[np.int32]:
    return (logprobs / LOGPROB_UNIT).round().clip(_INT32.min, 0).astype("<i4")


def _container(head: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bytes:
    """The head and the arrays behind each other, each array at a multiple of four bytes from the first one."""
    places: dict[str, list[Any]] = {}
    body = b""
    for name, array in arrays.items():
        places[name] = [array.dtype.str[1:], len(body), len(array)]
        body += array.tobytes() + b"\0" * (-array.nbytes % 4)
    text = json.dumps({**head, "arrays": places}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return struct.pack("<I", len(text)) + text + body


def _cut(text: str) -> str:
    if len(text) <= MAX_TOKEN_CHARS:
        return text
    return f"{text[:MAX_TOKEN_CHARS]}… ({len(text) - MAX_TOKEN_CHARS:,} more characters)"
