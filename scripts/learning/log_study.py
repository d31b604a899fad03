"""Logs in, adapter out: does `agentic-opd learn` keep what the corrections teach, and refuse what shuffled ones do?

    scripts/learning/study_logs --out runs/logs

draws a corpus of 300 sessions of Claude Code, Codex and OpenClaw with a person who corrects 15% of the answers
(`log_corpus`), and the same with the corrections shuffled among the sessions. `agentic-opd learn` makes an adapter for
SmolLM2-135M-Instruct of each, or refuses. Started again, it goes on. `results.json` in --out is written after each
corpus. --page docs/learning/logs copies it there and renews the page's table, and nothing is run. Everything after --
is passed to `agentic-opd learn`.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from install.active_environment import at_dashes, command_parser

ROOT = Path(__file__).parents[2]
MODEL = "runs/models/smollm2-135m-instruct"
CORPORA = ("kept", "shuffled")
START, END = "<!-- table -->", "<!-- end of the table -->"
"""Marks around the page's table."""
REFUSED = 3
"""Exit code of `agentic-opd learn` without an adapter."""
SETTINGS: Mapping[str, object] = {
    "env.renderer.name": "default",
    "env.renderer.tool_format": "text",
    "env.renderer.options": "{tool_parser: pythonic}",
    "env.hint.placement": "last_user",
    "env.judge.model_name": "person",
    "env.prm_votes": 1,
    "train.lr": 5e-4,
    "train.groups_epochs": 1,
    "train.batch_size": 8,
    "train.micro_tokens": 1024,
    "train.loss": "{forward_kl: 1.0, teacher_temperature: 0.3}",
    "learn.max_tokens": 48,
    "learn.max_held_out": 160,
}
"""Settings of `agentic-opd learn`: the renderer of a model without tools, and rates as in the person's sessions."""


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the study's arguments, and those of `agentic-opd learn`."""
    parser = command_parser(__doc__, "scripts/learning/study_logs")
    parser.add_argument("--out", type=Path, default=Path("runs/logs"), help="folder of the results: %(default)s")
    parser.add_argument("--sessions", type=int, default=300, help="of each corpus: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the corpora: %(default)s")
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=CORPORA, help="default: both")
    parser.add_argument("--corpus-only", action="store_true", help="write the logs, and learn nothing")
    parser.add_argument("--page", type=Path, help="folder of the page, docs/learning/logs")
    words, further = at_dashes(argv)
    return parser.parse_args(words), further


def write_corpora(out: Path, count: int, seed: int) -> None:
    """Write the logs of both corpora, and what they hold in `corpus.json`, unless an earlier start did."""
    from learning.log_corpus import draw_sessions, shuffled, write_corpus

    path = out / "corpus.json"
    drawn = {"sessions": count, "seed": seed}
    if path.exists():
        earlier = json.loads(path.read_text())
        if {name: earlier[name] for name in drawn} != drawn:
            raise SystemExit(f"error: {out} holds a corpus of {earlier}; choose another --out")
        return
    sessions = draw_sessions(count, seed)
    for name, corpus in zip(CORPORA, (sessions, shuffled(sessions, seed)), strict=True):
        shutil.rmtree(out / name / "logs", ignore_errors=True)
        write_corpus(corpus, out / name)
    answers, corrections = (sum(getattr(session, name) for session in sessions) for name in ("answers", "corrections"))
    by_wish = Counter(
        message.correction.value for session in sessions for message in session.messages if message.correction
    )
    by_agent = Counter(session.agent for session in sessions)
    counts = {"answers": answers, "corrections": corrections, "by_wish": by_wish, "by_agent": by_agent}
    path.write_text(json.dumps({**drawn, **counts}, indent=2) + "\n")


def learn(out: Path, further: Sequence[str]) -> None:
    """Run `agentic-opd learn` on the logs in a folder, beside the person as its judge.

    Raises:
        CalledProcessError: it failed.
    """
    from bench.local_server import child_process, free_port

    stored_port = (
        out / "judge.port"
    )  # The same after a restart: an address is a setting, and a run has one set of them.
    if not stored_port.exists():
        stored_port.write_text(str(free_port()))
    port = stored_port.read_text()
    judge = [sys.executable, "-m", "learning.log_person", port, str(out / "wishes.json")]
    settings = {**SETTINGS, "env.judge.base_url": f"http://127.0.0.1:{port}/v1"}
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "agentic_opd", "learn", str(out / "logs"), "--model", MODEL]
    with child_process(judge, out / "judge.log", cwd=ROOT):
        process = subprocess.run(
            [*command, "--out", str(out / "run"), *flags, *further, "--", "--max-model-len", "2048"], cwd=ROOT
        )
    if process.returncode not in (0, REFUSED):
        raise subprocess.CalledProcessError(process.returncode, command)


def results(out: Path) -> dict[str, Any]:
    """Return the figures of the corpora that are done."""
    paths = {name: out / name / "run" / "result.json" for name in CORPORA}
    figures = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    return {"corpus": json.loads((out / "corpus.json").read_text()), **figures}


def table(figures: Mapping[str, Any]) -> str:
    """Return the results as a table in Markdown; a corpus that is not done has no row."""
    lines = [
        "| corrections | verdict | answers to learn, with a hint | corrected before | after | change | fallen guards |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CORPORA:
        if (row := figures.get(name)) is None:
            continue
        shares = row["corrections"] or {}
        cells = [_share(shares.get(arm)) for arm in ("before", "after", "difference")]
        fallen = ", ".join(guard for guard, figure in row["guards"].items() if figure["fell"]) or "none"
        turns = f"{row['turns']['training']}, {row['hints']['training']}"
        lines.append(f"| {name} | {row['verdict']} | {turns} | {' | '.join(cells)} | {fallen} |")
    return "\n".join(lines)


def _share(estimate: Sequence[float] | None) -> str:
    if estimate is None:
        return "-"
    value, low, high = (f"{100 * number:.0f}%" for number in estimate[:3])
    return f"{value} ({low} to {high})"


def write_page(out: Path, page: Path) -> None:
    """Copy the results to the folder of the page, and renew its table."""
    shutil.copyfile(out / "results.json", page / "results.json")
    path = page / "README.md"
    before, start, rest = path.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"error: {path} has no table between {START} and {END}")
    path.write_text(f"{before}{start}\n\n{table(results(out))}\n\n{end}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    args, further = parse_args(sys.argv[1:] if argv is None else argv)
    out: Path = args.out.resolve()
    if args.page is not None:
        write_page(out, args.page)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    write_corpora(out, args.sessions, args.seed)
    for name in () if args.corpus_only else args.corpora:
        subprocess.run(["scripts/install/real_model"], cwd=ROOT, check=True)
        learn(out / name, further)
        (out / "results.json").write_text(json.dumps(results(out), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
