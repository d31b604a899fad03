"""`PrivateFolder`: where a sandbox of this machine keeps its files, from its entering to its end."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from agentic_opd.errors import SandboxError
from agentic_opd.rollout.sandboxes.leftovers import make_folder, remove_tree
from agentic_opd.rollout.sandboxes.trial import not_entered


class PrivateFolder:
    """A folder of the temporary directory whose name tells its owner."""

    def __init__(self) -> None:
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        """Where it is.

        Raises:
            SandboxError: it was not made yet, or is removed.
        """
        if self._path is None:
            raise not_entered()
        return self._path

    async def make(self, fill: Callable[[Path], None]) -> None:
        """Make it and put in what `fill` puts in.

        Raises:
            SandboxError: the file system refused; nothing of it is left.
        """
        try:
            self._path = make_folder()
            fill(self._path)
        except OSError as error:
            await self.remove()
            raise SandboxError(f"no work directory can be made in {tempfile.gettempdir()}: {error}") from error

    async def remove(self) -> None:
        """Remove it, whatever is in it; nothing where there is none."""
        if self._path is not None:
            path, self._path = self._path, None
            await asyncio.shield(asyncio.to_thread(remove_tree, path))
