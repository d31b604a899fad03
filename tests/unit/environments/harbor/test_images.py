"""Images of tasks: which are built, anew or not, and what is said of those that can't be."""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import WorldError
from agentic_opd.sandboxes.protocol import CommandResult
from agentic_opd_environments.harbor.images import Image, Images, build_failure
from agentic_opd_environments.harbor.tasks import HarborTask, read_tasks


class FakeEngine:
    """Images by name on a machine, those of a registry, and the engine's command line for both."""

    name = "podman --remote"

    def __init__(self, images: dict[str, str], registry: dict[str, str] | None = None) -> None:
        self.images = {name: {"Id": digest} for name, digest in images.items()}
        self.registry = registry or {}
        self.version = "podman version 5"
        self.commands: list[str] = []
        self.failures: list[str] = []
        """Outputs of the builds that fail."""

    async def run(self, *arguments: str, **_: Any) -> CommandResult:
        self.commands.append(arguments[0])
        output = b""
        match arguments:
            case ("--version",):
                output = self.version.encode()
            case ("image", "inspect", name) if name in self.images:
                output = json.dumps([self.images[name]]).encode()
            case ("pull", name) if name in self.registry:
                self.images[name] = {"Id": self.registry[name]}
            case ("build", *options) if not self.failures:
                name, (key, _, value) = options[options.index("--tag") + 1], _label(options)
                self.images[name] = {"Id": "built", "Config": {"Labels": {key: value}, "WorkingDir": "/app"}}
            case ("build", *_):
                output = self.failures.pop(0).encode()
                return CommandResult(1, output)
            case _:
                return CommandResult(125, b"Trying to pull it ...\nError: no such host\n")
        return CommandResult(0, output)

    def count(self, command: str) -> int:
        return self.commands.count(command)


def _label(options: list[str]) -> tuple[str, str, str]:
    return options[options.index("--label") + 1].partition("=")


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    for name, text in {
        "instruction.md": "Do it.",
        "task.toml": "",
        "tests/test.sh": "exit 0",
        "environment/Dockerfile": "FROM tools AS t\nFROM debian\nCOPY --from=t /a /a",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (task,) = read_tasks(tmp_path, {})
    return task.data


def image(engine: FakeEngine, task: HarborTask) -> Image:
    """Return the image, as a new run finds it."""
    return asyncio.run(Images(engine).of(task))  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["debian", "tools"])
def test_an_image_is_built_again_only_when_a_base_image_changes(base: str, task: HarborTask) -> None:
    engine = FakeEngine({"debian": "1", "tools": "1"})
    built = image(engine, task)
    assert built.workdir == "/app"
    assert (image(engine, task), engine.count("build")) == (built, 1)
    engine.images[base] = {"Id": "2"}
    image(engine, task)
    assert (image(engine, task).name, engine.count("build")) == (built.name, 2)


def test_a_run_keeps_the_image_that_it_began_with(task: HarborTask) -> None:
    engine = FakeEngine({"debian": "1", "tools": "1"})

    async def twice() -> None:
        images = Images(engine)  # type: ignore[arg-type]
        await images.of(task)
        engine.images["debian"] = {"Id": "2"}
        await images.of(task)

    asyncio.run(twice())
    assert engine.count("build") == 1


def test_an_image_that_was_carried_here_needs_no_base_image(task: HarborTask) -> None:
    engine = FakeEngine({"debian": "1", "tools": "1"})
    built = image(engine, task)
    del engine.images["debian"], engine.images["tools"]
    assert (image(engine, task), engine.count("build"), engine.count("pull")) == (built, 1, 0)


def test_an_image_of_before_the_labels_is_built_anew(task: HarborTask) -> None:
    engine = FakeEngine({"debian": "1", "tools": "1"})
    engine.images[image(engine, task).name] = {"Id": "old", "Config": None}
    image(engine, task)
    assert engine.count("build") == 2


def test_a_base_image_is_pulled_before_the_build_so_that_its_digest_is_recorded(task: HarborTask) -> None:
    engine = FakeEngine({"debian": "1"}, {"tools": "7"})
    image(engine, task)
    image(engine, task)
    assert (engine.count("pull"), engine.count("build")) == (1, 1)


def test_an_image_that_can_t_be_pulled_says_so_in_one_sentence(task: HarborTask) -> None:
    engine = FakeEngine({"debian": "1"})
    with pytest.raises(WorldError, match="the image 'tools' that environment/Dockerfile builds on is not on") as error:
        image(engine, task)
    assert "can't be pulled: Error: no such host. Without a network: `podman --remote load` it" in str(error.value)
    assert "\n" not in str(error.value)
    assert engine.count("build") == 0


def test_an_image_by_name_that_is_not_here(task: HarborTask) -> None:
    (task.folder / "task.toml").write_text('[environment]\ndocker_image = "a:1"')
    shutil.rmtree(task.folder / "environment")
    (named,) = read_tasks(task.folder, {})
    with pytest.raises(WorldError, match="'a:1' is not on this machine: `podman --remote pull a:1`, or without a"):
        image(FakeEngine({}), named.data)


RIGHTS = (
    "STEP 1/3: FROM debian\nSTEP 2/3: RUN make\nError: error running container: cannot clone: Operation not permitted"
)
MISTAKE = """\
STEP 1/3: FROM debian
STEP 2/3: RUN make
made
STEP 3/3: COPY nothing /
Error: building at STEP "COPY nothing /": no such file or directory"""


@pytest.mark.parametrize("failures", [[RIGHTS, MISTAKE], [MISTAKE, RIGHTS], [f"{MISTAKE}, first", MISTAKE]])
def test_of_a_failed_build_the_try_that_came_furthest_is_shown(failures: list[str], task: HarborTask) -> None:
    engine = FakeEngine({"debian": "1", "tools": "1"})
    engine.failures = [*failures]
    with pytest.raises(
        WorldError, match="environment/Dockerfile can't be built: it fails at `COPY nothing /`\n"
    ) as error:
        image(engine, task)
    assert "made\n" in str(error.value)
    assert str(error.value).endswith("no such file or directory"), "the last of two that came as far"


def test_docker_builds_once_since_it_has_no_chroots(task: HarborTask) -> None:
    engine = FakeEngine({"debian": "1", "tools": "1"})
    engine.version, engine.failures = "Docker version 28", ["ERROR: mistake", "ERROR: invalid isolation"]
    with pytest.raises(WorldError, match="mistake"):
        image(engine, task)
    assert engine.count("build") == 1


@pytest.mark.parametrize(
    ("output", "instruction"),
    [
        (MISTAKE, "COPY nothing /"),
        ('STEP 2/2: RUN echo "x": y\nError: building at STEP "RUN echo "x": y": exit status 1', 'RUN echo "x": y'),
        ("[1/2] STEP 1/2: FROM a\n[2/2] STEP 1/1: RUN b\nError: no space left", "RUN b"),
        ("Step 1/2 : FROM a\nStep 2/2 : RUN false\nThe command returned a non-zero code: 1", "RUN false"),
        (
            "Dockerfile:3\n---\n   2 |\n   3 | >>> RUN false && \\\n   4 | >>>   true\n---\nERROR: failed",
            "RUN false && \\",
        ),
    ],
)
def test_the_instruction_that_fails_is_named(output: str, instruction: str) -> None:
    first, rest = build_failure(output).split("\n", 1)
    assert first == f"it fails at `{instruction}`"
    assert output.endswith(rest.splitlines()[-1])


@pytest.mark.slow
def test_a_long_output_is_read_in_a_moment() -> None:
    start = time.process_time()
    build_failure("STEP 1/2: RUN " + 'building at STEP "' * 2**18)
    build_failure("\n".join(["STEP 1/2: RUN a", *["   3 | >>> " * 9] * 2**16]))
    assert time.process_time() - start < 10


def test_a_failure_shows_the_last_lines() -> None:
    assert build_failure("\n".join(map(str, range(99)))) == "\n".join(map(str, range(79, 99)))
