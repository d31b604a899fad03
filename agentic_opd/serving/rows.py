"""The engine's prompt logprobs as arrays, and arrays as base64 for the wire."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logprobs import FlatLogprobs, PromptLogprobs, SampleLogprobs
from vllm.v1.outputs import LogprobsTensors


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The last rows of one sequence (nats).

    `actual_R` of its own tokens, `top_ids_RK` and `top_logprobs_RK` of the K most likely ones, most likely first.
    """

    actual_R: NDArray[np.float32]
    top_ids_RK: NDArray[np.int32]
    top_logprobs_RK: NDArray[np.float32]
    num_cached_tokens: int
    weight_version: int

    def to_wire(self) -> dict[str, Any]:
        """Plain JSON data; arrays little-endian, row by row, as base64."""
        num_scored, top_k = self.top_ids_RK.shape
        return {
            "num_scored": num_scored,
            "top_k": top_k,
            "num_cached_tokens": self.num_cached_tokens,
            "actual_logprobs": encode(self.actual_R, "<f4"),
            "top_token_ids": encode(self.top_ids_RK, "<i4"),
            "top_logprobs": encode(self.top_logprobs_RK, "<f4"),
        }


def encode(array: NDArray[Any], dtype: str) -> str:
    """`array` as base64 of its elements, row by row."""
    return base64.b64encode(array.astype(dtype).tobytes()).decode("ascii")


def last_rows(
    logprobs: LogprobsTensors | SampleLogprobs | PromptLogprobs, num_rows: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The last `num_rows` rows as (ids, logprobs), both [num_rows, 1 + K]; column 0 is the row's own token.

    Fewer rows come back where the engine has fewer. Rows are counted from the end, because the V1 model runner returns
    a row for every position, and the V2 runner only for those that it computed.
    """
    if isinstance(logprobs, LogprobsTensors):
        ids, values = logprobs.logprob_token_ids[-num_rows:], logprobs.logprobs[-num_rows:]
        return ids.cpu().numpy().astype(np.int32), values.float().cpu().numpy()
    assert isinstance(logprobs, FlatLogprobs)
    first = max(0, len(logprobs.start_indices) - num_rows)
    begin, rows = logprobs.start_indices[first], len(logprobs.start_indices) - first
    ids = np.array(logprobs.token_ids[begin:], dtype=np.int32)
    return ids.reshape(rows, -1), np.array(logprobs.logprobs[begin:], dtype=np.float32).reshape(rows, -1)


def rows_fit(ids: NDArray[np.int32], logprobs: NDArray[np.float32], tokens: Sequence[int]) -> bool:
    """Whether rows [R, 1 + K] can be those of `tokens` [R].

    Rows that the engine read from its cache were never computed: they hold what the memory held before.
    """
    return (
        len(ids) == len(tokens)
        and np.array_equal(ids[:, 0], tokens)
        and bool(np.isfinite(logprobs[:, 0]).all())
        and not np.isnan(logprobs).any()
        and float(logprobs.max()) < 1e-3
    )
