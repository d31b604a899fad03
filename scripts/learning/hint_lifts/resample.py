"""Hinted turns of a file, sampled again with and without their hint, and judged by the world right after (I/O).

    with the hint      tokens[:insert_at] + hint_token_ids + tokens[insert_at:start]     what the teacher read
    without            tokens[:start]                                                    what the student read

Each sample is acted out in a session of its own: the earlier turns' tool calls are run again, then the sample's, and
the world verifies what is left. The lift is the difference of the two pass rates.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import (
    DatasetError,
    OPDError,
    OutputError,
    PlaceError,
    RendererError,
    SandboxError,
    ServerMismatchError,
    ServerUnreachableError,
)
from agentic_opd.core.precision import Noise, tolerance_for
from agentic_opd.core.text import text_lines
from agentic_opd.core.types import Task, TeacherRequest, ToolCall, World
from agentic_opd.plugin.client import PluginClient
from agentic_opd.report.lifts import ResampledTurn
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Completion
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord, VerdictCounts

_PROBED = 8
"""Turns by which weights are known again."""

SampleMany = Callable[[Sequence[int], int, int], Awaitable[Sequence[Completion]]]
"""(prompt ids, how many, tokens that each may have) -> so many completions."""


@dataclass(frozen=True, slots=True)
class HintedTurn:
    """A turn of a file whose prompt can be rebuilt with its hint, and its position."""

    line: int
    index: int
    turn: int
    task_id: str
    rollout: ScoredRollout
    record: TurnRecord
    hint: str
    insert_at: int
    version: int | None
    """Of the weights that sampled it."""

    @property
    def without_hint(self) -> tuple[int, ...]:
        """The prompt that the turn was sampled from."""
        return tuple(self.rollout.tokens_T[: self.record.span[0]])

    @property
    def with_hint(self) -> tuple[int, ...]:
        """The prompt that the teacher read."""
        prompt = self.without_hint
        return prompt[: self.insert_at] + self.record.hint_token_ids + prompt[self.insert_at :]


def hinted_turns(groups: Iterable[tuple[int, ScoredGroup]]) -> Iterator[HintedTurn]:
    """Yield the turns of numbered lines that have a hint, and of which the file says where it enters the prompt.

    Raises:
        PlaceError: a program held the conversation, so what its turns do can't be acted out here.
    """
    for line, group in groups:
        for index, rollout in enumerate(group.rollouts):
            if rollout.program is not None:
                raise PlaceError(
                    f"line {line} is of a program (env.agent.command): only it knows what its turns do, so they can't "
                    "be sampled again. Choose a file of the package's own loop"
                )
            if any(turn.why == "shared" for turn in rollout.context_turns):
                continue  # What its earlier turns did stands in another sequence.
            for turn, record in enumerate(rollout.turns or ()):
                if record.hint is not None and record.hint_token_ids and record.insert_at is not None:
                    version = group.weight_version if record.weight_version is None else record.weight_version
                    position = (line, index, turn, group.task_id or "", rollout, record)
                    yield HintedTurn(*position, record.hint, record.insert_at, version)


def drawn(turns: Sequence[HintedTurn], limit: int | None, seed: int) -> list[HintedTurn]:
    """All of them, or `limit` drawn from the seed, in the order of the file."""
    if limit is None or limit >= len(turns):
        return list(turns)
    return [turns[position] for position in sorted(Random(seed).sample(range(len(turns)), limit))]


def of_version(turns: Sequence[HintedTurn], version: int | None, server: str) -> list[HintedTurn]:
    """The turns that the server's weights sampled; all of them if it does not say which weights it has.

    Raises:
        PlaceError: there is no turn with a hint.
        ServerMismatchError: other weights sampled all of them.
    """
    if not turns:
        raise PlaceError("the file holds no turn with a hint that a prompt could be rebuilt from, so nothing to sample")
    same_version = [turn for turn in turns if version is None or turn.version in (None, version)]
    if not same_version:
        versions = sorted({turn.version for turn in turns if turn.version is not None})
        raise ServerMismatchError(
            f"{server} has the weights of version {version}, but the hinted turns were sampled by version "
            f"{', '.join(map(str, versions))}: load those weights, or choose a file of these"
        )
    return same_version


async def check_weights(turns: Sequence[HintedTurn], teacher: PluginClient, server: str) -> None:
    """Refuse a server that does not give the sampled tokens the logprobs that they were sampled with.

    A version is a number that each server counts by itself, so another policy may well have the same one.

    Raises:
        ServerMismatchError: its weights are others.
        ServerError: it did not do its part.
    """

    async def differences(turn: HintedTurn) -> NDArray[np.float64]:
        start, end = turn.record.span
        request = TeacherRequest(tuple(turn.rollout.tokens_T[:end]), end - start, start, ())
        rows = (await teacher.score(request, 1)).rows
        return rows.actual_R - np.asarray(turn.rollout.logprobs_T[start:end], np.float64)

    noise = Noise.of(np.concatenate(await gather_all(map(differences, drawn(turns, _PROBED, seed=0)))))
    tolerance = tolerance_for(teacher.info.dtype)
    if noise.exceeds(tolerance):
        raise ServerMismatchError(
            f"{server} has other weights than those that sampled the file, though its version is theirs or unsaid: "
            f"its logprobs of the sampled tokens are {noise} away, where {tolerance} would be noise. Serve the policy "
            "that sampled the file"
        )


def check_tokens(turns: Iterable[HintedTurn], chat: ChatFormat, tokenizer_name: str) -> None:
    """Refuse a tokenizer in which the tokens do not spell the messages beside them.

    Raises:
        ServerMismatchError: it is another one than that of the file.
    """
    size = len(chat.tokenizer)
    for turn in turns:
        tokens, messages = turn.with_hint, turn.rollout.messages or ()
        largest = max(tokens)
        if largest >= size:
            _refuse_tokenizer(turn, tokenizer_name, f"it holds the token {largest}, and that one has {size}")
        text = chat.tokenizer.decode(list(tokens))
        user_text = next(
            (m["content"] for m in messages if m.get("role") == "user" and isinstance(m["content"], str)), ""
        )
        first = next((line.strip() for line in text_lines(user_text) if line.strip()), "")
        if first not in text:
            _refuse_tokenizer(turn, tokenizer_name, f"its prompt does not hold the user's {first[:80]!r}")


def _refuse_tokenizer(turn: HintedTurn, name: str, why: str) -> None:
    raise ServerMismatchError(
        f"line {turn.line} was not made with the tokenizer {name!r}: {why}. Serve the policy that sampled the file, or "
        "name its tokenizer in env.tokenizer_name"
    )


@dataclass
class Resampler:
    """Samples hinted turns again, and lets the world judge each sample.

    Args:
        world: Where samples are acted out; `tasks` by their ids.
        chat: Parses what was sampled.
        sample: Asks the policy.
        samples: How many, with the hint and without it.
        config: How long a sample may be.
        slots: Bounds how many sessions there are at the same time.
    """

    world: World
    tasks: Mapping[str, Task]
    chat: ChatFormat
    sample: SampleMany
    samples: int
    config: RolloutConfig
    slots: AbstractAsyncContextManager[object]

    async def measure(self, turn: HintedTurn) -> ResampledTurn:
        """Sample one turn with and without its hint, and count what passes.

        Raises:
            DatasetError: its task is not among those of the settings.
            ServerError, SandboxError, RendererError: what did not do its part.
        """
        if turn.task_id not in self.tasks:
            raise DatasetError(
                f"the task {turn.task_id!r} of line {turn.line} is not among the {len(self.tasks)} of the settings: "
                "name the dataset that the file was made from (env.world.dataset_name)"
            )
        arms = await gather_all(self._sampled(prompt) for prompt in (turn.with_hint, turn.without_hint))
        different = {*arms[0], *arms[1]}
        verdicts = await gather_all(self._passes(turn, token_ids) for token_ids in different)
        passing = {token_ids for token_ids, passed in zip(different, verdicts, strict=True) if passed}
        with_hint, without = (sum(arm[token_ids] for token_ids in passing) for arm in arms)
        identity = (turn.line, turn.index, turn.turn, turn.task_id, turn.hint, turn.record.evidence)
        return ResampledTurn(*identity, self.samples, with_hint, without)

    async def _sampled(self, prompt: Sequence[int]) -> Counter[tuple[int, ...]]:
        """The samples of a prompt; equal ones are acted out once."""
        room = self.config.max_token_length - len(prompt)
        if room < 1:
            raise RendererError(f"a prompt of {len(prompt)} tokens leaves no room in env.max_token_length")
        completions = await self.sample(prompt, self.samples, min(room, self.config.max_tokens_per_turn))
        return Counter(completion.token_ids for completion in completions)

    async def _passes(self, turn: HintedTurn, token_ids: tuple[int, ...]) -> bool:
        """Act out the earlier turns and this sample, and ask the world."""
        task = self.tasks[turn.task_id]
        async with self.slots:
            async with self.world.session(task) as session:
                for call in (*self._earlier_calls(turn), *self._calls(turn.without_hint, token_ids, turn.turn)):
                    await session.run_tool(call)
                left = await session.collect()
            verification = await self.world.verify(task, left)
        return VerdictCounts(verification.outcome.value, verification.passed, verification.total).all_passed

    def _earlier_calls(self, turn: HintedTurn) -> Iterator[ToolCall]:
        tokens = turn.rollout.tokens_T
        for index, record in enumerate((turn.rollout.turns or ())[: turn.turn]):
            start, end = record.span
            yield from self._calls(tokens[:start], tokens[start:end], index)

    def _calls(self, prompt: Sequence[int], token_ids: Sequence[int], index: int) -> tuple[ToolCall, ...]:
        """The calls of a turn; none if it can't be parsed, which would have ended the episode."""
        try:
            return self.chat.parse(list(prompt), token_ids, index).tool_calls
        except RendererError:
            return ()


@dataclass
class Resampled:
    """The progress of a measurement. `stopped` is the error that ended it early."""

    turns: list[ResampledTurn] = field(default_factory=list[ResampledTurn])
    failed: list[str] = field(default_factory=list[str])
    stopped: BaseException | None = None


async def resample(
    turns: Sequence[HintedTurn],
    measure: Callable[[HintedTurn], Awaitable[ResampledTurn]],
    on_result: Callable[[Resampled], None],
    concurrency: int,
) -> Resampled:
    """Measure every turn, at most `concurrency` at a time; `on_result` is called after each.

    A turn that fails by itself is counted and the others go on. A dead server or sandbox, wrong tasks, a disk that
    can't be written, or a cancellation stops it; what is measured stays.
    """
    result, queue = Resampled(), iter(turns)

    async def work() -> None:
        for turn in queue:
            try:
                result.turns.append(await measure(turn))
            except (ServerUnreachableError, SandboxError, DatasetError):
                raise
            except OPDError as error:
                result.failed.append(f"line {turn.line}, sequence {turn.index}, turn {turn.turn + 1}: {error}")
            result.turns.sort(key=lambda turn: turn.key)
            on_result(result)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(turns))):
                workers.create_task(work())
    except* (ServerUnreachableError, SandboxError, DatasetError, OutputError) as failures:
        result.stopped = failures.exceptions[0]
    except* asyncio.CancelledError as cancelled:
        result.stopped = cancelled.exceptions[0]
    return result
