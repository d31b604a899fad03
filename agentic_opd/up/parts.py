"""A loop's settings -> its parts, each with its command line, port and readiness check."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from agentic_opd.core.errors import ConfigError
from agentic_opd.env.command import build_parser as environment_parser
from agentic_opd.env.command import mode_parser
from agentic_opd.env.config import default_settings
from agentic_opd.gateway.command import build_parser as gateway_parser
from agentic_opd.gateway.command import default_config as gateway_defaults
from agentic_opd.serving.launch import parse_args as parse_server
from agentic_opd.settings.flags import misunderstood
from agentic_opd.settings.read import read_settings
from agentic_opd.settings.servers import PolicyServerConfig
from agentic_opd.training.command import build_parser as trainer_parser
from agentic_opd.training.config import read_config
from agentic_opd.up.config import EnvironmentConfig, Flags, ServerConfig, UpConfig

Role = Literal["server", "api", "environment", "trainer"]
Start = Literal["new", "resume", "overwrite"]
"""Handling of an earlier run's files in the output folder."""


@dataclass(frozen=True, slots=True)
class Part:
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


def parts_of(config: UpConfig, start: Start = "new") -> list[Part]:
    """Return the parts in the order of their start.

    Raises:
        ConfigError: a part would refuse its command line or its file; the message lists all such parts.
    """
    parts = [*_servers(config), _api(config), *_environments(config, start), _trainer(config, start)]
    wrong = [f"{part.name}: {text}" for part in parts for text in _misunderstood(part, config)]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return parts


def _servers(config: UpConfig) -> Iterator[Part]:
    for name, server in config.servers.items():
        settings: Flags = {"port": server.port}
        if server.serves == "policy":
            settings["weights_root"] = config.output_dir / "weights"
        own = ("--", *server.vllm_args) if server.vllm_args else ()
        yield Part(
            name,
            "server",
            _module("agentic_opd", "serve-vllm"),
            (server.model, *_options(settings | server.flags), *own),
            _devices(server.devices) | server.variables,
            server.port,
            f"{server.url}/health",
        )


def _api(config: UpConfig) -> Part:
    api = config.api
    settings: Flags = {"host": "127.0.0.1", "port": api.port}
    arguments = (*_options(settings | api.flags),)
    return Part(
        "api",
        "api",
        _module("atroposlib.cli.run_api"),
        arguments,
        config.api.variables,
        config.api.port,
        f"{config.api.url}/",
    )


def _environments(config: UpConfig, start: Start) -> Iterator[Part]:
    for name, one in config.environments.items():
        file = ("--config", str(one.config)) if one.config else ()
        arguments = (*file, *_flags(_wiring(config, name) | one.flags))
        program = _module("agentic_opd", one.mode) if one.script is None else (sys.executable, str(one.script), "serve")
        part = Part(name, "environment", program, arguments, one.variables)
        if one.mode == "gateway":
            yield replace(part, ready_url=_gateway_url(part))
            continue
        yield replace(part, arguments=(*arguments, *_earlier_run(start, "env.")))


def _wiring(config: UpConfig, name: str) -> Flags:
    """Return the addresses of the other parts and the output file, as flags of an environment."""
    policies = [server for server in config.servers.values() if server.serves == "policy"]
    settings: Flags = {
        "openai.base_url": ",".join(f"{server.url}/v1" for server in policies),
        "openai.model_name": _served_name(policies[0]),
        "env.rollout_server_url": config.api.url,
        "env.data_path_to_save_groups": config.output_dir / f"{name}.jsonl",
    }
    for server in config.servers.values():
        if server.serves != "policy":
            settings[f"env.{server.serves}_base_url"] = f"{server.url}/v1"
    return settings


def _trainer(config: UpConfig, start: Start) -> Part:
    policies = [server for server in config.servers.values() if server.serves == "policy"]
    settings: Flags = {
        "model": policies[0].model,
        "output_dir": config.output_dir,
        "weights_dir": config.output_dir / "weights",
        "api_url": config.api.url,
        "vllm_urls": [server.url for server in policies],
    }
    trainer = config.trainer
    file = ("--config", str(trainer.config)) if trainer.config else ()
    processes = ("--standalone", "--nproc-per-node", str(trainer.processes), "-m", "agentic_opd.training.trainer")
    return Part(
        "trainer",
        "trainer",
        _module("agentic_opd", "train") if trainer.processes == 1 else _module("torch.distributed.run", *processes),
        (*file, *_flags(settings | trainer.flags), *_earlier_run(start)),
        _devices(trainer.devices) | trainer.variables,
    )


def _earlier_run(start: Start, section: str = "") -> tuple[str, ...]:
    """Return the flag for the handling of an earlier run's files."""
    return () if start == "new" else (f"--{section}{start}", "true")


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _devices(devices: str | None) -> dict[str, str]:
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}


def _served_name(server: ServerConfig) -> str:
    return str(server.flags.get("served_model_name", server.model))


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


def _gateway_url(part: Part) -> str:
    arguments, _ = gateway_parser().parse_known_args(part.arguments)
    try:
        gateway = read_settings(arguments, gateway_defaults(), [PolicyServerConfig()]).env
    except ConfigError as error:
        raise ConfigError(f"{part.name}: {error}") from error
    return f"http://{gateway.host}:{gateway.port}/health"


def _misunderstood(part: Part, config: UpConfig) -> Iterator[str]:
    """Yield the errors that the part's command would report about its arguments, before anything is started."""
    given = part.arguments
    try:
        if part.role == "server":
            # The weights folder does not exist before the loop starts.
            folder = str(config.output_dir / "weights")
            parse_server(["." if text == folder else text for text in given])
        elif part.role == "trainer":
            parser = trainer_parser()
            arguments, unknown = parser.parse_known_args(given)
            read_config(arguments, misunderstood(unknown, parser))
        elif part.role == "environment":
            _read_environment(config.environments[part.name], given)
    except ConfigError as error:
        yield str(error)
    except SystemExit:
        yield f"its command line is wrong: {shlex.join(given)}"


def _read_environment(one: EnvironmentConfig, given: tuple[str, ...]) -> None:
    """Check the environment's settings; a custom script checks its settings itself, so only its path is checked."""
    if one.script is not None:
        if not one.script.is_file():
            raise ConfigError(f"there is no script {str(one.script)!r} (the current folder is {Path.cwd()})")
        return
    if one.mode == "gateway":
        parser, defaults = gateway_parser(), (gateway_defaults(), [PolicyServerConfig()])
        arguments, unknown = parser.parse_known_args(given)
        read_settings(arguments, *defaults, misunderstood(unknown, parser))
        return
    env, servers = default_settings()
    parser = environment_parser("agentic-opd", "", {"env": env, "openai": servers[0]})
    arguments, unknown = parser.parse_known_args(["serve", *given])
    read_settings(arguments, env, servers, misunderstood(unknown, mode_parser(parser, "serve")))
