import asyncio
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from agentic_opd.core.errors import ConfigError, ServerMismatchError
from agentic_opd.core.exit_codes import EXIT_USAGE
from agentic_opd.env import command
from agentic_opd.env.opd import AgenticOPDEnv, AgenticOPDEnvConfig
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.flags import parse
from agentic_opd.settings.read import Settings, read_settings
from tests.unit.distill.fakes import Script, served

ENV, SERVERS = AgenticOPDEnv.config_init()


def read(*argv: str) -> Settings:
    parser = command.build_parser("prog", "text", {"env": ENV, "openai": SERVERS[0]})
    return read_settings(parse(parser, ["process", *argv]), ENV, SERVERS)


def wrong(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    return str(caught.value)


def test_the_defaults_that_the_project_promises() -> None:
    env = read().env
    assert (env.opd_enabled, env.distill_topk, env.prm_votes, env.hint_max_next_state_chars) == (True, 50, 3, 4000)
    assert (env.reward.correctness, env.reward.efficiency, env.reward.tool_usage) == (0.7, 0.15, 0.15)
    assert (env.hint.vote_rule, env.hint.selection, env.hint.placement) == ("majority", "longest", "end")


def test_flags_go_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("env: {group_size: 2, seed: 5}\nopenai: {model_name: m, base_url: http://h:1/v1}\n")
    settings = read("--config", str(file), "--env.group_size", "8", "--openai.api_key", "1234")
    assert (settings.env.group_size, settings.env.seed, settings.env.prm_votes) == (8, 5, 3)
    (server,) = settings.servers
    assert (server.model_name, server.base_url, server.api_key) == ("m", "http://h:1/v1", "1234")


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--env.total_steps", "-1"], "total_steps", -1),
        (["--env.resume"], "resume", True),
        (["--env.resume", "false"], "resume", False),
        (["--env.opd_enabled=false"], "opd_enabled", False),
        (["--env.hint.placement", "last_user"], "hint.placement", "last_user"),
    ],
)
def test_flag_values(argv: list[str], name: str, value: Any) -> None:
    assert attrgetter(name)(read(*argv).env) == value


def test_all_wrong_settings_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("env: {distil_topk: 5, prm_votes: 0, hint_placement: middle}\nopenAI: {}\n")
    message = wrong("--config", str(file), "--env.reward.correctness", "0.9", "--openai.base_url", "nowhere")
    assert "section 'openAI'" in message
    assert "did you mean 'openai'" in message
    assert "env.distil_topk is unknown; did you mean 'env.distill_topk'?" in message
    assert "env.prm_votes: Input should be greater than or equal to 1, got 0" in message
    assert "env.hint.placement" in message
    assert "openai.base_url must be http" in message


def test_weights_must_add_up() -> None:
    assert "must add up to 1, got 1.2" in wrong("--env.reward.correctness", "0.9")


def test_a_key_is_never_shown() -> None:
    message = wrong("--env.judge.api_key", "sk-secret", "--env.prm_votes", "none")
    assert "sk-secret" not in message
    assert "env.judge: api_key is set, but base_url is not" in wrong("--env.judge.api_key", "sk-secret")


def test_several_servers_come_from_the_file_only(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("openai: [{base_url: 'http://a/v1'}, {base_url: 'http://b/v1'}]\n")
    assert [server.base_url for server in read("--config", str(file)).servers] == ["http://a/v1", "http://b/v1"]
    assert "which one is meant" in wrong("--config", str(file), "--openai.model_name", "m")


def test_a_key_that_stands_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("env:\n  seed: 1\n  group_size: 2\n  seed: 3\nopenai: {}\nenv: {seed: 4}\n")
    message = wrong("--config", str(file))
    assert "'seed' is set in line 2 and again in line 4" in message
    assert "'env' is set in line 1 and again in line 6" in message


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("openai:\n  - &one {base_url: http://a/v1, model_name: m}\n  - {<<: *one, base_url: http://b/v1}\n")
    assert [server.base_url for server in read("--config", str(file)).servers] == ["http://a/v1", "http://b/v1"]


@pytest.mark.parametrize("text", ["- a\n", "env: [", "\0", "env: 3\n", "openai: [3]\n", "env: {seed: 2026-02-30}\n"])
def test_a_broken_file_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert "c.yaml" in wrong("--config", str(file))


def test_a_misspelt_flag_hides_nothing_else_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("env: {distil_topk: 5}\n")
    argv = ["process", "--config", str(file), "--env.grop_size", "4", "--prm_votes=3", "stray", "--env.seed"]
    assert command.main(AgenticOPDEnv, [*argv, "--env.max_turns", "0", "--openai.base_url", "nowhere"]) == 2
    said = capsys.readouterr().err
    for message in (
        "env.grop_size is unknown; did you mean 'env.group_size'?",
        "--prm_votes is unknown; did you mean '--env.prm_votes'?",
        "'stray' belongs to no flag",
        "--env.seed needs a value",
        "env.distil_topk is unknown; did you mean 'env.distill_topk'?",
        "env.max_turns: Input should be greater than or equal to 1, got 0",
        "openai.base_url must be http",
    ):
        assert message in said
    assert said.count("\n  - ") == 7


def test_settings_of_atropos_that_do_nothing_are_taken_and_named(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("env: {worker_timeout: 60}\nopenai: {health_check: true}\n")
    settings = read("--config", str(file), "--env.batch_size", "8")
    assert settings.without_effect == ("env.batch_size", "env.worker_timeout", "openai.health_check")
    assert read().without_effect == ()


def shown_in(mode: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        command.main(AgenticOPDEnv, [mode, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_shows_each_mode_what_it_needs_the_most_used_first(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {mode: shown_in(mode, capsys) for mode in command.MODES}
    text = shown["process"]
    assert text.index("The run and its output:") < text.index("Policy server:") < text.index("Agent:")
    assert "--env.distill_topk N" in text
    assert "(default: 50)" in text
    assert "Exit code 0: done; 1: failed" in text
    assert "--env.worker_timeout" not in text
    assert "This environment's own" not in text, "every setting of ours has its place"
    assert ["--env.rollout_server_url" in shown[mode] for mode in shown] == [True, False, False]
    assert ["--env.prm_votes" in shown[mode] for mode in shown] == [True, True, False]


class LevelsConfig(AgenticOPDEnvConfig):
    levels: int = Field(default=3, description="How many levels.")
    group_size: int = 8


class LevelsEnv(AgenticOPDEnv):
    env_config_cls = LevelsConfig  # type: ignore[assignment]

    @classmethod
    def config_init(cls) -> Any:
        return LevelsConfig(), SERVERS


def test_the_settings_of_a_subclass_have_a_place_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no docstring of its own, and overrides a setting, which stays where it was."""
    with pytest.raises(SystemExit):
        command.main(LevelsEnv, ["process", "--help"])
    before, _, own = capsys.readouterr().out.partition("This environment's own")
    assert "How many levels (default: 3)" in own
    assert "form a group" not in own
    assert before.index("The run and its output") < before.index("--env.group_size N") < before.index("Policy server")


def test_the_settings_of_a_subclass_reach_it() -> None:
    defaults, servers = LevelsEnv.config_init()
    parser = command.build_parser("prog", "text", {"env": defaults, "openai": servers[0]})
    argv = ["process", "--env.levels", "4", "--env.tokenizer_name", "scripts/demo_policy/policy"]
    argv += ["--openai.model_name", "scripts/demo_policy/policy"]
    settings = read_settings(parse(parser, argv), defaults, servers)
    env = LevelsEnv(settings.env, settings.servers)
    assert (env.config.levels, env.config.group_size) == (4, 8)  # type: ignore[attr-defined]
    assert isinstance(env.config, LevelsConfig)


ENV_CONFIGS = sorted(path for path in Path("configs").glob("*.yaml") if not path.name.startswith(("train_", "up_")))


@pytest.mark.parametrize("file", ENV_CONFIGS, ids=lambda file: file.name)
def test_every_config_loads(file: Path) -> None:
    assert read("--config", str(file)).servers


@pytest.mark.parametrize("mode", ["process", "serve"])
def test_a_file_that_cannot_be_written_is_named_before_a_server_is_asked(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [mode, "--env.data_path_to_save_groups", str(tmp_path), "--openai.base_url", "http://127.0.0.1:9/v1"]
    assert command.main(argv=argv) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "Is a directory" in error
    assert "127.0.0.1:9" not in error


@pytest.mark.parametrize("mode", ["process", "serve", "evaluate"])
def test_what_a_world_refuses_is_named_before_a_server_is_asked(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [mode, "--env.world.type", "babyai", "--env.world.levels", "GoToNowhere"]
    assert command.main(argv=[*argv, "--openai.base_url", "http://127.0.0.1:9/v1"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "GoToNowhere" in error
    assert "127.0.0.1:9" not in error


def test_a_model_that_is_not_served_is_refused_before_its_tokenizer_is_loaded() -> None:
    """A hub that can't be reached would be asked for the tokenizer for half a minute."""

    models = {"data": [{"id": "demo", "root": "a/demo", "max_model_len": 9}]}

    async def name(model: str) -> list[Any]:
        async with served({"/v1/opd/info": Script(404), "/v1/models": Script(models)}) as url:
            return await command.name_models([PolicyServerConfig(base_url=f"{url}/v1", model_name=model)], 0.0)

    with pytest.raises(ServerMismatchError, match=r"serves 'demo', 'a/demo', and openai\.model_name is 'big'"):
        asyncio.run(name("big"))
    for model in ("demo", "a/demo"):
        (server,) = asyncio.run(name(model))
        assert server.model_name == model
