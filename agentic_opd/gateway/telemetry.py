"""The gateway's Prometheus metrics. They contain no conversation text and no keys."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class Telemetry:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of_gateway = {"namespace": "agentic_opd_gateway", "registry": self.registry}
        counter, gauge = partial(Counter, **of_gateway), partial(Gauge, **of_gateway)
        histogram = partial(Histogram, buckets=_SECONDS, **of_gateway)
        self.requests = counter("requests", "responses by HTTP status", ["status"])
        self.hung_up = counter("hung_up", "requests whose client disconnected before the end of the response")
        self.turns = counter("turns", "finished turns", ["type"])
        self.tokens = counter("tokens", "tokens of prompts and completions", ["kind"])
        self.rewritten = counter(
            "rewritten_histories", "requests that created a branch because the client rewrote the history"
        )
        self.unlike = counter(
            "unlike_streams", "streamed turns whose final result differs from what was streamed first"
        )
        self.open = gauge("open_sessions", "open sessions")
        self.waiting = gauge("sessions_to_write", "closed sessions whose group is not written yet")
        self.sessions = counter("sessions", "closed sessions by final state", ["state"])
        self.unsent = gauge("groups_to_send", "groups that the trajectory API has not accepted yet")
        self.sent = counter("groups_sent", "items that the trajectory API accepted")
        self.skipped = counter("groups_skipped", "items that the trainer cannot accept, by reason", ["reason"])
        self.lost = counter("groups_lost", "groups lost by a restart of the trajectory API")
        self.outcomes = counter("turn_outcomes", "judged turns by outcome", ["outcome"])
        self.version = gauge("weight_version", "version of the weights that a policy server has", ["server"])
        self.failing = gauge("failing_outputs", "1 while the disk refuses writes to an output, else 0", ["output"])
        self.unrecorded = counter("unrecorded", "answers of the upstream that were not recorded, by reason", ["reason"])
        self.first_token_s = histogram("first_token_seconds", "seconds from a request to its first token")
        self.answer_s = histogram("answer_seconds", "seconds from a request to the end of its response")

    def text(self) -> bytes:
        return generate_latest(self.registry)
