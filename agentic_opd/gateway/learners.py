"""Which learner a session belongs to, and the files of each learner's groups (I/O).

A session belongs to its owner. With learners by key, the owner is the digest of the client's key, and so is the
learner's name; with learners by header, the owner is the digest and the name in `X-Learner`.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest

from agentic_opd.gateway.config import LearnersConfig
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.keys import bearer, checked_key, digest_of_key
from agentic_opd.wire.files import GroupFile, JsonLines, check_settings, has_lines, whole_lines
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.learners import GROUPS, HELD_OUT, LEARNER_NAME, names_of, remove_files, remove_sessions

HEADER = "X-Learner"
_LONGEST = 64
"""Maximum number of characters of a name in the header; the learner's name adds some of the key's digest."""
_MOST_OPEN = 64
"""Number of learners whose files of groups are open."""
_DIGEST = 16
"""Number of characters of the key's digest in a learner's name."""


class LearnerOwner:
    """Returns the owner of a request, whose learner `learner_of` names."""

    def __init__(self, keys: Sequence[str], config: LearnersConfig) -> None:
        """Accept `keys`; empty: any."""
        self._keys, self._config = keys, config

    async def __call__(self, http: HttpRequest) -> str:
        """Return the owner of a request.

        Raises:
            ClientError: 401 or 403, as `keys.owner_of`; 400, as `of_key`.
        """
        key = await checked_key(http, bearer(http), self._keys)
        return self.of_key(key, http.headers.get(HEADER, ""))

    @property
    def is_named(self) -> bool:
        """Whether clients name their learner beside the key."""
        return self._config.by == "header"

    def of_key(self, key: str, name: str) -> str:
        """Return the owner of the sessions of a key and, where clients name their learner, of this one.

        Raises:
            ClientError: 400, learners are named by clients, and `name` is not a valid name.
        """
        owner = digest_of_key(key)
        if not self.is_named:
            return owner
        if len(name) > _LONGEST or not LEARNER_NAME.fullmatch(name):
            raise ClientError(
                400,
                f"each request names its learner in {HEADER}: 1 to {_LONGEST} of a-z, 0-9, - and _, beginning with a "
                "letter or digit",
                HEADER,
                "no_learner",
            )
        return f"{owner}/{name}"


def no_learner(owner: str) -> Path | None:
    """Return None, as `LearnerFiles.folder_of` does for an owner without a learner."""
    return None


def learner_of(owner: str, config: LearnersConfig) -> str | None:
    """Return the learner of an owner; None: the policy of all, also of a session from before learners were named."""
    digest, _, name = owner.partition("/")
    if config.by == "key":
        return f"key-{digest[:_DIGEST]}" if digest else None
    if config.by == "header" and name:
        return f"{name}-{digest[:_DIGEST]}"
    return None


class LearnerFiles:
    """The folders of all learners of a gateway; a file is opened when a group is written to it.

    A learner's files have one writer at a time: a deletion replaces them, and a line that was appended to the replaced
    file meanwhile would be lost.
    """

    def __init__(self, config: LearnersConfig, folder: Path, settings: Mapping[str, Any]) -> None:
        """Write to `folder`; `settings` are those that the lines depend on.

        Raises:
            PlaceError: a learner's groups were written with other settings.
        """
        self.folder, self._config, self._settings = folder, config, settings
        self._files = OrderedDict[str, GroupFile]()
        self._writing = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """Held by the writer of a learner's files, by learner."""
        for path in sorted(folder.glob(f"*/{GROUPS}")):
            if has_lines(path):
                check_settings(path, settings)

    def of(self, owner: str) -> str | None:
        """Return the learner of an owner."""
        return learner_of(owner, self._config)

    def folder_of(self, owner: str) -> Path | None:
        """Return the folder of an owner's learner."""
        learner = self.of(owner)
        return None if learner is None else self.folder / learner

    def is_held_out(self, session_id: str) -> bool:
        """Return whether a session is for the evaluation of its learner; a hash of its id decides."""
        drawn = int.from_bytes(sha256(session_id.encode()).digest()[:4]) / 2**32
        return drawn < self._config.held_out

    def _file(self, learner: str) -> GroupFile:
        """Return the file of a learner's groups, for its writer; raises as `write`."""
        if learner not in self._files:
            path = self.folder / learner / GROUPS
            self._files[learner] = GroupFile(path, self._settings, resume=True, setting="env.learners.folder")
            if len(self._files) > _MOST_OPEN:
                unused = (name for name in self._files if not self._writing[name].locked())
                if (oldest := next(unused, None)) is not None:
                    self._close(oldest)
        self._files.move_to_end(learner)
        return self._files[learner]

    async def write(self, learner: str, group: ScoredGroup) -> None:
        """Append a group, unless its line is there.

        Raises:
            PlaceError: the file can't be written, or was written with other settings.
            OutputError: another process writes the file, or the write failed.
        """
        async with self._writing[learner]:
            file = self._file(learner)
            if group.item_id not in file.finished:
                await file.write(group)
                file.finished.add(group.item_id or "")

    async def hold_out(self, learner: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append held-out conversations, unless they are there; each row has an `item_id`.

        Raises:
            PlaceError, OutputError: the file can't be written.
        """
        path = self.folder / learner / HELD_OUT
        async with self._writing[learner]:
            written = {name for line, _ in whole_lines(path, may_be_missing=True) for name in names_of(line)}
            lines = JsonLines(path, is_continued=True)
            try:
                for row in rows:
                    if row["item_id"] not in written:
                        lines.write(row, durable=True)
            finally:
                lines.close()

    async def remove(self, learner: str, group_ids: Collection[str], session_ids: Collection[str]) -> None:
        """Remove groups and held-out conversations of a learner; raises OutputError as `remove_sessions`."""
        async with self._writing[learner]:
            self._close(learner)
            await asyncio.to_thread(remove_sessions, self.folder / learner, group_ids, session_ids)

    async def remove_all(self, learner: str) -> None:
        """Remove all files of a learner that the gateway has written; raises OutputError as `remove_files`."""
        async with self._writing[learner]:
            self._close(learner)
            await asyncio.to_thread(remove_files, self.folder / learner)

    def _close(self, learner: str) -> None:
        if (file := self._files.pop(learner, None)) is not None:
            file.close()

    def close(self) -> None:
        """Close all files."""
        for learner in [*self._files]:
            self._close(learner)
