"""The teacher: `TeacherRequest` -> `TeacherRows`, scored by a vLLM server (I/O)."""

import asyncio
import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.server_info import ServerInfo
from agentic_opd.core.types import TeacherRequest, TeacherRows, check_lengths
from agentic_opd.distill.arrays import check_rows

SCORE_ROUTE = 3
"""Required version of the plugin's scoring route; see `serving/score.py`."""


ReadBy = Literal["policy", "base", "teacher"]
"""Which weights of the server read: a policy version, the initial weights, or the teacher's adapter."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A sequence for the teacher, with `top_k` logprobs per scored position.

    With `unless_weight_version`, the sequence is read only if the weights are of another version.
    """

    request: TeacherRequest
    top_k: int
    unless_weight_version: int | None = None


class TeacherReply(NamedTuple):
    """The rows of one turn, the server's seconds without waiting for a free slot, and its cached tokens."""

    rows: TeacherRows
    latency_s: float
    cached_tokens: int | None = None
    """Tokens from the prefix cache, over all readings; None if the server does not report them."""
    weight_version: int | None = None
    """Version of the weights that produced all rows; None if the server does not report it."""
    also: tuple[TeacherRows | None, ...] = ()
    """Rows of the further readings; None for a skipped one."""


class TeacherClient(Protocol):
    """The teacher interface of the pipeline; implementations check the rows against the request."""

    @property
    def info(self) -> ServerInfo:
        """The server's info."""
        ...

    async def score(self, request: TeacherRequest, top_k: int, also: Sequence[Reading] = ()) -> TeacherReply:
        """Return the teacher's logprobs of the last `request.num_scored` tokens, and of its `top_k` most likely ones.

        The further readings `also` are scored by the same weights. If the weights are adapters, those of the request's
        `weight_version` are preferred while the server keeps them.

        Raises:
            AlignmentError: the rows do not fit the request.
            ServerRequestError: the server refused the request.
            ServerUnreachableError: no usable answer within the retry window.
        """
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class PluginTeacher:
    """Scores through `/v1/opd/score`, which returns only the turn's rows, in binary, and uses the prefix cache."""

    def __init__(
        self, client: JsonClient, info: ServerInfo, max_concurrent: int = 32, read_by: ReadBy = "policy"
    ) -> None:
        self.info = info
        self._client, self._read_by = client, read_by
        self._slots = asyncio.Semaphore(max_concurrent)

    async def score(self, request: TeacherRequest, top_k: int, also: Sequence[Reading] = ()) -> TeacherReply:
        """See `TeacherClient.score`."""
        readings = (Reading(request, top_k), *also)
        body: dict[str, Any] = {"sequences": [_sequence(reading, top_k) for reading in readings], "top_k": top_k}
        if request.weight_version is not None and self.info.max_adapters:
            body["prefer_weight_version"] = request.weight_version
        if self._read_by != "policy":
            body["read_by"] = self._read_by
        async with self._slots:
            start = time.monotonic()
            answer = await self._client.post("/v1/opd/score", body)
            latency = time.monotonic() - start
        rows, *others = _plugin_rows(answer, readings)
        for reading, found in zip(readings, (rows, *others), strict=True):
            if found is not None:
                check_rows(found, reading.request, reading.top_k, self.info.vocab_size)
        assert rows is not None  # the first reading does not depend on the weights' version
        cached = [_whole_or_none(result.get("num_cached_tokens")) for result in answer["results"] if result is not None]
        known = [tokens for tokens in cached if tokens is not None]
        version = _whole_or_none(answer.get("weight_version"))
        return TeacherReply(rows, latency, sum(known) if known == cached else None, version, tuple(others))

    async def close(self) -> None:
        """Close pooled connections."""
        await self._client.close()


class CompletionsTeacher:
    """Scores through `/v1/completions`, for servers without the plugin; all rows of the prompt are returned as JSON.

    Such a server does not report its weight version, so readings that depend on it are skipped.
    """

    def __init__(self, client: JsonClient, info: ServerInfo, max_concurrent: int = 32) -> None:
        self.info = info
        self._client = client
        self._slots = asyncio.Semaphore(max_concurrent)

    async def score(self, request: TeacherRequest, top_k: int, also: Sequence[Reading] = ()) -> TeacherReply:
        """See `TeacherClient.score`."""
        readings = (Reading(request, top_k), *also)
        first, *others = await gather_all(self._read(reading) for reading in readings)
        assert first is not None  # the first reading does not depend on the weights' version
        latency = max(read.latency_s for read in (first, *others) if read is not None)
        return TeacherReply(first.rows, latency, also=tuple(read and read.rows for read in others))

    async def _read(self, reading: Reading) -> TeacherReply | None:
        if reading.unless_weight_version is not None:
            return None
        body = completions_body(self.info.model, reading.request.token_ids, reading.top_k)
        async with self._slots:
            start = time.monotonic()
            answer = await self._client.post("/v1/completions", body)
            latency = time.monotonic() - start
        rows = _completions_rows(answer, reading.request, reading.top_k)
        check_rows(rows, reading.request, reading.top_k, self.info.vocab_size)
        return TeacherReply(rows, latency)

    async def close(self) -> None:
        """Close pooled connections."""
        await self._client.close()


def completions_body(model: str, token_ids: Sequence[int], top_k: int) -> dict[str, Any]:
    """Return the body of a `/v1/completions` request for the logprobs of a prompt given as ids."""
    return {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": top_k,
        "return_token_ids": True,
    }


def _sequence(reading: Reading, top_k: int) -> dict[str, Any]:
    """Return a reading in the plugin's format; `top_k` is the request's default for its sequences."""
    request = reading.request
    sequence: dict[str, Any] = {"token_ids": request.token_ids, "num_scored": request.num_scored}
    if reading.top_k != top_k:
        sequence["top_k"] = reading.top_k
    if reading.unless_weight_version is not None:
        sequence["unless_weight_version"] = reading.unless_weight_version
    return sequence


def _plugin_rows(answer: Any, readings: Sequence[Reading]) -> list[TeacherRows | None]:
    """Return the rows of each reading; None for a skipped one, which must depend on the weight version."""
    try:
        results = answer["results"]
        return [
            None if result is None and reading.unless_weight_version is not None else _result_rows(result)
            for result, reading in zip(results, readings, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:  # binascii.Error is a ValueError
        raise AlignmentError(f"the scoring answer can't be read: {type(error).__name__}: {error}") from error


def _result_rows(result: Any) -> TeacherRows:
    rows, top_k = int(result["num_scored"]), int(result["top_k"])
    return TeacherRows(
        _decode(result["actual_logprobs"], "<f4", (rows,)),
        _decode(result["top_token_ids"], "<i4", (rows, top_k)),
        _decode(result["top_logprobs"], "<f4", (rows, top_k)),
    )


def _whole_or_none(said: object) -> int | None:
    """Return `said` if it is an integer, otherwise None; rows are valid without this metadata."""
    return said if isinstance(said, int) else None


def _decode(text: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    values: NDArray[Any] = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    return values.reshape(shape)


def _completions_rows(answer: Any, request: TeacherRequest, top_k: int) -> TeacherRows:
    """Cut the turn's rows out of all rows of the prompt.

    A row is {id: {"logprob", "rank"}}: the top `top_k`, and the prompt's own token if it is not among them.
    """
    try:
        choice = answer["choices"][0]
        echo, rows = choice.get("prompt_token_ids"), choice["prompt_logprobs"]
        if echo is not None and tuple(echo) != request.token_ids:
            raise AlignmentError(f"the server read {len(echo)} other ids than the {len(request.token_ids)} it was sent")
        check_lengths("prompt logprobs", rows=len(rows), token_ids=len(request.token_ids))
        scored_ids = request.token_ids[-request.num_scored :]
        actual = [
            row[str(token)]["logprob"] for token, row in zip(scored_ids, rows[-request.num_scored :], strict=True)
        ]
        top = [_most_likely(row, top_k) for row in rows[-request.num_scored :]]
        return TeacherRows(
            np.asarray(actual, np.float32),
            np.asarray([[int(token) for token, _ in row] for row in top], np.int32),
            np.asarray([[entry["logprob"] for _, entry in row] for row in top], np.float32),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise AlignmentError(f"the completion's prompt_logprobs can't be read: {error!r}") from error


def _most_likely(row: dict[str, dict[str, float]], top_k: int) -> list[tuple[str, dict[str, float]]]:
    return sorted(row.items(), key=lambda item: (-item[1]["logprob"], item[1]["rank"]))[:top_k]
