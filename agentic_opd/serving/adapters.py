"""LoRA adapters as versions of the policy: loading them, and selecting one for each request.

A request uses the version that it prefers if that is still loaded, else the newest one. A running request keeps its
adapter to the end, so loading a new version pauses nothing. vLLM's own routes use the base weights.

A server also serves learners: policies that share the base weights, each with versions of its own. vLLM itself reads an
adapter again that it dropped for others, so any number of learners is served, and `max_loaded` limits only how many
adapters compute at a time.
"""

import asyncio
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

Reader = Literal["policy", "base", "teacher"]
"""Weights that process a request: a version of the policy, the base weights, or the teacher's adapter."""


Learner = Annotated[str, Meta(min_length=1, max_length=96)]
"""Name of a learner in the bodies of requests."""
_RELEASE_S = 0.05
"""Seconds between two looks at the requests that still use a forgotten adapter."""
LEARNER_VERSIONS = 2
"""Number of versions of a learner that requests may prefer; the trainer keeps the files of as many."""


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
    _learners: dict[str, dict[int, LoRARequest]] = field(default_factory=dict[str, dict[int, LoRARequest]])
    """The adapters of learners by learner and version, the newest last."""
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

    @property
    def newest_of_learners(self) -> dict[str, int]:
        """The newest version of each learner that has an adapter."""
        return {learner: next(reversed(versions)) for learner, versions in self._learners.items()}

    @contextmanager
    def reading(
        self,
        preferred: int | None,
        reader: Reader = "policy",
        learner: str | None = None,
        else_learner: str | None = None,
    ) -> Generator[Weights]:
        """Select a request's weights; their adapter stays loaded inside the block.

        A teacher without an adapter uses the base weights, which are the initial value of its moving average; so does a
        learner without an adapter, unless `else_learner` has one.
        """
        versions = self._loaded
        if learner is not None:
            versions = self._learners.get(learner) or self._learners.get(else_learner or "", {})
        version = preferred if preferred in versions else next(reversed(versions), None)
        chosen = None if version is None else (version, versions[version])
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

    async def load_of_learner(self, engine: AsyncLLM, folder: Path, version: int, learner: str) -> None:
        """Load the adapter in `folder` as the newest version of a learner; raises as `load`.

        The versions before the last `LEARNER_VERSIONS` are forgotten, those that a request uses later.
        """
        self._count += 1
        adapter = LoRARequest(f"agentic-opd-{self._count}", self._count, str(folder))
        await engine.add_lora(adapter)
        versions = self._learners.setdefault(learner, {})
        replaced = versions.pop(version, None)
        versions[version] = adapter
        if replaced is not None:
            await engine.remove_lora(replaced.lora_int_id)
        for old in [*versions][:-LEARNER_VERSIONS]:
            if not self._under_way[versions[old].lora_int_id]:
                await engine.remove_lora(versions.pop(old).lora_int_id)

    async def forget_learner(self, engine: AsyncLLM, learner: str) -> list[int]:
        """Unload all versions of a learner, which then has the base weights; return their numbers.

        Requests that use one are answered first, because vLLM may read its files again for them.
        """
        versions = {**self._learners.pop(learner, {})}  # A load under way may still drop old ones of it.
        for adapter in versions.values():
            while self._under_way[adapter.lora_int_id]:  # noqa: ASYNC110 - requests end at any time
                await asyncio.sleep(_RELEASE_S)
            await engine.remove_lora(adapter.lora_int_id)
        return list(versions)

    async def unload(self, engine: AsyncLLM) -> None:
        """Unload all adapters, so that policy and teacher use the base weights."""
        if self._teacher is not None:
            await engine.remove_lora(self._teacher[1].lora_int_id)
            self._teacher = None
        while self._loaded:
            await engine.remove_lora(self._loaded.popitem()[1].lora_int_id)
        for learner in [*self._learners]:
            await self.forget_learner(engine, learner)
