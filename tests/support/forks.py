"""`--forks N` runs the collected tests in N forks of this process.

Workers that are started anew would import torch, transformers and vLLM again: a third of the time of the unit tests.
A fork has them. The forks take modules from one pipe, so that the fixtures of a module are made once, and send the
reports of their tests to this process, which prints them; `report.fork` is the fork's number.
"""

import os
import pickle
import select
import signal
import struct
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest

from agentic_opd.core.processes import end_with_parent

_SIZE = struct.Struct("!I")
MOST = 60
"""A module with more tests is several pieces of work."""
GROUP = pytest.StashKey[str]()
"""Of an item: tests of one group are one piece of work, whatever their modules."""


class Fork:
    """A fork, seen from the process that prints."""

    def __init__(self, session: pytest.Session, number: int, work: int) -> None:
        self.number = number
        self.reports, answers = os.pipe()
        self.pid = os.fork()
        self.data = b""
        if self.pid == 0:
            end_with_parent()
            reporter = Reporter(session.config, answers)
            try:
                os.close(self.reports)
                run(session, number, work, reporter)
            except BaseException:  # noqa: BLE001 - the first process raises it
                reporter.send("error", traceback.format_exc())
            finally:
                os._exit(0)
        os.close(answers)

    def read(self) -> Iterator[tuple[str, Any]]:
        """What it has sent, whole messages only; at its end the process is gone and `reports` is closed."""
        chunk = os.read(self.reports, 1 << 20)
        if not chunk:
            os.close(self.reports)
            os.waitpid(self.pid, 0)
            self.reports = -1
        self.data += chunk
        while len(self.data) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self.data)
            if len(self.data) < _SIZE.size + size:
                return
            message, self.data = self.data[_SIZE.size : _SIZE.size + size], self.data[_SIZE.size + size :]
            yield pickle.loads(message)


class Reporter:
    """Sends what a fork's tests report."""

    def __init__(self, config: pytest.Config, answers: int) -> None:
        self.config, self.answers = config, answers

    def send(self, kind: str, value: Any) -> None:
        message = pickle.dumps((kind, value))
        left = memoryview(_SIZE.pack(len(message)) + message)
        while left:
            left = left[os.write(self.answers, left) :]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def pieces(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """The items by group; by module where they have none, and at most `MOST` in one piece."""
    found: list[list[pytest.Item]] = []
    for group, members in groupby(items, key=lambda item: item.stash.get(GROUP, None) or item.path):
        tests = list(members)
        most = len(tests) if isinstance(group, str) else MOST
        found += [tests[start : start + most] for start in range(0, len(tests), most)]
    return found


def run(session: pytest.Session, number: int, work: int, reporter: Reporter) -> None:
    """Run the tests of the pieces that this fork takes."""
    config = session.config
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # The temporary files of the first process would be shared.
    capture.start_global_capturing()
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"fork-{number}"
    factory._basetemp.mkdir(mode=0o700)
    plugins.register(reporter)
    found = pieces(session.items)

    def taken() -> Iterator[pytest.Item]:
        while place := os.read(work, _SIZE.size):
            yield from found[_SIZE.unpack(place)[0]]

    items = taken()
    item = next(items, None)
    while item is not None:
        after = next(items, None)  # Known beforehand: what the next test uses too is not taken down.
        config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        item = after


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, metavar="N", help="run the tests in N forks of this process")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("--forks")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    work, begun = os.pipe()
    for number in range(len(pieces(session.items))):
        os.write(begun, _SIZE.pack(number))
    os.close(begun)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    forks = [Fork(session, number, work) for number in range(count)]
    try:
        follow(session, forks)
    finally:
        for fork in forks:
            if fork.reports >= 0:
                os.kill(fork.pid, signal.SIGTERM)
                os.waitpid(fork.pid, 0)
    return True


def follow(session: pytest.Session, forks: Sequence[Fork]) -> None:
    """Pass on what the forks report, until all have ended; a test without a report has failed."""
    hook = session.config.hook
    missing = {item.nodeid: item.location for item in session.items}
    while alive := {fork.reports: fork for fork in forks if fork.reports >= 0}:
        for ready in select.select(list(alive), [], [])[0]:
            for kind, value in alive[ready].read():
                if kind == "error":
                    raise RuntimeError(f"a fork ended with:\n{value}")
                if kind == "start":
                    hook.pytest_runtest_logstart(nodeid=value, location=missing[value])
                    continue
                report = hook.pytest_report_from_serializable(config=session.config, data=value)
                report.fork = alive[ready].number
                hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=missing.pop(report.nodeid))
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
    for nodeid, location in missing.items():
        died: Any = pytest.TestReport(nodeid, location, {}, "failed", "its process died before it had ended", "call")
        hook.pytest_runtest_logreport(report=died)
