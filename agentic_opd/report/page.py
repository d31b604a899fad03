"""`Run` -> one HTML file: the template with the project's CSS and JS and the packed data in it (I/O).

Data never become markup. They are JSON in inert script elements, with `<`, `>` and `&` escaped, and the JS makes text
nodes of them. A content security policy allows only the page's own script and style.

The data consist of one JSON object for the overview and the list (`head`), and one packed block per rollout, which the
page unpacks when the rollout is opened. A block is base64 of gzip of: the length of its head (uint32, little-endian),
the head (JSON, padded with spaces to a multiple of 4 bytes), and the arrays, which `head["arrays"]` describes as
[type, offset, length].
"""

import base64
import gzip
import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import ConfigError, OutputError
from agentic_opd.core.files import check_regular
from agentic_opd.core.intervals import Estimate
from agentic_opd.report.compare import compare
from agentic_opd.report.findings import findings
from agentic_opd.report.numbers import GapRow, Overview, overview
from agentic_opd.report.read import Run, ShownRollout, ShownTurn
from agentic_opd.report.tokens import TokenTexts, load_tokenizer
from agentic_opd.report.transcript import Region, called_names, context_parts, regions, split_messages
from agentic_opd.report.words import script_words
from agentic_opd.settings.atropos import IdleEnvSettings
from agentic_opd.wire.group import TurnRecord

TURN_SCRIPTS = ("text.js", "block.js", "dom.js", "charts.js", "tokens.js", "detail.js", "turn.js")
"""The scripts that show a turn, for any page."""
_SCRIPTS = (*TURN_SCRIPTS, "data.js", "overview.js", "comparison.js", "list.js", "rollout.js", "main.js")
_DARK = ":root[data-theme=dark]"
LOGPROB_UNIT = 1e-4
"""Unit (nats) in which the teacher's logprobs are packed; files of groups round to it."""
MAX_TOKEN_CHARS = 2000


def choose_tokenizer(run: Run, name: str | None) -> tuple[Any | None, list[str]]:
    """Load the tokenizer `name`, or by default the run's own.

    Returns:
        The tokenizer, or None and a note for the reader if the run names no tokenizer or its tokenizer can't be loaded.

    Raises:
        ConfigError: `name` can't be loaded.
    """
    if name is not None:
        return load_tokenizer(name), []
    run_tokenizer = next(
        (run.settings[key] for key in ("tokenizer_name", "policy_model") if run.settings.get(key)), None
    )
    if not isinstance(run_tokenizer, str):
        why = "there is no settings file (.run.json) beside it"
    else:
        try:
            return load_tokenizer(run_tokenizer), []
        except ConfigError as error:
            why = str(error)
    return None, [f"Tokens are shown as ids: {why}. Name a tokenizer with --tokenizer."]


class ShownRun(NamedTuple):
    """A run to be shown, its tokenizer (None: tokens are shown as ids), and `notes`, the overview's first sentences."""

    run: Run
    tokenizer: Any | None
    notes: Sequence[str] = ()


def write_report(runs: Sequence[ShownRun], path: Path, packed: Callable[[int], None] = lambda count: None) -> int:
    """Write the report of one run, or the comparison of two, atomically to `path`; return its size in bytes.

    `packed` is called after each packed rollout with the number packed so far.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        check_regular(path)
        check_regular(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("w", encoding="utf-8") as file:
                file.writelines(_page(runs, packed))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path.stat().st_size
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def _page(runs: Sequence[ShownRun], packed: Callable[[int], None]) -> Iterator[str]:
    """Yield the pieces of the file. The blocks come before the head, because packing them fills its vocabularies."""
    before, between, after = _template()
    yield before
    heads: list[dict[str, Any]] = []
    count = 0
    for shown_run in runs:
        texts = TokenTexts(shown_run.tokenizer)
        packer = Packer(texts)
        for rollout in shown_run.run.rollouts:
            yield f'<script type="text/plain" id="rollout-{count}">{packer.block(rollout)}</script>\n'
            count += 1
            packed(count)
        heads.append(head(shown_run, texts, packer))
    compared = compare(runs[0].run, runs[1].run) if len(runs) == 2 else None
    data = {"unit": LOGPROB_UNIT, "runs": heads, "comparison": compared and _as_data(compared)}
    yield f'<script type="application/json" id="head">{_inert(data)}</script>\n'
    yield from (between, after)


def _template() -> tuple[str, str, str]:
    """Return the parts of the page: before the data, after the data up to the end of the script, and the rest."""
    style = static_text("report.css")
    script = page_script(*map(static_text, _SCRIPTS))
    template = static_text("template.html")
    for name, text in (("STYLE", style), ("STYLE_HASH", content_hash(style)), ("SCRIPT_HASH", content_hash(script))):
        template = template.replace(f"%{name}%", text)
    before, rest = template.split("%DATA%")
    between, after = rest.split("%SCRIPT%")
    return before, between + script, after


def _as_data(value: Any) -> Any:
    """Convert named tuples to objects, except estimates, which remain [value, low, high]."""
    if isinstance(value, Estimate) or not isinstance(value, tuple):
        return value
    items: Any = cast(Any, value)
    if hasattr(items, "_asdict"):
        return {name: _as_data(entry) for name, entry in items._asdict().items()}
    return [_as_data(entry) for entry in items]


def _inert(data: Any) -> str:
    """Return ASCII JSON in which an HTML parser finds no end tag, comment or entity."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content_hash(text: str) -> str:
    """Return the hash by which a content security policy allows a style or a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def static_text(name: str) -> str:
    """Return a file of the page, such as `report.css`."""
    return (resources.files("agentic_opd.report") / "static" / name).read_text(encoding="utf-8")


def plain_style() -> str:
    """Return the report's style for a page that needs no script: its colours follow the system's."""
    style = static_text("report.css")
    dark = style[style.index(_DARK) + len(_DARK) :].partition("}")[0]
    return f"{style}@media (prefers-color-scheme: dark) {{ :root:not([data-theme]){dark}}} }}\n"


def page_script(*scripts: str) -> str:
    """Return scripts as one, whose names no other script sees."""
    return "(() => {\n'use strict';\n" + script_words() + "".join(scripts) + "})();\n"


class Packer:
    """Packs rollouts and collects the tokens that they use."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._indices_by_id: dict[int, int] = {}
        self.moved_in: dict[str, float] = dict.fromkeys(("call", "think", "say"), 0.0)
        """Sum of |gap| (nats) over tokens that moved, by part of the turn: `call`, `think`, or `say` for the rest."""

    def block(self, rollout: ShownRollout) -> str:
        """Return the packed data of a rollout, whose tokens are places in `vocab`."""
        stretches = split_messages(rollout.messages, len(rollout.spans), rollout.context)
        assistants = [assistant for assistant, _ in stretches[1:]]
        turns = zip(rollout.spans, rollout.records or [None] * len(assistants), assistants, strict=True)
        head = {
            "contexts": list(self._contexts(rollout, stretches)),
            "judged": _judged_fields(rollout),
            "turns": [self._turn_fields(rollout, span, record, message) for span, record, message in turns],
        }
        return _packed(head, self._arrays(rollout))

    def turn_block(self, turn: ShownTurn) -> str:
        """Return the packed data of one turn by itself, without its context and with all that it needs of a head.

        The packer must be new.
        """
        rollout, judged = turn.rollout, None
        if rollout.windows:
            number = rollout.turns_before + turn.index + 1
            votes = [
                {"turns": vote.turns, "isReadable": vote.kind.is_readable}
                for window in rollout.windows
                if window.first <= number <= window.last
                for vote in window.votes
            ]
            judged = {"before": number - 1, "windows": [{"first": number, "last": number, "votes": votes}]}
        alone = rollout.only(turn.index)
        record = alone.records[0] if alone.records else None
        fields = self._turn_fields(alone, alone.spans[0], record, turn.message)
        arrays = self._arrays(alone)
        head = {"contexts": [], "judged": judged, "turns": [fields]}
        head |= {"vocab": self.vocab(), "movedFrom": rollout.moved_from, "unit": LOGPROB_UNIT}
        return _packed(head, arrays)

    def _turn_fields(
        self, rollout: ShownRollout, span: tuple[int, int], record: TurnRecord | None, message: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        return {**self._turn(rollout, span), **_record_fields(record), "calls": called_names(message)}

    def _arrays(self, rollout: ShownRollout) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {
            "student": _float32(rollout.student_S),
            "teacher": (rollout.teacher.logprobs / LOGPROB_UNIT).round().astype("<i4"),
            "tokens": self._token_indices(rollout.tokens_T[rollout.sampled_S]),
            "others": self._token_indices(rollout.teacher.ids),
            "counts": rollout.teacher.counts_S,
        }
        if not np.array_equal(rollout.baseline_S, rollout.student_S):
            arrays["baseline"] = _float32(rollout.baseline_S)
        return arrays

    def vocab(self) -> dict[str, Any]:
        """Return the ids and texts of all tokens in packed rollouts; the blocks' arrays index these lists."""
        texts = (self._texts.text(token_id) for token_id in self._indices_by_id)
        return {"ids": list(self._indices_by_id), "texts": [_cut(text) for text in texts]}

    def _contexts(self, rollout: ShownRollout, stretches: Sequence[Any]) -> Iterator[list[Any]]:
        starts = [0, *(end for _, end in rollout.spans)]
        ends = [*(start for start, _ in rollout.spans), len(rollout.tokens_T)]
        for start, end, (_, messages) in zip(starts, ends, stretches, strict=True):
            ids = rollout.tokens_T[start:end].tolist()
            if self._texts.has_tokenizer:
                parts = context_parts(self._texts.joined(ids), messages, self._texts.control)
            else:
                parts = [part._replace(unseen=False) for part in context_parts("", messages)]
            yield [list(part) for part in parts]

    def _turn(self, rollout: ShownRollout, span: tuple[int, int]) -> dict[str, Any]:
        first, behind = np.searchsorted(rollout.sampled_S, span).tolist()
        gaps = rollout.gaps_in(span)
        texts = [self._texts.text(token_id) for token_id in rollout.tokens_T[slice(*span)].tolist()]
        parts = regions(texts) if self._texts.has_tokenizer else []
        self._count_moved(rollout, span, parts)
        return {
            "start": span[0],
            "from": first,
            "to": behind,
            "scored": len(gaps),
            "moved": int((np.abs(gaps) >= rollout.moved_from).sum()) if len(gaps) else None,
            "regions": [list(region) for region in parts],
        }

    def _count_moved(self, rollout: ShownRollout, span: tuple[int, int], parts: Sequence[Region]) -> None:
        positions = rollout.sampled_S[rollout.is_scored_S]
        offsets = positions[(positions >= span[0]) & (positions < span[1])] - span[0]
        sizes = np.abs(rollout.gaps_in(span))
        sizes[sizes < rollout.moved_from] = 0.0
        self.moved_in["say"] += float(sizes.sum())
        for kind, start, end in parts:
            inside = float(sizes[(offsets >= start) & (offsets < end)].sum())
            self.moved_in[kind] += inside
            self.moved_in["say"] -= inside

    def _token_indices(self, token_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
        indices = (
            self._indices_by_id.setdefault(token_id, len(self._indices_by_id)) for token_id in token_ids.tolist()
        )
        return np.fromiter(indices, np.uint32, len(token_ids))


def _judged_fields(rollout: ShownRollout) -> dict[str, Any] | None:
    """Return the judge's questions about the whole rollout; a later sequence has the answers only."""
    if not rollout.windows:
        return None
    windows = [
        {
            "first": window.first,
            "last": window.last,
            "question": None if rollout.turns_before else window.question,
            "votes": [{**asdict(vote), "isReadable": vote.kind.is_readable} for vote in window.votes],
            "tokens": window.judge_tokens and [window.judge_tokens.read, window.judge_tokens.sampled],
        }
        for window in rollout.windows
    ]
    return {"before": rollout.turns_before, "windows": windows}


def _record_fields(turn: TurnRecord | None) -> dict[str, Any]:
    """Return the fields of a turn's record that the page shows; None gives empty values."""
    fields = {} if turn is None else turn.to_wire()
    return {
        **{name: fields.get(name) for name in ("outcome", "hint", "error")},
        "evidence": [] if turn is None else turn.evidence,
        "question": fields.get("question"),
        "proof": fields.get("proof"),
        "stepScore": fields.get("step_score"),
        "votes": fields.get("votes", []),
        "hintTokens": len(fields.get("hint_token_ids", ())),
        "insertAt": fields.get("insert_at"),
    }


def head(shown_run: ShownRun, texts: TokenTexts, packer: Packer) -> dict[str, Any]:
    """Return the data of a run outside of its blocks: overview, findings, settings, list of rollouts, and vocabulary.

    `packer` has packed all rollouts of the run.
    """
    run = shown_run.run
    numbers = overview(run.rollouts)
    return {
        "name": run.name,
        "settings": {name: value for name, value in run.settings.items() if name not in IdleEnvSettings.model_fields},
        "findings": [*shown_run.notes, *findings(numbers, run.rollouts)],
        "leftOut": list(run.left_out),
        "overview": _overview(numbers, run.rollouts, texts),
        "rollouts": [_row(rollout) for rollout in run.rollouts],
        "movedIn": packer.moved_in if texts.has_tokenizer else None,
        "vocab": packer.vocab(),
    }


def _overview(numbers: Overview, rollouts: Sequence[ShownRollout], texts: TokenTexts) -> dict[str, Any]:
    data = asdict(numbers)
    for name in ("judge", "funnel", "distributions", "by_task", "hint_rows", "evidence_rows"):
        data[name] = _as_data(getattr(numbers, name))
    data["gap_rows"] = [_gap_row(row, rollouts[row.rollout], texts) for row in numbers.gap_rows]
    return data


def _gap_row(row: GapRow, rollout: ShownRollout, texts: TokenTexts) -> dict[str, Any]:
    position = int(rollout.sampled_S[row.sampled])
    before = texts.joined(rollout.tokens_T[max(0, position - 12) : position].tolist())
    token_id = int(rollout.tokens_T[position])
    return {
        "rollout": row.rollout,
        "position": position,
        "gap": row.gap,
        "text": _cut(texts.text(token_id)),
        "before": before[-40:],
    }


def _row(rollout: ShownRollout) -> dict[str, Any]:
    gaps, moved = rollout.gaps, rollout.moved
    return {
        "line": rollout.line,
        "index": rollout.index,
        "task": rollout.task_id,
        "score": rollout.score,
        "passed": rollout.checks and rollout.checks.passed,
        "total": rollout.checks and rollout.checks.total,
        "reward": rollout.reward,
        "stop": rollout.stop_reason,
        "toolErrors": rollout.tool_errors,
        "outcomes": [turn.outcome.value for turn in rollout.records] or [None] * len(rollout.spans),
        "hints": rollout.counts.records.hints,
        "tokens": rollout.counts.tokens,
        "sampled": rollout.counts.sampled_tokens,
        "scored": len(gaps),
        "meanGap": float(gaps.mean()) if len(gaps) else None,
        "largestGap": float(np.abs(gaps).max()) if len(gaps) else None,
        "moved": len(moved),
        "toShow": float(np.abs(moved).sum()),
        "movedFrom": rollout.moved_from,
    }


def _float32(logprobs: NDArray[np.float64]) -> NDArray[np.float32]:
    return logprobs.astype("<f4")


def _packed(head: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> str:
    return base64.b64encode(gzip.compress(_container(head, arrays), 6, mtime=0)).decode()


def _container(head: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bytes:
    """Concatenate the head and the arrays; each array's offset from the first is a multiple of 4 bytes."""
    layout: dict[str, list[Any]] = {}
    body = b""
    for name, array in arrays.items():
        layout[name] = [array.dtype.str[1:], len(body), len(array)]
        body += array.tobytes() + b"\0" * (-array.nbytes % 4)
    text = json.dumps({**head, "arrays": layout}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return struct.pack("<I", len(text)) + text + body


def _cut(text: str) -> str:
    if len(text) <= MAX_TOKEN_CHARS:
        return text
    return f"{text[:MAX_TOKEN_CHARS]}… ({len(text) - MAX_TOKEN_CHARS:,} more characters)"
