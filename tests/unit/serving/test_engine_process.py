import warnings
from argparse import Namespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the plugin runs inside vLLM, which is not installed")

with warnings.catch_warnings():  # torch's and vLLM's own deprecations
    warnings.simplefilter("ignore")
    from vllm.v1.core.kv_cache_manager import KVCacheManager

from agentic_opd.serving.engine_process import MOST_CACHED, limit_cache_hits

REQUEST = Namespace(num_tokens=700, block_hashes=["a", "b"])


def of(extra_args: dict[str, Any] | None) -> Namespace:
    return Namespace(**vars(REQUEST), sampling_params=Namespace(extra_args=extra_args))


@pytest.mark.parametrize(
    ("request_", "num_tokens"),
    [
        (of({MOST_CACHED: 549}), 550),  # vLLM looks for a hit of all tokens but the last.
        (of({MOST_CACHED: 0}), 1),
        (of({MOST_CACHED: 900}), 700),
        (of({"other": 1}), 700),
        (of(None), 700),
        (Namespace(**vars(REQUEST), sampling_params=None), 700),
    ],
)
def test_the_lookup_sees_a_request_as_long_as_it_may_hit(
    request_: Namespace, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, list[str]]] = []

    def lookup(_self: object, request: Any) -> str:
        seen.append((request.num_tokens, request.block_hashes))
        return "found"

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", lookup)
    limit_cache_hits()
    limit_cache_hits()
    nothing: Any = None
    assert KVCacheManager.get_computed_blocks(nothing, request_) == "found"  # type: ignore[comparison-overlap]
    assert seen == [(num_tokens, ["a", "b"])]
