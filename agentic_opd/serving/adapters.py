"""LoRA adapters as versions of the policy: which are loaded, and which one a request is read by.

A request that prefers a version is read by it while it is kept, and every other one by the newest: what is under way
ends with what it began with, and nothing pauses. The base weights stay: vLLM's own routes answer by them.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vllm.lora.request import LoRARequest


class AdapterEngine(Protocol):
    """What of vLLM's `AsyncLLM` is needed here; its `EngineClient` lacks half of it."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load one."""
        ...

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget one."""
        ...


class Weights(NamedTuple):
    """What a request is read by."""

    version: int | None = None
    """None: the engine says, for these are not an adapter's."""
    adapter: LoRARequest | None = None


@dataclass(slots=True)
class Adapters:
    """The adapters that the engine holds, the newest last."""

    most: int = 0
    """Of them at a time; 0: vLLM was started without LoRA."""
    max_rank: int = 0
    _loaded: dict[int, LoRARequest] = field(default_factory=dict[int, LoRARequest])
    _under_way: Counter[int] = field(default_factory=Counter[int])
    """Requests by the id of the adapter that reads them."""
    _count: int = 0

    @classmethod
    def of_engine(cls, engine: Any) -> "Adapters":
        """As vLLM was started."""
        config = getattr(getattr(engine, "vllm_config", None), "lora_config", None)
        return cls() if config is None else cls(config.max_loras, config.max_lora_rank)

    @property
    def newest(self) -> int | None:
        """The newest version; None: no adapter is loaded."""
        return next(reversed(self._loaded), None)

    @contextmanager
    def reading(self, preferred: int | None) -> Generator[Weights]:
        """Choose what a request is read by; it is kept until the request has ended."""
        version = preferred if preferred in self._loaded else self.newest
        if version is None:
            yield Weights()
            return
        adapter = self._loaded[version]
        self._under_way[adapter.lora_int_id] += 1
        try:
            yield Weights(version, adapter)
        finally:
            self._under_way[adapter.lora_int_id] -= 1

    async def load(self, engine: AdapterEngine, folder: Path, version: int) -> None:
        """Make the adapter in `folder` the newest version; the oldest ones go, unless a request is under way with one.

        Its name is new to the engine, also where a version comes again: the prefix cache goes by names.

        Raises:
            Exception: the engine could not load it; what was loaded stays.
        """
        self._count += 1
        adapter = LoRARequest(f"agentic-opd-{self._count}", self._count, str(folder))
        await engine.add_lora(adapter)
        replaced = self._loaded.pop(version, None)
        self._loaded[version] = adapter
        if replaced is not None:
            await engine.remove_lora(replaced.lora_int_id)
        for old in [*self._loaded][: -self.most]:
            if not self._under_way[self._loaded[old].lora_int_id]:
                await engine.remove_lora(self._loaded.pop(old).lora_int_id)

    async def unload(self, engine: AdapterEngine) -> None:
        """Forget all: the base weights are the policy again."""
        while self._loaded:
            await engine.remove_lora(self._loaded.popitem()[1].lora_int_id)
