"""What replays say of hints: which hints help, how the test judges planted ones, and which signals name the turns that
matter.

    scripts/learning/study_proofs --out runs/proof

For each world it serves the demo policy on this machine, makes groups (`process`), and replays them: the recorded calls
of all episodes (do they give the recorded results?); continuations with and without the hint from each hinted turn, and
without a hint from each turn of a failed episode, as `agentic-opd prove` does; and continuations of turns with a known
fault, with a planted hint: the one that fits it, one of another task, and one that says nothing. `function calls` needs
SmolLM2-135M and BFCL's questions (configs/functions.yaml says how to get them). Started again, it goes on.
`results.json` is written after each world. `--page docs/learning/proof` then copies it there, and renews the tables of
the page; nothing is run. `--curves` are folders of learning curves for it (see `learning.break_even`).
"""
# ruff: noqa: ASYNC240 - a script of one task may wait for its small files

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

from bench.local_server import free_port, local_server
from demo_policy.sql.faults import mistake_of
from demo_policy.sql.questions import Question, questions
from demo_policy.sql.world import GeneratedSql
from demo_policy.variants import load_variants
from install.active_environment import command_parser

from agentic_opd.cli.run_settings import settings_of_run
from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.console import LiveBar, set_up_logging
from agentic_opd.core.intervals import Estimate, wilson
from agentic_opd.core.text import read_json
from agentic_opd.core.types import Message, ProofVerdict, Recording, Turn
from agentic_opd.distill.config import HintConfig
from agentic_opd.distill.insertion import HintEncoder, hint_place
from agentic_opd.env.command import name_models
from agentic_opd.env.config import default_settings
from agentic_opd.proof.prove import prove
from agentic_opd.proof.statistics import Passes, at_least
from agentic_opd.rollout.loop import HintInsertion
from agentic_opd.rollout.replay import ReplayError
from agentic_opd.runs.proof_journal import ProofJournal
from agentic_opd.runs.prove_file import FileTurn, Proving, turns_of_file
from agentic_opd.runs.shared_play import SharedPlay
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.wire.files import JsonLines, whole_lines
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord
from learning.break_even import learning_rows, learning_tables, read_learned, read_rows

ROOT = Path(__file__).parents[2]
DROP = 0.25
"""A turn matters if the pass rate of continuations after it is lower than of those from its prompt by at least this, in
an episode that failed."""


class World(NamedTuple):
    """A world with its demo policy."""

    config: str
    model: str
    env: Mapping[str, object] = {}
    groups: int = 64


_LESSONS = f"{ROOT}/scripts/demo_policy/sql_world.py:Lessons"
_BY_TRAJECTORY = {"judge.scope": "trajectory"}
WORLDS = {
    "coding": World("demo.yaml", "scripts/demo_policy/policy"),
    "coding without examples": World(
        "demo.yaml", "scripts/demo_policy/policy", {"world.builtin_examples": "false"}, groups=96
    ),
    "sql": World("sql.yaml", "scripts/demo_policy/sql_policy", {"world": _LESSONS}, 80),
    "function calls": World("functions.yaml", "runs/models/smollm2-135m-instruct", groups=100),
    "coding by trajectory": World("demo.yaml", "scripts/demo_policy/policy", _BY_TRAJECTORY, 48),
    "sql by trajectory": World("sql.yaml", "scripts/demo_policy/sql_policy", {"world": _LESSONS, **_BY_TRAJECTORY}, 48),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "scripts/learning/study_proofs")
    parser.add_argument("--out", type=Path, default=Path("runs/proof"), help="folder of the results: %(default)s")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--groups", type=int, help="groups of four episodes of each world; default: 64 to 96")
    parser.add_argument("--pairs", type=int, default=8, help="continuations of each arm at most: %(default)s")
    parser.add_argument("--planted", type=int, default=30, help="hints of each kind planted a world: %(default)s")
    parser.add_argument("--planted-pairs", type=int, default=32, help="--pairs of planted hints: %(default)s")
    parser.add_argument("--page", type=Path, help="folder of the page whose tables are to be renewed from --out")
    parser.add_argument("--curves", nargs="+", type=Path, help="curves for --page; default: those that the page has")
    args = parser.parse_args(argv)
    set_up_logging(verbose=False)
    if args.page is not None:
        write_results(args.out)
        write_page(args.out / "results.json", args.page, args.curves or ())
        return 0
    for name in args.worlds:
        folder = args.out / name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "done").exists():
            with local_server(
                ROOT / WORLDS[name].model,
                "--max-model-len",
                "4096",
                log=folder / "vllm.log",
                cwd=ROOT,
                port=free_port(),
            ) as server:
                asyncio.run(study(name, folder, f"{server.base_url}/v1", args))
            (folder / "done").touch()
        write_results(args.out)
    return 0


async def study(name: str, folder: Path, base_url: str, args: argparse.Namespace) -> None:
    """Make the groups of a world, and replay them."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    groups = folder / "groups.jsonl"
    await asyncio.to_thread(make_groups, WORLDS[name], groups, base_url, args.groups or WORLDS[name].groups)
    env = await environment(groups, base_url)
    try:
        await prove_turns(env, groups, args.pairs)
        await compare_calls(env, groups, folder / "equal.json")
        await plant(env, name, groups, folder / "planted.jsonl", args.planted, args.planted_pairs)
    finally:
        await env.close()


def make_groups(world: World, groups: Path, base_url: str, count: int) -> None:
    """Write the groups that are missing."""
    if groups.with_suffix(".made").exists():
        return
    settings = {
        **{"data_path_to_save_groups": groups, "total_steps": count, "resume": "true", "overwrite": "false"},
        **{"report": "false", "seed": 53, **world.env},
    }
    flags = [text for setting, value in settings.items() for text in (f"--env.{setting}", str(value))]
    command = [sys.executable, "-m", "agentic_opd", "process", "--config", f"configs/{world.config}", *flags]
    subprocess.run([*command, "--openai.base_url", base_url, "--openai.model_name", world.model], check=True, cwd=ROOT)
    groups.with_suffix(".made").touch()


async def environment(groups: Path, base_url: str) -> Any:
    """Return the environment of the run that wrote the groups, ready to replay them."""
    defaults, _ = default_settings()
    config = settings_of_run(defaults, groups).model_copy(update={"opd_enabled": False})
    servers = await name_models([PolicyServerConfig(base_url=base_url)], config.server_retry_s)
    from agentic_opd.env.opd import AgenticOPDEnv  # It imports torch, which --help does not need.

    env: Any = AgenticOPDEnv(config, servers)
    await env.setup()
    return env


# ------------------------------------------------------------------------------------------------------------- replays


async def prove_turns(env: Any, groups: Path, pairs: int) -> None:
    """Prove the hinted turns, and measure the pass rate from the others of failed episodes."""
    journal = ProofJournal(groups)
    try:
        turns = await asyncio.to_thread(turns_of_file, groups, env)
        failed = {
            (line, index)
            for line, group in read_groups(groups)
            for index, rollout in enumerate(group.rollouts)
            if rollout.checks is not None and not rollout.checks.all_passed
        }
        unhinted = [turn for turn in turns.unhinted if turn.position[:2] in failed]
        chosen = sorted([*turns.hinted, *unhinted], key=lambda turn: turn.position)
        with LiveBar("turns", len(chosen)) as bar:
            proving = Proving(chosen, env, journal, pairs, turns.proofs, bar)
            start = time.monotonic()
            await proving.run(10)
            cost = {"continuations": proving.outcomes.total(), "seconds": time.monotonic() - start}
            with groups.with_name("costs.jsonl").open("a") as file:
                file.write(json.dumps(cost) + "\n")
            if proving.stopped is not None:
                raise proving.stopped
    finally:
        journal.close()


async def compare_calls(env: Any, groups: Path, path: Path) -> None:
    """Run the recorded calls of all episodes again, and write how many turns gave the recorded results."""
    if path.exists():
        return
    episodes = [episode for _, group in read_groups(groups) for episode in env.recorded_episodes(group)]
    unread = [str(episode) for episode in episodes if isinstance(episode, ReplayError)]
    slots = asyncio.Semaphore(8)

    async def compared(recording: Recording) -> Any:
        async with slots:
            return await env.replay().compared(recording)

    recordings = [episode.recording for episode in episodes if not isinstance(episode, ReplayError)]
    results = await gather_all(map(compared, recordings))
    rest = [str(result.error) for result in results if result.error is not None]
    counts = {"equal": sum(result.equal for result in results), "total": sum(result.total for result in results)}
    turns = sum(len(recording.turns) for recording in recordings)
    path.write_text(json.dumps({**counts, "turns": turns, "different": [*rest, *unread]}) + "\n")


PLANTS = ("right", "other", "neutral")
"""Kinds of planted hints: that of the turn's fault, one of another task, and one that says nothing (hint.neutral)."""


class Plant(NamedTuple):
    """A hint for a turn with a known fault."""

    key: str
    turn: FileTurn
    hint: str
    kind: str


async def plant(env: Any, name: str, groups: Path, path: Path, count: int, pairs: int) -> None:
    """Prove planted hints, `count` of each kind."""
    finished = {read_json(line)["key"] for line, _ in whole_lines(path)} if path.exists() else set[str]()
    turns = await asyncio.to_thread(turns_of_file, groups, env, again=True)
    both = sorted([*turns.hinted, *turns.unhinted], key=lambda turn: turn.position)
    plants = [plant for plant in planted_hints(name, both, count) if plant.key not in finished]
    encoder, lines = HintEncoder(env.chat.renderer, env.tokenizer), JsonLines(path, is_continued=path.exists())
    queue, shared = iter(plants), SharedPlay(env)
    with LiveBar("planted hints", len(plants)) as bar:

        async def work() -> None:
            for planted in queue:
                trace, turn = located(planted.turn)
                position = hint_place(trace, turn, "end")
                ids = encoder.encode(planted.hint, as_message=position.as_message)
                hint = HintInsertion(position.insert_at, ids)
                async with shared.of(planted.turn.recording, planted.turn.turn_index, hint) as play:
                    proof = await prove(play, pairs)
                record = proof.record
                row = {
                    "key": planted.key,
                    "kind": planted.kind,
                    "verdict": record.verdict,
                    "rollouts": proof.rollouts,
                }
                lines.write({**row, "with": record.with_hint, "without": record.without_hint, "hint": planted.hint})
                bar.say(f"{planted.key}: {record.verdict} {record.with_hint} {record.without_hint}")

        await gather_all(work() for _ in range(8))
    lines.close()


def located(turn: FileTurn) -> tuple[Any, Turn]:
    """Return the trace and the turn of a turn of a file."""
    return [(trace, recorded) for trace in turn.recording.traces for recorded in trace.turns][turn.turn_index]


def planted_hints(name: str, turns: Sequence[FileTurn], count: int) -> Iterator[Plant]:
    """Yield, for `count` turns with a known fault, a hint of each kind.

    No two turns have the same prompt and the same fault; turns of a prompt that has none yet come first.
    """
    random = Random(53)
    faulty = [(turn, hints) for turn in turns if (hints := fault_hints(name, turn))]
    random.shuffle(faulty)
    by_prompt: defaultdict[object, dict[str, tuple[FileTurn, Sequence[str]]]] = defaultdict(dict)
    for turn, hints in faulty:
        trace, recorded = located(turn)
        by_prompt[turn.recording.name, trace.tokens_T[: recorded.start]].setdefault(hints[0], (turn, hints))
    rounds = zip_longest(*(cases.values() for cases in by_prompt.values()))
    distinct = [case for cases in rounds for case in cases if case is not None]
    for turn, hints in distinct[:count]:
        key = "/".join(map(str, turn.position))
        yield Plant(f"{key}/right", turn, hints[0], "right")
        foreign = [
            other_hints[0]
            for faulty_turn, other_hints in faulty
            if faulty_turn.recording.name != turn.recording.name and other_hints[0] != hints[0]
        ]
        yield Plant(f"{key}/other", turn, random.choice(foreign), "other")
        yield Plant(f"{key}/neutral", turn, HintConfig().neutral, "neutral")


def fault_hints(name: str, turn: FileTurn) -> Sequence[str]:
    """Return the hints that fit a turn's fault; empty if the turn has no fault that the demo policy was taught."""
    _, recorded = located(turn)
    texts = written(turn.recording.messages[recorded.message_index])
    if name.startswith("sql"):
        question = sql_questions().get(turn.recording.name)
        wrong = [mistake_of(question.query, text) for text in texts] if question else []
        return next((mistake.hints for mistake in wrong if mistake is not None), ())
    if (variants := load_variants().get(turn.recording.name.removeprefix("builtin/"))) is None:
        return ()  # No fault of function calls was taught.
    fits = (fault.hints for fault in variants.faults for text in texts if fault.solution.strip() == text.strip())
    return next(fits, ())


def written(message: Message) -> list[str]:
    """Return the texts of a turn's calls that may be its answer: file contents and queries."""
    texts: list[str] = []
    for call in message.get("tool_calls") or ():
        try:
            arguments = read_json(call["function"]["arguments"])
        except ValueError:
            continue
        if isinstance(arguments, dict):
            texts += [text for key, text in arguments.items() if key in ("content", "sql", "query") and text]
    return [text for text in texts if isinstance(cast(object, text), str)]


@cache
def sql_questions() -> dict[str, Question]:
    """Return the questions of the SQL world's training tasks by task id."""
    world = GeneratedSql()
    numbered = zip(range(world.num_tasks), questions(world.seed, held_out=False), strict=False)
    return {f"sql/training/{world.seed}/{number:05}": question for number, question in numbered}


def read_groups(path: Path) -> Iterator[tuple[int, ScoredGroup]]:
    for number, (line, _) in enumerate(whole_lines(path), start=1):
        yield number, ScoredGroup.from_wire(read_json(line))


# ------------------------------------------------------------------------------------------------------------- signals


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """A turn of a failed episode: what signals say of it, and what replays say."""

    task: str
    record: TurnRecord
    gap: float
    """Sum of |gap| over its scored tokens, in nats."""
    votes: float
    """Share of the judge's votes for a hint."""
    tokens: int
    drop: float
    """Pass rate from its prompt on, minus that after it."""
    p_value: float
    """Of the drop, by Fisher's exact test."""

    @property
    def matters(self) -> bool:
        return self.drop >= DROP


def failed_episodes(groups: Path) -> Iterator[list[JudgedTurn]]:
    """Yield the turns of each failed episode whose turns all have a pass rate."""
    for _, group in read_groups(groups):
        for rollout in group.rollouts:
            if rollout.checks is None or rollout.checks.all_passed or not rollout.turns:
                continue
            if all(turn.proof is not None and turn.proof.without_hint[1] for turn in rollout.turns):
                yield list(judged_turns(rollout, group.task_id or ""))


def judged_turns(rollout: ScoredRollout, task: str) -> Iterator[JudgedTurn]:
    records = rollout.turns or ()
    rates = [Passes(*turn.proof.without_hint) for turn in records if turn.proof is not None]
    for number, record in enumerate(records):
        before = rates[number]
        # The end of a failed episode is known: played again from there, it fails.
        after = rates[number + 1] if number + 1 < len(rates) else Passes(0, before.played)
        drop = before.passed / before.played - after.passed / after.played
        gap = 0.0
        if record.is_scored and rollout.rows is not None:
            span, baseline_T = range(*record.scored_span), rollout.baseline_T
            gap = sum(abs(rollout.rows.logprobs_TK[position][0] - baseline_T[position]) for position in span)
        votes = sum(vote.decision == 1 for vote in record.votes) / max(1, len(record.votes))
        length = record.span[1] - record.span[0]
        yield JudgedTurn(task, record, gap, votes, length, drop, at_least(before, after))


Signal = Callable[[Sequence[JudgedTurn]], Sequence[JudgedTurn]]
"""Turns of a failed episode -> those that the signal names."""


def largest(value: Callable[[JudgedTurn], float]) -> Signal:
    """Return a signal that names the turn with the largest value, or none if all values are 0."""

    def name(turns: Sequence[JudgedTurn]) -> Sequence[JudgedTurn]:
        best = max(turns, key=value)
        return [best] if value(best) else []

    return name


SIGNALS: dict[str, Signal] = {
    "blame: all hinted turns": lambda turns: [turn for turn in turns if turn.record.hint is not None],
    "vote share": largest(lambda turn: turn.votes),
    "gap size": largest(lambda turn: turn.gap),
    "length": largest(lambda turn: turn.tokens),
    "position: first turn": lambda turns: turns[:1],
    "position: last turn": lambda turns: turns[-1:],
    "last turn with a call": lambda turns: turns[-2:-1] or turns[-1:],
    "every turn": lambda turns: turns,
}
"""A random turn names as well as every turn does in the mean, so `random turn` has its precision."""


def signal_rows(episodes: Sequence[Sequence[JudgedTurn]]) -> dict[str, dict[str, object]]:
    """Return precision, recall and the share of the lost pass rate on named turns, by signal."""
    rows: dict[str, dict[str, object]] = {}
    all_turns = [turn for turns in episodes for turn in turns]
    matter, lost = sum(turn.matters for turn in all_turns), sum(turn.drop for turn in all_turns)
    for name, signal_of in SIGNALS.items():
        named = [turn for turns in episodes for turn in signal_of(turns)]
        hits = [turn for turn in named if turn.matters]
        rows[name] = {
            **{"named": len(named), "matter": matter, "hits": len(hits)},
            "precision": share_by_task(hits, named),
            "recall": share_by_task(hits, [turn for turn in all_turns if turn.matters]),
            "lost_share": round(sum(turn.drop for turn in named) / lost, 4) if lost else None,
        }
    weights = {id(turn): 1 / len(turns) for turns in episodes for turn in turns}
    hits = [turn for turn in all_turns if turn.matters]
    expected, count = sum(weights[id(turn)] for turn in hits), len(episodes)
    rows["random turn"] = {
        **{"named": count, "matter": matter, "hits": round(expected, 1)},
        "precision": share_by_task(hits, all_turns, lambda turn: weights[id(turn)], lambda turn: weights[id(turn)]),
        "recall": share_by_task(hits, hits, lambda turn: weights[id(turn)]),
        "lost_share": round(sum(sum(t.drop for t in turns) / len(turns) for turns in episodes) / lost, 4)
        if lost
        else None,
    }
    return rows


def share_by_task(
    hits: Sequence[JudgedTurn],
    of: Sequence[JudgedTurn],
    weight: Callable[[JudgedTurn], float] = lambda turn: 1,
    weight_of: Callable[[JudgedTurn], float] = lambda turn: 1,
) -> list[float] | None:
    """Return the share of the weights of `hits` in those of `of`, with Wilson's interval over tasks.

    Turns of a task are not independent (many have one prompt, and so one pass rate), so tasks are the sampling units:
    the effective number of draws gives the variance of the share between tasks (linearized ratio), as in
    `core.intervals.interval`.
    """
    hit_weights, weights = defaultdict[str, float](float), defaultdict[str, float](float)
    for turn in hits:
        hit_weights[turn.task] += weight(turn)
    for turn in of:
        weights[turn.task] += weight_of(turn)
    total, tasks = sum(weights.values()), len(weights)
    if not total:
        return None
    share = sum(hit_weights.values()) / total
    squares = sum((hit_weights[task] - share * count) ** 2 for task, count in weights.items())
    variance = squares / total**2 * tasks / (tasks - 1) if tasks > 1 else inf
    draws = min(max(share * (1 - share) / variance, 1.0), total) if variance > 0 else tasks
    return rounded(wilson(share, draws))


def estimate(hits: int, of: int) -> list[float] | None:
    return rounded(wilson(hits / of, of)) if of else None


def rounded(share: Estimate) -> list[float]:
    return [round(value, 4) for value in share]


# ------------------------------------------------------------------------------------------------------------- results


def write_results(out: Path) -> None:
    """Write results.json from what the worlds' folders hold; planted hints may be missing."""
    results: dict[str, Any] = {"turns": 0, "equal": {}, "signals": {}, "planted": {}, "hints": {}, "costs": {}}
    planted: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name in WORLDS:
        folder = out / name.replace(" ", "_")
        if not (folder / "equal.json").exists():
            continue
        equal = read_json((folder / "equal.json").read_text())
        results["turns"] += equal["turns"]
        results["equal"][name] = {**equal, "share": equal["equal"] / max(1, equal["total"])}
        episodes = list(failed_episodes(folder / "groups.jsonl"))
        judged = {"failed_episodes": len(episodes), "turns": sum(map(len, episodes))}
        results["signals"][name] = {**judged, "by_signal": signal_rows(episodes)}
        results["hints"][name] = hint_counts(folder / "groups.jsonl")
        hints = folder / "planted.jsonl"
        rows = [read_json(line) for line, _ in whole_lines(hints)] if hints.exists() else []
        for kind in PLANTS:
            of_kind = [row for row in rows if row["kind"] == kind]
            results["planted"].setdefault(kind, {})[name] = verdict_shares(of_kind)
            planted[kind] += of_kind
        costs = [read_json(line) for line, _ in whole_lines(folder / "costs.jsonl")]
        results["costs"][name] = {key: sum(cost[key] for cost in costs) for key in ("continuations", "seconds")}
    for kind, rows in planted.items():
        results["planted"][kind]["all"] = verdict_shares(rows)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


_TABLES = re.compile(r"(?s)(<!-- tables -->\n).*(<!-- end of tables -->)")


def write_page(path: Path, page: Path, curves: Sequence[Path] = ()) -> None:
    """Copy results.json to the page's folder, with the curves or the `learning` that is there, and renew the tables."""
    results, target = read_json(path.read_text()), page / "results.json"
    if curves:
        results["learning"] = learning_rows(read_learned(curves))
    elif target.exists():
        results["learning"] = read_json(target.read_text()).get("learning", [])
    target.write_text(json.dumps(results, indent=1) + "\n")
    lines = [*tables(results)]
    if results.get("learning"):
        lines += ["", *learning_tables(read_rows(results["learning"]))]
    text = "\n".join(lines)
    readme = page / "README.md"
    readme.write_text(_TABLES.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", readme.read_text()))


def verdict_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ProofVerdict}
    shares = {verdict.value: estimate(count, len(rows)) for verdict, count in counts.items()}
    return {**shares, "n": len(rows), "rollouts": sum(row["rollouts"] for row in rows)}


def hint_counts(groups: Path) -> dict[str, object]:
    """Return the judge's hints by verdict."""
    records = [turn for _, group in read_groups(groups) for rollout in group.rollouts for turn in rollout.turns or ()]
    proofs = [record.proof for record in records if record.hint is not None and record.proof is not None]
    played = sum(proof.without_hint[1] + (proof.with_hint or (0, 0))[1] for proof in proofs)
    return {
        **{verdict.value: sum(proof.verdict is verdict for proof in proofs) for verdict in ProofVerdict},
        "not_replayed": sum(proof.not_replayed is not None for proof in proofs),
        "continuations": played,
    }


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's tables."""
    yield from (
        "| world | replayed turns | equal | hints proven | refuted | open | continuations a hint |",
        "|-" * 7 + "|",
    )
    for name, equal in results["equal"].items():
        hints = results["hints"][name]
        count = sum(hints[verdict.value] for verdict in ProofVerdict)
        per_hint = hints["continuations"] / max(1, count)
        verdicts = " | ".join(str(hints[verdict]) for verdict in ("proven", "refuted", "open"))
        yield f"| {name} | {equal['turns']} | {equal['share']:.2%} | {verdicts} | {per_hint:.1f} |"
    yield from ("", "| planted hint | world | n | proven | refuted |", "|-" * 5 + "|")
    for kind, by_world in results["planted"].items():
        for name, shares in by_world.items():
            if not shares["n"]:
                continue
            yield f"| {kind} | {name} | {shares['n']} | {percent(shares['proven'])} | {percent(shares['refuted'])} |"
    yield from ("", "| world | signal | named | precision | recall | lost pass rate |", "|-" * 6 + "|")
    for name, signals in results["signals"].items():
        for signal_name, row in signals["by_signal"].items():
            share = "" if row["lost_share"] is None else f"{row['lost_share']:.0%}"
            figures = f"{percent(row['precision'])} | {percent(row['recall'])} | {share}"
            yield f"| {name} | {signal_name} | {row['named']} | {figures} |"


def percent(share: Sequence[float] | None) -> str:
    return "" if share is None else f"{share[0]:.0%} ({share[1]:.0%} to {share[2]:.0%})"


if __name__ == "__main__":
    sys.exit(main())
