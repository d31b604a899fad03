"""`agentic-opd learn PATH... --model MODEL --out DIR`: an adapter of the sessions on a disk, or a refusal."""

import argparse
import asyncio
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentic_opd.core.concurrency import cancel_on
from agentic_opd.core.console import log_console, set_up_logging
from agentic_opd.core.errors import ConfigError, PlaceError
from agentic_opd.core.exit_codes import EXIT_CODES, EXIT_OK, EXIT_REFUSED, exit_code
from agentic_opd.core.light import keep_torch_out
from agentic_opd.core.text import printable
from agentic_opd.distill.config import DistillConfig
from agentic_opd.env.config import default_settings
from agentic_opd.learn.config import SET_HERE, LearnConfig, train_defaults
from agentic_opd.settings.flags import SettingsParser, add_settings, parse
from agentic_opd.settings.read import Settings, read_settings

if TYPE_CHECKING:
    from agentic_opd.learn.plan import LearnPlan

_TRAINED = ("lr", "lora_rank", "groups_epochs", "batch_size", "loss", "precision", "device")
"""Settings of the trainer that --help shows."""
_SETTINGS = {
    *(DistillConfig.model_fields.keys() - {"opd_enabled"}),
    *("renderer", "tokenizer_name", "server_retry_s", "max_concurrent_groups", "base_url", "api_key"),
    "learn",
    *_TRAINED,
}
"""Settings that have an effect here; others are accepted, because files of settings have them."""


def build_parser() -> SettingsParser:
    """Return a parser with the command's own flags, and with the settings of hints, training and evaluation."""
    env, servers = default_settings()
    parser = SettingsParser(
        prog="agentic-opd learn PATH... --model MODEL --out DIR [--overwrite] [--keep-secrets]",
        description="Train an adapter on the agent sessions on your disk, and refuse it if it is not better on "
        "held-out sessions. The logs (docs/distill.md lists the formats) are split by project and time. The judge "
        "finds the answers that were corrected, and writes hints; an adapter is trained on them. The model answers "
        "held-out turns before and after training; a judge with fixed weights grades the shuffled answers, and "
        "measurements without a judge guard against other losses. DIR/report.html and DIR/result.json have the "
        "verdict, DIR/adapter an accepted adapter. After a kill, the same command continues. Without "
        "--openai.base_url it starts a vLLM server, to which all arguments after -- are passed.",
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="PATH", help="a file, also gzipped, or a folder")
    add("--model", required=True, metavar="MODEL", help="model to train: a folder or a name on the hub")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the run")
    add("--overwrite", action="store_true", help="start again if DIR holds a run")
    add(
        "--keep-secrets",
        action="store_true",
        help="do not mask keys; by default text that looks like a key becomes its prefix and ***",
    )
    models = {"env": env, "openai": servers[0], "train": train_defaults(), "learn": LearnConfig()}
    add_settings(parser, models, "process", _SETTINGS)
    parser.footer = EXIT_CODES.replace("130:", f"{EXIT_REFUSED}: refused; 130:")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 with an adapter, 3 if it is refused, 1 if it failed, 2 for wrong settings."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    arguments = parse(build_parser(), words[:end])
    set_up_logging(verbose=arguments.verbose)

    def run() -> int:
        env, servers = default_settings()
        further = {"train": train_defaults(), "learn": LearnConfig()}
        settings = read_settings(arguments, env, servers, further)
        check_settings(settings)
        keep_torch_out()
        return asyncio.run(_learn(settings, arguments, words[end + 1 :]))

    return exit_code(run, interrupted="interrupted; the same command resumes the run")


def check_settings(settings: Settings) -> None:
    """Refuse settings that this command sets by itself, or that need what logs do not have, and a missing extra.

    Raises:
        ConfigError: the message names them.
    """
    env, train, defaults = settings.env, settings.sections["train"], train_defaults()
    if len(settings.servers) > 1:
        raise ConfigError("learn uses one policy server: name only one below openai")
    if missing := {"sibling", "reference"} & {*env.hint.source}:
        raise ConfigError(f"env.hint.source {', '.join(sorted(missing))}: logs have no data for it; leave it out")
    if env.hint.proof.type != "none":
        raise ConfigError("env.hint.proof: logs can't be replayed; leave it out")
    if wrong := [name for name in SET_HERE if getattr(train, name) != getattr(defaults, name)]:
        raise ConfigError(f"{', '.join(f'train.{name}' for name in wrong)}: learn sets this by itself; leave it out")
    if train.lora_rank is None:
        raise ConfigError("train.lora_rank is unset, and learn trains adapters: name a rank")
    if missing := [name for name in ("torch", "peft", "safetensors") if find_spec(name) is None]:
        raise ConfigError(f"{', '.join(missing)} can't be imported, and learn trains: pip install 'agentic-opd[train]'")


async def _learn(settings: Settings, arguments: argparse.Namespace, vllm_args: Sequence[str]) -> int:
    from agentic_opd.learn.plan import LearnPlan, check_folder
    from agentic_opd.learn.run import learn
    from agentic_opd.wire.files import FileLock

    cancel_on(signal.SIGTERM)
    server = settings.servers[0]
    plan = LearnPlan(
        paths=arguments.paths,
        model=arguments.model,
        folder=arguments.out,
        env=settings.env,
        server=server,
        is_served="base_url" in server.model_fields_set,
        train=settings.sections["train"],
        config=settings.sections["learn"],
        mask_secrets=not arguments.keep_secrets,
        vllm_args=vllm_args,
    )
    try:
        lock = FileLock(plan.folder / "learn", "--out")
    except OSError as error:
        raise PlaceError(f"cannot write {str(plan.folder)!r}: {error.strerror or error}") from error
    try:
        check_folder(plan.folder)
        if arguments.overwrite:
            _remove_run(plan)
        result = await learn(plan)
    finally:
        lock.release()
    return _print(result if isinstance(result, Mapping) else result.to_json(), plan.folder)


def _remove_run(plan: "LearnPlan") -> None:
    """Remove the files of an earlier run."""
    for name in ("stages", "train", "candidate", "adapter", "logs"):
        shutil.rmtree(plan.folder / name, ignore_errors=True)
    patterns = ("training*", "held_out*", "answers.*", "grades.jsonl", "logprobs.jsonl", "result.json", "report.html")
    for pattern in (*patterns, "settings.json"):
        for path in plan.folder.glob(pattern):
            path.unlink()


def _print(result: Mapping[str, Any], folder: Path) -> int:
    """Print the verdict; return the exit code."""
    is_adapter = result["verdict"] == "adapter"
    lines = [f"{result['verdict']}: {result['reason']}", f"report: {folder / 'report.html'}"]
    if is_adapter:
        lines.append(f"adapter: {folder / 'adapter'}")
    for line in lines:
        log_console().print(printable(line), markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK if is_adapter else EXIT_REFUSED
