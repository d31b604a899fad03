"""A gateway of the tests' own: started as a person does, before a policy, asked by the `openai` client."""

import json
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.local_server import free_port, stop
from openai import OpenAI

from agentic_opd.core.processes import end_of

from . import commands
from .places import MODEL, ROOT
from .waiting import until


def request(url: str, body: Any = None, headers: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Ask a gateway as the client of the key that it has here."""
    headers = {"Authorization": "Bearer a-key", "Content-Type": "application/json", **headers}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)


def starts_of(mask: list[int]) -> list[int]:
    """Where runs of sampled tokens begin; between two turns there is a prompt."""
    return [at for at, value in enumerate(mask) if value != -100 and (at == 0 or mask[at - 1] == -100)]


class Served:
    """A gateway process."""

    def __init__(self, process: Any, port: int, folder: Path, log: Path) -> None:
        self.process, self.folder, self.log = process, folder, log
        self.url = f"http://127.0.0.1:{port}"
        self.questions: list[str] = []
        """What its judge was asked, if it has one of its own."""
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="a-key", max_retries=0)

    def ask(self, path: str, body: Any = None, headers: Mapping[str, str] = MappingProxyType({})) -> Any:
        return request(self.url + path, body, headers)

    def metric(self, name: str) -> float:
        """The sum of a metric's values."""
        request = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": "Bearer a-key"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"agentic_opd_gateway_{name}"))

    def chat(self, *messages: Any, session: str | None = None, **more: Any) -> Any:
        headers = {"X-Session-Id": session} if session else {}
        more = {"model": MODEL, "max_tokens": 60, **more}
        return self.client.chat.completions.create(messages=list(messages), extra_headers=headers, **more)

    def end(self, session: str, **body: Any) -> dict[str, Any]:
        """End a session; its group."""
        self.ask(f"/sessions/{session}/end", body)
        return self.group(session)

    def group(self, session: str) -> dict[str, Any]:
        """The group of a session that is over."""
        until(lambda: self.ask(f"/sessions/{session}")["state"] != "closed", 120)
        ended = self.ask(f"/sessions/{session}")
        assert ended["state"] == "written", end_of(self.log)
        lines = (self.folder / "groups.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines if ended["id"] in line]  # Another's may be half written.
        (group,) = [group for group in found if group["group_overrides"]["item_id"] == ended["id"]]
        return group


@contextmanager
def served(
    policy_url: str, folder: Path, *flags: str, port: int | None = None, real: bool = False
) -> Generator[Served]:
    """`agentic-opd gateway` before a policy, while the block runs."""
    port, log = port or free_port(), folder / "gateway.log"
    command = (
        *("agentic_opd", "gateway", "--config", str(ROOT / "configs/demo_gateway.yaml")),
        *("--openai.base_url", f"{policy_url}/v1", "--env.port", str(port)),
        *("--env.data_path_to_save_groups", str(folder / "groups.jsonl"), *flags),
    )
    with log.open("wb") as output:
        own = {"stdout": output, "stderr": commands.STDOUT, "AGENTIC_OPD_GATEWAY_KEY": "a-key"}
        process = commands.start(*command, **own, start_new_session=True, real=real)
    try:

        def is_up() -> bool:
            assert process.poll() is None, end_of(log)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    return True
            except OSError:
                return False

        until(is_up, 120)
        gateway = Served(process, port, folder, log)
        with gateway.client:
            yield gateway
    finally:
        stop(process)
