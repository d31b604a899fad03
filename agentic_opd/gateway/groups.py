"""Closed sessions -> scored groups in a file: judged, scored, written once (I/O).

A session whose server is gone waits, and is tried again; one that can't be made a group of is counted and kept in the
journal. A group is written first and noted in the journal then; which groups stand in the file is read at the start, so
a gateway that is killed between the two writes none twice.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import AlignmentError, ServerError, ServerUnreachableError
from agentic_opd.core.types import Message
from agentic_opd.distill.distiller import Distiller
from agentic_opd.distill.pipeline import DistilledEpisode, DistilledTurn
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.journal import Journal, SessionRow, SessionState
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import Branch, Path, TurnTree, answered, branches
from agentic_opd.runs.files import GroupFile
from agentic_opd.wire.group import GroupDistillation, ScoredGroup, ScoredRollout

logger = logging.getLogger(__name__)

Judged = Mapping[int, asyncio.Task[DistilledTurn]]
"""Turns that are being judged, by their id."""

RETRY_S = 10.0
"""Between two attempts at a session whose server is gone."""


class GroupWriter:
    """Makes and writes the groups of closed sessions, a few at the same time."""

    def __init__(
        self,
        config: GatewayConfig,
        distiller: Distiller | None,
        file: GroupFile,
        journal: Journal,
        telemetry: Telemetry,
    ) -> None:
        """Prepare; `distiller` is None if nothing is to be distilled."""
        self._config, self._distiller, self._file = config, distiller, file
        self._journal, self._telemetry = journal, telemetry
        self._slots = asyncio.Semaphore(config.max_concurrent_groups)
        self._one_writer = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()
        self._judging: set[asyncio.Task[DistilledTurn]] = set()

    def judge(self, session: SessionRow, path: Path, new: Sequence[Message]) -> asyncio.Task[DistilledTurn] | None:
        """Begin to judge the last turn of a path by the messages that answered it; None: there is nothing to judge."""
        turn, config = path[-1], self._config
        is_learned = turn.turn_type == "main" and (config.learn_from_altered_sampling or not turn.altered)
        if self._distiller is None or not config.judge_at_once or not is_learned:
            return None
        episode = answered(path, new, session.session_id)
        judging = asyncio.create_task(self._distiller.distill_turn(episode, 0, session.server))
        self._judging.add(judging)
        judging.add_done_callback(self._judged)
        return judging

    def submit(self, session: SessionRow, tree: TurnTree | None = None, judged: Judged | None = None) -> None:
        """Make the group of a closed session.

        Args:
            session: The session.
            tree: Its turns; None: they are read from the journal.
            judged: What `judge` began, by the turn's id.
        """
        task = asyncio.create_task(self._finish(session, tree, judged or {}))
        self._under_way.add(task)
        self._telemetry.waiting.set(len(self._under_way))
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop; what is not written stays in the journal, and is made when a gateway goes on with it."""
        tasks: list[asyncio.Task[Any]] = [*self._under_way, *self._judging]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drained(self) -> None:
        """Wait until no closed session is without its group."""
        while self._under_way:
            await asyncio.wait(set(self._under_way))

    def _judged(self, task: asyncio.Task[DistilledTurn]) -> None:
        self._judging.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a turn is judged when its session has ended: %s", error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._telemetry.waiting.set(len(self._under_way))
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a session stays without its group until the gateway is started again: %s", error)

    async def _finish(self, session: SessionRow, tree: TurnTree | None, judged: Judged) -> None:
        async with self._slots:
            state, problem = SessionState.WRITTEN, None
            try:
                if session.session_id not in self._file.finished:
                    group = await self._group(session, tree, judged)
                    if group is None:
                        state = SessionState.EMPTY
                    else:
                        await self._write(group)
            except (ServerError, AlignmentError) as error:
                state, problem = SessionState.FAILED, f"{type(error).__name__}: {error}"
                logger.warning("no group is made of %s: %s", session.session_id, type(error).__name__)
            await self._journal.run(lambda: self._journal.finish_session(session.session_id, state, problem))
            self._telemetry.sessions.labels(state.value).inc()

    async def _group(self, session: SessionRow, tree: TurnTree | None, judged: Judged) -> ScoredGroup | None:
        """The session's group; None if it holds nothing to learn from.

        Raises:
            ServerError: a server refuses what distilling asks of it.
        """
        if tree is None:
            tree = TurnTree()
            for turn in await self._journal.run(lambda: self._journal.turns(session.session_id)):
                tree.add(turn)
        assert session.ending is not None  # it is closed
        found = branches(
            tree,
            session.session_id,
            session.ending.stop,
            feedback=session.ending.feedback,
            learn_from_altered=self._config.learn_from_altered_sampling,
        )
        while found:
            try:
                return await self._scored(session, found, judged)
            except ServerUnreachableError as error:
                logger.warning("the group of a session waits: %s", error)
                await asyncio.sleep(RETRY_S)
        return None

    async def _scored(self, session: SessionRow, found: Sequence[Branch], judged: Judged) -> ScoredGroup:
        assert session.ending is not None
        distiller = self._distiller
        distilled: list[DistilledEpisode] | list[None] = [None for _ in found]
        about: GroupDistillation | None = None
        if distiller is not None:
            known = [await _known(branch, judged) for branch in found]
            made = await gather_all(
                distiller.distill(branch.episode, session.server, before)
                for branch, before in zip(found, known, strict=True)
            )
            about = (await distiller.close_group(made)).about
            distilled = made
        versions = [one.episode.weight_version for one in found if one.episode.weight_version is not None]
        return ScoredGroup(
            rollouts=tuple(
                ScoredRollout.of_conversation(
                    branch.episode,
                    given_reward=session.ending.reward,
                    context_turns=branch.context,
                    rows=one and one.arrays,
                    turns=one and one.records,
                )
                for branch, one in zip(found, distilled, strict=True)
            ),
            item_id=session.session_id,
            weight_version=min(versions, default=None),
            group_id=session.ending.group_id,
            session_id=session.name or session.session_id,
            distillation=about,
        )

    async def _write(self, group: ScoredGroup) -> None:
        """Raises OutputError if the disk refuses."""
        async with self._one_writer:
            writing = asyncio.create_task(asyncio.to_thread(self._file.write, group))
            await asyncio.shield(writing)
        if group.distillation is not None:
            for outcome, count in group.distillation.outcomes.items():
                self._telemetry.outcomes.labels(outcome).inc(count)


async def _known(branch: Branch, judged: Judged) -> dict[int, DistilledTurn]:
    """What was judged of a branch's turns already, by their index; what failed is judged again."""
    ids = {index: turn_id for index, turn_id in enumerate(branch.turn_ids) if turn_id in judged}
    done = await asyncio.gather(*(judged[turn_id] for turn_id in ids.values()), return_exceptions=True)
    return {index: one for index, one in zip(ids, done, strict=True) if isinstance(one, DistilledTurn)}
