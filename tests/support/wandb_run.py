"""What an offline W&B run holds, read back from its own file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after seven bytes, blocks of 32 KiB."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # A block's end that no record's head fits in is padding.
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # A whole record, or the last part of one.
            yield parts
            parts = b""


def logged_steps(folder: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each logging step of the offline run in `folder`."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    steps: dict[int, dict[str, Any]] = {}
    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if values:
            steps.setdefault(values["_step"], {}).update(values)
    return steps


def tables(folder: Path) -> list[dict[str, Any]]:
    """The tables of the run, in the order in which they were written."""
    files = sorted(
        folder.glob("wandb/offline-run-*/files/media/table/**/*.json"), key=lambda file: file.stat().st_mtime
    )
    return [json.loads(file.read_text()) for file in files]
