"""The receipts of a run: one for each version of the weights that is pushed or saved (I/O)."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import OutputError
from agentic_opd.training.config import TrainerConfig
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.receipts import (
    FOLDER,
    EarlierReceipt,
    GroupReceipt,
    Receipt,
    TrainedStep,
    WeightFiles,
    dropped_file,
    folder_sha256,
    read_receipt,
    receipt_file,
    receipt_of,
    settings_sha256,
    write_receipt,
)

logger = logging.getLogger(__name__)


class Receipts:
    """Writes the receipts of a run; only the trainer's first process uses it.

    A receipt is written before the servers get the version, and again as the files of its weights are written. Its hash
    is final once the next version is made.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._output_dir, self._model = config.output_dir, Path(config.model)
        self._folder = config.output_dir / FOLDER
        self._settings = config.receipt_settings
        self._receipt: Receipt | None = None
        """The receipt of the newest version."""
        self._head: EarlierReceipt | None = None
        """The newest receipt that is written."""
        self._steps: list[TrainedStep] = []
        """Steps since the newest version."""

    async def begin(self) -> None:
        """Write the receipt of version 0, with the files of the model if it is a folder.

        Raises:
            OutputError: a file can't be read or written.
        """
        self.write(0)
        if self._model.is_dir():
            await self.add_files(0, "base", self._model)

    async def resume(self, version: int, saved: Mapping[str, Any], checkpoint: Path) -> None:
        """Continue the chain at a checkpoint. `saved` is the receipt in it, used if the version has none.

        The receipts of later versions, which this run does not continue from, are set aside.

        Raises:
            OutputError: a receipt can't be read or written.
        """
        for path in self._folder.glob("step-*.json"):
            later, digest = read_receipt(path)
            if later.version > version:
                target = dropped_file(self._folder, later.version, digest)
                try:
                    target.parent.mkdir(exist_ok=True)
                    path.replace(target)
                except OSError as error:
                    raise OutputError(f"cannot move {str(path)!r} to {str(target)!r}: {error.strerror}") from error
        self.return_to(version)
        if self._receipt is None and saved:
            self._receipt = receipt_of(dict(saved), f"`receipt` of {str(checkpoint / 'step.json')!r}")
        if "checkpoint" not in self._of(version).files:
            await self.add_files(version, "checkpoint", checkpoint)

    def return_to(self, version: int) -> None:
        """Continue the chain at an earlier version, whose weights were restored.

        Raises:
            OutputError: its receipt can't be read.
        """
        self._steps, self._receipt, self._head = [], None, None
        path = receipt_file(self._folder, version)
        if path.exists():
            self._receipt, digest = read_receipt(path)
            self._head = EarlierReceipt(version=version, sha256=digest)

    def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        """Note the groups of the step that led to `version`."""
        self._steps.append(TrainedStep(step=version, groups=[GroupReceipt.of(group) for group in groups]))

    def draft(self, version: int) -> dict[str, Any]:
        """Return the receipt of the newest version so far, as JSON data."""
        return self._of(version).model_dump(mode="json")

    def write(self, version: int) -> None:
        """Write the receipt of the newest version so far.

        Raises:
            OutputError: it can't be written.
        """
        digest = write_receipt(self._folder, self._of(version))
        self._head = EarlierReceipt(version=version, sha256=digest)

    async def add_files(self, version: int, kind: str, folder: Path) -> None:
        """Add the hashes of a folder of weights to the receipt of the newest version, and write it.

        Raises:
            OutputError: a file can't be read, or the receipt can't be written.
        """
        digests = await asyncio.to_thread(folder_sha256, folder)
        receipt = self._of(version)
        files = {**receipt.files, kind: WeightFiles(folder=self._name_of(folder), sha256=digests)}
        self._receipt = receipt.model_copy(update={"files": files})
        self.write(version)

    def _name_of(self, folder: Path) -> str:
        """Return a folder relative to `output_dir` if it is in there, so that it is found after a move of both."""
        resolved, output_dir = folder.resolve(), self._output_dir.resolve()
        return str(resolved.relative_to(output_dir) if resolved.is_relative_to(output_dir) else resolved)

    def _of(self, version: int) -> Receipt:
        """Return the receipt of the newest version; a version without one continues from the one before it."""
        if self._receipt is None or self._receipt.version != version:
            if version > 0 and self._head is None:
                logger.warning("version %d is the first with a receipt: the versions before it have none", version)
            self._receipt = Receipt(
                version=version,
                previous=self._head,
                settings=self._settings,
                settings_sha256=settings_sha256(self._settings),
                steps=self._steps,
            )
            self._steps = []
        return self._receipt
