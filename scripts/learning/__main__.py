"""Does the demo policy learn from its hints, and how many rollouts does that take?

The whole loop on this machine: vLLM on the CPU with the demo policy, a second vLLM that keeps the first weights, judges
and teaches, run-api, `serve`, and the reference trainer. Five modes see the same number of rollouts: opd (top-K
divergence from the teacher that read the hint), grpo (the scores), opd+grpo (hints where there are some, scores
elsewhere), and two controls, wrong-hint (each hint is one of another task) and no-hint (the teacher reads none). First
a sweep chooses the learning rate of each mode on a seed of its own; a control takes that of opd, from which it is to
differ in its hints alone. Then every seed trains. Along the way `evaluate` measures the pass rate without hints at
temperature 1.

    scripts/learn            the whole experiment: hours on two cores; started again, it goes on where it was
    scripts/learn --quick    one seed, a few steps, no sweep: minutes; shows that everything runs, and proves nothing
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from laboratory import GROUP_SIZE, MODES, ROOT, Examiner, Laboratory, Point, Run, RunFailedError
from results import Curves, draw, markdown, mean_curve, read_curves, rollouts_to, table, write_json
from rich.console import Console

from agentic_opd.live_bar import LiveBar
from agentic_opd.serving.local import ServerFailedError, local_server

SWEEP_SEED = 1000
QUICK = {
    **{"seeds": [0], "rollouts": 32, "points": [0, 32], "eval_samples": 2},
    **{"batch_size": 16, "updates": 2, "lrs": [3e-4]},
}


def main() -> int:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if refusal := other_settings(args):
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return asyncio.run(experiment(args))
    except (RunFailedError, ServerFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {args.out / 'results.json'}", file=sys.stderr)
        return 130


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/learn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/learn"), help="where everything is written: %(default)s")
    parser.add_argument("--model", type=Path, default=Path("agentic_opd/demo/policy"), help="start: %(default)s")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="default: all five")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--rollouts", type=int, default=512, help="of each run: %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="rollouts of a batch: %(default)s")
    parser.add_argument("--updates", type=int, default=4, help="optimizer updates on each batch: %(default)s")
    parser.add_argument(
        "--points",
        nargs="+",
        type=int,
        default=[0, 32, 64, 128, 256, 384, 512],
        help="rollouts after which the pass rate is measured, multiples of --batch-size: 0 32 64 128 256 384 512",
    )
    parser.add_argument("--eval-samples", type=int, default=16, help="episodes of each of the 8 tasks: %(default)s")
    parser.add_argument(
        "--lrs", nargs="+", type=float, default=[3e-4, 1e-3], help="learning rates of the sweep; one: no sweep"
    )
    parser.add_argument("--sweep-rollouts", type=int, default=128, help="of each run of the sweep: %(default)s")
    parser.add_argument("--quick", action="store_true", help=f"the settings {QUICK}")
    args = parser.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    if args.batch_size % GROUP_SIZE or any(n % args.batch_size for n in (args.rollouts, *args.points)):
        parser.error(f"--batch-size must divide --rollouts and --points, and be a multiple of {GROUP_SIZE}")
    args.points = sorted({n for n in args.points if n <= args.rollouts} | {0, args.rollouts})
    return args


def other_settings(args: argparse.Namespace) -> str | None:
    """What forbids to add to the curves of the folder, whose settings are written down; None where nothing does."""
    kept = ("model", "rollouts", "batch_size", "updates", "points", "eval_samples", "lrs", "sweep_rollouts")
    settings = {name: str(value) if isinstance(value := getattr(args, name), Path) else value for name in kept}
    path = args.out / "settings.json"
    before = json.loads(path.read_text()) if path.exists() else settings
    if changed := [f"{name} {before[name]}" for name in kept if before[name] != settings[name]]:
        return f"{args.out} holds curves of other settings ({', '.join(changed)}); choose another --out"
    path.write_text(json.dumps(settings, indent=1) + "\n")
    return None


async def experiment(args: argparse.Namespace) -> int:
    if not missing(args, read_curves(args.out / "results.json")):
        print(f"nothing is left to do; {args.out / 'results.json'} is whole", file=sys.stderr)
        return 0
    weights = args.out / "weights"
    weights.mkdir(exist_ok=True)
    size = ("--max-model-len", "4096")
    trained = (*size, "--weights-root", str(weights.resolve()))
    with (
        local_server(args.model, *trained, log=args.out / "vllm.log", cwd=ROOT) as vllm,
        local_server(args.model, *size, log=args.out / "expert.log", cwd=ROOT) as expert,
    ):
        laboratory = Laboratory(vllm, expert, args.model, args.out, args.batch_size, args.eval_samples, args.updates)
        work = Work(args, laboratory, Examiner(laboratory))
        try:
            await work.do()
        finally:
            await work.examiner.close()
    return 0


class Work:
    """The sweep, then every seed; each finished curve is on disk."""

    def __init__(self, args: argparse.Namespace, laboratory: Laboratory, examiner: Examiner) -> None:
        self.args, self.laboratory, self.examiner = args, laboratory, examiner
        self.console = Console(stderr=True)
        self.sweep: Curves = read_curves(args.out / "sweep.json")
        self.curves: Curves = read_curves(args.out / "results.json")
        self.starts: dict[int, Point] = {}

    async def do(self) -> None:
        """Do what is missing, then show all of it."""
        args = self.args
        todo = missing(args, self.curves)
        for mode in {tuned_as(mode): None for mode, _ in todo} if len(args.lrs) > 1 else ():
            for lr in args.lrs:
                if f"{lr:g}" not in self.sweep.get(mode, {}):
                    run = Run(mode, SWEEP_SEED, lr, args.sweep_rollouts // args.batch_size)
                    points = [n for n in args.points if n <= args.sweep_rollouts]
                    self.sweep.setdefault(mode, {})[f"{lr:g}"] = await self.curve(run, points)
                    write_json(args.out / "sweep.json", self.sweep)
        for mode, seed in todo:
            run = Run(mode, seed, self.best_lr(mode), args.rollouts // args.batch_size)
            self.curves.setdefault(mode, {})[str(seed)] = await self.curve(run, args.points)
            self.show()

    def best_lr(self, mode: str) -> float:
        """The learning rate whose curve lies highest on average."""
        if len(self.args.lrs) == 1:
            return self.args.lrs[0]
        swept = self.sweep[tuned_as(mode)]
        means = {lr: sum(point.pass_rate for point in points) for lr, points in swept.items()}
        return float(max(means, key=means.__getitem__))

    async def curve(self, run: Run, points: Sequence[int]) -> list[Point]:
        """Train, then measure the weights at each point."""
        with LiveBar(self.console, f"{run.mode} seed {run.seed} lr {run.lr:g}: steps", run.steps) as bar:

            def stepped(metrics: dict[str, float]) -> None:
                bar.show(int(metrics["step"]), f"score {metrics['score_mean']:.2f}")

            weights = await self.laboratory.train(run, stepped)
        curve = [await self.point(run, weights, rollouts) for rollouts in points]
        shown = ", ".join(f"{point.rollouts}: {point.pass_rate:.2f}" for point in curve)
        self.console.print(f"{run.mode} seed {run.seed} lr {run.lr:g}: {shown}", highlight=False, soft_wrap=True)
        return curve

    async def point(self, run: Run, weights: Path, rollouts: int) -> Point:
        """The pass rate after so many rollouts; that of the start is measured once for each seed, for all modes."""
        if rollouts == 0 and run.seed in self.starts:
            return self.starts[run.seed]
        if rollouts == 0:
            self.laboratory.load_start()
        else:
            self.laboratory.load(weights / f"step-{rollouts // self.args.batch_size:06d}")
        point = Point(rollouts, *await self.examiner.pass_rate())
        if rollouts == 0:
            self.starts[run.seed] = point
        return point

    def show(self) -> None:
        """Write results.json, results.md and curves.png, and print the table."""
        ordered = {mode: self.curves[mode] for mode in MODES if mode in self.curves}
        write_json(self.args.out / "results.json", ordered)
        (self.args.out / "results.md").write_text(markdown(ordered))
        draw(ordered, self.args.out / "curves.png")
        self.console.print(table(ordered))
        reached = {mode: rollouts_to(mean_curve(seeds)) for mode, seeds in ordered.items()}
        if (opd := reached.get("opd")) and (grpo := reached.get("grpo")):
            self.console.print(f"opd needs {grpo / opd:.1f} times fewer rollouts than grpo", highlight=False)


def missing(args: argparse.Namespace, curves: Curves) -> list[tuple[str, int]]:
    """The modes and seeds that no curve is there for yet."""
    return [(mode, seed) for seed in args.seeds for mode in args.modes if str(seed) not in curves.get(mode, {})]


def tuned_as(mode: str) -> str:
    """The mode whose learning rate this one takes: a control differs from opd in its hints alone."""
    return "opd" if mode.endswith("-hint") else mode


if __name__ == "__main__":
    sys.exit(main())
