"""Closed sessions -> scored groups in a file: judged, scored, written once (I/O).

A session is a group of its own, or its client says by a name which sessions belong together; then the group is made
when `group_size` of them are closed, or when no other has come for as long as an idle session stays open. A session
whose server is gone waits, and is tried again; one that can't be made a group of is counted and kept in the journal. A
group is kept in the journal first, then written to the file, then noted; which groups stand in the file is read at the
start, so a gateway that is killed in between neither makes nor writes one twice.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import AlignmentError, ServerError, ServerUnreachableError
from agentic_opd.core.types import Message
from agentic_opd.distill.distiller import Distiller
from agentic_opd.distill.pipeline import DistilledEpisode, DistilledTurn
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.delivery import Delivery
from agentic_opd.gateway.journal import Ending, Journal, SessionRow, SessionState
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import Branch, Path, TurnTree, answered, branches
from agentic_opd.runs.files import GroupFile
from agentic_opd.wire.group import GroupDistillation, ScoredGroup, ScoredRollout

logger = logging.getLogger(__name__)

Judged = Mapping[int, asyncio.Task[DistilledTurn]]
"""Turns that are being judged, by their id."""

RETRY_S = 10.0
"""Between two attempts at a session whose server is gone."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A session that is over."""

    row: SessionRow
    tree: TurnTree | None = None
    """Its turns; None: they are read from the journal."""
    judged: Judged = field(default_factory=dict[int, asyncio.Task[DistilledTurn]])
    """What `GroupWriter.judge` began, by the turn's id."""

    @property
    def ending(self) -> Ending:
        """How it ended."""
        assert self.row.ending is not None
        return self.row.ending


@dataclass(slots=True, eq=False)
class _Gathering:
    """A named group of which not all sessions are closed."""

    key: tuple[str, str]
    """Its owner, and its name."""
    members: set[str] = field(default_factory=set[str])
    """The sessions that are closed or being closed."""
    closed: list[Closed] = field(default_factory=list[Closed])
    timer: asyncio.TimerHandle | None = None


class GroupWriter:
    """Makes and writes the groups of closed sessions, a few at the same time."""

    def __init__(
        self,
        config: GatewayConfig,
        distiller: Distiller | None,
        file: GroupFile,
        journal: Journal,
        telemetry: Telemetry,
        delivery: Delivery | None = None,
    ) -> None:
        """Prepare.

        Args:
            config: The gateway's settings.
            distiller: None: nothing is to be distilled.
            file: Where groups are written.
            journal: Where the sessions stand.
            telemetry: Is told what became of them.
            delivery: Sends written groups to a trajectory API; None: they stay in the file.
        """
        self._config, self._distiller, self._file = config, distiller, file
        self._journal, self._telemetry, self._delivery = journal, telemetry, delivery
        self._slots = asyncio.Semaphore(config.max_concurrent_groups)
        self._gatherings: dict[str, _Gathering] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._judging: set[asyncio.Task[DistilledTurn]] = set()

    def join(self, session: SessionRow) -> str:
        """The id of the group of a session that is being closed: one that waits for others, or a new one."""
        new_id = f"group-{uuid.uuid4().hex}"
        if session.group_name is None:
            return new_id
        key = (session.owner, session.group_name)
        waiting = (
            group_id
            for group_id, one in self._gatherings.items()
            if one.key == key and len(one.members) < self._config.group_size
        )
        group_id = next(waiting, new_id)
        self._gatherings.setdefault(group_id, _Gathering(key)).members.add(session.session_id)
        return group_id

    def leave(self, session: SessionRow, group_id: str) -> None:
        """A session that had joined a group could not be closed."""
        if (gathering := self._gatherings.get(group_id)) is not None:
            gathering.members.discard(session.session_id)

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

    def restore(self, sessions: Iterable[SessionRow]) -> None:
        """Go on with the closed sessions of the journal; those of one group id are one group, however many they are."""
        for row in sessions:
            self._gather(Closed(row))
        for group_id in [*self._gatherings]:
            self._make_if_full(group_id)

    def submit(self, closed: Closed) -> None:
        """Make the group of a closed session, when all sessions of the group are closed."""
        self._gather(closed)
        self._make_if_full(closed.ending.group_id)

    def _gather(self, closed: Closed) -> None:
        row = closed.row
        if row.group_name is None:
            self._make([closed])
            return
        gathering = self._gatherings.setdefault(closed.ending.group_id, _Gathering((row.owner, row.group_name)))
        gathering.members.add(row.session_id)
        gathering.closed.append(closed)

    def _make_if_full(self, group_id: str) -> None:
        """Make a group of which all sessions are closed; else wait for more, for as long as an idle session is open."""
        gathering = self._gatherings.get(group_id)
        if gathering is None:
            return
        if gathering.timer is not None:
            gathering.timer.cancel()
        if len(gathering.closed) >= self._config.group_size:
            self._make(self._gatherings.pop(group_id).closed)
        else:
            loop, idle_s = asyncio.get_running_loop(), self._config.session_idle_s
            gathering.timer = loop.call_later(idle_s, self._make_without_more, group_id)

    def _make_without_more(self, group_id: str) -> None:
        """No further session has come; one that is being closed, and so has joined already, is waited for."""
        gathering = self._gatherings[group_id]
        if len(gathering.members) > len(gathering.closed):
            self._make_if_full(group_id)
        else:
            self._make(self._gatherings.pop(group_id).closed)

    def _make(self, closed: Sequence[Closed]) -> None:
        task = asyncio.create_task(self._finish(closed))
        self._under_way.add(task)
        self._telemetry.waiting.set(len(self._under_way))
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop; what is not written stays in the journal, and is made when a gateway goes on with it."""
        for gathering in self._gatherings.values():
            if gathering.timer is not None:
                gathering.timer.cancel()
        tasks: list[asyncio.Task[Any]] = [*self._under_way, *self._judging]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drained(self) -> None:
        """Wait until no closed session is without its group, but those that wait for others of their group."""
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

    async def _finish(self, closed: Sequence[Closed]) -> None:
        async with self._slots:
            ids = [one.row.session_id for one in closed]
            states, problem = dict.fromkeys(ids, SessionState.WRITTEN), None
            try:
                group = await self._kept_or_made(closed)
                if group is None:
                    states = dict.fromkeys(ids, SessionState.EMPTY)
                elif group.item_id not in self._file.finished:
                    await self._write(group)
            except (ServerError, AlignmentError) as error:
                states, problem = dict.fromkeys(ids, SessionState.FAILED), f"{type(error).__name__}: {error}"
                logger.warning("no group is made of %s: %s", ", ".join(ids), type(error).__name__)
            await self._journal.run(partial(self._journal.finish_sessions, states, problem))
            for state in states.values():
                self._telemetry.sessions.labels(state.value).inc()
            if self._delivery is not None and SessionState.WRITTEN in states.values():
                self._delivery.add(closed[0].ending.group_id)

    async def _kept_or_made(self, closed: Sequence[Closed]) -> ScoredGroup | None:
        """The sessions' group, as the journal has it, or made and kept there; None if there is nothing to learn from.

        Raises:
            ServerError: a server refuses what distilling asks of it.
            OutputError: the disk refuses.
        """
        group_id = closed[0].ending.group_id
        group = await self._journal.group(group_id)
        if group is None:
            group = await self._made(closed)
            if group is not None:
                await self._journal.keep_group(group)
        return group

    async def _made(self, closed: Sequence[Closed]) -> ScoredGroup | None:
        """Raises ServerError if a server refuses what distilling asks of it."""
        found = {one.row.session_id: await self._branches(one) for one in closed}
        while any(found.values()):
            try:
                return await self._scored(closed, found)
            except ServerUnreachableError as error:
                logger.warning("the group of a session waits: %s", error)
                await asyncio.sleep(RETRY_S)
        return None

    async def _branches(self, closed: Closed) -> list[Branch]:
        session_id, tree = closed.row.session_id, closed.tree
        if tree is None:
            tree = TurnTree()
            for turn in await self._journal.run(partial(self._journal.turns, session_id)):
                tree.add(turn)
        return branches(
            tree,
            session_id,
            closed.ending.stop,
            feedback=closed.ending.feedback,
            learn_from_altered=self._config.learn_from_altered_sampling,
        )

    async def _scored(self, closed: Sequence[Closed], found: Mapping[str, Sequence[Branch]]) -> ScoredGroup:
        pairs = [(one, branch) for one in closed for branch in found[one.row.session_id]]
        distiller = self._distiller
        distilled: list[DistilledEpisode] | list[None] = [None for _ in pairs]
        about: GroupDistillation | None = None
        if distiller is not None:
            known = [await _known(branch, one.judged) for one, branch in pairs]
            made = await gather_all(
                distiller.distill(branch.episode, one.row.server, before)
                for (one, branch), before in zip(pairs, known, strict=True)
            )
            about = (await distiller.close_group(made)).about
            distilled = made
        versions = [one.episode.weight_version for _, one in pairs if one.episode.weight_version is not None]
        first = closed[0]
        is_named = first.row.group_name is not None
        names = _names([one.row for one in closed])
        return ScoredGroup(
            rollouts=tuple(
                ScoredRollout.of_conversation(
                    branch.episode,
                    given_reward=one.ending.reward,
                    rows=of_it and of_it.arrays,
                    turns=of_it and of_it.records,
                    session_id=names[one.row.session_id] if is_named else None,
                )
                for (one, branch), of_it in zip(pairs, distilled, strict=True)
            ),
            item_id=first.ending.group_id if is_named else first.row.session_id,
            weight_version=min(versions, default=None),
            group_id=first.ending.group_id,
            session_id=None if is_named else _name(first.row),
            distillation=about,
        )

    async def _write(self, group: ScoredGroup) -> None:
        """Raises OutputError if the disk refuses."""
        await self._file.write(group)
        if group.distillation is not None:
            for outcome, count in group.distillation.outcomes.items():
                self._telemetry.outcomes.labels(outcome).inc(count)


def _name(session: SessionRow) -> str:
    return session.name or session.session_id


def _names(sessions: Sequence[SessionRow]) -> dict[str, str]:
    """What the sessions of a group are called, by their ids; those that have one name go by their ids."""
    counts = Counter(map(_name, sessions))
    return {one.session_id: _name(one) if counts[_name(one)] == 1 else one.session_id for one in sessions}


async def _known(branch: Branch, judged: Judged) -> dict[int, DistilledTurn]:
    """What was judged of a branch's turns already, by their index; what failed is judged again."""
    ids = {index: turn_id for index, turn_id in enumerate(branch.turn_ids) if turn_id in judged}
    done = await asyncio.gather(*(judged[turn_id] for turn_id in ids.values()), return_exceptions=True)
    return {index: one for index, one in zip(ids, done, strict=True) if isinstance(one, DistilledTurn)}
