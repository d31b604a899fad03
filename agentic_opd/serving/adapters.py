"""LoRA adapters as versions of the policy: loading them, and selecting one for each request.

A request uses the version that it prefers if that is still loaded, else the newest one. A running request keeps its
adapter to the end, so loading a new version pauses nothing. vLLM's own routes use the base weights.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

Reader = Literal["policy", "base", "teacher"]
"""Weights that process a request: a version of the policy, the base weights, or the teacher's adapter."""


class Weights(NamedTuple):
    version: int | None = None
    """The adapter's version. None for the base weights, whose version the engine reports."""
    adapter: LoRARequest | None = None


@dataclass(slots=True)
class Adapters:
    max_loaded: int = 0
    """Largest number of adapters at a time, the teacher's included; 0 if vLLM was started without LoRA."""
    max_rank: int = 0
    _loaded: dict[int, LoRARequest] = field(default_factory=dict[int, LoRARequest])
    """The policy's adapters by version, the newest last."""
    _under_way: Counter[int] = field(default_factory=Counter[int])
    """Number of running requests by adapter id."""
    _count: int = 0
    _teacher: tuple[int, LoRARequest] | None = None
    """Version and adapter of the teacher."""

    @classmethod
    def of_engine(cls, engine: Any) -> "Adapters":
        """Read the limits from vLLM's LoRA configuration."""
        config = getattr(getattr(engine, "vllm_config", None), "lora_config", None)
        return cls() if config is None else cls(config.max_loras, config.max_lora_rank)

    @property
    def newest(self) -> int | None:
        """The newest version of the policy; None if no adapter is loaded."""
        return next(reversed(self._loaded), None)

    @contextmanager
    def reading(self, preferred: int | None, reader: Reader = "policy") -> Generator[Weights]:
        """Select a request's weights; their adapter stays loaded inside the block.

        A teacher without an adapter uses the base weights, which are the initial value of its moving average.
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

    async def load(self, engine: AsyncLLM, folder: Path, version: int, *, as_teacher: bool = False) -> None:
        """Load the adapter in `folder` as the newest version, and unload the oldest ones that no request uses.

        With `as_teacher` it replaces the teacher's adapter instead. Each adapter gets a new name, even for a repeated
        version, because vLLM's prefix cache distinguishes adapters by name.

        Raises:
            Exception: the engine could not load the adapter; the loaded ones are unchanged.
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
        room = self.max_loaded - (self._teacher is not None)
        for old in [*self._loaded][:-room]:
            if not self._under_way[self._loaded[old].lora_int_id]:
                await engine.remove_lora(self._loaded.pop(old).lora_int_id)

    async def unload(self, engine: AsyncLLM) -> None:
        """Unload all adapters, so that policy and teacher use the base weights."""
        if self._teacher is not None:
            await engine.remove_lora(self._teacher[1].lora_int_id)
            self._teacher = None
        while self._loaded:
            await engine.remove_lora(self._loaded.popitem()[1].lora_int_id)
