"""The solutions that cheat or break out once more, in containers of a real engine (podman with runc)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentic_opd.sandboxes.docker import DockerSandbox
from agentic_opd.sandboxes.protocol import Limits
from tests.integration.attacks.arena import Arena, Attack, arena, assert_withstood
from tests.integration.attacks.escaping import ESCAPING
from tests.integration.attacks.protocol import PROTOCOL
from tests.integration.attacks.reading import READING
from tests.integration.attacks.resources import RESOURCES, SMALL
from tests.integration.attacks.verdict import VERDICT
from tests.support.sandbox_backends import ENGINE, IMAGE, start_backend

EACH = {**VERDICT, **READING, **PROTOCOL, **ESCAPING}
# An image has files of its own, and numbers as long as a needle in them: what is returned is then no list of attempts.
EACH["files"] = replace(EACH["files"], report="")

# A container's work directory is its root's, so it can't be closed: the attack would not even be imported.
MACHINE = {name: attack for name, attack in RESOURCES.items() if name != "closes the work directory"}


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    start_backend("docker", {})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Arena]:
    with arena(tmp_path) as ready:
        yield ready


def container(limits: Limits | None) -> DockerSandbox:
    return DockerSandbox(ENGINE, IMAGE, limits)


@pytest.mark.parametrize("attack", EACH.values(), ids=EACH.keys())
def test_nothing_is_earned_and_nothing_escapes(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place, None, container)


@pytest.mark.parametrize("attack", MACHINE.values(), ids=MACHINE.keys())
def test_the_machine_withstands(attack: Attack, place: Arena) -> None:
    assert_withstood(attack, place, SMALL, container)
