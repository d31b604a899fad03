"""`PluginClient`: one vLLM server of the policy or of a teacher, with token ids in and out (I/O)."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError

from agentic_opd import __version__
from agentic_opd.core.attachments.files import AttachedFiles
from agentic_opd.core.attachments.messages import KIND
from agentic_opd.core.attachments.requests import AttachmentSender, is_lost, request_fields
from agentic_opd.core.concurrency import fair_slot, gather_all
from agentic_opd.core.errors import (
    AlignmentError,
    BrokenWeightsError,
    PlaceError,
    ServerMismatchError,
    ServerRequestError,
)
from agentic_opd.core.http import JsonClient, read_answer
from agentic_opd.core.types import Attachments, Completion, TeacherRequest
from agentic_opd.plugin.info import ServerInfo, fetch_info
from agentic_opd.plugin.sampling import CompletionsAnswer, Delta, StreamEvent, WholeAnswer, merged
from agentic_opd.plugin.scoring import (
    ReadBy,
    Reading,
    TeacherReply,
    completions_body,
    read_prompt_logprobs,
    read_scores,
    score_body,
)

_PARSED_AT_ONCE = 32
"""Largest number of a stream's events that are parsed in one slot of the event loop: about a millisecond."""


class _Tokens(BaseModel):
    tokens: list[int]


class _Text(BaseModel):
    prompt: str


@dataclass(slots=True)
class PluginClient:
    """A server and its reported properties. Retries are those of `http`.

    `max_concurrent` limits scoring requests. Without the plugin, `complete` and `score` use `/v1/completions`, and
    neither streams nor new weights are possible.
    """

    http: JsonClient
    info: ServerInfo
    read_by: ReadBy = "policy"
    max_concurrent: int = 32
    learner: str | None = None
    """Learner whose adapters sample, score and are loaded; None: those of the policy of all."""
    else_learner: str | None = None
    """Learner whose adapters `learner` has while it has none."""
    attached: AttachmentSender = field(init=False, repr=False)
    """What it was sent for prompts that name attachments."""
    _scoring: asyncio.Semaphore = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.attached = AttachmentSender(self.http, self.info.model, self.info.placeholder)
        self._scoring = asyncio.Semaphore(self.max_concurrent)

    @classmethod
    async def connected(
        cls, http: JsonClient, files: AttachedFiles | None = None, *, may_be_broken: bool = False
    ) -> Self:
        """Ask the server for its properties; see `fetch_info` for the errors.

        `files` are those of the attachments in prompts. `may_be_broken` accepts a server whose weights are broken, in
        order to load whole ones.

        Raises:
            BrokenWeightsError: the server computes nothing until whole weights are loaded.
        """
        info = await fetch_info(http)
        if info.broken_weights is not None and not may_be_broken:
            raise BrokenWeightsError(f"{http.base_url}: {info.broken_weights}")
        client = cls(http, info)
        client.attached.files = files
        return client

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return self.http.base_url

    async def close(self) -> None:
        await self.http.close()

    def of_learner(self, learner: str, else_learner: str | None = None) -> Self:
        """Return a client of this server's adapters of a learner; it shares the connection."""
        client = replace(self, learner=learner, else_learner=else_learner)
        client.attached = self.attached
        return client

    @property
    def _of_learner(self) -> dict[str, str]:
        return {} if self.learner is None else {"learner": self.learner}

    def _preferring(self, weight_version: int | None) -> dict[str, int | str]:
        """Return the fields that ask for a learner, and for a version of the weights if the server keeps several."""
        of_start = {} if self.else_learner is None else {"else_learner": self.else_learner}
        if weight_version is None or not self.info.max_adapters:
            return {**self._of_learner, **of_start}
        return {"prefer_weight_version": weight_version, **self._of_learner, **of_start}

    # ------------------------------------------------------------------------------------------------------- checks

    def check_caps(self, *, context: int = 0, vocab_size: int = 0, top_k: int | None = None) -> None:
        """Check that requests of `context` tokens, of ids below `vocab_size`, with `top_k` logprobs are possible.

        Raises:
            ServerMismatchError: a cap is too small; the message says how to restart the server, or what to set.
        """
        info = self.info
        wrong: list[str] = []
        if info.max_model_len < context:
            wrong.append(
                f"its context holds {info.max_model_len} tokens, but env.max_token_length is {context}: restart it "
                f"with --max-model-len {context} or more, or lower env.max_token_length"
            )
        if info.vocab_size is not None and info.vocab_size < vocab_size:
            wrong.append(
                f"its vocabulary has {info.vocab_size} tokens, the tokenizer {vocab_size}: set env.tokenizer_name to "
                "the model that is served"
            )
        if top_k is not None and info.max_logprobs is not None and 0 <= info.max_logprobs < top_k:
            wrong.append(
                f"it returns at most {info.max_logprobs} logprobs, but {top_k} are asked for (env.distill_topk, or "
                f"twice that with env.hint.control or env.teacher.support): restart it with --max-logprobs {top_k} or "
                "more, or lower env.distill_topk"
            )
        if wrong:
            raise ServerMismatchError(f"{self.url} (model {info.model!r}) does not fit: " + "; ".join(wrong) + ".")

    async def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a server whose tokenizer maps a probe text with all added tokens to other ids than `tokenizer`.

        Raises:
            ServerMismatchError: the ids differ (the message holds both), or the server does not return ids.
        """
        added = "".join(token.content for token in tokenizer.added_tokens_decoder.values())
        probe = f"def f(x):\n    return x * 2  # é, 数, 🙂{added}"
        ours = list(tokenizer.encode(probe, add_special_tokens=False))
        theirs = await self.token_ids(prompt=probe, add_special_tokens=False)
        if theirs != ours:
            raise ServerMismatchError(
                f"the tokenizer does not fit {self.url} (model {self.info.model!r}): a probe text is {ours[:12]}... "
                f"here and {theirs[:12]}... there. Set env.tokenizer_name to the model that is served."
            )

    async def token_ids(self, **body: Any) -> list[int]:
        """Return the server's token ids for a `prompt` or for `messages`; `body` as in vLLM's `/tokenize`.

        Raises:
            ServerRequestError: the server refuses the prompt or the messages.
            ServerMismatchError: the response is not a list of ids.
        """
        answer = await self.http.post("/tokenize", {"model": self.info.model, **body})
        return read_answer(_Tokens, answer, f"{self.url}/tokenize", "vLLM's tokenizer").tokens

    async def text(self, token_ids: Sequence[int]) -> str:
        """Return the server's decoding of the ids; raises as `token_ids`."""
        answer = await self.http.post("/detokenize", {"model": self.info.model, "tokens": list(token_ids)})
        return read_answer(_Text, answer, f"{self.url}/detokenize", "vLLM's tokenizer").prompt

    def check_streams(self) -> None:
        """Raise ServerMismatchError unless the server can stream sampled tokens."""
        if not self.info.has_plugin:
            raise ServerMismatchError(
                f"{self.url} has no agentic_opd plugin, which streams the sampled tokens: install agentic_opd "
                f"{__version__} in vLLM's environment, and start the server with scripts/serve_vllm MODEL."
            )

    async def check_scores(self, top_k: int) -> None:
        """Check that the server scores with `top_k` logprobs per position.

        Raises:
            ServerMismatchError: the server has no plugin, and refuses a test request.
        """
        if self.info.has_plugin:
            return  # `check_caps` has compared its limit.
        try:
            await self.http.post("/v1/completions", completions_body(self.info.model, (0, 0), top_k))
        except ServerRequestError as error:
            raise ServerMismatchError(
                f"{self.url} does not return the {top_k} prompt logprobs that env.distill_topk (or twice that, with "
                f"env.hint.control or env.teacher.support) asks for: {error}. Restart it with scripts/serve_vllm "
                f"{self.info.model} --max-logprobs {top_k}, or lower env.distill_topk."
            ) from error

    # ----------------------------------------------------------------------------------------------------- sampling

    async def complete(
        self, prompt_ids: Sequence[int], params: Mapping[str, Any], weight_version: int | None = None
    ) -> list[Completion]:
        """Sample `n` completions of a prompt (one without `n`); `params` have vLLM's names.

        Weights of `weight_version` sample if the server keeps them as an adapter.

        Raises:
            ServerMismatchError: the response does not hold the sampled ids and logprobs.
            ServerRequestError: the server refused the request.
            ServerUnreachableError: no usable answer within the retry window.
        """
        if self.info.has_plugin:
            route, kind = "/generate", WholeAnswer
            body: dict[str, Any] = {"prompt": {"prompt_token_ids": list(prompt_ids)}, "logprobs": 0}
        else:
            route, kind = "/v1/completions", CompletionsAnswer
            body = {"model": self.info.model, "prompt": list(prompt_ids), "return_token_ids": True, "logprobs": 0}
        answer: Any = await self.http.post(route, {**body, **params, **self._preferring(weight_version)})
        try:
            completions = kind.of(answer).completions()
            if len(completions) != params.get("n", 1):
                raise ValueError(f"{len(completions)} completions for n={params.get('n', 1)}")
        except (AlignmentError, ValueError) as error:
            text = repr(answer)
            raise ServerMismatchError(
                f"{self.url}{route} did not answer with sampled token ids and their logprobs ({_problem(error)}), "
                "so rollouts can't be kept token by token. Serve the policy with vLLM; scripts/serve_vllm MODEL starts "
                f"one with everything needed. The answer: {text[:300]}{'...' if len(text) > 300 else ''}"
            ) from error
        return completions

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        n: int,
        max_tokens: int,
        top_logprobs: int,
        params: Mapping[str, Any],
        interval: int = 1,
        weight_version: int | None = None,
        attachments: Attachments = (),
    ) -> AsyncGenerator[Delta]:
        """Sample `n` completions of a prompt; yields deltas as they arrive. Closing the generator stops the sampling.

        `top_logprobs` most likely tokens are returned at each position. `params` are further parameters by vLLM's
        names. After a choice's first token, an event holds `interval` tokens of it. `weight_version` is as in
        `complete`.

        Raises:
            PlaceError: an attachment's file is missing or has changed.
            ServerRequestError: the server refuses the request.
            ServerMismatchError: the events are not sampled ids with their logprobs.
            ServerUnreachableError: the server gave no usable answer, or its stream broke off.
        """
        body = {
            "prompt": {"prompt_token_ids": list(prompt_ids), **request_fields(attachments)},
            **params,
            **self._preferring(weight_version),
            **{"n": n, "max_tokens": max_tokens, "logprobs": top_logprobs, "stream": True},
        }
        if interval > 1:
            body["stream_interval"] = interval
        await self.attached.send(attachments)
        for is_last in (False, True):
            try:
                async with aclosing(self.http.events("/generate", body)) as events:
                    async for some in events:
                        deltas: list[Delta] = []
                        is_long = top_logprobs > 0 or len(some) > _PARSED_AT_ONCE
                        for start in range(0, len(some), _PARSED_AT_ONCE):
                            async with fair_slot() if is_long else nullcontext():
                                part = some[start : start + _PARSED_AT_ONCE]
                                deltas += [self._delta(event, top_logprobs) for event in part]
                            # With logprobs a delta's size decides how long it takes to write it for the client.
                            if top_logprobs > 0 or start + len(part) == len(some):
                                for delta in merged(deltas):
                                    yield delta
                                deltas = []
                    return
            except ServerRequestError as error:  # Only before the first event.
                if is_last or not is_lost(error, attachments):
                    raise
            await self.attached.send(attachments, again=True)

    def _delta(self, event: bytes, top_logprobs: int) -> Delta:
        """Parse an event. Errors do not quote it, because it holds conversation text."""
        where = f"{self.url}/generate"
        try:
            return StreamEvent.model_validate_json(event).delta(top_logprobs)
        except ValidationError as error:
            if event.startswith(b'{"error"'):
                raise ServerMismatchError(f"{where} failed while it sampled; the vLLM server's log says more") from None
            fields = ", ".join(".".join(map(str, problem["loc"])) or "event" for problem in error.errors()[:3])
            raise ServerMismatchError(f"{where} does not stream sampled tokens as the plugin does: {fields}") from None
        except ValueError as error:
            raise ServerMismatchError(f"{where} does not say what it sampled: {error}") from error

    # ------------------------------------------------------------------------------------------------------ scoring

    async def score(
        self, request: TeacherRequest, top_k: int, also: Sequence[Reading] = (), ids_of: tuple[int, ...] = ()
    ) -> TeacherReply:
        """Return the logprobs of the last `request.num_scored` tokens, and of the `top_k` most likely ones.

        The further readings `also` are scored by the same weights. `ids_of` is as a reading's, and needs a server with
        `named_ids`. If the weights are adapters, those of the request's `weight_version` are preferred while the server
        keeps them. A server without the plugin does not report its weight version, so readings that depend on it are
        skipped.

        Raises:
            AlignmentError: the rows do not fit the request, or its attachments can't be sent.
            ServerRequestError: the server refused the request.
            ServerUnreachableError: no usable answer within the retry window.
        """
        readings = (Reading(request, top_k, ids_of=ids_of), *also)
        if not self.info.has_plugin:
            if any(reading.request.attachments for reading in readings):
                raise AlignmentError(f"{self.url} has no plugin, and {KIND} are scored through it only")
            replies = await gather_all(self._read_prompt(reading) for reading in readings)
            assert replies[0] is not None  # the first reading does not depend on the weights' version
            latency = max(reply.latency_s for reply in replies if reply is not None)
            return TeacherReply(replies[0].rows, latency, also=tuple(reply and reply.rows for reply in replies[1:]))
        body = {**score_body(readings, top_k), **self._preferring(request.weight_version)}
        if self.read_by != "policy":
            body["read_by"] = self.read_by
        attachments = [attachment for reading in readings for attachment in reading.request.attachments]
        try:
            answer, latency = await self.attached.answer_of(attachments, lambda: self._timed("/v1/opd/score", body))
        except (PlaceError, ServerMismatchError) as error:
            raise AlignmentError(str(error)) from error
        return read_scores(answer, readings, self.info.vocab_size, latency)

    async def _read_prompt(self, reading: Reading) -> TeacherReply | None:
        """Score a reading through `/v1/completions`."""
        if reading.unless_weight_version is not None:
            return None
        body = completions_body(self.info.model, reading.request.token_ids, reading.top_k)
        answer, latency = await self._timed("/v1/completions", body)
        return TeacherReply(read_prompt_logprobs(answer, reading, self.info.vocab_size), latency)

    async def _timed(self, route: str, body: Mapping[str, Any]) -> tuple[Any, float]:
        """Post a scoring request in a free slot; return the answer and its seconds."""
        async with self._scoring:
            start = time.monotonic()
            answer = await self.http.post(route, body)
            return answer, time.monotonic() - start

    # ------------------------------------------------------------------------------------------------------ weights

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load a checkpoint of the whole model as `version`.

        Raises:
            ServerMemoryError: the server has no memory for it; the message says whether the old weights are whole.
            BrokenWeightsError: the load failed, and so did that of the previous weights.
            ServerRequestError: the checkpoint does not fit the model.
            ServerUnreachableError: no usable answer within the retry window.
        """
        await self.http.post("/v1/opd/reload_weights", {"path": str(folder), "version": version})

    async def load_adapter(self, folder: Path, version: int, *, as_teacher: bool = False) -> None:
        """Load a LoRA adapter as `version` of the policy, or as the teacher's; otherwise as `load_weights`."""
        body = {"path": str(folder), "version": version, "as_teacher": as_teacher, **self._of_learner}
        await self.http.post("/v1/opd/load_adapter", body)

    async def forget_learner(self, learner: str) -> None:
        """Unload a learner's adapters: the learner has the base weights then.

        Raises:
            ServerRequestError: the server refuses the request.
            ServerUnreachableError: no usable answer within the retry window.
        """
        await self.http.post("/v1/opd/forget_learner", {"learner": learner})

    async def join_transfer(self, address: str, port: int, world_size: int, rank_offset: int) -> None:
        """Join the process group of the weight transfer with the ranks from `rank_offset` on."""
        where = {"address": address, "port": port, "world_size": world_size, "rank_offset": rank_offset}
        await self.http.post("/v1/opd/join_transfer", where)

    async def receive_weights(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], version: int
    ) -> None:
        """Receive tensors from the process group as `version`; each list has an entry per tensor, in sending order."""
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "version": version}
        await self.http.post("/v1/opd/receive_weights", body)


def _problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
