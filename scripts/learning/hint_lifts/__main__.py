"""`scripts/learning/measure_hints FILE --samples N`: how much each hint of a file changes the pass rate (I/O).

Each turn with a hint is sampled N times with the hint in its prompt and N times without, on the server whose weights
sampled it. Each sample acts in a fresh session in which the calls of the earlier turns have run, and the world verifies
the result. The differences are written beside FILE (groups.hints.json), where the report finds them.

The settings are those of the run: the `.run.json` beside FILE, then --config, then flags.
"""

import argparse
import asyncio
import gzip
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentic_opd.cli.run_settings import settings_of_run
from agentic_opd.core.console import LiveBar, set_up_logging
from agentic_opd.core.errors import OPDError, PlaceError, WireError
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, exit_code
from agentic_opd.core.light import keep_torch_out
from agentic_opd.core.text import read_json
from agentic_opd.env.config import AgenticOPDEnvConfig, default_settings
from agentic_opd.plugin.info import fetch_info
from agentic_opd.report.lifts import Lifts, ResampledTurn, lift_of, lifts_path, read_lifts
from agentic_opd.report.read import read_run
from agentic_opd.settings.flags import SettingsParser, add_settings, parse
from agentic_opd.settings.read import Settings
from agentic_opd.settings.read import read_settings as read_flags
from agentic_opd.wire.group import ScoredGroup
from learning.hint_lifts.resample import (
    HintedTurn,
    Resampled,
    Resampler,
    check_tokens,
    check_weights,
    drawn,
    hinted_turns,
    of_version,
    resample,
)
from learning.hint_lifts.written import write_lifts


def build_parser() -> SettingsParser:
    """The settings of the modes, and the two options of this script."""
    env, servers = default_settings()
    parser = SettingsParser(
        prog="scripts/learning/measure_hints FILE --samples N [--turns N]",
        description=" ".join((__doc__ or "").split("\n\n")[1].split()),
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL that `process` wrote; .gz is unpacked")
    parser.add_argument(
        "--samples", type=_positive, required=True, metavar="N", help="samples of each turn, with and without its hint"
    )
    parser.add_argument(
        "--turns", type=_positive, metavar="N", help="turns to measure, drawn by env.seed (default: all)"
    )
    add_settings(parser, {"env": env, "openai": servers[0]}, "evaluate")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 0 if all turns were measured, 1 if not, 2 for wrong settings or a wrong file."""
    arguments = parse(build_parser(), argv)
    set_up_logging(verbose=arguments.verbose)

    def run() -> int:
        env, servers = default_settings()
        env = settings_of_run(env, arguments.file)
        settings = read_flags(arguments, env, servers)
        read_run(arguments.file)  # A file that can't be read is refused before a server is asked.
        keep_torch_out()
        return asyncio.run(_measure(settings, arguments.file, arguments.samples, arguments.turns))

    return exit_code(run, interrupted="interrupted: nothing was measured")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


async def _measure(settings: Settings, file: Path, samples: int, limit: int | None) -> int:
    """Measure the hints of `file` on the server of the settings."""
    from agentic_opd.env.command import name_models
    from agentic_opd.env.opd import AgenticOPDEnv

    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    config = settings.env.model_copy(update={"opd_enabled": False})  # The file has its hints.
    env: Any = AgenticOPDEnv(config, await name_models(settings.servers, config.server_retry_s))
    try:
        server = env.servers[0]
        info = await fetch_info(server.client)
        version, server_url = info.weight_version, server.client.base_url
        turns = drawn(of_version(list(hinted_turns(_groups(file))), version, server_url), limit, config.seed)
        await env.setup()
        check_tokens(turns, env.chat, env.config.tokenizer_name)
        await server.plugin.check_scores(1)
        await check_weights(turns, server.plugin, server_url)

        async def sample(prompt: Sequence[int], count: int, max_tokens: int) -> Any:
            sampling = {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": max_tokens}
            return await server.complete(prompt, n=count, stop_token_ids=env.chat.stop_token_ids, **sampling)

        tasks = {task.task_id: task for task in (*env.tasks, *env.eval_tasks)}
        slots = asyncio.Semaphore(config.max_concurrent_episodes)
        resampler = Resampler(env.world, tasks, env.chat, sample, samples, config, slots)
        lifts = Lifts(samples, config.temperature, server.config.model_name, version, len(turns), ())
        return await _resample(resampler, turns, lifts, file, config)
    finally:
        await env.close()


async def _resample(
    resampler: Resampler, turns: Sequence[HintedTurn], lifts: Lifts, file: Path, config: AgenticOPDEnvConfig
) -> int:
    """Measure the turns that lack a measurement; the file of lifts is complete JSON after each."""
    path = lifts_path(file)
    earlier = _earlier(path, lifts, config)
    finished = {turn.key for turn in earlier}
    todo = [turn for turn in turns if (turn.line, turn.index, turn.turn) not in finished]
    with LiveBar("turns", len(turns), len(turns) - len(todo)) as bar:

        def add_result(result: Resampled) -> None:
            measured = sorted((*earlier, *result.turns), key=lambda turn: turn.key)
            write_lifts(path, replace(lifts, turns=tuple(measured)))
            with_hint, without = (
                sum(getattr(turn, name) for turn in measured) for name in ("passed_with", "passed_without")
            )
            counted = f"passed {with_hint} with the hint, {without} without, of {len(measured) * lifts.samples} each"
            bar.show(len(turns) - len(todo) + len(result.turns) + len(result.failed), counted)
            if not bar.is_live:
                bar.say(f"turn {len(measured)}/{len(turns)}: {counted}")

        result = await resample(todo, resampler.measure, add_result, config.groups_at_a_time)
    for line in result.failed:
        bar.say(f"not measured: {line}")
    measured = (*earlier, *result.turns)
    if isinstance(result.stopped, OPDError) and not measured:
        raise result.stopped
    bar.say(f"{len(measured)} of {len(turns)} turns measured: {path}")
    if measured:
        measured_lift = lift_of(measured)
        with_hint, without, lift = measured_lift.with_hint, measured_lift.without_hint, measured_lift.lift
        bar.say(
            f"over all of them {with_hint.value:.1%} passed with the hint, {without.value:.1%} without: "
            f"{100 * lift.value:+.0f} ({100 * lift.low:+.0f} to {100 * lift.high:+.0f}) points"
        )
    if result.stopped is not None:
        why = str(result.stopped) or "interrupted"
        bar.say(f"stopped early: {why}; the same command with --env.resume continues")
    bar.say(f"to look at it: agentic-opd report {file}")
    if isinstance(result.stopped, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    return EXIT_OK if result.stopped is None and not result.failed else EXIT_FAILED


def _earlier(path: Path, lifts: Lifts, config: AgenticOPDEnvConfig) -> Sequence[ResampledTurn]:
    """Return the turns of an earlier measurement, which this one continues.

    Raises:
        PlaceError: it has other settings, or the flags don't say whether to resume.
    """
    if config.overwrite and not config.resume:
        return ()
    earlier = read_lifts(path)
    if earlier is None:
        return ()
    if not config.resume:
        raise PlaceError(
            f"{str(path)!r} holds an earlier measurement of {len(earlier.turns)} turns. Continue it with --env.resume, "
            "or replace it with --env.overwrite"
        )
    for name in ("samples", "temperature", "policy_model", "weight_version"):
        was, is_now = getattr(earlier, name), getattr(lifts, name)
        if was != is_now:
            raise PlaceError(
                f"{str(path)!r} was measured with {name} {was!r}, now it is {is_now!r}: set it back to continue, or "
                "use --env.overwrite, without --env.resume"
            )
    return earlier.turns


def _groups(path: Path) -> Iterator[tuple[int, ScoredGroup]]:
    """The good lines of the file, numbered from 1; what is wrong with the others, the report says."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, ScoredGroup.from_wire(read_json(line))
            except (ValueError, RecursionError, WireError):
                continue


if __name__ == "__main__":
    sys.exit(main())
