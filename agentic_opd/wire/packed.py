"""Distillation rows as text, for the way through a trajectory API. Pure.

The API parses, stores and writes each number of `distill_token_ids` and `distill_logprobs`, which is most of its work.
It passes on the texts in `group_overrides["packed_rows"]` as they are: an object per sequence with the base64 of
little-endian arrays, `lengths` (int32, entries of each row), `token_ids` (int32) and `logprobs` (float64) of all rows.
"""

import base64
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.errors import WireError

_ROWS = ("distill_token_ids", "distill_logprobs")
_NAME = "packed_rows"
_TYPES = {"lengths": "<i4", "token_ids": "<i4", "logprobs": "<f8"}


def packed(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group, in the wire format and with any rows, with its rows as text."""
    ids, logprobs = (line.get(name) for name in _ROWS)
    rest = {name: value for name, value in line.items() if name not in _ROWS}
    if ids is None or logprobs is None:
        return rest
    rows = [
        {
            "lengths": _text("lengths", map(len, ids_TK)),
            "token_ids": _text("token_ids", chain.from_iterable(ids_TK)),
            "logprobs": _text("logprobs", chain.from_iterable(logprobs_TK)),
        }
        for ids_TK, logprobs_TK in zip(ids, logprobs, strict=True)
    ]
    return {**rest, "group_overrides": {**rest["group_overrides"], _NAME: rows}}


def unpacked(value: Any, origin: str) -> Any:
    """Return a group of any origin with its rows as lists, if it has them as text; `origin` names it in errors.

    Raises:
        WireError: the texts can't be read.
    """
    overrides = value.get("group_overrides") if isinstance(value, dict) else None
    if not isinstance(overrides, dict) or _NAME not in overrides:
        return value
    rest = {name: entry for name, entry in overrides.items() if name != _NAME}
    try:
        sequences = [_rows(texts) for texts in overrides[_NAME]]
    except (ValueError, TypeError, KeyError) as error:  # binascii.Error is a ValueError
        raise WireError(f"{origin}: group_overrides: {_NAME} can't be read: {type(error).__name__}: {error}") from error
    rows = {name: [arrays[index] for arrays in sequences] for index, name in enumerate(_ROWS)}
    return {**value, "group_overrides": rest, **rows}


def _rows(texts: Mapping[str, str]) -> tuple[list[list[int]], list[list[float]]]:
    """Return the ids and the logprobs of a sequence, [T, K] each with rows of any length."""
    lengths, ids, logprobs = (
        np.frombuffer(base64.b64decode(texts[name], validate=True), kind) for name, kind in _TYPES.items()
    )
    if lengths.min(initial=0) < 0 or not lengths.sum() == len(ids) == len(logprobs):
        raise ValueError(f"rows of {lengths.sum()} entries have {len(ids)} ids and {len(logprobs)} logprobs")
    return _split(ids, lengths), _split(logprobs, lengths)


def _split(values: NDArray[Any], lengths: NDArray[Any]) -> list[list[Any]]:
    flat, ends = values.tolist(), np.cumsum(lengths).tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def _text(name: str, values: Iterable[float]) -> str:
    return base64.b64encode(np.fromiter(values, _TYPES[name]).tobytes()).decode()
