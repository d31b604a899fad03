"""Does the demo policy learn from its hints, and how many rollouts does that take?

The whole loop on this machine: vLLM on the CPU with the demo policy, a second vLLM that keeps the first weights, judges
and teaches, run-api, `serve`, and the reference trainer. All modes see the same number of rollouts: opd (top-K
divergence from the teacher that read the hint), grpo (the scores), opd+grpo (hints where there are some, scores
elsewhere), and two controls, wrong-hint (each hint is one of another task) and no-hint (the teacher reads none). More
by their names: next-state (turns are judged by their next state alone), feedback, sibling and reference (the hints are
of that source, and no judge is asked), step-reward (the judge's second question as a reward beside opd), on-policy
(opd, and no batch is sampled before the one before it is learned), held (opd, while turns without a hint are held at
the start), live (opd, and the teacher is the policy as it is), live-held (both), ema (opd, and the teacher is the
policy's moving average, on a third server), contrast and contrast-other (what a neutral or another task's hint explains
is taken out of the target), proof and wrong-hint-proof (opd and wrong-hint, but only hints are scored with which the
policy passes more often when it plays on from their turn), wrong-hint-contrast and wrong-hint-contrast-other (wrong
hints, with that contrast), bf16 (opd in that precision), lora (opd by adapters alone), lora-live and lora-ema (the
teacher is the policy itself, or its moving average), trajectory and trajectory-failed (opd, and the judge reads each
rollout once, as a whole; only failed ones). First a sweep with another seed chooses the learning rate, the batch size
and the divergence's weight of each mode; a control uses opd's, so that it differs only in its hints. Then every seed
trains. Along the way `evaluate` measures the pass rate without hints at temperature 1, and how many of its first
solutions pass. costs.json lists the judged turns and scored tokens of each curve.

With --world sql the tasks are questions over databases, and what is measured is held out: databases, and combinations
of what is asked, that neither this training nor the policy's first one has. Each run's mistakes.md shows the first five
mistakes of before, and what is answered in their place.

With --world functions the tasks are BFCL's questions and the model is a pretrained one (scripts/install/real_model).
What is measured shares no function and no question with what is trained on (split.json beside the results). The modes
train adapters. Hints of opd, wrong-hint and no-hint are what the environment answered to wrong calls, by a scripted
judge that repeats it; of opd-judge, what that judge says in words; of feedback, what it answered to any call. opd-full
trains whole weights.

With --world multiturn the tasks are BFCL's conversations of several user turns over stateful APIs. Two classes of APIs
are held out. The start imitates right conversations of the other classes; the hints are what the environment says of
the first wrong user turn, by a scripted judge that repeats it. A point is the share of user turns that are right, and
conversations.json has [conversations, share of turns, share whole, n], and calls.json [conversations, share of calls
that return no error, calls of a conversation, n]. --world multiturn-gpu is the same for models
that call functions as they are, with whole documents and all categories, on a GPU: --model runs/models/qwen3-4b.

With --world babyai the tasks are missions in a grid world (pip install 'agentic-opd[babyai]'), and seeds are held out.
The start imitates minigrid's bot in rooms with one object, and what is learned are rooms with eight. The hints are what
the environment says of steps that changed nothing, of an end before the mission is done, and in mode trajectory of the
step that took an object of the mission out of view. A point is the share of missions done.

Worlds of functions also measure gauges before and after each run (gauges.md): pass@8, calls where none is right,
repetition, length, and the hinted teacher's agreement on failure.

With --world person the rollouts are 36 sessions at the gateway of a person who wants short answers, and says so in
words; the model is the same. Modes: opd (the person's words are the hint), binary (they are read as a score of 1 or -1
for the turn), combined (both), no-hint. What is measured is the score of first answers to questions of no session: the
share of the person's four rules that they keep.

With --objectives the objectives are compared with opd: reward (the scores alone), combined, rlsd, overlap-sequence,
rlcsd, sdar, rejection, and by name student-support, union-support, token-advantage, combined-outcome
(without the judge's step scores), combined-normalized, eopd, clipped, by-turn, annealed; each at its own best of three
rates. The coding tasks have no examples then. Each --world has a folder in --out, where results.json holds the curves
of all worlds, and objectives.md their ends with intervals, the difference from opd on the same seeds, and costs.

The expected hours are printed at the start, and again as soon as two steps have been timed; --seconds gives rates that
were measured before. A command that was stopped or killed continues each run from the last step that was trained.

With --talk nobody gives a reward, and no hidden test is run while it trains: the rollouts are sessions that a scripted
user holds at the gateway, through OpenAI's client. It tries what it gets on inputs of its own, and complains in words.

    scripts/learn            the whole experiment: about two hours on two cores; started again, it continues
    scripts/learn --objectives --world sql    the comparison of objectives in one world
    scripts/learn --quick    one seed, a few steps, no sweep: minutes; shows that everything runs, and proves nothing

Everything after -- is passed to the vLLM servers, for example `-- --gpu-memory-utilization 0.3` on a GPU that the
trainer uses too.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from bench.local_server import ServerFailedError, free_port, local_server
from install.active_environment import at_dashes, command_parser
from rich.console import Console

from agentic_opd.core.console import LiveBar
from agentic_opd.core.errors import OPDError
from agentic_opd.core.text import text_lines
from agentic_opd.env.config import AgenticOPDEnvConfig
from learning.costs import costs_at, costs_table, read_costs
from learning.first_mistakes import first_mistakes
from learning.first_solutions import first_solutions
from learning.gauges import RunGauges, agreement_of
from learning.gauges import table as gauges_table
from learning.laboratory import (
    BFCL,
    MODES,
    OBJECTIVES,
    ROOT,
    SUBJECTS,
    TALK_MODES,
    TRAJECTORY_JUDGE,
    USUAL_FUNCTION_MODES,
    USUAL_MODES,
    USUAL_OBJECTIVES,
    USUAL_PERSON_MODES,
    Examiner,
    Laboratory,
    Run,
    RunFailedError,
    Setting,
    Subject,
    examiner,
    scripted_judge,
    settings_of,
)
from learning.objectives import collect, read_seconds
from learning.person import PersonExaminer
from learning.progress import Point, Progress, Rates, measured_rates, read_point, trained_steps, write_json, write_point
from learning.results import (
    Curves,
    best,
    by_points,
    draw,
    markdown,
    mean_curve,
    read_curves,
    rollouts_to,
    table,
    tuned_as,
)
from learning.supervised import Start, SupervisedError, supervised_start, with_questions

SWEEP_SEED = 1000
SERVED_RANKS = (8, 16, 32, 64, 128, 256)
"""What vLLM takes as the largest rank of adapters."""
PERSON = {
    **{"modes": list(USUAL_PERSON_MODES), "seeds": [0, 1], "rollouts": 36, "points": [0, 12, 24, 36], "epochs": 2},
    **{"batch_sizes": [4], "minibatches": 1, "lrs": [2e-4], "weights": [1.0]},
}
"""What --world person has in place of the defaults."""
QUICK = {
    **{"seeds": [0], "rollouts": 16, "points": [0, 16], "eval_samples": 1},
    **{"batch_sizes": [8], "epochs": 1, "minibatches": 1, "lrs": [3e-4], "weights": [1.0]},
}
QUICK_LONG = {
    **{"rollouts": 8, "points": [0, 8], "batch_sizes": [4], "exam_tasks": 4},
    **{"start_conversations": 8, "start_questions": 8},
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
    except (RunFailedError, ServerFailedError, SupervisedError, OPDError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {args.out / 'results.json'}", file=sys.stderr)
        return 130


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_parser(__doc__, "scripts/learn")
    parser.add_argument("--out", type=Path, help="where everything is written: runs/learn, or runs/objectives")
    parser.add_argument("--world", choices=list(SUBJECTS), default="coding", help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="start; default: the world's demo policy")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=list(MODES),
        help=f"default: {' '.join(USUAL_MODES)}; of functions: {' '.join(USUAL_FUNCTION_MODES)}; of person: "
        f"{' '.join(USUAL_PERSON_MODES)}",
    )
    parser.add_argument(
        "--objectives",
        nargs="*",
        choices=list(OBJECTIVES),
        help=f"compare objectives, in place of --modes; without names: {' '.join(USUAL_OBJECTIVES)}",
    )
    parser.add_argument(
        "--without-examples", action="store_true", help="tasks without public examples: nothing to run before the end"
    )
    parser.add_argument(
        "--talk", action="store_true", help=f"rollouts are a complaining user's sessions; modes: {' '.join(TALK_MODES)}"
    )
    parser.add_argument(
        "--through", choices=["chat", "messages"], default="chat", help="protocol of --talk at the gateway: %(default)s"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--rollouts", type=int, default=256, help="of each run: %(default)s")
    parser.add_argument("--epochs", type=int, default=4, help="passes over each batch: %(default)s")
    parser.add_argument("--minibatches", type=int, default=4, help="optimizer updates of each pass: %(default)s")
    parser.add_argument("--group-size", type=int, default=4, help="rollouts of one task: %(default)s")
    parser.add_argument(
        "--points",
        nargs="+",
        type=int,
        default=[0, 64, 128, 256],
        help="rollouts after which the pass rate is measured, multiples of each batch size: 0 64 128 256",
    )
    parser.add_argument(
        "--eval-samples",
        type=int,
        help="episodes of each measured task; default: 16 of coding's 8, 2 of sql's 192, 1 of the 200 of functions, "
        "multiturn and babyai, 2 of person's 40",
    )
    parser.add_argument("--exam-tasks", type=int, help="held-out tasks that are measured; default: all")
    parser.add_argument(
        "--start-conversations",
        type=int,
        default=64,
        help="episodes that a supervised start imitates, of each of its worlds: %(default)s",
    )
    parser.add_argument(
        "--start-questions", type=int, default=256, help="questions of one turn beside them, of multiturn: %(default)s"
    )
    parser.add_argument("--start-epochs", type=int, default=1, help="passes over these: %(default)s")
    parser.add_argument("--lrs", nargs="+", type=float, default=[5e-5, 1e-4], help="learning rates of the sweep")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[32], help="rollouts of a batch, likewise")
    parser.add_argument(
        "--weights", nargs="+", type=float, default=[1.0, 4.0], help="of the divergence, likewise: 1 4; GRPO has 1"
    )
    parser.add_argument("--sweep-rollouts", type=int, default=64, help="of each run of the sweep: %(default)s")
    parser.add_argument(
        "--lr-schedule", choices=["constant", "linear", "cosine"], default="linear", help="of the trainer: %(default)s"
    )
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="fp32",
        help="of trainer and servers; on CPUs with amx_bf16 vLLM is about twice as fast in bf16: %(default)s",
    )
    parser.add_argument(
        "--seconds",
        nargs=2,
        type=float,
        metavar=("ROLLOUT", "EPISODE"),
        help="expected of a rollout that is trained on, and of a measured episode; default: measured",
    )
    parser.add_argument(
        "--expert",
        metavar="URL",
        help="server of scripts/serve_vllm with the start, which judges and teaches; default: one is started. Several "
        "of these commands can share it, with different modes or seeds and one --out each. Resume with the same URL",
    )
    parser.add_argument("--quick", action="store_true", help=f"the settings {QUICK}")
    arguments, flags = at_dashes(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(arguments)
    if args.precision == "bf16":
        flags = ["--dtype", "bfloat16", *flags]
    args.vllm_flags = ["--", *flags] if flags else []
    args.collected = None
    args.out = args.out or Path("runs/learn" if args.objectives is None else "runs/objectives")
    if args.objectives is not None:
        compare_objectives(parser, args)
    check_talk(parser, args)
    if args.world == "person":
        args.talk = True
        for name, value in PERSON.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    if args.quick:
        subject = SUBJECTS[args.world]
        is_long = subject.has_conversations or subject.has_supervised_start
        vars(args).update(
            QUICK | (QUICK_LONG if is_long else {}) | ({"batch_sizes": [4]} if args.world == "person" else {})
        )
    check_world(parser, args)
    args.settings = [Setting(*values) for values in product(args.lrs, args.batch_sizes, args.weights)]
    numbers = (args.rollouts, args.sweep_rollouts, *args.points)
    if any(size % args.group_size or any(n % size for n in numbers) for size in args.batch_sizes):
        parser.error(
            f"a batch size must divide all numbers of rollouts, and be a multiple of --group-size ({args.group_size})"
        )
    args.points = sorted({n for n in args.points if n <= args.rollouts} | {0, args.rollouts})
    return args


def check_talk(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse settings that do not apply to `--talk`."""
    if not args.talk:
        return
    if args.world != "coding":
        parser.error("--talk is for the coding tasks only: leave --world out")
    if args.group_size != parser.get_default("group_size"):
        parser.error("with --talk every session is a group of one: leave --group-size out")
    if refused_modes := set(args.modes or ()) - set(TALK_MODES):
        parser.error(
            f"--talk has no mode {', '.join(sorted(refused_modes))}, which needs a reward or the task of a session"
        )


def check_world(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set what the world decides, and refuse modes that it has not and files that are missing."""
    subject = SUBJECTS[args.world]
    args.model = args.model or Path(subject.model)
    args.eval_samples = args.eval_samples or {"coding": 16, "sql": 2, "person": 2}.get(args.world, 1)
    args.modes = args.modes or list(subject.usual_modes or USUAL_MODES)
    if subject.modes and (refused_modes := [mode for mode in args.modes if mode not in subject.modes]):
        parser.error(f"--world {args.world} has no {' '.join(refused_modes)}, only {' '.join(subject.modes)}")
    needed = (args.model, *([BFCL] if subject.irrelevance else [])) if subject.modes else ()
    if lacking := [str(path) for path in needed if not path.exists()]:
        parser.error(
            f"{' and '.join(lacking)} is missing: scripts/install/real_model makes the model, and `pip install "
            "--no-deps --target runs/bfcl bfcl-eval==2026.3.23 mpmath` gets the questions"
        )


def compare_objectives(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set what `--objectives` implies."""
    if args.talk:
        parser.error("--talk has no rewards to compare objectives by: leave --objectives out")
    args.modes, args.weights = args.objectives or list(USUAL_OBJECTIVES), [1.0]
    if args.lrs == parser.get_default("lrs"):
        args.lrs = [5e-5, 1e-4, 2e-4]
    args.without_examples = args.world == "coding"
    args.collected, args.out = args.out, args.out / args.world


def other_settings(args: argparse.Namespace) -> str | None:
    """What forbids to add to the curves of the folder, whose settings are written down; None where nothing does."""
    names = (
        *("model", "rollouts", "epochs", "minibatches", "points", "eval_samples"),
        *("without_examples", "talk", "lrs", "lr_schedule", "batch_sizes", "weights", "sweep_rollouts", "world"),
        *("group_size", "through", "exam_tasks", "start_conversations", "start_questions", "start_epochs"),
        "precision",
    )
    unset = {"world": "coding", "group_size": 4, "through": "chat", "exam_tasks": None, "precision": "fp32"}
    unset |= {"start_conversations": 64, "start_questions": 0, "start_epochs": 2}
    settings = {name: str(value) if isinstance(value := getattr(args, name), Path) else value for name in names}
    path = args.out / "settings.json"
    before = json.loads(path.read_text()) if path.exists() else settings
    if changed := [
        f"{name} {before.get(name)}" for name in names if before.get(name, unset.get(name, False)) != settings[name]
    ]:
        return f"{args.out} holds curves of other settings ({', '.join(changed)}); choose another --out"
    path.write_text(json.dumps(settings, indent=1) + "\n")
    return None


async def start_of(subject: Subject, args: argparse.Namespace) -> Path:
    """Return the folder of the policy that has imitated episodes of each of the start's worlds, one after the other."""
    settings = yaml.safe_load((ROOT / "configs" / subject.config).read_text())["env"]
    questions = with_questions(settings["world"], subject.start_questions, BFCL)
    start = Start(args.start_conversations, args.start_epochs, subject.start_lr, args.start_questions)
    model = args.model
    for number, world in enumerate(subject.start_worlds):
        changed = {"world": {**questions, **world}, "data_path_to_save_groups": None}
        config = AgenticOPDEnvConfig(**{**settings, **changed})
        model = await supervised_start(config, model, args.out / f"supervised-{number}", start)
    return model


async def experiment(args: argparse.Namespace) -> int:
    results = args.out / "results.json"
    if not missing(args, read_curves(results)):
        print(f"nothing is left to do; {results} is whole", file=sys.stderr)
        return 0
    subject = SUBJECTS[args.world]
    if subject.has_supervised_start:
        args.model = await start_of(subject, args)
    weights = args.out / "weights"
    weights.mkdir(exist_ok=True)
    size = ("--max-model-len", str(subject.context), "--kv-cache-gib", str(subject.kv_cache_gib))
    trained = (*size, "--weights-root", str(weights.resolve()))
    flags = args.vllm_flags
    if ranks := [subject.trainer(mode).get("lora_rank") for mode in args.modes if "lora_rank" in subject.trainer(mode)]:
        trained += ("--max-lora-rank", str(max(map(int, map(str, ranks)))), "--max-adapters", "4")
    policy_port, expert_port, judge_port, api_port, average_port = ports(args.out)
    with ExitStack() as parts:
        log = args.out / "vllm.log"
        vllm = parts.enter_context(local_server(args.model, *trained, *flags, log=log, cwd=ROOT, port=policy_port))
        expert_url = (args.expert or f"http://127.0.0.1:{expert_port}").rstrip("/").removesuffix("/v1")
        if args.expert is None and any(map(subject.needs_expert, args.modes)):
            log, options = args.out / "expert.log", expert_options(subject, args.modes, flags)
            parts.enter_context(local_server(args.model, *size, *options, log=log, cwd=ROOT, port=expert_port))
        average = None
        if any(map(subject.needs_teacher, args.modes)):
            log = args.out / "average.log"
            average = parts.enter_context(
                local_server(args.model, *trained, *flags, log=log, cwd=ROOT, port=average_port)
            )
        judge_url = None
        if subject.has_scripted_judge:
            judge_url = parts.enter_context(scripted_judge(judge_port, args.out / "judge.log"))
        laboratory = Laboratory(
            *(vllm, expert_url, args.model, args.out, args.eval_samples),
            *(args.epochs, args.minibatches, args.lr_schedule, not args.without_examples),
            *(args.talk, subject, args.group_size, args.through, judge_url, average, api_port, args.exam_tasks),
            args.precision,
        )
        work = Work(args, laboratory, examiner(laboratory))
        try:
            await work.do()
        finally:
            await work.examiner.close()
    return 0


def expert_options(subject: Subject, modes: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the options of the expert's server: the judge of trajectories is an adapter beside its weights."""
    judge = next(filter(None, map(subject.judge_adapter, modes)), None)
    if judge is None:
        return [*flags]
    load = ["--lora-modules", f"{TRAJECTORY_JUDGE}={judge.adapter}"]
    rank = next(rank for rank in SERVED_RANKS if rank >= judge.rank)
    return ["--max-lora-rank", str(rank), *(flags or ["--"]), *load]


def ports(out: Path) -> list[int]:
    """Return the ports of policy, expert, scripted judge, run-api and the server of the moving average.

    They stay the same when the experiment is resumed, because they are in the settings of the groups' file.
    """
    path = out / "ports.json"
    if not path.exists():
        write_json(path, [free_port() for _ in range(5)])
    return json.loads(path.read_text())


class Work:
    """The sweep, then every seed; each finished curve is on disk."""

    def __init__(self, args: argparse.Namespace, laboratory: Laboratory, examiner: Examiner | PersonExaminer) -> None:
        self.args, self.laboratory, self.examiner = args, laboratory, examiner
        self.console = Console(stderr=True)
        self.sweep: Curves = read_curves(args.out / "sweep.json")
        self.curves: Curves = read_curves(args.out / "results.json")
        self.firsts: Curves = read_curves(args.out / "first_solutions.json")
        self.costs = read_costs(args.out / "costs.json")
        self.gauges: RunGauges = read_json_file(args.out / "gauges.json")
        self.conversations: dict[str, dict[str, list[list[float]]]] = read_json_file(args.out / "conversations.json")
        self.calls: dict[str, dict[str, list[list[float | None]]]] = read_json_file(args.out / "calls.json")
        self.seconds = read_seconds(args.out / "seconds.json")
        self._has_timed_steps = False
        self.starts = {int(seed): points[0] for seeds in self.curves.values() for seed, points in seeds.items()}

    async def do(self) -> None:
        """Do what is missing, then show all of it."""
        args = self.args
        todo = missing(args, self.curves)
        self.say_hours()
        for mode in {tuned_as(mode): None for mode, _ in todo}:
            settings = settings_of(mode, args.settings)
            for setting in settings if len(settings) > 1 else ():
                if str(setting) not in self.sweep.get(mode, {}):
                    run, points = self.sweep_run(mode, setting)
                    self.sweep.setdefault(mode, {})[str(setting)] = await self.curve(run, points)
                    write_json(args.out / "sweep.json", self.sweep)
                    self.laboratory.forget_checkpoints(run)
        for mode, seed in todo:
            run = Run(mode, seed, self.chosen(mode), args.rollouts)
            self.curves.setdefault(mode, {})[str(seed)] = await self.curve(run, args.points)
            self.costs.setdefault(mode, {})[str(seed)] = costs_at(self.laboratory.groups(run), args.points)
            if SUBJECTS[args.world].irrelevance is not None:
                agreed = agreement_of(self.laboratory.group_file(run).with_name("metrics.jsonl"))
                before, after = (read_json_file(self.folder(run, n) / "gauges.json") for n in (0, run.rollouts))
                self.gauges.setdefault(mode, {})[str(seed)] = {"before": before, "after": {**after, **agreed}}
            if SUBJECTS[args.world].has_conversations:
                samples = {rollouts: self.samples(run, rollouts) for rollouts in args.points}
                points = [conversation_point(*measured) for measured in samples.items()]
                self.conversations.setdefault(mode, {})[str(seed)] = points
                self.calls.setdefault(mode, {})[str(seed)] = [call_point(*measured) for measured in samples.items()]
            if args.world == "coding":
                firsts = [await self.first_solutions(run, rollouts) for rollouts in self.measured_points(run)]
                self.firsts.setdefault(mode, {})[str(seed)] = firsts
                text = f"{mode} seed {seed}, first solutions: {curve_text(firsts)}"
                self.console.print(text, highlight=False, soft_wrap=True)
            elif not args.talk and {0, run.rollouts} <= {*self.measured_points(run)}:
                before, after = (self.samples(run, rollouts) for rollouts in (0, run.rollouts))
                (args.out / run.name / "mistakes.md").write_text(first_mistakes(before, after))
            self.show()
            self.laboratory.forget_checkpoints(run)

    def say_hours(self) -> None:
        """Print how many curves are missing, and the hours they are expected to take."""
        runs, rates = self.missing_runs(), measured_rates(self.args.out)
        if self.args.seconds:
            rates = Rates(*self.args.seconds, "given")
        sweeps = sum(run.seed == SWEEP_SEED for run, _ in runs)
        hours = rates.hours(*self.left(runs))
        text = f"{len(runs) - sweeps} curves and {sweeps} of the sweep are missing: about {hours:.1f} hours ({rates})"
        self.console.print(text, highlight=False, soft_wrap=True)

    def missing_runs(self) -> list[tuple[Run, Sequence[int]]]:
        """Return the runs without a curve and their points, those of the sweep first."""
        args, todo = self.args, missing(self.args, self.curves)
        swept = [
            self.sweep_run(mode, setting)
            for mode in {tuned_as(mode): None for mode, _ in todo}
            for setting in settings_of(mode, args.settings)
            if len(settings_of(mode, args.settings)) > 1 and str(setting) not in self.sweep.get(mode, {})
        ]
        return [*swept, *((Run(mode, seed, self.chosen(mode), args.rollouts), args.points) for mode, seed in todo)]

    def sweep_run(self, mode: str, setting: Setting) -> tuple[Run, Sequence[int]]:
        """Return a run of the sweep, and the points at which it is measured."""
        args = self.args
        points = sorted({n for n in args.points if 0 < n <= args.sweep_rollouts} | {args.sweep_rollouts})
        return Run(mode, SWEEP_SEED, setting, args.sweep_rollouts), points

    def left(self, runs: Sequence[tuple[Run, Sequence[int]]]) -> tuple[int, int]:
        """Return the rollouts to train on and the episodes to measure that these runs lack."""
        rollouts = sum(
            run.rollouts - trained_steps(self.args.out / run.name) * run.setting.batch_size for run, _ in runs
        )
        folders = {
            self.folder(run, point) for run, points in runs for point in points if point or self.lacks_start(run)
        }
        return rollouts, self.episodes * sum(read_point(folder) is None for folder in folders)

    def lacks_start(self, run: Run) -> bool:
        """Return whether no run of the seed has measured the first weights."""
        return run.seed not in self.starts

    @property
    def episodes(self) -> int:
        """Episodes of a point."""
        return min(SUBJECTS[self.args.world].exam_tasks, self.args.exam_tasks or sys.maxsize) * self.args.eval_samples

    def chosen(self, mode: str) -> Setting:
        """Return the sweep's best setting of the mode; the first setting if there is only one, or before its sweep."""
        settings = settings_of(tuned_as(mode), self.args.settings)
        if len(settings) == 1 or tuned_as(mode) not in self.sweep:
            return settings[0]
        name = best(self.sweep[tuned_as(mode)])
        return next(setting for setting in settings if str(setting) == name)

    async def curve(self, run: Run, points: Sequence[int]) -> list[Point]:
        """Measure the start, train, then measure the weights at each point; skip what an earlier process has done."""
        started, steps = [await self.point(run, None, 0)] if 0 in points else [], 0
        with LiveBar(f"{run.mode} seed {run.seed} {run.setting}: steps", run.steps, console=self.console) as bar:

            def stepped(metrics: dict[str, float]) -> None:
                nonlocal steps
                steps += 1
                bar.show(int(metrics["step"]), f"score {metrics['score_mean']:.2f}")
                if steps == 2 and not self._has_timed_steps:
                    self._has_timed_steps = True
                    self.say_hours()

            weights = await self.laboratory.train(run, points, stepped)
        curve = started + [await self.point(run, weights, rollouts) for rollouts in points if rollouts]
        progress = Progress.of(self.args.out / run.name, run.setting.batch_size)
        measuring = [measured[1] for n in points if (measured := read_point(self.folder(run, n)))]
        size = run.rollouts + len(points) * self.episodes
        self.seconds.setdefault(run.mode, {})[f"{run.seed} {run.setting}"] = progress.seconds[-1] + sum(measuring), size
        write_json(self.args.out / "seconds.json", self.seconds)
        self.console.print(
            f"{run.mode} seed {run.seed} {run.setting}: {curve_text(curve)}", highlight=False, soft_wrap=True
        )
        return curve

    async def point(self, run: Run, weights: Path | None, rollouts: int) -> Point:
        """Return the pass rate after so many rollouts; that of the start is measured once for each seed, for all modes.

        `weights` is the folder of the run's weights, None for the start.
        """
        if rollouts == 0 and run.seed in self.starts:
            return self.starts[run.seed]
        folder, since = self.folder(run, rollouts), time.monotonic()
        measured = read_point(folder)
        has_gauges = isinstance(self.examiner, Examiner) and SUBJECTS[self.args.world].irrelevance is not None
        lacks_gauges = has_gauges and run.seed != SWEEP_SEED and rollouts in (0, run.rollouts)
        lacks_gauges &= not (folder / "gauges.json").exists()
        if measured is not None and not lacks_gauges:
            return measured[0]
        if weights is None:
            self.laboratory.load_start()
        else:
            self.laboratory.load(weights / f"step-{rollouts // run.setting.batch_size:06d}")
        if measured is None:
            point = Point(rollouts, *await self.examiner.pass_rate(folder))
            write_point(folder, point, time.monotonic() - since)
        else:
            point, _ = measured
        if lacks_gauges and isinstance(self.examiner, Examiner):
            write_json(folder / "gauges.json", await self.examiner.gauges())
        return point

    async def first_solutions(self, run: Run, rollouts: int) -> Point:
        """A point like that of the pass rate, of the first solutions that pass the hidden tests."""
        rows = self.samples(run, rollouts)
        passing, _ = await first_solutions(rows)
        return Point(rollouts, passing / len(rows), len(rows))

    def samples(self, run: Run, rollouts: int) -> list[dict[str, Any]]:
        """Return the episodes that measured a point."""
        return [json.loads(line) for line in text_lines((self.folder(run, rollouts) / "samples.jsonl").read_text())]

    def measured_points(self, run: Run) -> list[int]:
        """Return the points whose episodes are in the folder; a start measured in another folder has only its rate."""
        return [rollouts for rollouts in self.args.points if (self.folder(run, rollouts) / "samples.jsonl").exists()]

    def folder(self, run: Run, rollouts: int) -> Path:
        """Return the folder of the episodes that measured the weights after `rollouts` rollouts."""
        if rollouts == 0:
            return self.args.out / "start" / f"seed-{run.seed}"
        return self.args.out / run.name / f"eval-{rollouts:06d}"

    def show(self) -> None:
        """Write the curves, what they cost, tables and a picture of them; print the table, and where the page is."""
        ordered = {mode: self.curves[mode] for mode in MODES if mode in self.curves}
        results = self.args.out / "results.json"
        write_json(results, ordered)
        write_json(self.args.out / "costs.json", self.costs)
        (self.args.out / "costs.md").write_text(costs_table(self.curves, self.costs))
        if self.gauges:
            write_json(self.args.out / "gauges.json", self.gauges)
            (self.args.out / "gauges.md").write_text(gauges_table(self.gauges))
        if self.conversations:
            write_json(self.args.out / "conversations.json", self.conversations)
            write_json(self.args.out / "calls.json", self.calls)
        if self.firsts:
            write_json(self.args.out / "first_solutions.json", {mode: self.firsts.get(mode, {}) for mode in ordered})
        settings = {mode: str(self.chosen(mode)) for mode in ordered}
        (self.args.out / "results.md").write_text(markdown(ordered, settings))
        (self.args.out / "points.md").write_text(by_points(ordered))
        draw(ordered, self.args.out / "curves.png", SUBJECTS[self.args.world].measured)
        if self.args.collected is not None:
            collect(self.args.collected)
        self.console.print(table(ordered, settings))
        reached = {mode: rollouts_to(mean_curve(seeds)) for mode, seeds in ordered.items()}
        if (opd := reached.get("opd")) and (grpo := reached.get("grpo")):
            self.console.print(f"opd needs {grpo / opd:.1f} times fewer rollouts than grpo", highlight=False)


def conversation_point(rollouts: int, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return `[conversations, share of user turns, share whole, n]` of measured conversations."""
    right, judged = (sum(row[name] for row in rows) for name in ("checks_passed", "checks"))
    return [rollouts, right / judged, sum(row["passed"] for row in rows) / len(rows), len(rows)]


def call_point(rollouts: int, rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return `[conversations, share of calls that return no error, calls of a conversation, n]`; no calls, no share."""
    calls, errors = (sum(row[name] for row in rows) for name in ("tool_calls", "tool_errors"))
    return [rollouts, (calls - errors) / calls if calls else None, calls / len(rows), len(rows)]


def read_json_file(path: Path) -> dict[str, Any]:
    """Return what an earlier run wrote; empty where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def curve_text(curve: Sequence[Point]) -> str:
    return ", ".join(f"{point.rollouts}: {point.pass_rate:.2f}" for point in curve)


def missing(args: argparse.Namespace, curves: Curves) -> list[tuple[str, int]]:
    """Return the modes and seeds without a curve."""
    return [(mode, seed) for seed in args.seeds for mode in args.modes if str(seed) not in curves.get(mode, {})]


if __name__ == "__main__":
    sys.exit(main())
