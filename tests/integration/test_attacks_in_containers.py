"""Attacks that a container withstands by means of its own, in containers of a real engine (podman with runc).

Its network, its file system, the user and the capabilities of its commands, its first process, its tmpfs, the engine's
pipes. All attacks are tried in bubblewrap; what happens between the solution and its tests is the same in both. Limits
of output, time and a process's memory are in test_sandbox_backends.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentic_opd.sandboxes.docker import DockerSandbox
from agentic_opd.sandboxes.protocol import Limits
from tests.integration.attacks.arena import Arena, arena, assert_withstood
from tests.integration.attacks.escaping import ESCAPING
from tests.integration.attacks.reading import READING
from tests.integration.attacks.resources import RESOURCES, SMALL
from tests.support.sandbox_backends import ENGINE, IMAGE, start_backend

ESCAPES = (
    *("writes outside", "mounts, chroots and makes devices", "uses the network", "kills everything"),
    *("raises its own limits", "daemons that outlive the episode", "daemons that hold the pipes"),
)
MACHINE = ("a fork bomb", "memory shared beyond its limit", "fills the disk")


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    start_backend("docker")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Arena]:
    with arena(tmp_path) as ready:
        yield ready


def container(limits: Limits | None) -> DockerSandbox:
    return DockerSandbox(ENGINE, IMAGE, limits)


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_is_earned_and_nothing_escapes(name: str, place: Arena) -> None:
    assert_withstood(ESCAPING[name], place, None, container)


def test_the_expected_values_cannot_be_found_in_files_and_processes(place: Arena) -> None:
    # An image has files of its own, and numbers as long as a needle: what is returned is then no list of attempts.
    assert_withstood(replace(READING["files"], report=""), place, None, container)


@pytest.mark.parametrize("name", MACHINE)
def test_the_machine_withstands(name: str, place: Arena) -> None:
    assert_withstood(RESOURCES[name], place, SMALL, container)
