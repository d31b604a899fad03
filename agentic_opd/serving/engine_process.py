"""What the plugin adds to vLLM's engine: weight transfers, a limit of prefix cache hits, adapters and seeds on CPUs."""

from contextlib import suppress
from typing import Any

MOST_CACHED = "agentic_opd_most_cached"
"""Entry of a request's `extra_args`: how many of its first tokens may be taken from the prefix cache."""


def register() -> None:
    """Register the additions; vLLM calls this function in each of its processes, as a general plugin."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from agentic_opd.serving.process_group import limit_nccl_waits
    from agentic_opd.serving.settle import add_to_workers

    with suppress(ValueError):  # The name is registered already.
        WeightTransferEngineFactory.register_engine(
            "gloo", "agentic_opd.serving.cpu.gloo_transfer", "GlooWeightTransferEngine"
        )
    limit_cache_hits()
    add_to_workers()
    limit_nccl_waits()
    if current_platform.is_cpu():
        from agentic_opd.serving.cpu.lora_kernels import skip_tokens_without_adapter
        from agentic_opd.serving.cpu.seeded_sampling import restore_generators

        skip_tokens_without_adapter()
        restore_generators()


def limit_cache_hits() -> None:
    """Make vLLM's cache lookup obey `MOST_CACHED`.

    vLLM computes logprobs of a prompt only after the cache hit, which covers a whole turn that was sampled here.
    vLLM's own setting `skip_reading_prefix_cache` avoids the hit altogether, and computes the whole context again.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    lookup: Any = KVCacheManager.get_computed_blocks
    if hasattr(lookup, "__wrapped__"):
        return

    def limited(self: KVCacheManager, request: Any) -> Any:
        extra_args = request.sampling_params and request.sampling_params.extra_args
        most_cached = (extra_args or {}).get(MOST_CACHED)
        return lookup(self, request if most_cached is None else _Shorter(request, most_cached))

    limited.__wrapped__ = lookup  # type: ignore[attr-defined]
    KVCacheManager.get_computed_blocks = limited


class _Shorter:
    """A request as the lookup sees it: it may hit all tokens but the last, so one token more is left of it."""

    def __init__(self, request: Any, most_cached: int) -> None:
        self._request, self.num_tokens = request, min(most_cached + 1, request.num_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
