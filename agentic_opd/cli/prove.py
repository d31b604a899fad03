"""`agentic-opd prove GROUPS`: replay hinted turns with and without their hints, and write the effects (I/O).

Settings come from the run's `.run.json` beside GROUPS if there is one, then --config, then flags. Imports for
tokenizers and servers happen only after the settings are validated.
"""

import argparse
import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentic_opd.cli.run_settings import settings_of_run
from agentic_opd.core.concurrency import cancel_on
from agentic_opd.core.console import LiveBar, set_up_logging
from agentic_opd.core.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, exit_code
from agentic_opd.core.light import keep_torch_out
from agentic_opd.distill.config import ReplayProof
from agentic_opd.env.config import default_settings
from agentic_opd.settings.flags import SettingsParser, add_settings, parse
from agentic_opd.settings.read import Settings
from agentic_opd.settings.read import read_settings as read_flags

_SETTINGS = {
    *("renderer", "tokenizer_name", "world", "sandbox", "seed", "overwrite", "server_retry_s", "agent"),
    *("max_concurrent_episodes", "max_turns", "max_token_length", "max_tokens_per_turn", "temperature", "top_p"),
    *("tool_timeout_s", "verify_timeout_s", "base_url", "api_key", "model_name"),
}
"""Settings that have an effect here; others are accepted, because files of settings have them."""


def build_parser() -> SettingsParser:
    """Return a parser with the settings of the modes and this command's own flags."""
    env, servers = default_settings()
    parser = SettingsParser(
        prog="agentic-opd prove GROUPS [--pairs N] [--unhinted SHARE|N] [--limit N]",
        description="Measure what each hint of a file changes. The episode is replayed to the hinted turn, and the "
        "policy plays on to the end, with the hint in this turn's prompt and without it, in pairs of the same seed: 4 "
        "pairs where the case is clear, --pairs at most. A hint is proven if the policy passes more often with it, "
        "beyond chance (at most 5% of hints without effect are), refuted if less often, and open otherwise. The proofs "
        "are written into the turns' records in GROUPS. Turns that have a proof are skipped, so that the same command "
        "continues after a kill; --env.overwrite proves them again.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("groups", type=Path, metavar="GROUPS", help="JSONL of scored groups that process wrote")
    parser.add_argument(
        "--pairs",
        type=_positive,
        default=ReplayProof.model_fields["pairs"].default,
        metavar="N",
        help="largest number of continuations with the hint, and of those without (default: %(default)s)",
    )
    parser.add_argument(
        "--unhinted",
        type=_share,
        default=0.0,
        metavar="SHARE|N",
        help="turns without a hint whose pass rate is measured, drawn by env.seed: a share below 1, or a number "
        "(default: none)",
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="largest number of turns, drawn by env.seed")
    add_settings(parser, {"env": env, "openai": servers[0]}, "evaluate", _SETTINGS)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, expected 1 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not value >= 0 or (value >= 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{text}, expected a share below 1 or a whole number")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if every turn was proven or counted, 1 if not, 2 for wrong settings or a file."""
    arguments = parse(build_parser(), argv)
    set_up_logging(verbose=arguments.verbose)

    def run() -> int:
        env, servers = default_settings()
        env = settings_of_run(env, arguments.groups)
        settings = read_flags(arguments, env, servers)
        keep_torch_out()
        return asyncio.run(_prove(settings, arguments))

    return exit_code(run, interrupted="interrupted: finished proofs are kept; the same command continues")


async def _prove(settings: Settings, arguments: argparse.Namespace) -> int:
    from agentic_opd.env.command import name_models
    from agentic_opd.env.opd import AgenticOPDEnv
    from agentic_opd.runs.proof_journal import ProofJournal
    from agentic_opd.runs.prove_file import check_file

    await asyncio.to_thread(check_file, arguments.groups)
    cancel_on(signal.SIGTERM)
    config = settings.env.model_copy(update={"opd_enabled": False})  # The file has its hints.
    journal = ProofJournal(arguments.groups)
    try:
        env: Any = AgenticOPDEnv(config, await name_models(settings.servers, config.server_retry_s))
        try:
            await env.setup()
            env.replay()  # Refuses a world that can't replay.
            return await _prove_turns(env, journal, arguments)
        finally:
            await env.close()
    finally:
        journal.close()


async def _prove_turns(env: Any, journal: Any, arguments: argparse.Namespace) -> int:
    from agentic_opd.runs.prove_file import Proving, counts_line, proof_table, turns_of_file, version_warning

    config, path = env.config, arguments.groups
    turns = await asyncio.to_thread(turns_of_file, path, env, again=config.overwrite)
    chosen = turns.chosen(arguments.unhinted, arguments.limit, config.seed)
    with LiveBar("turns", len(chosen)) as bar:
        proving = Proving(chosen, env, journal, arguments.pairs, turns.proofs, bar)
        bar.say(f"{path}: {len(chosen)} turns to prove ({sum(turn.hint is not None for turn in chosen)} with a hint)")
        if turns.proofs:
            bar.say(f"proofs of earlier runs: {counts_line(turns.proofs)}")
        for reason, count in turns.left_out.items():
            bar.say(f"left out: {count} {reason}")
        if (warning := version_warning(chosen, await env.policy_versions())) is not None:
            bar.say(f"warning: {warning}")
        smallest, largest = proving.expected
        bar.say(f"expected: {smallest} to {largest} continuations, {config.max_concurrent_episodes} at a time")
        # Each turn has at least `2 * FIRST_LOOK` continuations in flight.
        await proving.run(2 + config.max_concurrent_episodes // 8)
        if turns.proofs:
            bar.console.print(proof_table(turns.proofs), soft_wrap=True)
        for outcome, count in proving.outcomes.items():
            if outcome.value != "played":
                bar.say(f"continuations without an outcome: {count} {outcome.value}")
        if proving.stopped is not None:
            why = str(proving.stopped) or "interrupted"
            bar.say(f"stopped early: {why}; finished proofs are in {path}, and the same command continues")
        bar.say(f"to look at it: agentic-opd report {path}")
    if isinstance(proving.stopped, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    return EXIT_OK if proving.finished == len(chosen) else EXIT_FAILED
