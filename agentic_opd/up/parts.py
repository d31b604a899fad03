"""A loop's settings -> its parts, each with its command line, port and readiness check.

What follows from another part is filled in: addresses, models and folders; adapters on the policy's servers and their
moving average as the teacher if the trainer has adapters; and rows as text, which the package's trainer reads.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from agentic_opd.core.errors import ConfigError
from agentic_opd.env.command import build_parser as environment_parser
from agentic_opd.env.config import AgenticOPDEnvConfig, default_settings
from agentic_opd.gateway.command import build_parser as gateway_parser
from agentic_opd.gateway.command import default_config as gateway_defaults
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.serving.launch import parse_args as parse_server
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.files import read_yaml
from agentic_opd.settings.flags import parse
from agentic_opd.settings.read import read_settings
from agentic_opd.training.command import build_parser as trainer_parser
from agentic_opd.training.config import TrainerConfig, read_config
from agentic_opd.up.config import EnvironmentConfig, Flags, UpConfig
from agentic_opd.up.mismatches import mismatches

Role = Literal["server", "api", "environment", "trainer"]
Start = Literal["new", "resume", "overwrite"]
"""Handling of an earlier run's files in the output folder."""
_GROUPS = "env.data_path_to_save_groups"
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank."""


@dataclass(frozen=True, slots=True)
class LoopPart:
    """A process of the loop."""

    name: str
    role: Role
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    port: int | None = None
    """Port on this machine; None if the part does not listen."""
    ready_url: str | None = None
    """The part is ready when this URL answers; None: as soon as its process runs."""

    def written(self) -> str:
        """Return its command as typed in a shell."""
        variables = (f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        return " ".join([*variables, shlex.join((*self.program, *self.arguments))])


def parts_of(config: UpConfig, start: Start = "new") -> list[LoopPart]:
    """Return the parts in the order of their start.

    Raises:
        ConfigError: a part would refuse its command line or its file, or two parts do not fit; the message lists all.
    """
    trainer = _trainer(config, start)
    training = None
    with suppress(ConfigError, SystemExit):  # `_refusal` reports it.
        training = read_config(parse(trainer_parser(), trainer.arguments))
    environments = list(_environments(config, start, training))
    parts = [*_servers(config, training), _api(config), *environments, trainer]
    if wrong := [f"{part.name}: {text}" for part in parts if (text := _refusal(part, config)) is not None]:
        raise ConfigError("\n".join(wrong))
    assert training is not None  # Its refusal is reported above.
    if wrong := list(mismatches(config, training, settings_of(parts, config))):
        raise ConfigError("\n".join(wrong))
    return parts


def settings_of(parts: Sequence[LoopPart], config: UpConfig) -> dict[str, Any]:
    """Return the settings (`env.*`) of each environment of this package by name; a custom script reads its own."""
    settings: dict[str, Any] = {}
    for part in parts:
        environment = config.environments.get(part.name)
        if part.role == "environment" and environment is not None and environment.script is None:
            is_gateway = environment.mode == "gateway"
            read = _read_gateway if is_gateway else _read_environment
            settings[part.name] = read(part.arguments)
    return settings


def _servers(config: UpConfig, training: TrainerConfig | None) -> Iterator[LoopPart]:
    rank = training.lora_rank if training is not None else None
    for name, server in config.servers.items():
        settings: Flags = {"port": server.port}
        if server.serves == "policy":
            settings["weights_root"] = config.output_dir / "weights"
            if rank is not None:
                settings["max_lora_rank"] = next((most for most in _ADAPTER_RANKS if most >= rank), rank)
        own = ("--", *server.vllm_args) if server.vllm_args else ()
        yield LoopPart(
            name,
            "server",
            _module("agentic_opd", "serve-vllm"),
            (server.model, *_options(settings | server.flags), *own),
            _devices(server.devices) | server.variables,
            server.port,
            f"{server.url}/health",
        )


def _api(config: UpConfig) -> LoopPart:
    api = config.api
    settings: Flags = {"host": "127.0.0.1", "port": api.port}
    arguments = tuple(_options(settings | api.flags))
    return LoopPart("api", "api", _module("atroposlib.cli.run_api"), arguments, api.variables, api.port, f"{api.url}/")


def _environments(config: UpConfig, start: Start, training: TrainerConfig | None) -> Iterator[LoopPart]:
    wiring = _wiring(config)
    for number, (name, environment) in enumerate(config.environments.items()):
        file = ("--config", str(environment.config)) if environment.config else ()
        filled_in = {**wiring, **_filled_in(config, environment, training, number)}
        groups = config.output_dir / f"{name}.jsonl"
        arguments = (*file, *_flags({**filled_in, _GROUPS: groups, **environment.flags}))
        program = _module("agentic_opd", environment.mode)
        if environment.script is not None:
            program = (sys.executable, str(environment.script), "serve")
        part = LoopPart(name, "environment", program, arguments, environment.variables)
        if environment.mode == "serve":
            part = replace(part, arguments=(*arguments, *_earlier_run(start, "env.")))
        else:
            with suppress(ConfigError):  # `_refusal` reports it.
                gateway = _read_gateway(arguments)
                part = replace(part, ready_url=f"http://{gateway.host}:{gateway.port}/health")
        yield part


def _filled_in(config: UpConfig, environment: EnvironmentConfig, training: TrainerConfig | None, number: int) -> Flags:
    """Return the flags that follow from other parts, without those that the environment's own file sets.

    `number` is the environment's index. With equal seeds, environments of one file would draw equal tasks.
    """
    settings: Flags = {}
    if environment.script is not None or training is None:
        return settings  # An environment of another package need not have these settings.
    if environment.mode == "serve":
        settings["env.packed_rows"] = True
        if number:
            settings["env.seed"] = number
    has_average = training.lora_rank is not None and training.ema_decay is not None
    if has_average and all(server.serves != "teacher" for server in config.servers.values()):
        settings["env.teacher.weights"] = "ema"
    in_file: object = {}
    if environment.config is not None:
        with suppress(ConfigError):  # `_refusal` reports it.
            in_file = read_yaml(environment.config, "environment").get("env")
    set_names = {*_dotted({"env": in_file})}
    if "env.teacher.base_url" in {*set_names, *_dotted(environment.flags)}:
        settings.pop("env.teacher.weights", None)
    return {name: value for name, value in settings.items() if name not in set_names}


def _dotted(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in settings, and the dotted names in their sections."""
    for name, value in settings.items():
        yield name
        if isinstance(value, dict):
            yield from _dotted({f"{name}.{inner}": entry for inner, entry in cast(dict[str, Any], value).items()})


def _wiring(config: UpConfig) -> Flags:
    """Return the addresses of the other parts, as flags of an environment."""
    policies = config.policies
    settings: Flags = {
        "openai.base_url": ",".join(f"{server.url}/v1" for server in policies),
        "openai.model_name": str(policies[0].flags.get("served_model_name", policies[0].model)),
        "env.rollout_server_url": config.api.url,
    }
    for server in config.servers.values():
        if server.serves != "policy":
            settings[f"env.{server.serves}.base_url"] = f"{server.url}/v1"
    return settings


def _trainer(config: UpConfig, start: Start) -> LoopPart:
    policies = config.policies
    settings: Flags = {
        "model": policies[0].model,
        "output_dir": config.output_dir,
        "weights_dir": config.output_dir / "weights",
        "api_url": config.api.url,
        "vllm_urls": [server.url for server in policies],
    }
    if config.brake is not None:
        settings["brake.command"] = shlex.join(_evaluation(config))
    trainer = config.trainer
    file = ("--config", str(trainer.config)) if trainer.config else ()
    processes = ("--standalone", "--nproc-per-node", str(trainer.processes), "-m", "agentic_opd.training.trainer")
    return LoopPart(
        "trainer",
        "trainer",
        _module("agentic_opd", "train") if trainer.processes == 1 else _module("torch.distributed.run", *processes),
        (*file, *_flags(settings | trainer.flags), *_earlier_run(start)),
        _devices(trainer.devices) | trainer.variables,
    )


def _evaluation(config: UpConfig) -> tuple[str, ...]:
    """Return the command of the brake's evaluation; the trainer adds servers and folder."""
    assert config.brake is not None
    brake, wiring = config.brake, _wiring(config)
    del wiring["openai.base_url"]
    file = ("--config", str(brake.config)) if brake.config else ()
    program = (sys.executable, str(brake.script)) if brake.script else _module("agentic_opd")
    return (*program, "evaluate", *file, *_flags({**wiring, **brake.flags}))


def _earlier_run(start: Start, section: str = "") -> tuple[str, ...]:
    """Return the flag for the handling of an earlier run's files."""
    return () if start == "new" else (f"--{section}{start}", "true")


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _devices(devices: str | None) -> dict[str, str]:
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}


def _options(flags: Flags) -> Iterator[str]:
    """Yield flags as argparse options: `max_model_len: 4096` as `--max-model-len 4096`, `no_plugin: true` as switch."""
    for name, value in flags.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            yield option
        elif value not in (None, False):
            yield from (option, str(value))


def _flags(flags: Flags) -> Iterator[str]:
    """Yield flags in the style of this package's settings: values are YAML, written as JSON."""
    for name, value in flags.items():
        is_text = isinstance(value, str | Path)
        yield from (f"--{name}", str(value) if is_text else json.dumps(value))


def _read_gateway(arguments: Sequence[str]) -> GatewayConfig:
    return read_settings(parse(gateway_parser(), arguments), gateway_defaults(), [PolicyServerConfig()]).env


def _read_environment(arguments: Sequence[str], mode: str = "serve") -> AgenticOPDEnvConfig:
    env, servers = default_settings()
    parser = environment_parser("agentic-opd", "", {"env": env, "openai": servers[0]})
    return read_settings(parse(parser, (mode, *arguments)), env, servers).env


def _check_brake(config: UpConfig) -> None:
    """Raise ConfigError if the section `brake` has settings that its evaluation would refuse."""
    if config.brake is None or config.brake.script is not None:
        return
    mode, *arguments = _evaluation(config)[3:]
    try:
        _read_environment(arguments, mode)
    except ConfigError as error:
        raise ConfigError(f"its evaluation, of the section brake: {error}") from error


def _refusal(part: LoopPart, config: UpConfig) -> str | None:
    """Return the error that the part's command would report about its arguments; a custom script checks its own."""
    given, one = part.arguments, config.environments.get(part.name)
    try:
        if part.role == "server":
            # The weights folder does not exist before the loop starts.
            folder = str(config.output_dir / "weights")
            parse_server(["." if text == folder else text for text in given])
        elif part.role == "trainer":
            read_config(parse(trainer_parser(), given))
            _check_brake(config)
        elif one is not None and one.script is not None:
            if not one.script.is_file():
                raise ConfigError(f"there is no script {str(one.script)!r} (the current folder is {Path.cwd()})")
        elif one is not None and one.mode == "gateway":
            _read_gateway(given)
        elif one is not None:
            _read_environment(given)
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return f"its command line is wrong: {shlex.join(given)}"
    return None
