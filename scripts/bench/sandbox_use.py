"""How many containers an environment has, and the memory that its sandboxes hold: for benchmarks."""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_PAUSE_S = 1.0


@dataclass
class SandboxUse:
    """A thread that looks at an environment's sandboxes until `stop`; memory is in MiB, shared pages in parts (PSS)."""

    pid: int
    containers: int = 0
    """Containers at most."""
    containers_mb: float = 0.0
    """Memory of the processes in the containers, and of their monitors, at most."""
    largest_mb: float = 0.0
    """Memory of one container at most."""
    clients_mb: float = 0.0
    """Memory of the environment's child processes at most: the engine's command lines, or bubblewrap's sandboxes."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start to look."""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            start = time.monotonic()
            self._look()
            self._ended.wait(max(_PAUSE_S, 5 * (time.monotonic() - start)))

    def _look(self) -> None:
        children, named = defaultdict[int, list[int]](list), defaultdict[str, list[int]](list)
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                children[int(fields[1])].append(int(process.name))
                command = (process / "cmdline").read_bytes().decode(errors="replace")
                if command.partition("\0")[0].endswith("conmon"):
                    for name in set(re.findall(rf"agentic-opd-{self.pid}-[\w-]+", command)):
                        named[name].append(int(process.name))
        sizes = [sum(map(_pss_mb, _tree(monitors, children))) for monitors in named.values()]
        self.containers = max(self.containers, len(sizes))
        self.containers_mb = max(self.containers_mb, sum(sizes))
        self.largest_mb = max(self.largest_mb, max(sizes, default=0.0))
        self.clients_mb = max(self.clients_mb, sum(map(_pss_mb, _tree(children[self.pid], children))))


def _tree(roots: Iterable[int], children: dict[int, list[int]]) -> list[int]:
    pids = list(roots)
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def _pss_mb(pid: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
