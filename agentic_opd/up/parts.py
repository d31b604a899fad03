"""A loop's settings -> its parts, each with its command line, its settings, its port and its readiness check.

What follows from another part is filled in: addresses, models and folders; adapters on the policy's servers and their
moving average as the teacher if the trainer has adapters; and rows as text, which the package's trainer reads.

Each part's command line is read once, by the function with which the part's own command reads it.
"""

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from agentic_opd.core.errors import ConfigError
from agentic_opd.env.command import read_arguments as read_environment
from agentic_opd.gateway.command import read_arguments as read_gateway
from agentic_opd.serving.launch import parse_args as read_server
from agentic_opd.settings.files import read_yaml
from agentic_opd.training.command import read_arguments as read_trainer
from agentic_opd.training.config import TrainerConfig
from agentic_opd.up.config import EnvironmentConfig, Flags, UpConfig
from agentic_opd.up.mismatches import mismatches

SettingsT = TypeVar("SettingsT")

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
    settings: Any = None
    """What its command reads from `arguments`: a server's arguments, an environment's or gateway's settings (`env.*`),
    the trainer's. None for the API and for a custom script, which reads its own."""

    def written(self) -> str:
        """Return its command as typed in a shell."""
        variables = (f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        return " ".join([*variables, shlex.join((*self.program, *self.arguments))])


def parts_of(config: UpConfig, start: Start = "new") -> list[LoopPart]:
    """Return the parts in the order of their start.

    Raises:
        ConfigError: a part would refuse its command line or its file, or two parts do not fit; the message lists all.
    """
    return _Parts(config, start).parts()


def max_lora_rank(rank: int) -> int:
    """Return the smallest value of vLLM's --max-lora-rank that holds adapters of `rank`."""
    return next((max_rank for max_rank in _ADAPTER_RANKS if max_rank >= rank), rank)


class _Parts:
    """Builds the parts of a loop, and collects what their commands would refuse."""

    def __init__(self, config: UpConfig, start: Start) -> None:
        self._config = config
        self._start: Start = start
        self._refusals: dict[str, str] = {}
        """Name of a part -> the error that its command would report."""
        self._servers = {name: self._server_settings(name) for name in config.servers}
        """What each server reads from its own flags; None if it refuses them."""

    def parts(self) -> list[LoopPart]:
        config = self._config
        trainer = self._trainer()
        servers = [self._server(name, trainer.settings) for name in config.servers]
        numbered = enumerate(config.environments.items())
        environments = [self._environment(name, row, trainer.settings, number) for number, (name, row) in numbered]
        parts = [*servers, self._api(), *environments, trainer]
        if self._refusals:
            raise ConfigError(
                "\n".join(f"{part.name}: {self._refusals[part.name]}" for part in parts if part.name in self._refusals)
            )
        settings = {part.name: part.settings for part in parts if part.settings is not None}
        if problems := list(mismatches(config, settings)):
            raise ConfigError("\n".join(problems))
        return parts

    def _read(
        self, name: str, read: Callable[[Sequence[str]], SettingsT], arguments: Sequence[str], origin: str = ""
    ) -> SettingsT | None:
        """Return what a command reads from its arguments; None if it refuses them, for the reason in `_refusals`."""
        try:
            return read(arguments)
        except ConfigError as error:
            self._refusals.setdefault(name, f"{origin}{error}")
        except SystemExit:
            self._refusals.setdefault(name, f"{origin}its command line is wrong: {shlex.join(arguments)}")
        return None

    # ------------------------------------------------------------------------------------------------------- servers

    def _server_arguments(self, name: str, weights_root: Path) -> list[str]:
        server = self._config.servers[name]
        settings: Flags = {"port": server.port}
        if server.serves == "policy":
            settings["weights_root"] = weights_root
        return [server.model, *_options(settings | server.flags)]

    def _server_settings(self, name: str) -> Namespace | None:
        # The weights folder does not exist before the loop starts.
        vllm_args = self._config.servers[name].vllm_args
        return self._read(name, read_server, [*self._server_arguments(name, Path()), *_after_dashes(vllm_args)])

    def _server(self, name: str, training: TrainerConfig | None) -> LoopPart:
        server, settings = self._config.servers[name], self._servers[name]
        arguments = self._server_arguments(name, self._config.output_dir / "weights")
        rank = None if training is None or server.serves != "policy" else training.lora_rank
        if rank is not None and settings is not None and settings.max_lora_rank is None:
            arguments += ["--max-lora-rank", str(max_lora_rank(rank))]
        return LoopPart(
            name,
            "server",
            _module("agentic_opd", "serve-vllm"),
            (*arguments, *_after_dashes(server.vllm_args)),
            _devices(server.devices) | server.variables,
            server.port,
            f"{server.url}/health",
            settings,
        )

    def _api(self) -> LoopPart:
        api = self._config.api
        settings: Flags = {"host": "127.0.0.1", "port": api.port}
        program, arguments = _module("atroposlib.cli.run_api"), tuple(_options(settings | api.flags))
        return LoopPart("api", "api", program, arguments, api.variables, api.port, f"{api.url}/")

    # -------------------------------------------------------------------------------------------------- environments

    def _environment(
        self, name: str, environment: EnvironmentConfig, training: TrainerConfig | None, number: int
    ) -> LoopPart:
        flags: Flags = {
            **self._addresses(),
            **_filled_in(self._config, environment, training, number),
            _GROUPS: self._config.output_dir / f"{name}.jsonl",
            **self._trainer_dir(environment),
            **environment.flags,
        }
        arguments = (*_file(environment.config), *_flags(flags))
        if environment.mode == "serve":
            arguments += _earlier_run(self._start, "env.")
        program, ready_url, settings = _module("agentic_opd", environment.mode), None, None
        if environment.script is not None:
            program = (sys.executable, str(environment.script), "serve")
            if not environment.script.is_file():
                self._refusals[name] = (
                    f"there is no script {str(environment.script)!r} (the current folder is {Path.cwd()})"
                )
        elif environment.mode == "serve":
            read = self._read(name, read_environment, ("serve", *arguments))
            settings = read and read.env
        elif (read := self._read(name, read_gateway, arguments)) is not None:
            settings = read.env
            ready_url = f"http://{settings.host}:{settings.port}/health"
        variables = environment.variables
        return LoopPart(name, "environment", program, arguments, variables, ready_url=ready_url, settings=settings)

    def _trainer_dir(self, environment: EnvironmentConfig) -> Flags:
        """Return the flag by which a gateway's page finds the trainer's evaluations."""
        if environment.mode != "gateway":
            return {}
        return {"env.trainer_dir": self._config.trainer.flags.get("output_dir", self._config.output_dir)}

    def _addresses(self) -> Flags:
        """Return the addresses of the other parts, as flags of an environment."""
        policies = {name: server for name, server in self._config.servers.items() if server.serves == "policy"}
        first, server = next(iter(policies.items()))
        settings = self._servers[first]
        flags: Flags = {
            "openai.base_url": ",".join(f"{server.url}/v1" for server in policies.values()),
            "openai.model_name": (settings and settings.served_model_name) or server.model,
            "env.rollout_server_url": self._config.api.url,
        }
        for server in self._config.servers.values():
            if server.serves != "policy":
                flags[f"env.{server.serves}.base_url"] = f"{server.url}/v1"
        return flags

    # ------------------------------------------------------------------------------------------------------- trainer

    def _trainer(self) -> LoopPart:
        config, trainer = self._config, self._config.trainer
        policies = config.policies
        settings: Flags = {
            "model": policies[0].model,
            "output_dir": config.output_dir,
            "weights_dir": config.output_dir / "weights",
            "api_url": config.api.url,
            "vllm_urls": [server.url for server in policies],
        }
        if config.brake is not None:
            settings["brake.command"] = self._brake_command()
        arguments = (*_file(trainer.config), *_flags(settings | trainer.flags), *_earlier_run(self._start))
        processes = ("--standalone", "--nproc-per-node", str(trainer.processes), "-m", "agentic_opd.training")
        return LoopPart(
            "trainer",
            "trainer",
            _module("agentic_opd", "train") if trainer.processes == 1 else _module("torch.distributed.run", *processes),
            arguments,
            _devices(trainer.devices) | trainer.variables,
            settings=self._read("trainer", read_trainer, arguments),
        )

    def _brake_command(self) -> str:
        """Return the command of the brake's evaluation; the trainer adds servers and folder."""
        assert self._config.brake is not None
        brake, addresses = self._config.brake, self._addresses()
        del addresses["openai.base_url"]
        arguments = ("evaluate", *_file(brake.config), *_flags({**addresses, **brake.flags}))
        if brake.script is None:
            self._read("trainer", read_environment, arguments, "its evaluation, of the section brake: ")
        program = (sys.executable, str(brake.script)) if brake.script else _module("agentic_opd")
        return shlex.join((*program, *arguments))


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
    section: object = {}
    if environment.config is not None:
        with suppress(ConfigError):  # The environment's command reports it.
            section = read_yaml(environment.config, "environment").get("env")
    names_in_file = {*_dotted({"env": section})}
    if "env.teacher.base_url" in {*names_in_file, *_dotted(environment.flags)}:
        settings.pop("env.teacher.weights", None)
    return {name: value for name, value in settings.items() if name not in names_in_file}


def _dotted(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in settings, and the dotted names in their sections."""
    for name, value in settings.items():
        yield name
        if isinstance(value, dict):
            yield from _dotted({f"{name}.{inner}": entry for inner, entry in cast(dict[str, Any], value).items()})


def _after_dashes(vllm_args: Sequence[str]) -> tuple[str, ...]:
    return ("--", *vllm_args) if vllm_args else ()


def _file(path: Path | None) -> tuple[str, ...]:
    return () if path is None else ("--config", str(path))


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
