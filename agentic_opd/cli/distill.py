"""`agentic-opd distill PATH...`: add hints and teacher rows to groups and conversations, without rollouts (I/O).

Settings come from the `.run.json` beside PATH if it is the file of a run, then --config, then flags. Imports for
tokenizers and servers happen only after the settings are validated.
"""

import argparse
import asyncio
import signal
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentic_opd.cli.run_settings import settings_of_run
from agentic_opd.core.concurrency import cancel_on
from agentic_opd.core.console import log_console, set_up_logging
from agentic_opd.core.errors import (
    AlignmentError,
    ConfigError,
    PlaceError,
    ServerRequestError,
)
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_OK, exit_code
from agentic_opd.core.files import check_regular
from agentic_opd.core.light import keep_torch_out
from agentic_opd.core.text import printable_line, read_json
from agentic_opd.distill.config import DistillConfig
from agentic_opd.env.config import default_settings
from agentic_opd.logs import FORMAT_NAMES
from agentic_opd.settings.fields import line_settings
from agentic_opd.settings.flags import SettingsParser, add_settings, parse
from agentic_opd.settings.read import Settings
from agentic_opd.settings.read import read_settings as read_flags

if TYPE_CHECKING:
    from agentic_opd.runs.distill_file import Line

_SETTINGS = (DistillConfig.model_fields.keys() - {"opd_enabled"}) | {
    *("renderer", "tokenizer_name", "world", "seed", "resume", "overwrite", "server_retry_s", "max_concurrent_groups"),
    *("base_url", "api_key"),
}
"""Settings that have an effect here; others are accepted, because files of settings have them."""
_PROBE_S = 1.0
"""Longest time, in seconds, for which a server that does not answer at the start is asked again."""


def build_parser() -> SettingsParser:
    """Return a parser with the settings of the modes and this command's own flags."""
    env, servers = default_settings()
    parser = SettingsParser(
        prog="agentic-opd distill PATH... [--out OUT] [--keep-hints] [--tools TOOLS] [--keep-secrets]",
        description="Add hints and teacher rows to existing groups and conversations, without new rollouts. PATH is a "
        "file, or a folder that is searched for files. A file has an agent's sessions "
        f"({', '.join(FORMAT_NAMES)}), or scored groups of this package or of another Atropos environment, or "
        'conversations in text ({"messages": [...], "tools": [...]}), as JSONL or one JSON array; or it is the '
        "journal of a gateway that recorded another provider's model (--env.upstream). The format is recognised by "
        "content; skipped files and turns are counted. The turns of a group are located by rendering its messages "
        "with the policy's renderer; a group whose messages do not render to its tokens is counted as unmatched and "
        "left out. Missing inference_logprobs are read from the policy server, and the group is marked as off-policy.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a file, also gzipped, or a folder")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="OUT",
        help="output file (default: the file's name.distilled.jsonl; of a folder or several paths: ./distilled.jsonl)",
    )
    parser.add_argument(
        "--keep-hints", action="store_true", help="score the hints in PATH again, without asking a judge"
    )
    parser.add_argument(
        "--tools", type=Path, metavar="TOOLS", help="JSON list of the tools in prompts that do not name theirs"
    )
    parser.add_argument(
        "--keep-secrets",
        action="store_true",
        help="do not mask keys; by default text that looks like a key becomes its prefix and ***",
    )
    add_settings(parser, {"env": env, "openai": servers[0]}, "process", _SETTINGS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if every line was written, 1 if not, 2 for wrong settings or a wrong file."""
    arguments = parse(build_parser(), argv)
    set_up_logging(verbose=arguments.verbose)

    def run() -> int:
        env, servers = default_settings()
        if (file := _file(arguments)) is not None:
            env = settings_of_run(env, file)
        settings = read_flags(arguments, env, servers)
        if len(settings.servers) > 1:
            raise ConfigError("distill uses one policy server: name only one below openai")
        if missing := {"sibling", "reference"} & {*settings.env.hint.source}:
            raise ConfigError(f"env.hint.source {', '.join(sorted(missing))}: a file has no data for it; leave it out")
        keep_torch_out()
        return asyncio.run(_distill(settings, arguments))

    return exit_code(run, interrupted="interrupted: finished groups are stored; --env.resume continues")


async def _distill(settings: Settings, arguments: argparse.Namespace) -> int:
    """Connect, and distill every line that an earlier run did not write."""
    from agentic_opd.gateway.recorded import is_journal
    from agentic_opd.runs.distill import PolicyDistiller
    from agentic_opd.runs.distill_file import FileDistiller, distill_lines, read_inputs
    from agentic_opd.wire.files import GroupFile, check_place

    cancel_on(signal.SIGTERM)
    config, server = settings.env, settings.servers[0]
    file, out = _file(arguments), _out(arguments)
    check_place(out, resume=config.resume, overwrite=config.overwrite, setting="--out")
    try:
        journals = [path for path in arguments.paths if is_journal(path)]
        inputs = read_inputs([path for path in arguments.paths if path not in journals], but=out)
        lines = [*inputs.lines, *(line for path in journals for line in _recorded_lines(path))]
    except (OSError, EOFError, zlib.error) as error:
        path = getattr(error, "filename", None) or str(arguments.paths[0])
        raise PlaceError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    if file is None and not lines:
        raise PlaceError("; ".join(("no group and no conversation in these paths", *inputs.summary)))
    for sentence in inputs.summary:
        print(printable_line(sentence), file=sys.stderr)
    tools = _tools(arguments.tools, file, config)
    asks_judge = config.hint.asks_judge and not arguments.keep_hints
    judge_url = config.judge.base_url if asks_judge else None
    await _probe((server.base_url, judge_url, config.teacher.base_url), config.server_retry_s)
    names = (config.tokenizer_name, server.tokenizer_name)
    connected = PolicyDistiller.connected(
        server.base_url,
        config,
        config.renderer,
        api_key=server.api_key or None,
        tokenizer_name=next((name for name in names if name not in ("", "none")), ""),
        retry_s=config.server_retry_s,
        seed=config.seed,
        file=file or arguments.paths[0],
        asks_judge=asks_judge,
    )
    written_settings = {**line_settings(config), "keep_hints": arguments.keep_hints}
    if arguments.keep_secrets:
        written_settings["keep_secrets"] = True
    async with connected as by:
        groups = GroupFile(out, written_settings, resume=config.resume, overwrite=config.overwrite, setting="--out")
        try:
            distiller = FileDistiller(
                by, tools, arguments.keep_hints, mask_secrets=not arguments.keep_secrets, written_to=out
            )
            counts = await distill_lines(lines, distiller, groups, config.groups_at_a_time)
            log_console().print(
                f"to look at it: agentic-opd report {groups.path}", markup=False, highlight=False, soft_wrap=True
            )
            return EXIT_FAILED if counts.lines["failed"] or counts.unmatched_sequences else EXIT_OK
        finally:
            groups.close()


def _recorded_lines(path: Path) -> "list[Line]":
    """Return the conversations of a recording gateway's journal as lines."""
    from agentic_opd.gateway.recorded import read_recorded
    from agentic_opd.runs.distill_file import Line

    log = read_recorded(path)
    if not log.sessions:
        raise PlaceError(f"{str(path)!r} holds no session that agentic-opd gateway --env.upstream URL recorded")
    log_console().print(f"{path}: {log.text()}", markup=False, highlight=False, soft_wrap=True)
    return [
        Line(number, conversation.fields, conversation.name, f"conversation {conversation.name!r}")
        for number, conversation in enumerate(log.conversations, start=1)
    ]


async def _probe(urls: Sequence[str | None], retry_s: float) -> None:
    """Check that each server listens, so that a wrong address ends the command within seconds."""
    from agentic_opd.core.http import JsonClient

    for url in filter(None, urls):
        async with JsonClient(url, retry_s=min(_PROBE_S, retry_s)) as client:
            with suppress(ServerRequestError):  # It answers, but wants its key or has no such route.
                await client.get("/v1/models")


def _file(arguments: argparse.Namespace) -> Path | None:
    """Return the file that is read; None for a folder or several paths."""
    path: Path = arguments.paths[0]
    return None if len(arguments.paths) > 1 or path.is_dir() else path


def _out(arguments: argparse.Namespace) -> Path:
    """Return the output file; it must differ from all input files."""
    file = _file(arguments)
    name = "distilled.jsonl"
    if file is not None:
        stem = file.name.removesuffix(".gz").removesuffix(".zst")
        for ending in (".jsonl", ".json", ".sqlite", ".parquet", ".arrow"):
            stem = stem.removesuffix(ending)
        name = f"{stem}.{name}"
    out: Path = arguments.out or (Path(name) if file is None else file.with_name(name))
    if any(out.resolve() == path.resolve() for path in arguments.paths):
        raise PlaceError(f"--out {str(out)!r} is an input file; choose another")
    return out


def _tools(named: Path | None, file: Path | None, config: Any) -> Sequence[dict[str, Any]]:
    """Return the tools in the prompts of the groups: those of --tools, or those of the world of the file's run."""
    from agentic_opd.logs.tools import plain_tools
    from agentic_opd.report.read import settings_path
    from agentic_opd.worlds.choose import make_world

    if named is not None:
        try:
            check_regular(named, is_read=True)
            return plain_tools({"tools": read_json(named.read_text())})
        except (OSError, ValueError, RecursionError) as error:
            raise PlaceError(f"--tools {str(named)!r} can't be read: {error}") from error
        except AlignmentError as error:
            raise PlaceError(f"--tools {str(named)!r}: {error}") from error

    if file is None or not settings_path(file).exists():
        return ()

    return make_world(config).tools
