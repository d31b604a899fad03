import asyncio
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from demo_policy import POLICY_DIR

from agentic_opd.cli.doctor import machine
from agentic_opd.cli.doctor.command import build_parser, main
from agentic_opd.cli.doctor.diagnose import CHECKS, Diagnosis, run_checks
from agentic_opd.cli.doctor.servers import PAIR, DoctorSetup, check_judge, check_versions, judged_noise
from agentic_opd.core.errors import ConfigError, OPDError, OutputError, ServerMismatchError
from agentic_opd.env.config import default_settings
from agentic_opd.env.setup import REQUIREMENTS, Note, SetupCheck, Status, check_tasks, check_world, meet
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import ServerInfo
from agentic_opd.sandboxes import memory
from agentic_opd.settings.listing import settings_in
from agentic_opd.worlds.config import WorldConfig
from tests.support.fake_plugin import fake_plugin
from tests.unit.distill.fakes import Script, served


def diagnoses(*checks: SetupCheck) -> list[Diagnosis]:
    async def run() -> list[Diagnosis]:
        return [one async for one in run_checks(checks, [])]

    return asyncio.run(run())


def ends(note: Note | Exception) -> Any:
    async def check(setup: list[str]) -> Note:
        if isinstance(note, Exception):
            raise note
        return note

    return check


def test_the_rest_goes_on_after_a_failure_where_it_can() -> None:
    """b fails; c needs it, d needs c; e needs neither, and f needs only what a check was not asked to look at."""
    found = diagnoses(
        SetupCheck("a", ends(Note("unused", Status.SKIPPED))),
        SetupCheck("b", ends(ConfigError("set it"))),
        SetupCheck("c", ends(Note("fine")), ("b",)),
        SetupCheck("d", ends(Note("fine")), ("c",)),
        SetupCheck("e", ends(Note("doubtful", Status.WARNING))),
        SetupCheck("f", ends(Note("fine")), ("a", "e")),
    )
    assert [(one.name, one.status.value, one.text) for one in found] == [
        ("a", "skipped", "unused"),
        ("b", "failed", "set it"),
        ("c", "skipped", "needs: b"),
        ("d", "skipped", "needs: c"),
        ("e", "warning", "doubtful"),
        ("f", "ok", "fine"),
    ]


def test_a_check_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(setup: list[str]) -> Note:
        await asyncio.sleep(60)
        return Note("")

    monkeypatch.setattr("agentic_opd.cli.doctor.diagnose.PATIENCE_S", 0.01)
    assert [one.status for one in diagnoses(SetupCheck("a", hang))] == [Status.FAILED]


def test_every_check_needs_earlier_ones() -> None:
    names = [check.name for check in CHECKS]
    assert {check.name for check in REQUIREMENTS} < {*names}, "what a run checks, doctor prints"
    assert all(needed in names[:i] for i, check in enumerate(CHECKS) for needed in check.needs)


def test_setup_ends_with_the_first_failure_and_logs_warnings(caplog: pytest.LogCaptureFixture) -> None:
    checks = [
        SetupCheck("a", ends(Note("doubtful", Status.WARNING))),
        SetupCheck("b", ends(ConfigError("set it"))),
        SetupCheck("c", ends(ConfigError("too late"))),
    ]
    with pytest.raises(ConfigError, match="set it"):
        asyncio.run(meet(checks, setup_of()))
    assert caplog.messages == ["doubtful"]


def setup_of(**settings: Any) -> DoctorSetup:
    config, servers = default_settings()
    config = type(config).model_validate({**config.model_dump(), **settings})
    return DoctorSetup.of(config, servers, is_serve=False)


def look(check: Any, setup: DoctorSetup) -> Note:
    async def run() -> Note:
        try:
            return await check(setup)
        finally:
            await setup.close()

    return asyncio.run(run())


def test_packages_that_do_not_fit_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "atroposlib 0.4.0" in look(machine.check_packages, setup_of()).text
    wanted = ["numpy>=99", "no-such-package-here", "openai>=1.60", "torch>=99 ; extra == 'train'"]
    monkeypatch.setattr(machine, "requires", lambda name: wanted)
    with pytest.raises(ConfigError) as caught:
        look(machine.check_packages, setup_of())
    assert "numpy>=99 is required" in str(caught.value)
    assert "no-such-package-here is not installed" in str(caught.value)
    assert "openai" not in str(caught.value)
    assert "torch" not in str(caught.value)


def test_a_package_that_is_not_installed_itself_can_not_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Sequence[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine, "requires", missing)
    assert look(machine.check_packages, setup_of()).status is Status.WARNING


def test_places_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = tmp_path / "new" / "folder" / "groups.jsonl"
    places: dict[str, Any] = {"data_path_to_save_groups": str(groups), "data_dir_to_save_evals": str(tmp_path)}
    assert look(machine.check_disk, setup_of(**places)).status is Status.OK
    assert not groups.parent.exists(), "looking leaves nothing behind"
    groups.parent.mkdir(parents=True)
    groups.write_text("{}\n")
    note = look(machine.check_disk, setup_of(**places))
    assert (note.status, "--env.resume" in note.text) == (Status.WARNING, True)
    assert look(machine.check_disk, setup_of(**places, overwrite=True)).status is Status.OK
    monkeypatch.setattr(machine, "_LEAST_FREE_GIB", 1e9)
    assert "GiB are free" in look(machine.check_disk, setup_of(**places)).text
    with pytest.raises(OutputError, match="data_path_to_save_groups"):
        look(machine.check_disk, setup_of(data_path_to_save_groups="/dev/null/groups.jsonl"))


def test_tasks_and_sandbox(tmp_path: Path) -> None:
    assert "8 tasks" in look(check_tasks, setup_of()).text
    with pytest.raises(OPDError, match="no such file"):
        look(check_tasks, setup_of(world={"dataset_name": str(tmp_path / "none.jsonl")}))


@pytest.mark.sandbox
def test_how_memory_is_limited_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "its memory is limited by " in look(check_world, setup_of()).text
    monkeypatch.setattr(memory, "parent_group", lambda: None)
    assert "its memory is limited by a watch" in look(check_world, setup_of()).text


def test_wandb_must_know_who_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(machine.check_wandb, setup_of()).status is Status.SKIPPED
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert look(machine.check_wandb, setup_of(use_wandb=True)).status is Status.OK


@pytest.mark.parametrize(
    ("info", "doubt"),
    [
        (ServerInfo("m", 9, has_plugin=True, plugin_version="0.1.0", vllm_version="0.28.1"), "runs vLLM 0.28.1"),
        (ServerInfo("m", 9, has_plugin=False, vllm_version="0.33.0"), "no agentic_opd plugin"),
        (ServerInfo("m", 9, has_plugin=True, plugin_version="0.1.0", vllm_version="0.33.0.dev1+g12"), None),
    ],
)
def test_versions_that_differ_are_a_doubt(info: ServerInfo, doubt: str | None) -> None:
    setup = setup_of()
    setup.clients = [PluginClient(setup.connections[0], info)]
    note = look(check_versions, setup)
    assert note.status is (Status.OK if doubt is None else Status.WARNING)
    assert (doubt or "") in note.text


@pytest.mark.parametrize(("scope", "answer"), [("turn", "<think> hm"), ("trajectory", "\\boxed{1}")])
def test_a_judge_is_asked_what_a_run_asks_and_its_votes_are_read(scope: str, answer: str) -> None:
    script = Script({"data": []}, {"choices": [{"message": {"content": answer}}] * 3})

    async def run() -> Note:
        async with served({"/v1/models": script, "/v1/chat/completions": script}) as url:
            setup = setup_of(judge={"base_url": f"{url}/v1", "model_name": "j", "scope": scope})
            try:
                return await check_judge(setup)
            finally:
                await setup.close()

    with pytest.raises(ServerMismatchError, match="all 3 votes"):
        asyncio.run(run())
    system, user = (message["content"] for message in script.bodies[1]["messages"])
    assert PAIR.evidence[0].text in user
    assert ("\\boxed{N}" in system) is (scope == "trajectory")
    assert (script.bodies[1]["n"], script.bodies[1]["model"]) == (3, "j")


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", Status.OK), ("float32", Status.WARNING), (None, Status.OK)]
)
def test_noise_is_judged_by_the_precision_that_the_server_names(dtype: str | None, expected: Status) -> None:
    """Of four tokens that were sampled one is scored 0.4 nats lower: 0.2 root mean square."""
    note = judged_noise((0.0, 0.0, 0.0, -0.39), dtype)
    assert note.status is expected
    assert note.text.startswith("3.9e-01 nats at most, 2.0e-01 root mean square, over 4 sampled tokens in ")
    assert (dtype or "does not name") in note.text
    assert ("more than the precision explains" in note.text) == (expected is Status.WARNING)


def test_no_judge_is_asked_where_no_source_needs_one() -> None:
    """Nobody listens there."""

    async def run() -> Note:
        setup = setup_of(judge={"base_url": "http://127.0.0.1:9/v1"}, hint={"source": "feedback,reference"})
        try:
            return await check_judge(setup)
        finally:
            await setup.close()

    note = asyncio.run(run())
    assert (note.status, note.text) == (Status.SKIPPED, "hint.source feedback, reference needs no judge")


def test_wrong_settings_are_named_like_those_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--env.grop_size", "4", "--env.prm_votes", "0"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'env.group_size'" in said
    assert "env.prm_votes" in said


def test_it_takes_every_setting_of_a_run() -> None:
    flags = {row.flag for row in settings_in(build_parser().models)}
    assert {row.flag for row in settings_in({"env": WorldConfig()})} <= flags


def test_one_line_a_check() -> None:
    text = Diagnosis("noise floor", Status.OK, "1e-6 nats").line().plain
    assert text == "ok       noise floor  1e-6 nats"


def test_json_holds_every_check_and_a_dead_server_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--env.server_retry_s", "0", "--env.rollout_server_url", "http://127.0.0.1:9")
    assert main(["--json", "--openai.base_url", "http://127.0.0.1:9/v1", *flags]) == 1
    found = {one["name"]: one["status"] for one in json.loads(capsys.readouterr().out)}
    assert list(found) == [check.name for check in CHECKS]
    assert found["server"] == "failed"
    assert found["judge"] == "skipped"


@pytest.mark.slow
def test_a_served_name_need_not_be_that_of_a_tokenizer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with vLLM's --served-model-name: the settings name the model as served, and the tokenizer beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # Else the hub is asked, for a minute.
    flags = ["--env.rollout_server_url", "http://127.0.0.1:9", "--env.renderer.name", "qwen3"]
    flags += ["--env.renderer.options", "{enable_thinking: false}", "--openai.model_name", "a-served-name"]
    with fake_plugin(model="a-served-name") as server:
        url = ["--openai.base_url", f"{server.base_url}/v1"]
        assert main(["--json", *url, *flags, "--env.tokenizer_name", str(POLICY_DIR)]) == 0
        found = {one["name"]: one["status"] for one in json.loads(capsys.readouterr().out)}
        assert {name for name, status in found.items() if status == "ok"} >= {"tokenizer", "judge", "noise floor"}
        assert main(["--json", *url, *flags]) == 1
        texts = {one["name"]: one["text"] for one in json.loads(capsys.readouterr().out) if one["status"] == "failed"}
    assert texts.keys() == {"tokenizer"}
    assert "the tokenizer 'a-served-name' can't be loaded" in texts["tokenizer"]


def test_options_of_the_renderer_without_a_space_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--env.renderer.options", "{enable_thinking:false}"]) == 2
    said = capsys.readouterr().err
    assert "env.renderer.options" in said
    assert "{enable_thinking: false}" in said
    assert "Traceback" not in said
