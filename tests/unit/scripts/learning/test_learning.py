"""The experiment of `scripts/learn`: its modes, its curves, and its plan."""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from learning import __main__ as learn
from learning import costs, first_mistakes, first_solutions, laboratory, objectives, progress, results, unhinted
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from agentic_opd.core.types import JudgeTokens, TurnOutcome
from agentic_opd.training.config import LossConfig
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks

pytestmark = pytest.mark.slow

Point = progress.Point
WORLDS = {world: laboratory.SUBJECTS[world] for world in ("coding", "sql")}


CURVES = {
    "opd": {"0": [Point(0, 0.5, 128), Point(64, 0.92, 128)], "1": [Point(0, 0.6, 128), Point(64, 0.84, 128)]},
    "grpo": {"0": [Point(0, 0.5, 128), Point(64, 0.7, 128)]},
}


def test_curves_are_averaged_and_raced_to_the_target() -> None:
    assert results.mean_curve(CURVES["opd"]) == [Point(0, 0.55, 256), Point(64, pytest.approx(0.88), 256)]
    assert results.rollouts_to(CURVES["opd"]["0"]) == 64
    assert results.rollouts_to(CURVES["opd"]["1"]) is None
    assert results.rows(CURVES, {"opd": "lr 1", "grpo": "lr 2"}) == [
        ("opd", "lr 1", "2", "55% (50% to 60%)", "88% (84% to 92%)", "64, not in 64", "not in 64"),
        ("grpo", "lr 2", "1", "50% (50% to 50%)", "70% (70% to 70%)", "not in 64", "not in 64"),
    ]


def test_the_sweep_takes_the_curve_that_lies_highest_and_a_control_takes_that_of_opd() -> None:
    swept = {"lr 1": [Point(32, 0.7, 128), Point(64, 0.9, 128)], "lr 2": [Point(32, 0.8, 128), Point(64, 0.82, 128)]}
    assert results.best(swept) == "lr 2"
    assert [results.tuned_as(mode) for mode in laboratory.USUAL_MODES] == ["opd", "grpo", "opd+grpo", "opd", "opd"]
    assert results.tuned_as("wrong-hint-contrast") == "contrast"


def test_curves_survive_the_file_and_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert results.read_curves(path) == {}
    progress.write_json(path, CURVES)
    assert results.read_curves(path) == CURVES
    results.draw(CURVES, tmp_path / "curves.png", "pass rate")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_finished_experiment_has_nothing_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = learn.parse_args(["--quick", "--modes", "opd", "grpo", "--out", str(tmp_path)])
    nobody: Any = None
    work = learn.Work(args, nobody, nobody)
    work.curves = CURVES
    work.show()
    assert (tmp_path / "curves.png").exists()
    capsys.readouterr()

    assert asyncio.run(learn.experiment(args)) == 0
    assert "nothing is left to do" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "servers"),
    [((), ["vllm.log", "expert.log"]), (("--expert", "http://127.0.0.1:9/v1"), ["vllm.log"])],
)
def test_a_shared_expert_is_used_in_place_of_a_server(
    given: tuple[str, ...], servers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, experts = list[str](), list[str]()

    def server(model: Path, *flags: str, log: Path, **rest: Any) -> Any:
        started.append(log.name)
        return nullcontext(FakeServer(2))

    async def do(work: learn.Work) -> None:
        experts.append(work.laboratory.expert_url)

    monkeypatch.setattr(learn, "local_server", server)
    monkeypatch.setattr(learn.Work, "do", do)
    args = learn.parse_args(["--quick", "--modes", "opd", "--out", str(tmp_path), *given])
    assert asyncio.run(learn.experiment(args)) == 0
    assert started == servers
    assert experts == ["http://127.0.0.1:9"] if given else experts[0].startswith("http://127.0.0.1:")


def test_objectives_are_compared_by_world_with_rates_of_their_own(tmp_path: Path) -> None:
    args = learn.parse_args(["--objectives", "--world", "sql", "--out", str(tmp_path)])
    assert (args.modes, args.lrs, args.weights) == ([*laboratory.USUAL_OBJECTIVES], [5e-5, 1e-4, 2e-4], [1.0])
    assert (args.out, args.without_examples) == (tmp_path / "sql", False)
    args = learn.parse_args(["--objectives", "rlsd", "sdar", "--lrs", "1e-3", "--out", str(tmp_path)])
    assert (args.modes, args.lrs, args.without_examples) == (["rlsd", "sdar"], [1e-3], True)
    assert all(len(laboratory.settings_of(mode, args.settings)) == 1 for mode in laboratory.OBJECTIVES)
    for mode in laboratory.OBJECTIVES:
        loss = laboratory.Run(mode, 0, args.settings[0], 64).loss
        assert LossConfig.model_validate(loss), mode


def test_the_curves_of_all_worlds_are_collected_and_the_hours_foretold(tmp_path: Path) -> None:
    nobody: Any = None
    for world in ("coding", "sql"):
        args = learn.parse_args(
            ["--objectives", "opd", "rlsd", "--seeds", "0", "1", "--world", world, "--out", str(tmp_path)]
        )
        args.out.mkdir()
        work = learn.Work(args, nobody, nobody)
        work.sweep = {mode: {str(one): [Point(64, 0.9, 8)] for one in args.settings} for mode in args.modes}
        work.curves = {"opd": CURVES["opd"]}
        work.seconds = {"opd": {f"{seed} lr": (100.0 + seed, 640) for seed in (0, 1)}}
        progress.write_json(args.out / "seconds.json", work.seconds)
        work.show()
        assert learn.missing(args, work.curves) == [("rlsd", 0), ("rlsd", 1)]
        assert work.left(work.missing_runs()) == (2 * 256, 2 * 4 * (128 if world == "coding" else 384))
    collected = json.loads((tmp_path / "results.json").read_text())
    assert {world: list(curves) for world, curves in collected.items()} == {"coding": ["opd"], "sql": ["opd"]}
    assert collected["sql"]["opd"]["0"] == [[0, 0.5, 128], [64, 0.92, 128]]
    half = 12.71 * 0.08 / 2  # The ends are 92% and 84%.
    assert objectives.interval([0.92, 0.84]) == pytest.approx((0.88 - half, 0.88 + half), abs=1e-3)
    assert "| sql | opd | 2 | 55% | 88% (37% to 100%) | - | - | - | 100 |" in (tmp_path / "objectives.md").read_text()


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((0.95, 0.88, 0.91), "better: +4.3 (+2.9 to +5.8)"),
        ((0.95, 0.80, 0.90), "not better: +1.3 (-10.1 to +12.8)"),
        ((0.71, 0.65, 0.68), "worse: -19.0 (-21.5 to -16.5)"),
        ((0.95,), "-"),
    ],
)
def test_an_objective_is_compared_with_opd_on_the_same_seeds(ends: tuple[float, ...], said: str) -> None:
    def curves(*ends: float) -> dict[str, list[Point]]:
        return {str(seed): [Point(0, 0.5, 128), Point(64, end, 128)] for seed, end in enumerate(ends)}

    assert objectives.against(curves(*ends), curves(0.91, 0.84, 0.86)) == said


def test_modes_differ_in_what_they_name_and_nothing_else() -> None:
    run = laboratory.Run("wrong-hint", 3, laboratory.Setting(1e-3, 32, 4.0), 256)
    place = laboratory.Laboratory(
        FakeServer(2), "http://127.0.0.1:3", Path("policy"), Path("out"), 16, 4, 2, "linear", True
    )
    commands = {
        mode: [text.replace(f"out/{mode}/", "out/MODE/") for text in place.serve_command(one, "http://127.0.0.1:1")]
        for mode in laboratory.MODES
        if (one := run._replace(mode=mode))
    }
    plain = commands["opd"]
    assert commands["opd+grpo"] == plain
    assert commands["wrong-hint"] == [*plain, "--env.hint.source", laboratory.WRONG_HINT]
    assert commands["no-hint"] == [*plain, "--env.hint.source", laboratory.NO_HINT]
    assert commands["grpo"] == [*plain, "--env.opd_enabled", "false"]
    assert commands["next-state"] == [*plain, "--env.hindsight.evidence", "next_state"]
    assert commands["contrast"] == [*plain, "--env.hint.control", "neutral"]
    assert commands["sibling"] == [*plain, "--env.hint.source", "sibling"]
    judge = plain.index("--env.judge.model_name") + 1
    named = ["trajectory", "--env.judge.temperature", "0.3"]
    by_adapter = [*plain[:judge], *named, *plain[judge + 1 :], "--env.judge.scope", "trajectory"]
    assert commands["trajectory"] == by_adapter
    assert commands["trajectory-failed"] == [*by_adapter, "--env.judge.when", "failed"]
    assert plain[plain.index("--env.world.builtin_examples") + 1] == "true"
    urls = {name: plain[plain.index(name) + 1] for name in plain if name.endswith("base_url")}
    assert urls == {
        "--openai.base_url": "http://127.0.0.1:2/v1",
        "--env.judge.base_url": "http://127.0.0.1:3/v1",
        "--env.teacher.base_url": "http://127.0.0.1:3/v1",
    }


def test_the_judge_of_trajectories_is_an_adapter_on_the_experts_server() -> None:
    options = {world: learn.expert_options(subject, ["opd", "trajectory"], []) for world, subject in WORLDS.items()}
    assert options["coding"][:3] == ["--max-lora-rank", "256", "--"]
    assert options["sql"][:3] == ["--max-lora-rank", "32", "--"]
    assert [text[-1].rpartition("/")[2] for text in options.values()] == ["trajectory_judge", "sql_trajectory_judge"]
    judges = [subject.judge_adapter("trajectory") for subject in WORLDS.values()]
    assert [judge and judge.rank for judge in judges] == [192, 32]
    assert learn.expert_options(WORLDS["sql"], ["opd"], ["--", "--x"]) == ["--", "--x"]
    flags = learn.expert_options(WORLDS["sql"], ["trajectory"], ["--", "--x"])
    assert flags[2:5] == ["--", "--x", "--lora-modules"]


def test_a_moving_average_of_whole_weights_teaches_from_a_server_of_its_own() -> None:
    place = laboratory.Laboratory(
        *(FakeServer(2), "http://127.0.0.1:3", Path("policy"), Path("out"), 16, 4, 2, "linear", True),
        average=FakeServer(5),
    )
    assert [mode for mode in laboratory.MODES if place.subject.needs_teacher(mode)] == ["ema"]
    for mode, port, trained in (("opd", 3, False), ("ema", 5, True)):
        run = laboratory.Run(mode, 3, laboratory.Setting(1e-3, 32, 4.0), 256)
        served, command = place.serve_command(run, "api"), place.trainer_command(run, "api", Path("weights"))
        assert served[served.index("--env.teacher.base_url") + 1] == f"http://127.0.0.1:{port}/v1"
        assert served[served.index("--env.judge.base_url") + 1] == "http://127.0.0.1:3/v1"
        assert ("--teacher_urls" in command) == ("--ema_decay" in command) == trained
    assert command[command.index("--teacher_urls") + 1] == "[http://127.0.0.1:5]"


def test_the_precision_is_that_of_the_servers_and_of_a_trainer_whose_mode_has_none() -> None:
    assert learn.parse_args(["--", "--x"]).vllm_flags == ["--", "--x"]
    args = learn.parse_args(["--precision", "bf16", "--", "--x"])
    assert args.vllm_flags == ["--", "--dtype", "bfloat16", "--x"]
    place = laboratory.Laboratory(
        *(FakeServer(2), "http://127.0.0.1:3", Path("policy"), Path("out"), 16, 4, 2, "linear", True), precision="fp32"
    )
    for mode, precision in (("opd", "fp32"), ("bf16", "bf16")):
        run = laboratory.Run(mode, 3, laboratory.Setting(1e-3, 32, 4.0), 256)
        command = place.trainer_command(run, "api", Path("weights"))
        assert command[command.index("--precision") + 1] == precision


def test_the_sql_world_is_measured_on_what_is_held_out_and_trained_on_nothing_of_it() -> None:
    args = learn.parse_args(["--world", "sql"])
    assert (args.model, args.eval_samples) == (Path("scripts/demo_policy/sql_policy"), 2)
    assert learn.parse_args([]).model == Path("scripts/demo_policy/policy")
    subject = laboratory.SUBJECTS["sql"]
    run = laboratory.Run("opd", 3, laboratory.Setting(1e-4, 32, 4.0), 256)
    place = laboratory.Laboratory(
        *(FakeServer(2), "http://127.0.0.1:3", args.model, Path("out"), 2, 4, 2, "linear", True), subject=subject
    )
    command = place.serve_command(run, "http://127.0.0.1:1")
    assert command[command.index("--config") + 1].endswith("configs/sql.yaml")
    assert command[command.index("--env.world") + 1].endswith("scripts/demo_policy/sql_world.py:Lessons")
    tasks = asyncio.run(laboratory.Examiner(place).env.world.train_and_eval_tasks())
    assert (len(tasks[0]), len(tasks[1])) == (1, 192)


def test_on_functions_adapters_learn_from_the_environments_answers_and_controls_from_a_scripted_judge() -> None:
    subject = laboratory.SUBJECTS["functions"]
    place = laboratory.Laboratory(
        *(FakeServer(2), "http://127.0.0.1:3", Path("model"), Path("out"), 1, 2, 4, "linear", True, False),
        *(subject, 4, "chat", "http://127.0.0.1:4"),
    )

    def command(mode: str) -> dict[str, str]:
        run = laboratory.Run(mode, 0, laboratory.Setting(5e-4, 32, 1.0), 256)
        served, trained = place.serve_command(run, "http://127.0.0.1:1"), place.trainer_command(run, "u", Path("w"))
        words = [*served[served.index("--config") :], *trained[trained.index("--config") :]]
        return {name.lstrip("-").removeprefix("env."): words[i + 1] for i, name in enumerate(words) if name[:2] == "--"}

    commands = {mode: command(mode) for mode in subject.modes}
    assert commands["opd"]["world.split_file"] == "out/split.json"
    expected = {
        "feedback": "feedback",
        "opd": "judge",
        "opd-judge": "judge",
        "wrong-hint": laboratory.WRONG_HINT,
        "no-hint": laboratory.NO_HINT,
    }
    for mode, source in expected.items():
        assert commands[mode].get("hint.source") == source
        assert (commands[mode]["teacher.weights"], commands[mode]["lora_rank"]) == ("frozen", "16")
        assert "teacher.base_url" not in commands[mode]
        assert commands[mode]["judge.base_url"] == "http://127.0.0.1:4/v1"
        assert commands[mode]["judge.model_name"] == ("words" if mode == "opd-judge" else "verbatim")
        assert not subject.needs_expert(mode)
    assert commands["opd-full"]["teacher.base_url"] == "http://127.0.0.1:3/v1"
    assert "lora_rank" not in commands["opd-full"]
    assert [mode for mode in subject.modes if subject.needs_expert(mode)] == ["opd-full"]
    assert all(map(laboratory.SUBJECTS["sql"].needs_expert, laboratory.USUAL_MODES))


def test_of_conversations_opd_and_next_state_differ_in_their_evidence_and_a_gpu_has_a_configuration() -> None:
    for world, size in (("multiturn", "16"), ("multiturn-gpu", "32")):
        subject = laboratory.SUBJECTS[world]
        assert subject.usual_modes == ("opd", "held", "grpo", "opd+grpo", "wrong-hint", "no-hint", "next-state")
        place = laboratory.Laboratory(
            *(FakeServer(2), "http://127.0.0.1:3", Path("model"), Path("out"), 1, 2, 4, "linear", True, False),
            *(subject, 4, "chat", "http://127.0.0.1:4"),
        )
        commands = {}
        for mode in subject.usual_modes:
            run = laboratory.Run(mode, 0, laboratory.Setting(5e-4, 32, 1.0), 256)
            served, trained = place.serve_command(run, "u"), place.trainer_command(run, "u", Path("w"))
            commands[mode] = [text.replace(f"out/{mode}/", "out/MODE/") for text in served]
            assert trained[trained.index("--lora_rank") + 1] == size
            assert json.loads(trained[trained.index("--loss") + 1]).get("start_kl") == (1.0 if mode == "held" else None)
            assert not subject.needs_expert(mode)
        assert commands["next-state"] == [*commands["opd"][:-4], *commands["next-state"][-6:]]
        assert commands["next-state"][-6:-4] == ["--env.hindsight.evidence", "next_state"]
        assert commands["opd+grpo"] == commands["held"] == commands["opd"]
        assert commands["opd"][commands["opd"].index("--env.judge.model_name") + 1] == "conversation"
        assert commands["wrong-hint"][commands["wrong-hint"].index("--env.hint.source") + 1] == laboratory.WRONG_HINT
        configured = yaml.safe_load((laboratory.ROOT / "configs" / subject.config).read_text())["env"]
        assert configured["hindsight"]["evidence"] == "delayed"
        assert len(configured["world"]["held_out_classes"]) == 2
        assert not any("split_file" in text for text in commands["opd"])


def test_a_game_has_its_levels_reward_and_a_judge_without_a_model() -> None:
    args, subject = (
        learn.parse_args(["--world", "babyai", "--model", "scripts/demo_policy/policy", "--quick"]),
        laboratory.SUBJECTS["babyai"],
    )
    assert (args.modes, args.start_conversations, args.exam_tasks) == (["opd", "held", "trajectory", "grpo"], 8, 4)
    place = laboratory.Laboratory(
        *(FakeServer(2), "http://127.0.0.1:3", args.model, Path("out"), 1, 2, 4, "linear", True, False),
        *(subject, 4, "chat", "http://127.0.0.1:4"),
    )
    run = laboratory.Run("opd", 0, laboratory.Setting(5e-4, 32, 1.0), 256)
    command = place.serve_command(run, "http://127.0.0.1:1")
    assert command[command.index("--env.judge.model_name") + 1] == "game"
    of_all = place.serve_command(run._replace(mode="trajectory"), "http://127.0.0.1:1")
    assert {*of_all} - {*command} >= {"--env.judge.scope", "trajectory"}
    assert not any(map(subject.needs_expert, subject.modes))
    env = laboratory.Examiner(place).env
    assert env.config.reward.correctness == 1
    training, held_out = asyncio.run(env.world.train_and_eval_tasks())
    assert (len(training), 190 < len(held_out) <= 200) == (1024, True)


def test_a_start_imitates_its_worlds_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[Any, Path, Path, learn.Start]] = []

    async def supervised_start(config: Any, model: Path, folder: Path, start: learn.Start) -> Path:
        played.append(([*config.world.levels], model, folder, start))
        return folder / "final"

    monkeypatch.setattr(learn, "supervised_start", supervised_start)
    policy = Path("scripts/demo_policy/policy")
    args = learn.parse_args(["--world", "babyai", "--model", str(policy), "--quick", "--out", str(tmp_path)])
    final = asyncio.run(learn.start_of(laboratory.SUBJECTS["babyai"], args))
    start, rooms, blocked = learn.Start(8, 1, 5e-4, 8), tmp_path / "supervised-0", tmp_path / "supervised-1"
    assert played == [
        (["BabyAI-GoToRedBallNoDists-v0", "BabyAI-GoToObj-v0"], policy, rooms, start),
        (["BabyAI-GoToLocal-v0"], rooms / "final", blocked, start),
    ]
    assert final == blocked / "final"


def test_a_point_of_conversations_has_shares_of_user_turns_and_of_whole_conversations() -> None:
    rows = [
        {"checks_passed": passed, "checks": total, "passed": passed == total}
        for passed, total in ((1, 4), (3, 3), (0, 3), (0, 2))
    ]
    assert learn.conversation_point(64, rows) == [64, 1 / 3, 0.25, 4]


def test_a_point_of_calls_has_the_share_that_return_no_error() -> None:
    rows = [{"tool_calls": calls, "tool_errors": errors} for calls, errors in ((4, 1), (0, 0), (1, 1))]
    assert learn.call_point(64, rows) == [64, 0.6, 5 / 3, 3]
    assert learn.call_point(0, rows[1:2]) == [0, None, 0, 1]


def test_the_same_tasks_are_measured_in_every_run() -> None:
    tasks = builtin_tasks()
    assert laboratory.first_tasks(tasks, None) == tasks
    chosen = laboratory.first_tasks(tasks, 3)
    assert (len(chosen), chosen) == (3, laboratory.first_tasks(tasks, 3))
    assert len(laboratory.first_tasks(tasks, 99)) == len(tasks)


def test_what_the_world_of_functions_needs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        (["--modes", "opd+grpo"], "--world functions has no opd+grpo, only opd feedback"),
        (["--model", str(tmp_path / "none")], "is missing: scripts/install/real_model makes the model"),
    ):
        with pytest.raises(SystemExit):
            learn.parse_args(["--world", "functions", *flags])
        assert said in capsys.readouterr().err


def test_talk_is_refused_in_the_sql_world(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learn.parse_args(["--world", "sql", "--talk"])
    assert "leave --world out" in capsys.readouterr().err


def test_the_sweep_weights_the_divergence_of_modes_that_have_one() -> None:
    settings = [laboratory.Setting(lr, 32, weight) for lr in (1e-4, 2e-4) for weight in (2.0, 4.0)]
    assert laboratory.settings_of("opd+grpo", settings) == settings
    assert laboratory.settings_of("grpo", settings) == [laboratory.Setting(lr, 32, 1.0) for lr in (1e-4, 2e-4)]
    losses = {mode: laboratory.Run(mode, 0, settings[1], 256).loss for mode in laboratory.MODES}
    assert losses["opd"] == losses["wrong-hint"] == losses["no-hint"] == {"forward_kl": 4.0}
    assert losses["opd+grpo"] == {"forward_kl": 4.0, "grpo": 1.0}
    assert losses["grpo"] == {"grpo": 1.0, "route_by_turn": False}
    names = {laboratory.Run("opd", 0, setting, 256).name for setting in settings}
    assert len(names) == len({str(setting) for setting in settings}) == 4


class FakeServer:
    def __init__(self, port: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}"


LEARNED = Path("docs/learning")
ARCHIVE = LEARNED / "archive"


def test_the_committed_result_is_what_the_pages_show() -> None:
    curves = results.read_curves(ARCHIVE / "results.json")
    assert list(curves) == list(laboratory.USUAL_MODES)
    assert all(len(seeds) >= 3 for seeds in curves.values())
    points = [curve for seeds in curves.values() for curve in seeds.values()]
    assert len({tuple(point.rollouts for point in curve) for curve in points}) == 1
    assert min(point.episodes for curve in points for point in curve) >= 128
    sweep = results.read_curves(ARCHIVE / "sweep.json")
    table = results.markdown(curves, {mode: results.best(sweep[results.tuned_as(mode)]) for mode in curves})
    assert (ARCHIVE / "results.md").read_text() == table
    assert table in (ARCHIVE / "README.md").read_text()


def test_the_committed_result_of_the_sql_world_is_what_its_page_shows() -> None:
    curves = results.read_curves(ARCHIVE / "sql" / "results.json")
    assert list(curves) == list(laboratory.USUAL_MODES)
    assert all(len(seeds) >= 3 for seeds in curves.values())
    assert results.by_points(curves) in (ARCHIVE / "README.md").read_text()
    # opd has after 32 rollouts what grpo has after eight times as many.
    means = {mode: [point.pass_rate for point in results.mean_curve(seeds)] for mode, seeds in curves.items()}
    assert means["opd"][1] > means["grpo"][-1]


def test_the_committed_result_of_the_functions_is_what_its_pages_show() -> None:
    curves = results.read_curves(LEARNED / "functions" / "results.json")
    usual = laboratory.USUAL_FUNCTION_MODES
    assert list(curves)[: len(usual)] == list(usual)
    for page in (LEARNED / "README.md", Path("README.md")):
        assert results.by_points(curves) in page.read_text(), page
    means = {mode: [point.pass_rate for point in results.mean_curve(seeds)] for mode, seeds in curves.items()}
    assert means["opd"][-1] - means["opd"][0] > 0.15
    assert means["opd"][1] > max(means["grpo"]), "a quarter of the rollouts"
    assert means["opd"][-1] - means["wrong-hint"][-1] > 0.1


def test_the_committed_result_of_the_person_is_what_its_page_shows() -> None:
    curves = results.read_curves(LEARNED / "person" / "results.json")
    assert results.by_points(curves) in (LEARNED / "README.md").read_text()
    assert {len(curve) for seeds in curves.values() for curve in seeds.values()} == {4}
    means = {mode: [point.pass_rate for point in results.mean_curve(seeds)] for mode, seeds in curves.items()}
    assert means["opd"][1] > means["binary"][1] > means["no-hint"][1]


def test_the_committed_comparison_of_objectives_is_what_its_page_shows(tmp_path: Path) -> None:
    folder = LEARNED / "objectives"
    by_world = json.loads((folder / "results.json").read_text())
    page = (folder / "README.md").read_text()
    for world, curves in by_world.items():
        (tmp_path / world).mkdir()
        for name in ("costs.json", "seconds.json"):
            (tmp_path / world / name).write_text((folder / world / name).read_text())
        (tmp_path / world / "results.json").write_text(json.dumps(curves))
        assert set(curves) == {*laboratory.USUAL_OBJECTIVES, "overlap-token"}, "of a setting that was removed"
        assert results.by_points(results.read_curves(tmp_path / world / "results.json")) in page
    objectives.collect(tmp_path)
    header, rule, *rows = (tmp_path / "objectives.md").read_text().splitlines()
    for world in by_world:
        table = [header, rule, *(row for row in rows if row.startswith(f"| {world} |"))]
        assert "\n".join(table) in page, world


def test_the_committed_long_runs_are_what_their_page_shows_and_those_that_hold_do_not_fall() -> None:
    folder = LEARNED / "objectives" / "long"
    curves = results.read_curves(folder / "results.json")
    assert results.by_points(curves) in (folder.parent / "README.md").read_text()
    for mode in ("opd", "ema"):
        assert len(curves[mode]) == 3
        for points in curves[mode].values():
            rates = [point.pass_rate for point in points]
            assert points[-1].rollouts == 2048
            assert all(rate > best - 0.05 for rate, best in zip(rates, accumulate(rates, max), strict=True))


@pytest.mark.parametrize(
    ("folder", "modes"),
    [
        ("adapters", ["lora", "lora-live", "lora-ema"]),
        ("bf16", ["bf16"]),
        ("eight_passes", ["opd"]),
        ("on_policy", ["on-policy", "opd"]),
        ("sources", ["opd", "feedback", "sibling", "reference"]),
        ("sql/held", ["held"]),
        ("sql/grpo", ["grpo"]),
        ("sql/contrast", ["contrast-other", "wrong-hint-contrast-other"]),
    ],
)
def test_the_points_of_a_committed_result_are_what_its_page_shows(folder: str, modes: list[str]) -> None:
    curves = results.read_curves(ARCHIVE / folder / "results.json")
    assert list(curves) == modes
    assert all(len(seeds) >= 3 for seeds in curves.values())
    assert results.by_points(curves) in (ARCHIVE / "README.md").read_text()


def test_the_committed_costs_are_what_the_page_shows() -> None:
    curves = results.read_curves(ARCHIVE / "sources" / "results.json")
    table = costs.costs_table(curves, costs.read_costs(ARCHIVE / "sources" / "costs.json"))
    assert table in (ARCHIVE / "README.md").read_text()


def test_the_first_mistakes_are_shown_with_what_came_in_their_place() -> None:
    def row(task: str, sample: int, sql: str, passed: bool) -> dict[str, Any]:
        call = {"function": {"name": "answer", "arguments": json.dumps({"sql": sql})}}
        asked, ending = {"role": "user", "content": f"How many {task}?"}, {"role": "assistant", "content": "Done."}
        messages = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, ending]
        return {"task_id": task, "sample": sample, "passed": passed, "messages": messages}

    before = [row("a", 0, "A", True), row("b", 0, "B0", False), row("b", 1, "B1", False), row("c", 0, "C", False)]
    after = [row("a", 0, "A", True), row("b", 1, "B3", False), row("b", 0, "B2", True), row("c", 0, "{", False)]
    assert first_mistakes.first_mistakes(before, after, 1).splitlines() == [
        "**How many b?**",
        "",
        "- before, wrong: `B0`",
        "- after, right: `B2`",
    ]
    assert first_mistakes.first_mistakes(before, after).count("**") == 4
    assert first_mistakes.last_answer([]) == "no answer"
    broken = {"function": {"name": "answer", "arguments": "{"}}
    assert first_mistakes.last_answer([{"role": "assistant", "tool_calls": [broken]}]) == "{"


def turn(start: int, end: int, outcome: TurnOutcome, question: str | None = "?") -> TurnRecord:
    return TurnRecord((start, end), outcome, "tool", question=question)


def test_what_hints_cost_is_added_up_to_each_point() -> None:
    turns = (turn(1, 4, TurnOutcome.SCORED), turn(5, 6, TurnOutcome.VOTE_FAILED), turn(7, 8, TurnOutcome.SCORED, None))
    tokens, masks, logprobs = (1,) * 8, (-100, 1, 1, 1, -100, 1, -100, 1), (1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0)
    rollout = ScoredRollout(tokens, masks, logprobs, 0.5, turns=turns)
    groups = [ScoredGroup((rollout, rollout)) for _ in range(4)]
    found = costs.costs_at(groups, [0, 2, 4, 8])
    assert [cost[:3] for cost in found] == [(0, 0, 0), (2, 4, 8), (4, 8, 16), (8, 16, 32)]
    assert [cost.policy_tokens for cost in found] == [0, 10, 20, 40]
    curve = [Point(0, 0.5, 4), Point(4, 0.95, 4)]
    table = costs.costs_table(
        {"opd": {"0": curve}, "grpo": {"0": curve[:1]}}, {"opd": {"0": found}, "grpo": {"0": found[:1]}}
    )
    assert table.splitlines()[2:] == ["| opd | 4 | 8 | 16 | 16 | 32 |", "| grpo | not reached | - | - | 0 | 0 |"]


def test_what_the_judge_took_is_a_mean_over_the_rollouts_whose_tokens_are_known() -> None:
    def group(*judge_tokens: JudgeTokens | None) -> ScoredGroup:
        turns = tuple(
            replace(turn(n, n + 1, TurnOutcome.VOTE_FAILED), judge_tokens=tokens)
            for n, tokens in enumerate(judge_tokens, 1)
        )
        length = len(turns) + 1
        ids, logprobs = tuple(range(length)), (1.0, *(-1.0,) * (length - 1))
        return ScoredGroup((ScoredRollout(ids, (-100, *ids[1:]), logprobs, 0.5, turns=turns),))

    groups = [
        group(JudgeTokens(900, 60), JudgeTokens(1000, 40)),
        group(),
        group(JudgeTokens(500, 20), None),
        group(JudgeTokens(480, 20)),
    ]
    rows = costs.costs_at(groups, [1, 2, 3, 4])
    assert [row.judge_tokens for row in rows] == [2000, 1000, 1000, pytest.approx(2500 / 3)]
    assert [row.judged_turns for row in rows] == [2, 2, 4, 5]
    unknown = costs.costs_at([group(None), group()], [1, 2])
    assert [row.judge_tokens for row in unknown] == [None, None], "an endpoint that counts nothing gives no 0"
    table = costs.costs_table({"opd": {}, "old": {}}, {"opd": {"0": rows}, "old": {"0": unknown}})
    assert table.splitlines()[0].endswith(" tokens scored in all | judge tokens a rollout |")
    assert [line.split("|")[-2] for line in table.splitlines()[2:]] == [" 833 ", " - "]


def test_first_solutions_are_told_from_repairs() -> None:
    task = next(task for task in builtin_tasks() if task.task_id == "builtin/is_palindrome")
    assert task.reference_solution is not None

    def row(passed: bool, *texts: str | None) -> dict[str, Any]:
        calls = [json.dumps({"path": "solution.py", "content": text}) if text else "{no JSON" for text in texts]
        messages = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "write_file", "arguments": call}}],
            }
            for call in calls
        ]
        return {"task_id": task.task_id, "passed": passed, "messages": messages}

    right, wrong = task.reference_solution, "def is_palindrome(s): return None"
    rows = [row(True, right), row(True, None, right), row(True, wrong, right), row(False, wrong), row(False, None)]
    assert asyncio.run(first_solutions.first_solutions(rows)) == (2, 1)


def test_what_fails_is_told_by_whether_a_hint_was_about_it() -> None:
    def messages(text: str) -> list[dict[str, Any]]:
        call = {"name": "write_file", "arguments": json.dumps({"path": "solution.py", "content": text})}
        return [{"role": "assistant", "content": "", "tool_calls": [{"function": call}]}]

    def rollout(text: str, *turns: TurnRecord) -> ScoredRollout:
        return ScoredRollout((1, 2), (-100, 2), (1.0, -1.0), 0.5, messages=messages(text), turns=turns)

    plain, hinted = turn(1, 2, TurnOutcome.VOTE_FAILED), replace(turn(1, 2, TurnOutcome.SCORED), hint="Sort the words.")
    groups = [
        ScoredGroup((rollout("A", plain, hinted), rollout("A", plain), rollout("B", plain), rollout("C")), task_id="t"),
        ScoredGroup((rollout("D", hinted),) * 4, task_id="t"),
    ]
    rows = [{"task_id": "t", "passed": text == "B", "messages": messages(text)} for text in "ABCD"]
    rows.append({"task_id": "other", "passed": False, "messages": messages("A")})
    assert unhinted.by_hint(groups, rows, 4) == {"hinted": 1, "seen": 1, "new": 2}
    assert unhinted.by_hint(groups, rows, 8) == {"hinted": 2, "seen": 1, "new": 1}


def test_an_adapter_is_merged_into_the_first_weights(tmp_path: Path) -> None:
    policy = Path(__file__).parents[4] / "scripts" / "demo_policy" / "policy"
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        expected = adapted(ids).logits
        merged = laboratory.merge_adapter(policy, tmp_path / "adapter", tmp_path / "merged")
        got = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(ids).logits
        first = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)(ids).logits
    assert (merged / "tokenizer.json").exists()
    assert torch.allclose(got, expected, atol=1e-4)
    assert not torch.allclose(first, expected, atol=1e-2)
