"""The gateway's web server."""

from fastapi import FastAPI

from agentic_opd.gateway.serve import WebServer


def test_an_idle_connection_outlives_an_agents_thought() -> None:
    """A client that reuses one at the moment of its end would see a lost connection; vLLM is started with 60 s."""
    assert WebServer(FastAPI()).config.timeout_keep_alive >= 60
