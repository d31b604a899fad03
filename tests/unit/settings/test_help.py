"""The short help shows at most 30 settings; groups and everything are shown on request."""

import re
from collections.abc import Callable, Sequence

import pytest

from agentic_opd.cli.distill import main as distill
from agentic_opd.cli.doctor.command import main as doctor
from agentic_opd.cli.prove import main as prove
from agentic_opd.env.command import main as environment
from agentic_opd.gateway.command import main as gateway
from agentic_opd.learn.command import main as learn
from agentic_opd.settings.atropos import IdleEnvSettings
from agentic_opd.training.command import main as train
from agentic_opd.up.command import main as up

Main = Callable[[Sequence[str]], int]
MOST_SHOWN = 30
COMMANDS: dict[str, Main] = {
    **{mode: lambda argv, mode=mode: environment(None, [mode, *argv]) for mode in ("process", "serve", "evaluate")},
    **{"gateway": gateway, "train": train, "doctor": doctor, "distill": distill, "prove": prove, "learn": learn},
}


def shown(command: Main, capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        command([*argv])
    assert caught.value.code == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def settings(text: str) -> list[str]:
    return re.findall(r"^  --([a-z_.]+) (?!FILE)", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_help_has_at_most_30_settings_and_names_the_groups(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(COMMANDS[name], capsys, "--help")
    assert 10 <= len(settings(text)) <= MOST_SHOWN
    assert "--help GROUP shows one group of settings" in text
    everything = shown(COMMANDS[name], capsys, "--help", "all")
    assert not [idle for idle in IdleEnvSettings.model_fields if f"--env.{idle} " in everything]


def test_the_help_of_up_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(re.findall(r"^  --", shown(up, capsys, "--help"), re.MULTILINE)) <= MOST_SHOWN


@pytest.mark.parametrize(("group", "setting"), [("judge", "env.judge.question"), ("sandbox", "env.sandbox.image")])
def test_a_group_is_shown_alone(group: str, setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = settings(shown(COMMANDS["process"], capsys, "--help", group))
    assert setting in names
    assert all(name.startswith(f"env.{group}.") for name in names)


def test_all_is_everything_and_an_unknown_group_is_answered_with_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    names = settings(shown(COMMANDS["process"], capsys, "--help", "all"))
    assert {"env.judge.question", "env.sandbox.type", "env.sandbox.warm", "env.eval.samples"} <= {*names}
    shared = {name for name in names if names.count(name) > 1}
    assert all(name.startswith("env.world.") for name in shared), "several worlds have a setting of this name"
    text = shown(COMMANDS["process"], capsys, "--help", "jugde", code=2)
    assert "--help jugde: there is no such group of settings; there are run, policy, distillation, hint, judge" in text


def test_a_type_of_a_section_is_named_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(COMMANDS["process"], capsys, "--help", "sandbox")
    assert "--env.sandbox.type {bubblewrap,docker}" in text
    assert re.search(r"--env\.sandbox\.image TEXT\n\s+docker: Image with Python", text)
