"""LoRA adapters as versions of the policy: which are loaded, and which one a request is read by.

A request that prefers a version is read by it while it is kept, and every other one by the newest: what is under way
ends with what it began with, and nothing pauses. The base weights stay: vLLM's own routes answer by them.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from vllm.lora.request import LoRARequest


class AdapterEngine(Protocol):
    """What of vLLM's `AsyncLLM` is needed here; its `EngineClient` lacks half of it."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load one."""
        ...

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget one."""
        ...


Reader = Literal["policy", "base", "teacher"]
"""Who reads: a version of the policy, the weights without an adapter, or the teacher's adapter."""


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
    _teacher: tuple[int, LoRARequest] | None = None
    """Its version and adapter."""

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
    def reading(self, preferred: int | None, reader: Reader = "policy") -> Generator[Weights]:
        """Choose what a request is read by; it is kept until the request has ended.

        A teacher that has no adapter yet reads with the base weights: an average begins where the training does.
        """
        version = preferred if preferred in self._loaded else self.newest
        chosen = None if version is None else (version, self._loaded[version])
        if reader != "policy":
            chosen = self._teacher if reader == "teacher" else None
        if chosen is None:
            yield Weights()
            return
        version, adapter = chosen
        self._under_way[adapter.lora_int_id] += 1
        try:
            yield Weights(version, adapter)
        finally:
            self._under_way[adapter.lora_int_id] -= 1

    async def load(self, engine: AdapterEngine, folder: Path, version: int, *, as_teacher: bool = False) -> None:
        """Make the adapter in `folder` the newest version; the oldest ones go, unless a request is under way with one.

        As the teacher's it takes the place of the teacher's last one, and leaves the policy's alone.

        Its name is new to the engine, also where a version comes again: the prefix cache goes by names.

        Raises:
            Exception: the engine could not load it; what was loaded stays.
        """
        self._count += 1
        adapter = LoRARequest(f"agentic-opd-{self._count}", self._count, str(folder))
        await engine.add_lora(adapter)
        if as_teacher:
            replaced = self._teacher and self._teacher[1]
            self._teacher = (version, adapter)
        else:
            replaced = self._loaded.pop(version, None)
            self._loaded[version] = adapter
        if replaced is not None:
            await engine.remove_lora(replaced.lora_int_id)
        room = self.most - (self._teacher is not None)
        for old in [*self._loaded][:-room]:
            if not self._under_way[self._loaded[old].lora_int_id]:
                await engine.remove_lora(self._loaded.pop(old).lora_int_id)

    async def unload(self, engine: AdapterEngine) -> None:
        """Forget all: the base weights are the policy again, and the teacher."""
        if self._teacher is not None:
            await engine.remove_lora(self._teacher[1].lora_int_id)
            self._teacher = None
        while self._loaded:
            await engine.remove_lora(self._loaded.popitem()[1].lora_int_id)
