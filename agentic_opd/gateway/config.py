"""Settings of the gateway (address, keys, files, limits) and of distillation."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from agentic_opd.distill.config import DistillConfig
from agentic_opd.rollout.config import RendererConfig, RolloutConfig
from agentic_opd.runs.config import RunConfig
from agentic_opd.settings.fields import FIRST, GATEWAY, RUN_ONLY, Section, Url
from agentic_opd.worlds.config import WorldConfig

KEY_VARIABLE = "AGENTIC_OPD_GATEWAY_KEY"
"""Environment variable with the clients' key, for settings without `api_keys`. Other users can read a command line."""


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
"""An origin as browsers send it."""


class LearnersConfig(Section):
    """Whether clients teach one policy, or each learner one of its own."""

    setting_group: ClassVar = GATEWAY

    by: Annotated[Literal["nothing", "key", "header"], FIRST, RUN_ONLY] = Field(
        default="nothing",
        description="How sessions are assigned to learners, each with an adapter beside the base weights: key (one for "
        "each API key), header (X-Learner, within the key), or nothing (all sessions train one policy).",
    )
    folder: Annotated[Path | None, RUN_ONLY] = Field(
        default=None,
        description="Folder of the learners, which the trainer reads (learners.folder there). Unset: learners beside "
        "the groups.",
    )
    start: Annotated[str | None, RUN_ONLY] = Field(
        default=None,
        description="Learner whose adapter answers a new learner until that has one; the trainer's learners.start must "
        "be the same. Unset: the base weights answer.",
    )
    held_out: Annotated[float, RUN_ONLY] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of each learner's sessions that are held out of training, for the brake of this learner. A "
        "hash of the session's id selects them.",
    )


class GatewayConfig(DistillConfig):
    """All settings of the gateway except those of the policy's servers."""

    model_config = ConfigDict(frozen=True)
    setting_group: ClassVar = GATEWAY
    settings_elsewhere: ClassVar = dict.fromkeys(
        {*RunConfig.model_fields, *RolloutConfig.model_fields, *WorldConfig.model_fields, "world", "skip_too_long"},
        "`agentic-opd process`, `serve` and `evaluate`",
    )
    """Command of each setting that other commands have; these come with a task."""

    renderer: RendererConfig = RendererConfig()
    learners: LearnersConfig = LearnersConfig()

    tokenizer_name: Annotated[str, FIRST] = Field(
        default="", description="Tokenizer of the policy. Unset: the tokenizer of the server's model."
    )
    data_path_to_save_groups: Annotated[Path, FIRST, RUN_ONLY] = Field(
        default=Path("runs/gateway/groups.jsonl"),
        description="JSONL file of scored groups. If the file exists, groups are appended.",
    )
    host: Annotated[str, FIRST, RUN_ONLY] = Field(
        default="127.0.0.1", description="Address to listen on. Any address but a loopback one requires api_keys."
    )
    port: Annotated[int, FIRST, RUN_ONLY] = Field(
        default=8080, ge=0, le=65535, description="Port to listen on; 0 picks a free one."
    )
    api_keys: Annotated[tuple[SecretStr, ...], FIRST, RUN_ONLY] = Field(
        default=(),
        description="Keys that clients may use; sessions of different keys are isolated from each other. Unset: the "
        f"key in the variable {KEY_VARIABLE}, or, on a loopback address, any key.",
    )
    cors_origins: Annotated[tuple[str, ...], RUN_ONLY] = Field(
        default=(),
        description="Origins of web pages that may send requests from a browser, as https://example.org or "
        "http://localhost:3000. Such a page needs a key as any other client. Unset: none (no CORS).",
    )
    rollout_server_url: Annotated[str | None, FIRST, RUN_ONLY] = Field(
        default=None,
        description="Trajectory API (run-api) that receives the groups. Unset: groups are only written to the file.",
    )
    upstream: Annotated[Url | None, FIRST, RUN_ONLY] = Field(
        default=None,
        description="Server of a foreign model, such as https://api.anthropic.com, to which each request is passed on "
        "with the client's own key. Its answers are only recorded in the journal, for `agentic-opd distill`: no policy "
        "server is needed. Unset: the policy answers.",
    )
    group_size: int = Field(
        default=1,
        ge=1,
        description="Number of sessions that form a group, which GRPO compares. Clients give the sessions of a "
        "group the same X-Group-Id, or the same group at their end.",
    )
    journal_path: Annotated[Path | None, RUN_ONLY] = Field(
        default=None,
        description="SQLite file that stores every turn, also after its group is written. Unset: journal.sqlite "
        "beside the groups.",
    )
    trainer_dir: Annotated[Path | None, RUN_ONLY] = Field(
        default=None,
        description="Output folder of the trainer (its output_dir), whose evaluations the page /ui shows as a curve. "
        "`up` fills it in. Unset: none.",
    )
    keep_sessions_days: Annotated[float | None, RUN_ONLY] = Field(
        default=None,
        gt=0,
        description="Days after which a session whose group is written, or with upstream a recorded one, is removed "
        "from the journal. Unset: sessions are kept.",
    )
    learn_from_altered_sampling: bool = Field(
        default=False,
        description="Also learn from turns that a client sampled greedily, under a grammar, with a logit bias, or "
        "from a truncated or penalised distribution. Off: such turns are context only.",
    )
    judge_at_once: Annotated[bool, RUN_ONLY] = Field(
        default=True,
        description="Judge and score a turn as soon as its next state arrives, while the next answer is sampled. "
        "Off, with judge.scope trajectory, and with judge.when failed: they are judged when their session has ended, "
        "or by judge_every_turns.",
    )
    judge_every_turns: Annotated[int, RUN_ONLY] = Field(
        default=0,
        ge=0,
        description="judge.scope trajectory: number of turns with a next state after which those of an open session "
        "are judged together and become a group, so that learning does not wait for the session's end; the turns "
        "before them are context. 0: a session is judged at its end alone.",
    )
    session_idle_s: Annotated[float, RUN_ONLY] = Field(
        default=1800.0, gt=0, description="Seconds without a request after which a session ends."
    )
    max_open_sessions: Annotated[int, RUN_ONLY] = Field(
        default=1024,
        ge=1,
        description="Maximum number of open sessions; a request for another is refused (429). Half of them is divided "
        "among the api_keys, so that no key can take all; the other half is for the keys that come first.",
    )
    max_body_bytes: Annotated[int, RUN_ONLY] = Field(
        default=8 * 2**20,
        ge=1024,
        description="Maximum size of a request body, in bytes; a larger one is refused (413).",
    )
    max_choices: Annotated[int, RUN_ONLY] = Field(default=16, ge=1, description="Maximum `n` of a request.")
    max_concurrent_groups: Annotated[int, RUN_ONLY] = Field(
        default=4, ge=1, description="Number of sessions that are judged and scored at the same time."
    )
    server_retry_s: Annotated[float, RUN_ONLY] = Field(
        default=60.0, ge=0, description="Seconds to retry a server that does not answer before giving up."
    )

    @property
    def journal(self) -> Path:
        return self.journal_path or self.data_path_to_save_groups.with_name("journal.sqlite")

    @property
    def learners_folder(self) -> Path:
        return self.learners.folder or self.data_path_to_save_groups.with_name("learners")

    @model_validator(mode="after")
    def _check_learners(self) -> "GatewayConfig":
        if self.learners.by == "nothing":
            return self
        if self.upstream is not None or self.rollout_server_url is not None:
            raise ValueError(
                "learners.by: each learner's groups are files for `agentic-opd train --learners.folder`; leave "
                "upstream and rollout_server_url out"
            )
        if self.opd_enabled and self.teacher.weights != "frozen" and self.teacher.base_url is None:
            raise ValueError(
                "learners.by: the base weights are the teacher of all learners: set teacher.weights to frozen, or "
                "teacher.base_url"
            )
        if self.hint.control in ("other", "same_task"):
            raise ValueError(
                "learners.by: a control is a hint of another session, maybe of another person: leave hint.control at "
                "none or neutral"
            )
        if self.teacher.support != "teacher":
            raise ValueError("learners.by: rows hold the teacher's tokens: leave teacher.support at teacher")
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> "GatewayConfig":
        if missing := {"sibling", "reference"} & {*self.hint.source}:
            raise ValueError(f"hint.source {', '.join(sorted(missing))}: a conversation has none; leave it out")
        return self

    @model_validator(mode="after")
    def _check_parts(self) -> "GatewayConfig":
        if self.judge_every_turns and self.judge.scope == "turn":
            raise ValueError(
                "judge_every_turns is for judge.scope trajectory: with scope turn, each turn of an open session is "
                "judged as soon as its next state arrives; set the scope, or judge_every_turns to 0"
            )
        if self.judge_every_turns and self.group_size > 1:
            raise ValueError(
                "judge_every_turns makes groups of parts of a session, but group_size compares whole sessions: set "
                "group_size to 1, or judge_every_turns to 0"
            )
        return self

    @field_validator("upstream")
    @classmethod
    def _check_upstream(cls, url: str | None) -> str | None:
        """Return the address without /v1 and slashes at its end: the paths of requests follow it."""
        if url is None:
            return None
        parts = urlsplit(url)
        if not parts.hostname or parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("write scheme, host, port and path only, as https://api.example.org; clients send the key")
        return url.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _check_recording(self) -> "GatewayConfig":
        if self.upstream is not None and (self.rollout_server_url or self.cors_origins):
            raise ValueError(
                "with upstream the gateway only records: leave rollout_server_url out, because `agentic-opd distill` "
                "makes the groups, and cors_origins, because no request of a web page is passed on"
            )
        return self

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin: write scheme, host and port as the browser does, in lower case and "
                    "without a path, as https://example.org; there is no pattern for several origins"
                )
        return origins

    @model_validator(mode="after")
    def _check_host(self) -> "GatewayConfig":
        if not is_loopback(self.host) and not self.api_keys:
            raise ValueError(f"host {self.host} can be reached from other machines: set api_keys, or {KEY_VARIABLE}")
        if any(not key.get_secret_value().strip() for key in self.api_keys):
            raise ValueError("api_keys holds an empty key")
        return self


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
