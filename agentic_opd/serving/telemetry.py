"""What the plugin adds to vLLM's `/metrics`: the version of the served weights."""

from prometheus_client import Gauge

_VERSION = Gauge(
    "agentic_opd_weight_version", "version of the weights that serve new requests", multiprocess_mode="mostrecent"
)


def loaded(version: int) -> None:
    """Record the version of new weights."""
    _VERSION.set(version)
