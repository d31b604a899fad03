"""Nested settings: sections, sections with types, and the layers defaults, file and flags."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field, ValidationError

from agentic_opd.core.errors import ConfigError
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.fields import RUN_ONLY, Kinds, Section, line_settings
from agentic_opd.settings.flags import SettingsParser, add_settings, parse
from agentic_opd.settings.listing import settings_in
from agentic_opd.settings.read import read_settings


class JudgeSection(Section):
    temperature: float = Field(default=0.7, ge=0)
    max_tokens: int = 512
    api_key: str | None = None
    extra_body: dict[str, Any] = Field(default_factory=dict)


class BoxSection(Section):
    type: str
    memory_mb: int = 1024
    workers: Annotated[int, RUN_ONLY] = 1


class PlainBox(BoxSection):
    type: Literal["plain"] = "plain"


class ImageBox(BoxSection):
    type: Literal["image"] = "image"
    image: str = "slim"
    warm: int = 0


class EnvSettings(BaseModel):
    seed: int = 0
    judge: JudgeSection = JudgeSection()
    box: Annotated[BoxSection, Kinds.of(plain=PlainBox, image=ImageBox)] = PlainBox()


def read(tmp_path: Path, file: Any, *argv: str, defaults: BaseModel | None = None) -> Any:
    parser = SettingsParser(prog="prog", add_help=False)
    defaults = defaults or EnvSettings()
    add_settings(parser, {"env": defaults, "openai": PolicyServerConfig()})
    if file is not None:
        path = tmp_path / "env.yaml"
        path.write_text(yaml.safe_dump({"env": file}))
        argv = (*argv, "--config", str(path))
    return read_settings(parse(parser, argv), defaults, [PolicyServerConfig()]).env


def refusal(tmp_path: Path, file: Any, *argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, file, *argv)
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def test_a_flag_replaces_one_setting_of_a_section_in_the_file(tmp_path: Path) -> None:
    file = {"judge": {"temperature": 0.2, "max_tokens": 64}}
    env = read(tmp_path, file, "--env.judge.temperature", "0.5", "--env.seed", "3")
    assert (env.judge.temperature, env.judge.max_tokens, env.seed) == (0.5, 64, 3)


def test_a_whole_section_is_a_flag_and_merged_like_its_settings(tmp_path: Path) -> None:
    file = {"judge": {"temperature": 0.2, "max_tokens": 64}}
    env = read(tmp_path, file, "--env.judge", "{temperature: 0.5}", "--env.judge.api_key", "123")
    assert env.judge == JudgeSection(temperature=0.5, max_tokens=64, api_key="123")


def test_defaults_of_an_environment_stay_below_the_file(tmp_path: Path) -> None:
    defaults = EnvSettings(judge=JudgeSection(temperature=0.1, max_tokens=9), box=ImageBox(image="own"))
    env = read(tmp_path, {"judge": {"max_tokens": 64}, "box": {"warm": 2}}, defaults=defaults)
    assert (env.judge.temperature, env.judge.max_tokens) == (0.1, 64)
    assert env.box == ImageBox(image="own", warm=2)


@pytest.mark.parametrize(
    ("file", "argv", "box"),
    [
        (None, (), PlainBox()),
        ({"box": "image"}, (), ImageBox()),
        ({"box": {"type": "image", "image": "own"}}, (), ImageBox(image="own")),
        (None, ("--env.box", "image"), ImageBox()),
        (None, ("--env.box.image", "own", "--env.box.type", "image"), ImageBox(image="own")),
        (None, ("--env.box", "{type: image, image: own}", "--env.box.warm", "2"), ImageBox(image="own", warm=2)),
        ({"box": {"memory_mb": 2048}}, ("--env.box", "image"), ImageBox(memory_mb=2048)),
        # Another type drops the settings that only the earlier one has.
        ({"box": {"type": "image", "image": "own", "memory_mb": 9}}, ("--env.box", "plain"), PlainBox(memory_mb=9)),
    ],
)
def test_the_type_of_a_section_decides_its_settings(
    file: Any, argv: tuple[str, ...], box: BoxSection, tmp_path: Path
) -> None:
    assert read(tmp_path, file, *argv).box == box


def test_errors_name_dotted_paths_all_at_once(tmp_path: Path) -> None:
    lines = refusal(
        tmp_path,
        {"judge": {"temprature": 1, "max_tokens": "many"}, "box": {"image": "own"}, "sed": 1},
        *("--env.judge.temperature", "-1", "--env.judge.extra_body.key", "1", "--env.seed"),
    )
    for line in (
        "env.judge.temprature is unknown; did you mean 'env.judge.temperature'?",
        "env.box.image is a setting of env.box.type image, and the type is plain",
        "env.sed is unknown; did you mean 'env.seed'?",
        "env.judge.extra_body.key is unknown: env.judge.extra_body is a single value",
        "--env.seed needs a value",
        "env.judge.temperature: Input should be greater than or equal to 0, got -1",
    ):
        assert line in lines
    assert any(line.startswith("env.judge.max_tokens: Input should be a valid integer") for line in lines)
    assert len(lines) == 7


def test_an_unknown_type_is_answered_with_the_types(tmp_path: Path) -> None:
    assert refusal(tmp_path, None, "--env.box", "imag") == [
        "env.box.type: expected plain, image, got 'imag'; did you mean 'image'?"
    ]


def test_a_value_in_place_of_a_section_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, {"judge": 3}) == ["env.judge holds settings by name, got 3"]


def test_models_are_made_of_types_in_python_too() -> None:
    assert EnvSettings.model_validate({"box": {"type": "image", "warm": 1}}).box == ImageBox(warm=1)
    assert EnvSettings(box=ImageBox(warm=1)).model_dump()["box"]["warm"] == 1
    with pytest.raises(ValidationError, match="expected plain, image, got 'none'"):
        EnvSettings.model_validate({"box": "none"})
    with pytest.raises(ValidationError, match="Extra inputs"):
        EnvSettings.model_validate({"box": {"image": "own"}})


def test_settings_of_lines_have_dotted_names_without_keys() -> None:
    config = EnvSettings(judge=JudgeSection(api_key="sk"), box=ImageBox(warm=1))
    assert line_settings(config) == {
        "seed": 0,
        **{"judge.temperature": 0.7, "judge.max_tokens": 512, "judge.extra_body": {}},
        **{"box.type": "image", "box.memory_mb": 1024, "box.image": "slim", "box.warm": 1},
    }


def test_a_list_has_the_settings_of_each_type_once() -> None:
    rows = {row.flag: row.type_name for row in settings_in({"env": EnvSettings()})}
    assert rows["env.box.memory_mb"] is None
    assert rows["env.box.image"] == "image"
    assert "env.box" not in rows


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ({5: 1}, "env: the name of a setting is a text, got 5"),
        ({"judge": {None: 1}}, "env.judge: the name of a setting is a text, got None"),
        ({"seed": True}, "env.seed: expected a number, got true"),
        ({"judge": {"temperature": False}}, "env.judge.temperature: expected a number, got false"),
        (
            {"judge.temperature": 1},
            "env.judge.temperature is unknown as one name; write it in sections: judge: {temperature: ...}",
        ),
    ],
)
def test_a_name_or_a_value_of_a_wrong_type_is_refused_in_a_sentence(tmp_path: Path, file: Any, sentence: str) -> None:
    assert refusal(tmp_path, file) == [sentence]


@pytest.mark.parametrize("value", ["${JUDGE_KEY}", "$JUDGE_KEY"])
def test_a_variable_of_the_environment_is_refused_in_a_file_and_not_in_a_flag(tmp_path: Path, value: str) -> None:
    (sentence,) = refusal(tmp_path, {"judge": {"api_key": value}})
    assert sentence.startswith(f"env.judge.api_key: {value!r} stays as it is in a file")
    assert sentence.endswith(f'--env.judge.api_key "{value}"')
    assert read(tmp_path, {"judge": {"api_key": f"x{value}"}}).judge.api_key == f"x{value}"
    assert read(tmp_path, None, "--env.judge.api_key", value).judge.api_key == value
