"""What the plugin adds to vLLM's `/metrics`: the served weights' version, and roll-backs."""

from prometheus_client import Counter, Gauge

_VERSION = Gauge(
    "agentic_opd_weight_version", "version of the weights that serve new requests", multiprocess_mode="mostrecent"
)
_ROLLBACKS = Counter(
    "agentic_opd_weight_rollbacks", "times that a trainer's brake replaced worse weights by those of an earlier version"
)


def loaded(version: int, withdrawn_from: int | None) -> None:
    """Record new weights; `withdrawn_from` is the first version that they replace by a roll-back."""
    _VERSION.set(version)
    if withdrawn_from is not None:
        _ROLLBACKS.inc()


def rollbacks() -> int:
    """Return the number of roll-backs since the server started."""
    return int(next(iter(_ROLLBACKS.collect())).samples[0].value)
