"""A session of a gateway, for scripts and other frameworks (I/O)."""

import json
import uuid
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from agentic_opd.core.errors import ServerRequestError, ServerUnreachableError
from agentic_opd.core.http import key_advice


class GatewaySession:
    """A session of a gateway: give `base_url` and `api_key` to any OpenAI client, then call `end`."""

    def __init__(
        self,
        gateway_url: str,
        api_key: str = "none",
        name: str | None = None,
        group: str | None = None,
        learner: str | None = None,
    ) -> None:
        """Name the session, by default with a fresh name; the gateway opens it at its first request.

        Sessions that end with one `group`, such as the name of a task, form groups of the gateway's `env.group_size`.
        Where a header names the learner (`env.learners.by`), give `headers` to the client too.
        """
        self.headers = {} if learner is None else {"X-Learner": learner}
        self.name, self.api_key, self.group = name or uuid.uuid4().hex, api_key, group
        self._url = f"{gateway_url.rstrip('/').removesuffix('/v1')}/sessions/{quote(self.name, safe='')}"
        self.base_url = f"{self._url}/v1"

    def end(self, reward: float | None = None, feedback: str | None = None, timeout_s: float = 60.0) -> None:
        """End the session with a reward and evidence in words, so that the gateway makes a group of it.

        Raises:
            ServerRequestError: the gateway refused it, for example because the session has no request (404), or has a
                group although the gateway makes none (400).
            ServerUnreachableError: the gateway did not answer.
        """
        values = {"reward": reward, "feedback": feedback, "group": self.group}
        body = {name: value for name, value in values.items() if value is not None}
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json", **self.headers}
        try:
            with urlopen(Request(f"{self._url}/end", json.dumps(body).encode(), headers), timeout=timeout_s):
                pass
        except HTTPError as error:
            text = error.read().decode(errors="replace")
            advice = key_advice(error.code, text, self.api_key != "none", "GatewaySession(api_key=...)")
            refusal = f"{self._url}/end: HTTP {error.code}: {text[:1000]}{advice}"
            raise ServerRequestError(refusal, error.code, text) from error
        except OSError as error:
            raise ServerUnreachableError(f"the gateway does not answer at {self._url}: {error}") from error
