"""One real vLLM server for the whole session, and a transformers forward pass over the same checkpoint."""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Browser

from agentic_opd.serving.local import LocalServer, end_of, local_server

from .browser import Report, chromium, opened
from .report_facts import Scored, scored_tokens

ROOT = Path(__file__).parents[2]
MODEL = os.environ.get("AGENTIC_OPD_TEST_MODEL", "scripts/demo_policy/policy")
"""What is served; a path relative to the project's root."""


def hear_sigint() -> None:
    """For `preexec_fn`: a child of a background job of a shell would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


Forward = Callable[..., NDArray[np.float32]]
StartVllm = Callable[..., AbstractContextManager[LocalServer]]


@pytest.fixture(scope="session")
def start_vllm(tmp_path_factory: pytest.TempPathFactory) -> StartVllm:
    """`start_vllm(*options, plugin=True, port=None, **variables)` serves the model while its block runs."""
    if not (ROOT / MODEL / "config.json").exists():
        pytest.skip(f"{MODEL} is no checkpoint; scripts/train_demo_policy makes the demo policy")

    @contextmanager
    def start(*options: str, plugin: bool = True, port: int | None = None, **variables: str) -> Generator[LocalServer]:
        log = tmp_path_factory.mktemp("vllm") / "server.log"
        options = options if plugin else ("--no-plugin", *options)
        launcher = (str(ROOT / "scripts" / "serve_vllm"),)
        with local_server(
            MODEL, *options, log=log, launcher=launcher, variables=variables, cwd=ROOT, port=port
        ) as server:
            yield server

    return start


@pytest.fixture(scope="session")
def vllm_server(start_vllm: StartVllm) -> Iterator[LocalServer]:
    """The server that most tests share: the demo policy, no API key, no weights root."""
    with start_vllm() as server:
        yield server


class DemoRun(NamedTuple):
    """A `process` run of configs/demo.yaml: its file of eight groups of four rollouts, and what it said."""

    path: Path
    said: str

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups in the file."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture(scope="session")
def demo(vllm_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """One run of the demo, for all who only read what it wrote."""
    out = tmp_path_factory.mktemp("demo") / "groups.jsonl"
    command = [
        *(sys.executable, "-m", "agentic_opd.env", "process", "--config", "configs/demo.yaml"),
        *("--openai.base_url", f"{vllm_server.base_url}/v1", "--env.data_path_to_save_groups", str(out)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return DemoRun(out, done.stderr)


@pytest.fixture(scope="module")
def groups(demo: DemoRun) -> list[dict[str, Any]]:
    """What stands in the demo run's file."""
    return demo.groups


@pytest.fixture(scope="module")
def tokens(groups: list[dict[str, Any]]) -> list[Scored]:
    """The scored tokens of it, the largest gap first."""
    return scored_tokens(groups)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium; closed with the module: Playwright's loop would be in the way of other tests' loops."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def report(browser: Browser, demo: DemoRun) -> Iterator[Report]:
    """The report of the demo run, open in a tab."""
    with opened(browser, demo.path.with_suffix(".html")) as report:
        yield report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of a server's log with a test that failed on it."""
    report = yield
    servers = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, LocalServer)]
    if report.failed:
        report.sections += [(f"{server.log}", end_of(server.log)) for server in servers]
    return report


@cache
def load_model(directory: str) -> Any:
    """The checkpoint in transformers, float32."""
    with warnings.catch_warnings():  # torch's and transformers' own deprecations
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(2)
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def forward() -> Forward:
    """`forward(ids, model=...)`: ids [T] -> transformers' logprobs [T, V] (nats); row p is about the token at p + 1."""

    def run(ids: Sequence[int], model: str | Path = ROOT / MODEL) -> NDArray[np.float32]:
        network = load_model(str(model))
        import torch

        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return network(torch.tensor([list(ids)])).logits[0].log_softmax(-1).numpy()

    return run
