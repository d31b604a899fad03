"""The gateway's Prometheus metrics. They contain no conversation text and no keys."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class Telemetry:
    """Metrics of one gateway, in a separate registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = "agentic_opd_gateway_"
        self.requests = Counter(f"{name}requests", "responses by HTTP status", ["status"], registry=registry)
        self.hung_up = Counter(
            f"{name}hung_up", "requests whose client disconnected before the end of the response", registry=registry
        )
        self.turns = Counter(f"{name}turns", "finished turns", ["type"], registry=registry)
        self.tokens = Counter(f"{name}tokens", "tokens of prompts and completions", ["kind"], registry=registry)
        self.rewritten = Counter(
            f"{name}rewritten_histories",
            "requests that created a branch because the client rewrote the history",
            registry=registry,
        )
        self.unlike = Counter(
            f"{name}unlike_streams",
            "streamed turns whose final result differs from what was streamed first",
            registry=registry,
        )
        self.open = Gauge(f"{name}open_sessions", "open sessions", registry=registry)
        self.waiting = Gauge(
            f"{name}sessions_to_write", "closed sessions whose group is not written yet", registry=registry
        )
        self.sessions = Counter(f"{name}sessions", "closed sessions by final state", ["state"], registry=registry)
        self.unsent = Gauge(
            f"{name}groups_to_send", "groups that the trajectory API has not accepted yet", registry=registry
        )
        self.sent = Counter(f"{name}groups_sent", "items that the trajectory API accepted", registry=registry)
        self.skipped = Counter(
            f"{name}groups_skipped", "items that the trainer cannot accept, by reason", ["reason"], registry=registry
        )
        self.lost = Counter(f"{name}groups_lost", "groups lost by a restart of the trajectory API", registry=registry)
        self.outcomes = Counter(f"{name}turn_outcomes", "judged turns by outcome", ["outcome"], registry=registry)
        self.version = Gauge(
            f"{name}weight_version", "version of the weights that a policy server has", ["server"], registry=registry
        )
        self.rollbacks = Gauge(
            f"{name}weight_rollbacks",
            "times that a trainer's brake replaced a server's weights by earlier ones, since the server's start",
            ["server"],
            registry=registry,
        )
        self.first_token_s = Histogram(
            f"{name}first_token_seconds",
            "seconds from a request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.answer_s = Histogram(
            f"{name}answer_seconds",
            "seconds from a request to the end of its response",
            buckets=_SECONDS,
            registry=registry,
        )

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)
