"""Folders in Harbor's format: what is read, named, and refused."""

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentic_opd.core.errors import ConfigError, DatasetError, WorldError
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.worlds.choose import make_world
from agentic_opd_environments.harbor.images import _lock_of
from agentic_opd_environments.harbor.tasks import HarborTask, read_tasks
from tests.support.places import ROOT

TASKS = ROOT / "tests" / "harbor_tasks"
NAMED = '[environment]\ndocker_image = "a"'
FILES = {
    "instruction.md": "Do it.",
    "task.toml": '[environment]\ndocker_image = "a:1"',
    "tests/test.sh": "exit 0",
}


def make(folder: Path, files: Mapping[str, str | None] | None = None) -> Path:
    """Write a task: FILES, and `files` in their places; None leaves one out."""
    for name, text in {**FILES, **(files or {})}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8", "surrogateescape")
    return folder


def data_of(folder: Path, **variables: str) -> HarborTask:
    (task,) = read_tasks(folder, variables)
    assert isinstance(task.data, HarborTask)
    return task.data


def test_the_first_and_the_current_schema() -> None:
    greeting, ledger, notes = read_tasks(TASKS, {"LEDGER_CURRENCY": "francs"})
    assert (greeting.task_id, ledger.task_id, notes.task_id) == ("greeting", "ledger", "notes")
    assert greeting.prompt.startswith("Create a file called `greeting.txt`")
    assert (greeting.data.memory_mb, greeting.data.disk_mb, greeting.data.cpus) == (256, 1024, 1.0)
    assert (greeting.data.image, greeting.data.workdir) == ("localhost/agentic-opd-sandbox", "/root")
    assert greeting.limits == {"agent_timeout_s": 60.0}
    assert ledger.data.variables == {"CURRENCY": "francs"}
    assert ledger.data.healthcheck.command == "test -e /app/inbox/ready"
    assert ledger.data.build.dockerfile.is_file()
    assert greeting.data.build is None
    assert ledger.hidden_tests is not None
    assert "def test_total" in ledger.hidden_tests
    assert "#!/bin/bash" not in ledger.hidden_tests
    assert (notes.data.agent_user, notes.data.verifier_user) == ("1000", "root")
    assert notes.data.verifier_variables == {"ANSWER": "amber"}
    assert notes.hidden_tests is not None
    assert "No reward file" in notes.hidden_tests
    assert {task.data.has_network for task in (greeting, ledger, notes)} == {False}


def test_a_task_alone_and_defaults(tmp_path: Path) -> None:
    (task,) = read_tasks(make(tmp_path / "alone"), {})
    assert (task.task_id, task.prompt, task.limits) == ("alone", "Do it.", {})
    data = task.data
    assert (data.memory_mb, data.disk_mb, data.verifier_timeout_s, data.workdir) == (2048, 10240, 600.0, None)


def test_tasks_at_any_depth_but_not_hidden_ones(tmp_path: Path) -> None:
    for name in ("b", "a/deep/one", ".git/task"):
        make(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert [task.task_id for task in read_tasks(tmp_path, {})] == ["a/deep/one", "b"]


@pytest.mark.parametrize(
    ("lines", "default", "has_network"),
    [
        ("", False, False),
        ("", True, True),
        ("[environment]\nallow_internet = true", False, True),
        ("[environment]\nallow_internet = false", True, False),
        ('[environment]\nnetwork_mode = "public"', False, True),
        ('[environment]\nnetwork_mode = "no-network"\nallow_internet = true', True, False),
        ('[agent]\nnetwork_mode = "public"\n[verifier]\nnetwork_mode = "public"', False, True),
    ],
)
def test_the_network_is_off_unless_the_file_or_the_setting_asks(
    lines: str, default: bool, has_network: bool, tmp_path: Path
) -> None:
    make(tmp_path / "t", {"task.toml": lines, "environment/Dockerfile": "FROM a"})
    (task,) = read_tasks(tmp_path, {}, has_network=default)
    assert task.data.has_network is has_network


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ('[[steps]]\nname = "one"', r"[[steps]]: tasks of several steps"),
        ('[environment]\nos = "windows"', "[environment] os = 'windows'"),
        ("[environment]\ngpus = 1", "[environment] gpus"),
        ('[environment.tpu]\ntype = "v4"', "[environment] tpu"),
        ('[[environment.mcp_servers]]\nname = "a"', "[environment] mcp_servers"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org"]', "network_mode allowlist"),
        ('[environment]\nallow_internet = false\n[verifier]\nnetwork_mode = "public"', "a network for the agent but"),
        ('[verifier]\nenvironment_mode = "separate"', "[verifier] environment_mode separate"),
        ("[verifier.environment]\ncpus = 1", "[verifier.environment]"),
        ('[[verifier.collect]]\ncommand = "true"', "[[verifier.collect]]"),
    ],
)
def test_what_would_run_otherwise_than_in_harbor_is_refused_by_name(lines: str, named: str, tmp_path: Path) -> None:
    make(tmp_path / "t", {"task.toml": lines, "environment/Dockerfile": "FROM a"})
    with pytest.raises(DatasetError, match="t: not supported: ") as error:
        read_tasks(tmp_path, {})
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"environment/compose.yml": "services: {}"}, "environment/compose.yml: Harbor does not read it; rename it to"),
        ({"trajectory.json": "[]"}, "trajectory.json: a conversation before the task"),
        ({"task.toml": "[environment"}, "t: task.toml, line 1: expected ']' at the end of a table"),
        ({"task.toml": "[environment]\n\ncpus = oops"}, "t: task.toml, line 3: invalid value"),
        ({"task.toml": 'a = 1\nb = """x\n'}, "t: task.toml, line 2: unterminated string"),
        ({"task.toml": 'a = "\udcff"'}, "t: task.toml, line 1: byte 0xff is not UTF-8"),
        ({"instruction.md": "Do\n\nit \udce4."}, "t: instruction.md, line 3: byte 0xe4 is not UTF-8"),
        (
            {"task.toml": "[agent]\n[environment]\n# none\n\ncpus = 0"},
            "t: task.toml, line 5: environment.cpus: input should be greater than 0",
        ),
        (
            {"task.toml": 'a = """\n[environment]\n"""\n[environment.env]\nA = [\n1\n]'},
            "t: task.toml, line 5: environment.env.A: input should be a valid string",
        ),
        (
            {"task.toml": "[environment]\n[environment.healthcheck]\nretries = 3"},
            "t: task.toml, line 2: environment.healthcheck.command: field required",
        ),
        (
            {"task.toml": "environment = {docker_image = 'a', gpus = 1}"},
            "t: not supported: [environment] gpus (task.toml, line 1)",
        ),
        ({"task.toml": f"a = {'[' * 9_999}"}, "t: task.toml: maximum recursion"),
        ({"task.toml": f"# {'a.' * 40_000}"}, "task.toml has 80002 characters, expected at most 65536"),
        (
            {"task.toml": '[environment]\ndocker_image = "a"\nmemory = "lots"'},
            "task.toml, line 3: [environment] memory = 'lots', expected a size as '2G' or '512M'",
        ),
        (
            {"task.toml": '[environment]\ndocker_image = "a"\nmemory = "1G"\nmemory_mb = 5'},
            "memory = '1G', but memory_mb = 5",
        ),
        ({"task.toml": "[environment]\ncpus = 1"}, "neither [environment] docker_image nor environment/Dockerfile"),
        (
            {"task.toml": f'{NAMED}\nenv = {{K = "${{K}}"}}'},
            "task.toml, line 3: [environment.env] K needs a value: set env.world.variables to {K: ...}",
        ),
        ({"tests/test.sh": None}, "there is no tests/test.sh"),
        ({"instruction.md": None}, "No such file or directory"),
        ({"instruction.md": "<!-- canary 1 -->\n\n"}, "instruction.md is empty"),
    ],
)
def test_broken_tasks_are_named_all_at_once(files: dict[str, str | None], said: str, tmp_path: Path) -> None:
    make(tmp_path / "t", files)
    make(tmp_path / "another", {"instruction.md": ""})
    make(tmp_path / "whole")
    with pytest.raises(DatasetError, match="2 of 3 tasks in") as error:
        read_tasks(tmp_path, {})
    assert said in str(error.value)
    assert "another: instruction.md is empty" in str(error.value)
    assert str(error.value).endswith("Skip such tasks with env.world.skip_broken.")
    assert [task.task_id for task in read_tasks(tmp_path, {}, skip_broken=True)] == ["whole"]


@pytest.mark.slow
def test_the_lines_of_errors_are_searched_in_a_moment(tmp_path: Path) -> None:
    """Many errors, in a file with many lines; and keys that take the parser long."""
    wrong = "".join(f"n{number} = []\n" for number in range(150))
    start = time.process_time()
    for number, lines in enumerate((wrong, "#\n" * 9_000 + "a = []", f"{'a.' * 4_000}b = []\n" + "#\n" * 100)):
        make(tmp_path / f"t{number}", {"task.toml": f"[environment.env]\n{lines}"})
    with pytest.raises(DatasetError, match=r"t0: task\.toml, line 2: .*; and 130 more\n"):
        read_tasks(tmp_path, {})
    assert time.process_time() - start < 10


@pytest.mark.parametrize("skip_broken", [False, True])
def test_where_all_tasks_are_broken_there_is_nothing_to_skip(skip_broken: bool, tmp_path: Path) -> None:
    make(tmp_path / "t", {"instruction.md": ""})
    with pytest.raises(DatasetError, match=r"instruction\.md is empty\nNo task is left\.$"):
        read_tasks(tmp_path, {}, skip_broken=skip_broken)


def test_unknown_fields_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = 'new = 1\n[environment]\ndocker_image = "a"\ncolour = "red"\n[metadata]\nanything = 1'
    for name in ("one", "two"):
        make(tmp_path / name, {"task.toml": lines})
    with caplog.at_level(logging.WARNING):
        assert len(read_tasks(tmp_path, {})) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "task.toml: new is unknown here and has no effect (2 tasks)",
        "task.toml: [environment] colour is unknown here and has no effect (2 tasks)",
    ]


def test_variables_come_from_the_settings_and_never_from_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A", "of this process")
    lines = (
        '[environment]\ndocker_image = "a"\nenv = {ONE = "${A:-none}", TWO = "${A:-}", THREE = "a ${A} b", FOUR = 4}'
    )
    make(tmp_path, {"task.toml": lines})
    assert data_of(tmp_path).variables == {"ONE": "none", "TWO": "", "THREE": "a ${A} b", "FOUR": "4"}
    assert data_of(tmp_path, A="given").variables["ONE"] == "given"


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    make(tmp_path / "t", {"task.toml": f"\ufeff{NAMED}", "instruction.md": "\ufeffDo it."})
    (task,) = read_tasks(tmp_path, {})
    assert (task.prompt, task.data.image) == ("Do it.", "a")


# ------------------------------------------------------------------------------------------------------- compose files

OF_HARBOR = """
version: "3"
services:
  main:
    build: {context: "${CONTEXT_DIR}", dockerfile: Dockerfile}
    image: ${MAIN_IMAGE_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment: ["TEST_DIR=${TEST_DIR}"]
    volumes: ["${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}"]
    deploy: {resources: {limits: {cpus: "${CPUS}", memory: "${MEMORY}"}}}
    x-note: {any: thing}
"""
COMPOSE = "environment/docker-compose.yaml"


def test_a_compose_file_that_says_what_harbor_s_own_says_changes_nothing(tmp_path: Path) -> None:
    data = data_of(make(tmp_path, {"task.toml": "", "environment/Dockerfile": "FROM a", COMPOSE: OF_HARBOR}))
    assert data.build is not None
    assert (data.image, data.build.context, data.build.target) == (None, tmp_path / "environment" / ".", None)
    assert data.variables == {"TEST_DIR": "/tests"}


def test_the_one_service_of_a_compose_file_is_the_agent_s_container(tmp_path: Path) -> None:
    text = """
services:
  main:
    build: {context: app, dockerfile: own.Dockerfile, args: {VERSION: "${V:-3}"}, target: tools}
    environment: {A: 1, B: true, C: "x${V}y$$", D: null, E: "${V-none}"}
    working_dir: /srv
    user: 1000
    tty: true
"""
    toml = '[environment]\ndocker_image = "a"\nenv = {A = "of task.toml"}\n[verifier]\nuser = "root"'
    make(tmp_path, {"task.toml": toml, COMPOSE: text, "environment/app/own.Dockerfile": "FROM a"})
    data = data_of(tmp_path, V="4", D="of the settings")
    assert data.build is not None
    assert (data.build.dockerfile, data.build.target) == (tmp_path / "environment/app/own.Dockerfile", "tools")
    assert (data.image, data.build.arguments, data.workdir) == (None, {"VERSION": "4"}, "/srv")
    assert (data.agent_user, data.verifier_user) == ("1000", "root")
    assert data.variables == {"A": "of task.toml", "B": "true", "C": "x4y$", "D": "of the settings", "E": "4"}


def test_an_image_of_a_compose_file_comes_before_the_dockerfile(tmp_path: Path) -> None:
    text = "services: {main: {image: 'a:2', command: tail -f /dev/null}}"
    data = data_of(make(tmp_path, {COMPOSE: text, "environment/Dockerfile": "FROM a"}))
    assert (data.image, data.build) == ("a:2", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services: {}", "it has no service: name the agent's container `main`"),
        ("", "it has no service"),
        ("- a", "the file must be a mapping, got list"),
        ("services: [a]", "services must be a mapping, got list"),
        ("services:\n  main: {a: [}\n", ", line 2: "),
        ("services: {main: {}, db: {image: b}}", "services 'main', 'db': containers of several services are not"),
        ("services: {client: {image: b}}", "its only service is 'client', which Harbor runs beside"),
        ("services: {main: {command: python3 server.py}}", "main.command: let the image's ENTRYPOINT start it"),
        ("services: {main: {privileged: true, ports: ['80:80']}}", "main.privileged: remove it, or leave the task out"),
        ("services: {main: {network_mode: host}}", "main.network_mode: write [environment] network_mode in task.toml"),
        ("services: {main: {volumes: ['./data:/data']}}", "main.volumes: copy the files in the Dockerfile"),
        ("services: {main: {mem_limit: 2g}}", "main.mem_limit: write [environment] memory_mb in task.toml"),
        ("services: {main: {build: {context: ..}}}", "build: '..' is not in environment/: move it there"),
        ("services: {main: {build: {context: ., secrets: [a]}}}", "main.build.secrets: write it in environment/Docker"),
        ("services: {main: {build: .}}", "build: there is no environment/Dockerfile"),
        ("a: &a [1]\nb: *a", ", line 2: aliases are not read: write the value out"),
        (f"a: {'[' * 9_999}", ": maximum recursion"),
        (f"a: {'9' * 9_999}", ": Exceeds the limit"),
        ("#" * 70_000, ": it has 70000 characters, expected at most 65536"),
        ("services: {main: {}}\nnetworks: {a: {}}", "networks: remove it, or leave the task out"),
        ("services: {main: {environment: [K]}}", "environment.K needs a value: set env.world.variables to {K: ...}"),
        ("services: {main: {environment: {K: [1]}}}", "environment.K must be a text, got list"),
    ],
)
def test_other_compose_files_are_refused_by_name_with_what_to_do(text: str, said: str, tmp_path: Path) -> None:
    make(tmp_path / "t", {COMPOSE: text})
    with pytest.raises(DatasetError, match=r"t: environment/docker-compose\.yaml") as error:
        read_tasks(tmp_path, {})
    assert said in str(error.value)


def test_a_folder_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="holds no task: no folder in it has a task"):
        read_tasks(tmp_path, {})
    with pytest.raises(DatasetError, match="there is no folder"):
        read_tasks(tmp_path / "elsewhere", {})


def test_the_folder_is_required() -> None:
    with pytest.raises(ValidationError, match=r"world\.folder\n  Field required"):
        AgentEnvConfig(world="harbor")  # type: ignore[arg-type]


def test_a_sandbox_without_containers_is_refused() -> None:
    config = AgentEnvConfig(world={"type": "harbor", "folder": "tasks"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"of docker or podman on this machine: set .* got bubblewrap"):
        make_world(config)


def test_an_image_that_another_process_builds_for_ever_is_not_waited_for(tmp_path: Path) -> None:
    async def wait(limit_s: float) -> None:
        async with _lock_of("agentic-opd:unit-test-lock", limit_s):
            with pytest.raises(
                WorldError, match=r"another process has been building .* for over 0 s and holds '.*lock'"
            ):
                async with _lock_of("agentic-opd:unit-test-lock", 0.0):
                    pass

    asyncio.run(wait(60.0))
