"""What is started once and used by many: vLLM servers, a run of the demo, a browser; and in which order all runs."""

import os
import signal
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from bench.local_server import LocalServer
from numpy.typing import NDArray
from playwright.sync_api import Browser

from agentic_opd.core.processes import end_of
from tests.support import commands, session
from tests.support.browser import Report, chromium, opened
from tests.support.environment import command, read_lines
from tests.support.fake_plugin import FakePlugin, fake_plugin
from tests.support.forks import GROUP
from tests.support.machine import part_of_machine
from tests.support.places import MODEL, ROOT
from tests.support.recording_proxy import recording_proxy
from tests.support.report_facts import Scored, scored_tokens
from tests.support.vllm import Forward, RootedServer, SharedServer, StartVllm, forked_server, shared_server

FIRST = {
    "learn": ("test_learn",),
    "weights": (
        *(
            "test_plugin_contract",
            "test_adapters",
            "test_weights",
            "test_versions",
            "test_trainer",
            "test_pushes",
            "test_weight_transfer",
        ),
        *("test_gateway_pushes", "test_counts", "test_hindsight", "test_learn_logs"),
    ),
    "up": ("test_up", "test_sharded_training"),
    # An attack looks for processes that are left of it, on the whole machine and below its own process.
    "attacks": (
        *("test_attacks", "test_attacks_tools", "test_attacks_in_containers", "test_attacks_as_user"),
        *("test_fuzz_tools", "test_harbor"),
    ),
}
LAST = {
    "demo": ("test_demo", "test_start", "test_distill_file", "test_hints", "test_replay"),
    "report_hostile": ("test_report_hostile",),
    "report_use": ("test_report_use",),
    "report": ("test_report", "test_report_compare"),
}
"""Modules that share what is expensive run in one fork, one after the other; any other module is a group by itself.

First come the groups that take longest, so that no fork waits long at the end. Tests marked `alone` are the last group,
whatever their modules: before it, the forks would wait for each other at each of them.
"""
PLACES = {
    module: (place, i, name)
    for place, groups in ((0, FIRST), (2, LAST))
    for i, name in enumerate(groups)
    for module in groups[name]
}


def place_of(item: pytest.Item) -> tuple[int, int, str]:
    """The place of the test's group, and the group's name."""
    if item.get_closest_marker("alone") is not None:
        return 3, 0, "alone"
    return PLACES.get(item.path.stem, (1, 0, item.path.stem))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by group; within a group they keep their order, which may be shuffled."""
    for item in items:
        item.stash[GROUP] = place_of(item)[2]
    items.sort(key=lambda item: place_of(item)[:2])


SESSION = pytest.StashKey[session.Session]()
AHEAD = pytest.StashKey[int]()
"""The process that starts what nearly all tests wait for."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SESSION] = session.Session()
    if config.getoption("forks") and all(Path(argument).is_dir() for argument in config.args):
        config.stash[AHEAD] = start_ahead()


def start_ahead() -> int:
    """Start the shared processes in a fork, while this one collects the tests; returns the fork's id."""
    if (pid := os.fork()) != 0:
        return pid
    try:
        commands.warm("env")
        shared_server()
    finally:
        os._exit(0)  # Whoever needs what could not be started tries again, and says why.


def pytest_unconfigure(config: pytest.Config) -> None:
    if AHEAD in config.stash:
        os.kill(config.stash[AHEAD], signal.SIGKILL)
        os.waitpid(config.stash[AHEAD], 0)
    if SESSION in config.stash:
        config.stash[SESSION].close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: Any) -> None:
    """Say when a fork goes on from a module: a log that is read while it grows shows where it is."""
    if (fork := getattr(report, "fork", None)) is None:
        return
    module = report.nodeid.partition("::")[0]
    before = UNDER_WAY.get(fork)
    if before is None or before.module != module:
        if before is not None:
            seconds = time.monotonic() - before.began
            print(f"\nfork {fork} {before.module}: {before.tests} tests, {seconds:.0f} s", flush=True)
        UNDER_WAY[fork] = Module(module, time.monotonic())
    UNDER_WAY[fork].tests += report.when == "call"


@dataclass
class Module:
    module: str
    began: float
    tests: int = 0


UNDER_WAY: dict[int, Module] = {}
"""What each fork runs."""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Each server's start, and who asked for it."""
    if SESSION in config.stash and (starts := session.starts()):
        terminalreporter.section(f"{len(starts)} starts")
        for one in starts:
            terminalreporter.line(f"{one['seconds']:6.1f} s  {one['what']}  for {one['by']}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that measures time has the machine to itself, where there are other forks (they share a cache)."""
    cache = getattr(item.config, "cache", None)
    alone = item.get_closest_marker("alone") is not None
    with part_of_machine(cache.mkdir("machine"), alone=alone) if cache else nullcontext():
        return (yield)


@pytest.fixture(scope="session")
def start_vllm(tmp_path_factory: pytest.TempPathFactory) -> StartVllm:
    """`start_vllm(*options, port=None, **variables)` serves the model while its block runs."""
    if not (ROOT / MODEL / "config.json").exists():
        pytest.skip(f"{MODEL} is no checkpoint; scripts/demo_policy/train makes the demo policy")

    def start(*options: str, port: int | None = None, **variables: str) -> AbstractContextManager[LocalServer]:
        log = tmp_path_factory.mktemp("vllm") / "server.log"
        return forked_server(MODEL, *options, log=log, variables=variables, port=port)

    return start


@pytest.fixture(scope="session")
def vllm_server() -> SharedServer:
    """The server that most tests of all forks share: the demo policy as it is, no API key, no weights root."""
    if not (ROOT / MODEL / "config.json").exists():
        pytest.skip(f"{MODEL} is no checkpoint; scripts/demo_policy/train makes the demo policy")
    return shared_server()


@pytest.fixture
def fake_server() -> Iterator[FakePlugin]:
    """A server that answers as the plugin does, with scripted turns: for what is not about its numbers, and outages."""
    with fake_plugin() as server:
        yield server


@pytest.fixture(scope="session")
def rooted_server(start_vllm: StartVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RootedServer]:
    """The server of those that give it other weights or kill it; `rooted` hands it out as new."""
    server = RootedServer(start_vllm, tmp_path_factory.mktemp("weights"))
    yield server
    server.close()


@pytest.fixture
def rooted(rooted_server: RootedServer) -> RootedServer:
    """A server with all flags: a weights root, adapters, weight transfer. It runs, with the first weights."""
    rooted_server.renew()
    return rooted_server


@pytest.fixture
def without_adapters(rooted: RootedServer) -> Iterator[str]:
    """The address of that server as one that takes whole weights only: adapters are merged for it."""
    with recording_proxy(rooted.base_url) as proxy:
        proxy.info = {"max_adapters": 0, "max_lora_rank": 0}
        yield proxy.url


class DemoRun(NamedTuple):
    """A `process` run of configs/demo.yaml: its file of eight groups of four rollouts, and what it said."""

    path: Path
    said: str

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups in the file."""
        return read_lines(self.path)


@pytest.fixture(scope="session")
def demo(vllm_server: SharedServer) -> DemoRun:
    """One run of the demo, as a person starts it, for all who only read what it wrote."""

    def run() -> dict[str, str]:
        folder = session.folder() / "demo"
        folder.mkdir(exist_ok=True)
        argv = command("process", vllm_server.base_url, "--env.data_path_to_save_groups", str(folder / "groups.jsonl"))
        done = commands.run(*argv, timeout_s=1200, real=True)
        assert done.returncode == 0, done.stderr
        return {"path": str(folder / "groups.jsonl"), "said": done.stderr}

    ran = session.once("demo", run)
    return DemoRun(Path(ran["path"]), ran["said"])


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
    values = list(getattr(item, "funcargs", {}).values())
    servers = [value for value in values if isinstance(value, LocalServer | SharedServer)]
    servers += [value.server for value in values if isinstance(value, RootedServer)]
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
