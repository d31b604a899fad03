"""Closed sessions -> scored groups in a file: judged, scored, written once (I/O).

A session without a group name forms a group by itself. Sessions with the same group name form one group as soon as
`group_size` of them are closed, or if no further one closes within `session_idle_s`. If a server is unreachable, the
group is retried until it answers; if the disk refuses it, until the disk takes it. Sessions whose group fails are
counted and stay in the journal.

With `judge_every_turns`, that many turns of an open session form a group too: a part. Its sequences end with these
turns, and the turns before them are context. A turn is in one part at most, and the session's own group has the rest.

A group is stored in the journal first, then in the file; then its sessions are marked as written. The file is read at
the start, so a gateway that was killed in between neither builds nor writes a group twice.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import AlignmentError, OutputError, ServerError, ServerUnreachableError
from agentic_opd.core.types import Message, Recording, StopReason
from agentic_opd.distill.distiller import Distiller
from agentic_opd.distill.records import DistilledRecording, DistilledTurn
from agentic_opd.gateway.changes import Changes
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.delivery import Delivery
from agentic_opd.gateway.journal import Ending, Journal, SessionPart, SessionRow, SessionState
from agentic_opd.gateway.learners import LearnerFiles
from agentic_opd.gateway.telemetry import Telemetry
from agentic_opd.gateway.turns import Branch, Feedback, Path, TurnTree, answered, branches
from agentic_opd.gateway.under_way import Waiting
from agentic_opd.wire.files import GroupFile
from agentic_opd.wire.group import GroupDistillation, ScoredGroup, ScoredRollout

logger = logging.getLogger(__name__)

Judged = dict[int, asyncio.Task[DistilledTurn]]
"""Tasks that judge turns, by turn id."""

RETRY_S = 10.0
"""Seconds between two attempts at a group whose server is unreachable."""
STORE_RETRY_S = 2.0
"""Seconds between two attempts to store a group that the disk refused."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed session, or a part of an open session."""

    row: SessionRow
    tree: TurnTree | None = None
    """The session's turns; None: read them from the journal."""
    judged: Judged = field(default_factory=dict[int, asyncio.Task[DistilledTurn]])
    """Tasks started by `GroupWriter.judge`, by turn id."""

    feedback: dict[int, list[Feedback]] = field(default_factory=dict[int, list[Feedback]])
    """The client's feedback for single turns, by turn id."""
    grouped: Collection[int] = ()
    """The turns in parts of the session, by their ids."""
    part: SessionPart | None = None
    """The part of the session; None: the rest, at its end."""

    @property
    def ending(self) -> Ending:
        assert self.row.ending is not None
        return self.row.ending


@dataclass(slots=True, eq=False)
class _Gathering:
    """A named group that waits for further sessions."""

    key: tuple[str, str]
    """Owner and name of the group."""
    members: set[str] = field(default_factory=set[str])
    """Ids of its closed sessions and of those that are being closed."""
    closed: list[Closed] = field(default_factory=list[Closed])
    timer: asyncio.TimerHandle | None = None


class GroupWriter:
    """The builder of scored groups, at most `max_concurrent_groups` at the same time."""

    def __init__(
        self,
        config: GatewayConfig,
        distiller: Distiller | None,
        file: GroupFile,
        journal: Journal,
        telemetry: Telemetry,
        delivery: Delivery | None = None,
        learners: LearnerFiles | None = None,
    ) -> None:
        """Start without sessions. Without a distiller groups hold no targets; without a delivery they are not sent.

        With `learners` the groups of each learner have a file of their own.
        """
        self._config, self._distiller, self._file = config, distiller, file
        self._journal, self._telemetry, self._delivery = journal, telemetry, delivery
        self._learners = learners
        self._in_the_making = Counter[str]()
        """Number of groups that are being made of each session, by its id."""
        self._slots = asyncio.Semaphore(config.max_concurrent_groups)
        self._gatherings: dict[str, _Gathering] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._judging: set[asyncio.Task[DistilledTurn]] = set()
        self._changeable: dict[str, Closed] = {}
        """Closed sessions, by id, until their group is made: feedback still changes it."""
        self._changes = Counter[str]()
        """Number of changes of feedback since a session in `_changeable` was closed, by its id."""
        self._refused: dict[object, str] = {}
        """Why the disk refused the groups that wait for it."""
        self.changes = Changes()
        """Notifies open pages that a session changed."""

    @property
    def problem(self) -> str | None:
        """Why a finished group can't be stored now; None: none waits for the disk."""
        return next(iter(self._refused.values()), None)

    @property
    def waiting(self) -> Waiting:
        """Groups that wait for training."""
        gathered = sum(len(gathering.closed) for gathering in self._gatherings.values())
        delivery, sessions = self._delivery, gathered + len(self._under_way)
        return Waiting(sessions, delivery and delivery.unsent, delivery and delivery.queued)

    def join(self, session: SessionRow) -> str:
        """Add a closing session to a waiting group of its name, or to a new group; returns the group id."""
        new_id = f"group-{uuid.uuid4().hex}"
        if session.group_name is None:
            return new_id
        key = (session.owner, session.group_name)
        waiting = (
            group_id
            for group_id, gathering in self._gatherings.items()
            if gathering.key == key and len(gathering.members) < self._config.group_size
        )
        group_id = next(waiting, new_id)
        self._gatherings.setdefault(group_id, _Gathering(key)).members.add(session.session_id)
        return group_id

    def leave(self, session: SessionRow, group_id: str) -> None:
        """Remove a session that could not be closed from its group."""
        if (gathering := self._gatherings.get(group_id)) is not None:
            gathering.members.discard(session.session_id)

    def judge(self, session: SessionRow, path: Path, new: Sequence[Message]) -> asyncio.Task[DistilledTurn] | None:
        """Start to judge and score a path's last turn with its next state `new`; None if it is not judged now."""
        turn, config = path[-1], self._config
        is_learned = turn.turn_type == "main" and (config.learn_from_altered_sampling or not turn.altered)
        is_early = config.judge_at_once and config.judge.judges_early
        if self._distiller is None or not is_early or not is_learned or self._is_held_out(session):
            return None
        recording = Recording(session.session_id, (answered(path, new),))
        judging = asyncio.create_task(self._distiller.distill_turn(recording, 0, session.server))
        self._judging.add(judging)
        judging.add_done_callback(self._judged)
        judging.add_done_callback(lambda _: self.changes.tell(session))
        return judging

    def restore(self, sessions: Iterable[Closed]) -> None:
        """Resume closed sessions of the journal. Sessions with one group id form one group, even above `group_size`."""
        for closed in sessions:
            self._gather(closed)
        for group_id in [*self._gatherings]:
            self._make_if_full(group_id)

    def submit_part(
        self,
        session: SessionRow,
        part: SessionPart,
        tree: TurnTree | None = None,
        feedback: dict[int, list[Feedback]] | None = None,
    ) -> None:
        """Build the group of a part that is in the journal; without `tree` its turns and feedback are read there."""
        row = replace(session, state=SessionState.CLOSED, ending=Ending(StopReason.OPEN, part.group_id))
        self._make([Closed(row, tree, feedback=feedback or {}, part=part)])

    def submit(self, closed: Closed) -> None:
        """Add a closed session to its group, and build the group once it is complete."""
        self._gather(closed)
        self._make_if_full(closed.ending.group_id)

    def is_changeable(self, session_id: str, turn_id: int) -> bool:
        """Return whether feedback for a turn of a closed session still reaches its group."""
        closed = self._changeable.get(session_id)
        return closed is not None and turn_id not in closed.grouped

    def closed(self, session_id: str) -> Closed | None:
        """Return a closed session whose group is not made."""
        return self._changeable.get(session_id)

    def change_feedback(self, session_id: str, turn_id: int, feedback: Feedback) -> bool:
        """Use this feedback, which is in the journal, for a turn of a closed session; False if its group is made."""
        if not self.is_changeable(session_id, turn_id):
            return False
        closed = self._changeable[session_id]
        closed.feedback[turn_id] = [feedback]
        if (judging := closed.judged.pop(turn_id, None)) is not None:
            judging.cancel()
        self._changes[session_id] += 1
        return True

    def _gather(self, closed: Closed) -> None:
        row = closed.row
        self._changeable[row.session_id] = closed
        if row.group_name is None:
            self._make([closed])
            return
        gathering = self._gatherings.setdefault(closed.ending.group_id, _Gathering((row.owner, row.group_name)))
        gathering.members.add(row.session_id)
        gathering.closed.append(closed)

    def _make_if_full(self, group_id: str) -> None:
        """Build a group once `group_size` sessions are closed; otherwise wait `session_idle_s` for another one."""
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
        """Build an incomplete group after the wait; a session that is still being closed extends the wait."""
        gathering = self._gatherings[group_id]
        if len(gathering.members) > len(gathering.closed):
            self._make_if_full(group_id)
        else:
            self._make(self._gatherings.pop(group_id).closed)

    def _make(self, closed: Sequence[Closed]) -> None:
        task = asyncio.create_task(self._finish(closed))
        self._under_way.add(task)
        self._telemetry.waiting.set(len(self._under_way))
        names = [session.row.session_id for session in closed]
        self._in_the_making.update(names)
        task.add_done_callback(partial(self._ended, names))

    def is_in_the_making(self, session_id: str) -> bool:
        """Return whether a group of the session is being made, or waits for further sessions."""
        waiting = any(session_id in gathering.members for gathering in self._gatherings.values())
        return waiting or self._in_the_making[session_id] > 0

    async def close(self) -> None:
        """Stop; unwritten groups are built by the next gateway, from the journal."""
        for gathering in self._gatherings.values():
            if gathering.timer is not None:
                gathering.timer.cancel()
        tasks: list[asyncio.Task[Any]] = [*self._under_way, *self._judging]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drained(self) -> None:
        """Wait until all complete groups are finished. Groups that wait for further sessions are not included."""
        while self._under_way:
            await asyncio.wait(set(self._under_way))

    def _judged(self, task: asyncio.Task[DistilledTurn]) -> None:
        self._judging.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a turn is judged when its session has ended: %s", error)

    def _ended(self, session_ids: Sequence[str], task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._in_the_making.subtract(session_ids)
        self._in_the_making = +self._in_the_making
        self._telemetry.waiting.set(len(self._under_way))
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a session stays without its group until the gateway is started again: %s", error)

    async def _finish(self, closed: Sequence[Closed]) -> None:
        async with self._slots:
            ids, part = [session.row.session_id for session in closed], closed[0].part
            state, problem = SessionState.WRITTEN, None
            try:
                group = None
                if self._is_held_out(closed[0].row):
                    await self._hold_out(closed)
                else:
                    group = await self._stored_or_built_group(closed)
                if group is None:
                    state = SessionState.EMPTY
                elif group.learner is not None or group.item_id not in self._file.finished:
                    await self._stored(partial(self._write, group))
            except (ServerError, AlignmentError) as error:
                self._keep_unchanged(closed)
                state, problem = SessionState.FAILED, f"{type(error).__name__}: {error}"
                logger.warning("no group is made of %s: %s", ", ".join(ids), type(error).__name__)
            finish = partial(self._journal.finish_sessions, dict.fromkeys(ids, state), problem)
            if part is not None:
                finish = partial(self._journal.finish_part, part.group_id, state, problem)
            await self._stored(partial(self._journal.run, finish))
            counter = self._telemetry.sessions if part is None else self._telemetry.parts
            counter.labels(state.value).inc(len(ids))
            for session in closed:
                self.changes.tell(session.row)
            if self._delivery is not None and state is SessionState.WRITTEN:
                self._delivery.add(closed[0].ending.group_id)

    async def _stored_or_built_group(self, closed: Sequence[Closed]) -> ScoredGroup | None:
        """Return the group from the journal, or build and store it there; None if there is nothing to learn from."""
        group_id = closed[0].ending.group_id
        group = await self._journal.group(group_id)
        if group is not None:
            self._keep_unchanged(closed)
        else:
            group = await self._built_group(closed)
            if group is not None:
                await self._stored(partial(self._journal.keep_group, group))
        return group

    async def _stored(self, store: Callable[[], Awaitable[None]]) -> None:
        """Call `store`, again and again while it raises OutputError."""
        waiting = object()
        try:
            while True:
                try:
                    return await store()
                except OutputError as error:
                    if not self._refused:
                        logger.error("finished groups wait until they can be written: %s", error)
                    cause = error.__cause__ or error
                    self._refused[waiting] = getattr(cause, "strerror", None) or str(cause)
                await asyncio.sleep(STORE_RETRY_S)
        finally:
            self._refused.pop(waiting, None)

    async def _built_group(self, closed: Sequence[Closed]) -> ScoredGroup | None:
        """Build the group, again if feedback changes meanwhile or while a server is unreachable; None without branches.

        Raises:
            ServerError: a server refuses a request.
        """
        while True:
            changes = self._changes_of(closed)
            branches_of = {session.row.session_id: await self._branches(session) for session in closed}
            try:
                group = await self._scored(closed, branches_of) if any(branches_of.values()) else None
            except ServerUnreachableError as error:
                logger.warning("the group of a session waits: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                if self._changes_of(closed) == changes:
                    self._keep_unchanged(closed)
                    return group

    def _changes_of(self, closed: Sequence[Closed]) -> list[int]:
        return [self._changes[session.row.session_id] for session in closed if session.part is None]

    def _keep_unchanged(self, closed: Sequence[Closed]) -> None:
        """Accept no more feedback for these sessions: their group is made."""
        for session in closed:
            if session.part is not None:
                continue
            self._changeable.pop(session.row.session_id, None)
            self._changes.pop(session.row.session_id, None)

    async def _branches(self, closed: Closed) -> list[Branch]:
        session_id, tree, feedback = closed.row.session_id, closed.tree, closed.feedback
        if tree is None:
            tree = TurnTree.of(await self._journal.run(partial(self._journal.turns, session_id)))
            feedback = await self._journal.run(partial(self._journal.feedback, session_id))
        among = closed.part.turn_ids if closed.part else tree.turns.keys() - {*closed.grouped}
        return branches(
            tree,
            feedback=closed.ending.feedback,
            learn_from_altered=self._config.learn_from_altered_sampling,
            reward=closed.ending.reward,
            of_turns=feedback,
            among=among,
        )

    async def _scored(self, closed: Sequence[Closed], branches_of: Mapping[str, Sequence[Branch]]) -> ScoredGroup:
        """Distill the branches of closed sessions, and return them as a group; `branches_of` is by session id."""
        pairs = [(session, branch) for session in closed for branch in branches_of[session.row.session_id]]
        distiller = self._distiller
        distilled: list[DistilledRecording] | list[None] = [None for _ in pairs]
        distillation: GroupDistillation | None = None
        if distiller is not None:
            judged_turns = [await _judged_turns(branch, session.judged) for session, branch in pairs]
            recordings = await gather_all(
                distiller.distill(
                    Recording(session.row.session_id, (branch.trace,), failed=branch.failed), session.row.server, turns
                )
                for (session, branch), turns in zip(pairs, judged_turns, strict=True)
            )
            distillation = (await distiller.close_group(recordings)).metadata
            distilled = recordings
        versions = [version for _, branch in pairs if (version := branch.trace.weight_version) is not None]
        first = closed[0]
        is_named = first.row.group_name is not None
        names = [session.row.name or session.row.session_id for session in closed]
        # Sessions that share a name keep their id.
        wire_names = {
            session.row.session_id: name if names.count(name) == 1 else session.row.session_id
            for session, name in zip(closed, names, strict=True)
        }
        return ScoredGroup(
            rollouts=tuple(
                ScoredRollout.of_conversation(
                    branch.trace,
                    session.ending.stop,
                    given_reward=branch.reward,
                    rows=recording and recording.traces[0].arrays,
                    turns=recording and recording.records,
                    trajectory=recording and recording.traces[0].trajectory,
                    session_id=wire_names[session.row.session_id] if is_named else None,
                )
                for (session, branch), recording in zip(pairs, distilled, strict=True)
            ),
            item_id=first.ending.group_id if is_named or first.part else first.row.session_id,
            weight_version=min(versions, default=None),
            group_id=first.ending.group_id,
            session_id=None if is_named else names[0],
            learner=self._learners and self._learners.of(first.row.owner),
            distillation=distillation,
        )

    def _is_held_out(self, session: SessionRow) -> bool:
        learners = self._learners
        if learners is None or learners.of(session.owner) is None:
            return False
        return learners.is_held_out(session.session_id)

    async def _hold_out(self, closed: Sequence[Closed]) -> None:
        """Write the conversations of sessions that are not trained on; those of parts come with their sessions."""
        self._keep_unchanged(closed)
        learner = self._learners and self._learners.of(closed[0].row.owner)
        if self._learners is None or learner is None or closed[0].part is not None:
            return
        rows: list[dict[str, Any]] = []
        for session in closed:
            session_id, tree = session.row.session_id, session.tree
            if tree is None:
                tree = TurnTree.of(await self._journal.run(partial(self._journal.turns, session_id)))
            for number, branch in enumerate(await self._branches(session)):
                names = {"item_id": f"{session_id}/{number}", "session_id": session_id}
                messages = [dict(message) for message in branch.trace.messages]
                rows.append({**names, "messages": messages, "tools": list(tree.turns[branch.turn_ids[-1]].tools)})
        await self._stored(partial(self._learners.hold_out, learner, rows))

    async def _write(self, group: ScoredGroup) -> None:
        if self._learners is not None and group.learner is not None:
            await self._learners.write(group.learner, group)
        else:
            await self._file.write(group)
        if group.distillation is not None:
            for outcome, count in group.distillation.outcomes.items():
                self._telemetry.outcomes.labels(outcome).inc(count)


async def _judged_turns(branch: Branch, judged: Judged) -> dict[int, DistilledTurn]:
    """Return the finished judgements of a branch by turn index; failed ones are omitted, to be judged again."""
    ids = {index: turn_id for index, turn_id in enumerate(branch.turn_ids) if turn_id in judged}
    results = await asyncio.gather(*(judged[turn_id] for turn_id in ids.values()), return_exceptions=True)
    return {index: result for index, result in zip(ids, results, strict=True) if isinstance(result, DistilledTurn)}
