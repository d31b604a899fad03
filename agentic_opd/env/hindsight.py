"""Hindsight for any Atropos environment: `class MyOpd(Hindsight, MyEnv)`. See docs/environments.md.

    collect_trajectories -> postprocess_histories -> handle_send_to_api: turns located, judged, scored -> file, trainer

Nothing else of the environment changes. Its groups are distilled before Atropos writes and sends them, in `serve` and
`process`; `evaluate` connects to no judge.
"""

import asyncio
import inspect
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import yaml
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import BeforeValidator, Field, ValidationError, create_model, model_validator
from typing_extensions import TypeAliasType

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import ConfigError, NoGroupsError, OPDError, ServerUnreachableError
from agentic_opd.core.text import well_formed
from agentic_opd.distill.alarms import live_teacher
from agentic_opd.distill.config import DistillConfig
from agentic_opd.plugin.info import check_model, names_the_same
from agentic_opd.rollout.config import RendererConfig
from agentic_opd.rollout.renderer import load_tokenizer
from agentic_opd.runs.distill import PolicyDistiller
from agentic_opd.runs.distill_file import FEEDBACK, FileDistiller, Line
from agentic_opd.settings import old_names
from agentic_opd.settings.atropos import UNNAMED_MODEL
from agentic_opd.settings.fields import section_of
from agentic_opd.settings.files import parse_yaml, read_yaml
from agentic_opd.settings.flags import FlagText
from agentic_opd.settings.layers import Merge, flags_layer
from agentic_opd.settings.read import refuse

logger = logging.getLogger(__name__)

_WARNED = 5
"""Number of problems that are logged in full; later ones are only counted."""
_WARNED_ITEMS, _MOST_ITEMS = 20, 100
"""Items in a row without a group after which the log says why, and after which `process` ends."""
_COLLECTING = ("collect_trajector", "postprocess_histories", "score")
"""Parts of the names of methods that return groups."""


class HindsightRenderer(RendererConfig):
    """The renderer with which an environment's prompts are compared."""

    name: str = Field(
        default="default",
        description="Renderer of the `renderers` package with which the environment's prompts are compared. default: "
        "the tokenizer's chat template, as Atropos' servers apply it.",
    )


class HindsightConfig(DistillConfig):
    """Settings that `Hindsight` adds to an environment's own."""

    renderer: HindsightRenderer = HindsightRenderer()
    server_retry_s: float = Field(
        default=60.0, ge=0, description="Seconds to retry a server that does not answer before giving up."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_texts(cls, values: Any) -> Any:
        """Read sections that Atropos' command line passes as text."""
        if not isinstance(values, dict):
            return values
        return {name: _from_text(value) if name in _SECTIONS else value for name, value in values.items()}

    @model_validator(mode="after")
    def _check_hindsight(self) -> "HindsightConfig":
        if missing := {"sibling", "reference"} & {*self.hint.source}:
            raise ValueError(f"hint.source {', '.join(sorted(missing))}: only the package's own worlds have these")
        return self

    @property
    def rendering(self) -> RendererConfig:
        """The renderer's settings; the chat template needs a parser of tool calls, which is not used here."""
        if self.renderer.name != "default":
            return self.renderer
        return self.renderer.model_copy(update={"options": {"tool_parser": "hermes", **self.renderer.options}})


def _from_text(text: Any) -> Any:
    """Return the data that a text holds as YAML (`{a: b}`); other values stay as they are."""
    if not isinstance(text, str):
        return text
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not YAML: {error}") from error


_SECTIONS = {
    name: section for name, info in HindsightConfig.model_fields.items() if (section := section_of(info)) is not None
}


class Hindsight(BaseEnv):
    """A mixin that adds hints and the teacher's rows to the groups of the environment class after it.

    Its methods and attributes begin with `opd_` or `_opd_`, except for `verdicts` and those of Atropos that it extends.
    Its settings join those of the environment (`env.distill_topk`, `env.judge.base_url`, ...); with `env.opd_enabled`
    off the environment runs as it was. The policy's servers must be vLLM with the package's plugin.
    """

    opd_tools: Sequence[dict[str, Any]] = ()
    """Tools that the chat template shows in the environment's prompts, in OpenAI's format."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.env_config_cls = _with_hindsight(cast(type[BaseEnvConfig], cls.env_config_cls))  # type: ignore[assignment]

    def __init__(self, config: BaseEnvConfig, server_configs: Any, *args: Any, **kwargs: Any) -> None:
        """Create the environment; a configuration without the mixin's settings gets their defaults.

        Raises:
            ConfigError: the tokenizer can't be loaded.
        """
        # Each server's client loads a tokenizer too, and the name of a served model need not be a tokenizer's.
        servers = _with_tokenizer(server_configs, config.tokenizer_name)
        named = [server.tokenizer_name for server in (servers if isinstance(servers, list) else [servers])]
        for name in dict.fromkeys([config.tokenizer_name, *named]):
            load_tokenizer(name)
        super().__init__(_joined(config), servers, *args, **kwargs)
        _return_lists(self.tokenizer)
        self.opd_counts: Counter[str] = Counter()
        """Numbers of groups, turns by outcome, unmatched sequences, and groups that failed, since the start."""
        self._opd_stack, self._opd_connecting = AsyncExitStack(), asyncio.Lock()
        self._opd_distillers: list[PolicyDistiller] = []
        self._opd_without_group: Counter[str] = Counter()
        """Items in a row without a group, and the groups of theirs that were dropped for equal scores."""
        self._opd_most_items = float("inf")

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:  # type: ignore[override]
        """Return the environment's default settings with those of the mixin, and its servers as vLLM servers."""
        config, servers = super().config_init()
        return _joined(config), _as_list(servers)

    @classmethod
    def cli(cls) -> NoReturn:
        """Run the environment's command line, with errors of settings and servers as text instead of a traceback."""
        try:
            sys.argv[1:] = _with_sections(sys.argv[1:], cast(type[BaseEnvConfig], cls.env_config_cls))
            super().cli()
        except ValidationError as error:
            problems = [
                f"env.{'.'.join(map(str, entry['loc'])).removeprefix('env.')}: {entry['msg']}"
                for entry in error.errors()
            ]
            raise SystemExit("\n  - ".join(["error: settings are wrong:", *problems])) from None
        except OPDError as error:
            raise SystemExit(f"error: {error}") from None

    def verdicts(self, group: Mapping[str, Any]) -> Sequence[str | None]:
        """Return evidence in words for each rollout of a scored group, None if there is none: an end verdict.

        The judge reads it as what followed the last turn. `group["item"]` is what `get_next_item` returned. Default:
        the environment's own `verdicts`, else `overrides[i]["feedback"]`.
        """
        if (inherited := getattr(super(), "verdicts", None)) is not None:
            return inherited(group)
        overrides = group.get("overrides") or [None for _ in group["tokens"]]
        feedback = [fields.get(FEEDBACK) if isinstance(fields, dict) else None for fields in overrides]
        return [text if isinstance(text, str) else None for text in feedback]

    async def env_manager(self) -> None:
        """Serve a trainer, as Atropos does, with connections to judge and teacher."""
        if warning := live_teacher(self._opd_config):
            logger.warning("%s", warning)
        await self._opd_run(super().env_manager)

    async def process_manager(self) -> None:
        """Write groups to a file, as Atropos does, with connections to judge and teacher.

        Raises:
            NoGroupsError: the environment returned no group for 100 items in a row, or none that Atropos keeps.
        """
        await self._opd_run(partial(self._opd_process, super().process_manager))

    async def _opd_process(self, manage: Any) -> None:
        self._opd_most_items = _MOST_ITEMS
        await manage()
        is_empty = self.n_groups_to_process > 0 and not self.opd_counts["groups"]  # type: ignore[attr-defined]
        if self._opd_config.opd_enabled and is_empty:
            raise NoGroupsError(f"process wrote no group: {self._opd_reason()}")

    async def _opd_run(self, manage: Any) -> None:
        """Connect before the first rollout, so that wrong settings end the run at once; disconnect at the end."""
        try:
            async with self._opd_stack:
                if self._opd_config.opd_enabled:
                    await self._opd_distiller()
                    self._opd_watch()
                await manage()
        except OPDError:
            writer: Any = self.jsonl_writer
            if writer is not None:
                writer.close()
            raise
        if self._opd_config.opd_enabled:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self.opd_counts.items()))
            logger.warning("hindsight: %s", counts or "Atropos kept no group")

    async def handle_send_to_api(self, scored_data: Any, item: Any = None, *args: Any, **kwargs: Any) -> None:
        """Distill the groups that Atropos will write or send, then continue as the environment does."""
        if self._opd_config.opd_enabled:
            groups = scored_data if isinstance(scored_data, list) else [scored_data]
            kept_groups = [group for group in groups if self._opd_is_kept(group)]
            if self.config.ensure_scores_are_not_same:
                self._opd_count_equal(sum(map(self._opd_is_equal, groups)))
            if kept_groups:
                self._opd_without_group.clear()
            else:
                self._opd_count_item()
            await gather_all(self._opd_distill(group, item) for group in kept_groups)
        await super().handle_send_to_api(scored_data, item, *args, **kwargs)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the environment's metrics with the counts, as `opd/NAME`."""
        counts = {f"opd/{name}": count for name, count in self.opd_counts.items()}
        await super().wandb_log({**counts, **(wandb_metrics or {})})

    @property
    def _opd_config(self) -> HindsightConfig:
        return hindsight_settings(self.config)

    def _opd_is_kept(self, group: Any) -> bool:
        """Return whether Atropos keeps the group, so that only such groups are judged."""
        if not isinstance(group, dict) or not group.get("tokens"):
            return False
        size = (group.get("group_overrides") or {}).get("group_size", self.config.group_size)
        is_even = self.config.ensure_scores_are_not_same and len(set(group["scores"])) == 1
        is_too_long = 0 < self.max_token_len <= max(map(len, group["tokens"]))
        return len(group["tokens"]) == size and not is_even and not is_too_long

    def _opd_is_equal(self, group: Any) -> bool:
        """Return whether a value is a whole group whose scores are all equal."""
        if not isinstance(group, dict):
            return False
        columns: list[Any] = [group.get(name) for name in ("tokens", "masks", "scores")]
        size = (group.get("group_overrides") or {}).get("group_size", self.config.group_size)
        is_whole = all(isinstance(column, list) and len(column) == size for column in columns)
        return is_whole and all(score == columns[2][0] for score in columns[2])

    def _opd_watch(self) -> None:
        """Replace the environment's methods that return groups, on this object, by `_opd_completed`."""
        for name in dir(type(self)):
            method = getattr(type(self), name, None)
            is_own = method is not getattr(BaseEnv, name, None) and not name.startswith("_opd_")
            if is_own and inspect.iscoroutinefunction(method) and any(part in name for part in _COLLECTING):
                setattr(self, name, partial(self._opd_completed, getattr(self, name)))
        self.collect_trajectories = partial(self._opd_collected, self.collect_trajectories)

    async def _opd_completed(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a method of the environment returns, or the group that it dropped because of equal scores.

        Many environments build such a group and return None in its place. It is then a local variable of the method.
        """
        running = method(*args, **kwargs)
        frame = getattr(running, "cr_frame", None)
        result = await running
        is_pair = isinstance(result, tuple) and len(cast(tuple[Any, ...], result)) == 2
        if frame is None or (result[0] if is_pair else result) is not None:
            return result
        group = next((value for value in reversed([*frame.f_locals.values()]) if self._opd_is_equal(value)), None)
        if group is None:
            return result
        if self.config.ensure_scores_are_not_same:  # Atropos would drop it.
            self._opd_count_equal(1)
            return result
        return (group, result[1]) if is_pair else group

    async def _opd_collected(self, collect: Any, item: Any) -> Any:
        """Return what `collect_trajectories` returns, and count an item without a group."""
        if self._opd_without_group["items"] >= self._opd_most_items:
            raise NoGroupsError(f"process ends: {self._opd_reason()}")
        result = await collect(item)
        if not result[0]:
            self._opd_count_item()
        return result

    def _opd_count_equal(self, count: int) -> None:
        for counts in (self.opd_counts, self._opd_without_group) if count else ():
            counts["equal_scores"] += count

    def _opd_count_item(self) -> None:
        """Count an item without a group; after `_WARNED_ITEMS` in a row the log says why."""
        self._opd_without_group["items"] += 1
        if self._opd_without_group["items"] == _WARNED_ITEMS:
            logger.warning("%s", self._opd_reason())

    def _opd_reason(self) -> str:
        """Return why the last items have no group, and what to do."""
        items, equal = self._opd_without_group["items"], self._opd_without_group["equal_scores"]
        if not items:
            return "get_next_item returned no item"
        text = f"the last {items} items have no group that Atropos keeps"
        if not equal:
            return f"{text}; the environment's own log may say why collect_trajectories returns none"
        return (
            f"{text}; {equal} groups were dropped because all their scores are equal. Hints can be learned from such "
            "groups too: set env.ensure_scores_are_not_same to False"
        )

    async def _opd_distiller(self) -> PolicyDistiller:
        """Return the distiller of the next of the policy's servers, in turn; connects to all at the first call."""
        async with self._opd_connecting:
            servers: Any = () if self._opd_distillers else self.server.servers
            for config in (server.config for server in servers):
                if not config.base_url:
                    raise ConfigError("hindsight needs the policy's vLLM server: set openai.base_url")
                connected = PolicyDistiller.connected(
                    config.base_url,
                    self._opd_config,
                    self._opd_config.rendering,
                    api_key=config.api_key or None,
                    tokenizer_name=self.config.tokenizer_name,
                    retry_s=self._opd_config.server_retry_s,
                )
                distiller = await self._opd_stack.enter_async_context(connected)
                info = distiller.policy.info
                if config.model_name != UNNAMED_MODEL:
                    await check_model(distiller.policy.http, info, config.model_name, "openai.model_name")
                if config.model_name == UNNAMED_MODEL or names_the_same(config.model_name, info.model):
                    config.model_name = info.model  # vLLM recognises a folder only by the path that it was given.
                self._opd_distillers.append(distiller)
        return self._opd_distillers[self.opd_counts["groups"] % len(self._opd_distillers)]

    async def _opd_distill(self, group: dict[str, Any], item: Any) -> None:
        """Add rows and records to a group in place; a group that can't be distilled stays as it was, and is counted."""
        by = await self._opd_distiller()
        self.opd_counts["groups"] += 1
        name = f"{self.name or type(self).__name__}#{self.opd_counts['groups']}"
        try:
            line = Line(self.opd_counts["groups"], self._opd_with_verdicts(group, item), name)
            distilled = await FileDistiller(by, self.opd_tools).distill(line)
        except ServerUnreachableError:
            raise
        except OPDError as error:
            self._opd_count("failed_groups", f"group {name} has no hindsight: {error}")
            return
        for why in distilled.unmatched:
            self._opd_count("unmatched_sequences", f"group {name}, unmatched: {why}")
        assert distilled.group is not None
        for turn in (turn for rollout in distilled.group.rollouts for turn in rollout.turns or ()):
            self.opd_counts[f"turns_{turn.outcome.value}"] += 1
        for column in [column for column, value in group.items() if _is_empty(value)]:
            del group[column]
        group.update(distilled.group.to_wire())

    def _opd_with_verdicts(self, group: dict[str, Any], item: Any) -> dict[str, Any]:
        columns = {name: value for name, value in group.items() if not _is_empty(value)}
        verdicts: list[Any] = [*(self.verdicts({**group, "item": item}) or ())]
        count = len(group["tokens"])
        if len(verdicts) != count:
            raise ConfigError(f"verdicts returned {len(verdicts)} entries for a group of {count} rollouts")
        if wrong := [type(verdict).__name__ for verdict in verdicts if not isinstance(verdict, str | None)]:
            raise ConfigError(f"verdicts returned {wrong[0]}, expected a text or None for each rollout")
        overrides = [dict(fields or {}) for fields in columns.get("overrides") or [{}] * count]
        for fields, verdict in zip(overrides, verdicts, strict=False):
            if verdict is not None:
                fields[FEEDBACK] = well_formed(verdict)
        return {**columns, "overrides": overrides}

    def _opd_count(self, kind: str, text: str) -> None:
        self.opd_counts[kind] += 1
        if self.opd_counts[kind] <= _WARNED:
            more = " (further ones are only counted)" if self.opd_counts[kind] == _WARNED else ""
            logger.warning("%s%s", text, more)


def _as_list(servers: Any) -> list[APIServerConfig]:
    """Return an environment's servers as vLLM servers that the command line can set.

    Atropos reads no `--openai.*` if the environment names several servers, or one outside a list.
    """
    if not isinstance(servers, list):
        servers = [servers if isinstance(servers, APIServerConfig) else APIServerConfig()]
    is_named = any(flag.startswith("--openai.") for flag in sys.argv)
    configs: list[APIServerConfig] = servers[:1] if is_named else servers
    return [config.model_copy(update={"server_type": "vllm"}) for config in configs]


def _with_tokenizer(servers: Any, name: str) -> Any:
    """Return the settings of servers with this tokenizer, if they name none."""
    if isinstance(servers, list):
        return [_with_tokenizer(server, name) for server in cast(list[Any], servers)]
    return servers.model_copy(update={"tokenizer_name": name}) if servers.tokenizer_name == "none" else servers


def _return_lists(tokenizer: Any) -> None:
    """Let `apply_chat_template` return ids, as Atropos and its environments expect; in transformers 5 it does not."""
    if getattr(tokenizer, "chat_template", None):
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)


def _is_empty(value: Any) -> bool:
    """Return whether a column has no entries: Atropos' default `collect_trajectories` makes empty ones."""
    return value is None or (isinstance(value, (list, dict)) and not value)


def _settings(model: type[BaseEnvConfig]) -> dict[str, str]:
    """Return the mixin's settings and their names in a configuration class: `opd_NAME` if the environment has NAME."""
    names = {name: f"opd_{name}" for name in HindsightConfig.model_fields}
    return {name: prefixed if prefixed in model.model_fields else name for name, prefixed in names.items()}


def _with_sections(argv: Sequence[str], model: type[BaseEnvConfig]) -> list[str]:
    """Return a command line on which the settings of each section are one flag, as Atropos reads them.

    `--env.judge.temperature 0.5` becomes `--env.judge '{"temperature": 0.5}'`, with the file's settings of the section.

    Raises:
        ConfigError: a setting does not exist.
    """
    sections = {field: name for name, field in _settings(model).items() if name in _SECTIONS}
    words: list[str] = []
    wrong: list[str] = []
    flags: dict[str, list[FlagText]] = {}
    remaining = list(argv)
    while remaining:
        word = remaining.pop(0)
        path, has_value, text = word.removeprefix("--env.").partition("=")
        field, _, inner = path.partition(".")
        if not word.startswith("--env.") or not inner or field not in sections:
            if (
                word.startswith("--env.")
                and field not in {*model.model_fields, *sections}
                and field in old_names.RENAMED
            ):
                wrong.append(f"--env.{field} is now --env.{old_names.RENAMED[field]}")
            words.append(word)
            continue
        texts = (text,) if has_value else (remaining.pop(0),) if remaining else ()
        flags.setdefault(field, []).append(FlagText(f"env.{path}", texts))
    file = next((Path(path) for word, path in pairwise(words) if word == "--config"), None)
    in_file = read_yaml(file, "environment").get("env") if file is not None and flags else None
    for field, texts in flags.items():
        layers = [[(in_file or {}).get(field) or {}], flags_layer(texts, f"env.{field}")]
        merged = Merge(_SECTIONS[sections[field]], f"env.{field}", wrong).merged(layers)
        words += [f"--env.{field}", json.dumps(merged)]
    refuse(wrong)
    return words


def hindsight_settings(config: BaseEnvConfig) -> HindsightConfig:
    """Return the settings of the mixin that a configuration holds."""
    names = _settings(type(config))
    settings = {name: getattr(config, field) for name, field in names.items() if field in config.model_fields_set}
    return HindsightConfig(**settings)


def _checked(config: Any) -> Any:
    hindsight_settings(config)
    return config


def _refuse_old_names(model: type[BaseEnvConfig], values: Any) -> Any:
    """Raise ValueError for names of earlier versions that the environment does not have itself."""
    return old_names.refuse(values, {*model.model_fields, *HindsightConfig.model_fields})


@cache
def _with_hindsight(model: type[BaseEnvConfig]) -> type[BaseEnvConfig]:
    """Return an environment's configuration class with the settings of the mixin.

    Atropos makes the model of its command line of the fields' annotations alone, without validators, so that the
    sections are named types, which read texts.
    """
    if "opd_enabled" in model.model_fields:
        return model
    fields: dict[str, Any] = {}
    for name, info in HindsightConfig.model_fields.items():
        kind: Any = info.annotation
        if name in _SECTIONS:
            kind = TypeAliasType(name, Annotated[kind, BeforeValidator(_from_text)])  # type: ignore[misc]
        fields[f"opd_{name}" if name in model.model_fields else name] = (kind, info)
    validators: Any = {
        "check_hindsight": model_validator(mode="after")(_checked),
        "refuse_old_names": model_validator(mode="before")(partial(_refuse_old_names, model)),
    }
    name = f"Hindsight{model.__name__}"
    return create_model(name, __base__=model, __module__=model.__module__, __validators__=validators, **fields)


def _joined(config: BaseEnvConfig) -> BaseEnvConfig:
    """Return the configuration with the settings of the mixin; its own are kept as they are."""
    model = _with_hindsight(type(config))
    if isinstance(config, model):
        return config
    return model(**{name: getattr(config, name) for name in type(config).model_fields})
