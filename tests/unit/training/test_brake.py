"""The brake: which falls count, and that worse weights are rolled back everywhere."""

import asyncio
import json
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentic_opd.core.errors import ConfigError, PlaceError, RolledBackError, ServerError
from agentic_opd.training import trainer as trainer_module
from agentic_opd.training.brake import Brake, EvaluationFailedError, Fall, Roll, Version, compare, with_version
from agentic_opd.training.brake import read_scores as scores_of
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.trainer import Trainer, open_trainer
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.receipts import read_chain, receipt_file
from tests.support.served_model import Server
from tests.support.tiny_model import save_tiny_model
from tests.support.training import ScriptedClient, make_group
from tests.support.waiting import until
from tests.unit.distill.fakes import served

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EVALUATE = """
import base64, json, math, struct, sys, urllib.request
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
url = options["--openai.base_url"].removesuffix("/v1")
version = json.load(urllib.request.urlopen(f"{url}/v1/opd/info"))["weight_version"]
with open(options["--env.data_dir_to_save_evals"] + "/samples.jsonl", "w") as file:
    for number, ids in enumerate(json.load(open(sys.argv[1]))):
        body = json.dumps({"sequences": [{"token_ids": ids, "num_scored": len(ids) - 1}], "top_k": 1}).encode()
        answer = json.load(urllib.request.urlopen(f"{url}/v1/opd/score", body))["results"][0]
        score = math.exp(struct.unpack("<f", base64.b64decode(answer["actual_logprobs"])[-4:])[0])
        file.write(json.dumps({"task_id": str(number), "weight_version": version, "score": score}) + "\\n")
"""
"""Its tasks are sequences; a task's score is the served policy's probability of the last token."""


def version(number: int, *scores: float) -> Version:
    return Version(number, {str(task): score for task, score in enumerate(scores)})


def test_a_fall_is_measured_task_by_task() -> None:
    one_of_three = compare(version(2, 0.0, 1.0, 0.0), version(1, 1.0, 1.0, 0.0))
    assert one_of_three == Fall(1, pytest.approx(-1 / 3), pytest.approx(-1.0))
    assert compare(version(1, *[0.0] * 16), version(0, *[1.0] * 16)).standard_errors == pytest.approx(-4.0)
    assert compare(version(1, *[0.0] * 16), version(0, *[0.25] * 16)).standard_errors == pytest.approx(-4.0)
    assert compare(version(1, 0.5, 0.75), version(0, 0.5, 0.75)) == Fall(0, 0.0, 0.0)
    up_and_down = compare(version(1, 0.0, 1.0, 1.0, 1.0), version(0, 1.0, 0.0, 0.0, 1.0))
    assert up_and_down == Fall(0, pytest.approx(0.25), pytest.approx(1 / 3**0.5))
    with pytest.raises(EvaluationFailedError, match="other tasks than version 0"):
        compare(version(1, 1.0), version(0, 1.0, 1.0))


def test_the_best_version_and_the_last_ones_are_kept() -> None:
    kept: list[Version] = []
    for number, score in enumerate((0.5, 0.75, 0.25, 0.5, 0.75, 0.5)):
        kept = with_version(kept, version(number, score), limit=2)
    assert [one.number for one in kept] == [4, 5]
    assert [one.number for one in with_version(kept, version(6, 0.25), limit=3)] == [4, 5, 6]
    assert [one.number for one in with_version(kept, version(6, 0.25), limit=1)] == [4]


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "samples", "most"), [(16, 1, 0.02), (32, 4, 0.03), (100, 1, 0.08)])
def test_equal_versions_are_rarely_taken_for_worse_ones(tasks: int, samples: int, most: float) -> None:
    """Of 300 runs of twenty equal pushes, each sampled anew at temperature 1: the share with a false alarm."""
    drawn, bound, alarms = np.random.default_rng(0), TrainerConfig(model="").brake.bound, 0
    for _ in range(300):
        chances_N = drawn.beta(1, 1, tasks)
        kept: list[Version] = []
        for number in range(21):
            now = version(number, *drawn.binomial(samples, chances_N) / samples)
            if any(compare(now, then).standard_errors <= -bound for then in kept):
                alarms += 1
                break
            kept = with_version(kept, now, limit=3)
    assert alarms / 300 <= most


def test_samples_of_other_weights_are_no_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    rows = [("a", 3, 1.0), ("a", 3, 0.0), ("b", None, 1.0)]
    named = [{"task_id": task, "weight_version": number, "score": score} for task, number, score in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in named))
    assert scores_of(file, 3) == {"a": 0.5, "b": 1.0}
    with pytest.raises(EvaluationFailedError, match="version 3 answered: does another trainer push"):
        scores_of(file, 4)
    file.write_text("")
    with pytest.raises(EvaluationFailedError, match="no sample"):
        scores_of(file, 3)


def samples(*rows: str) -> str:
    """A file of 32 samples, which all passed, with these lines in place of the first ones."""
    passed = [json.dumps({"task_id": f"t{number}", "score": 1.0}) for number in range(len(rows), 32)]
    return "".join(f"{row}\n" for row in (*rows, *passed))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"task_id": "t0", "score": NaN}', "line 1: the score of task 't0' is nan, expected 0 to 1"),
        ('{"task_id": "t0", "score": Infinity}', "score of task 't0' is inf"),
        ('{"task_id": "t0", "score": -Infinity}', "score of task 't0' is -inf"),
        ('{"task_id": "t0", "score": 1e9}', "score of task 't0' is 1000000000.0"),
        ('{"task_id": "t0", "score": 1e999}', "score of task 't0' is inf"),
        ('{"task_id": "t0", "score": -0.5}', "score of task 't0' is -0.5"),
        ('{"task_id": "t0", "score": 1.01}', "score of task 't0' is 1.01"),
        ('{"task_id": "t0", "score": ' + "9" * 400 + "}", "score of task 't0' is 9999"),
        ('{"task_id": "t0", "score": "1.0"}', "score of task 't0' is '1.0'"),
        ('{"task_id": "t0", "score": true}', "score of task 't0' is True"),
        ('{"task_id": "t0", "score": null}', "score of task 't0' is None"),
        ('{"task_id": "t0", "score": [1]}', r"score of task 't0' is \[1\]"),
        ('{"task_id": 0, "score": 1.0}', "line 1: task_id 0, expected a text"),
        ('{"task_id": null, "score": 1.0}', "task_id None, expected a text"),
        ('{"task_id": ["t0"], "score": 1.0}', r"task_id \['t0'\], expected a text"),
        ('{"task_id": "", "score": 1.0}', "task_id '', expected a text"),
        ('{"score": 1.0}', "holds no samples of an evaluation: KeyError"),
        ('[{"task_id": "t0", "score": 1.0}]', "holds no samples of an evaluation"),
        ('{"task_id": "t0", "score": 1.0, "weight_version": true}', "version True answered"),
        ('{"task_id": "t0", "score": 1.0, "weight_version": 1.0}', "version 1.0 answered"),
        ("", "holds no samples of an evaluation"),
    ],
)
def test_a_score_that_would_hide_a_fall_is_refused_with_its_task(row: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(samples(row))
    with pytest.raises(EvaluationFailedError, match=said):
        scores_of(file, 1)


def test_the_last_sample_counts_without_a_line_end_too(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(samples().removesuffix("\n"))
    assert len(scores_of(file, 1)) == 32
    file.write_text(samples()[:-9])
    with pytest.raises(EvaluationFailedError, match="holds no samples of an evaluation: JSONDecodeError"):
        scores_of(file, 1)


@pytest.mark.parametrize("score", [float("nan"), 1e9, float("inf"), -1.0, True, "1.0"])
def test_a_version_has_scores_that_can_be_compared(score: Any) -> None:
    """One of them hid a fall of 31 of 32 tasks."""
    with pytest.raises(EvaluationFailedError, match="version 1: the score of task '0' is"):
        version(1, score, *[0.0] * 31)


@pytest.mark.parametrize(
    "row",
    [
        '{"version": 0, "verdict": "good", "scores": {"a": NaN}}',
        '{"version": 0, "verdict": "good", "scores": {"a": 1e999}}',
        '{"version": 0, "verdict": "good", "scores": [1.0]}',
        '{"version": 0, "verdict": "rolled_back", "bad": 1, "to": 9}',
        '{"verdict": "good"}',
        "[]",
        "{",
    ],
)
def test_verdicts_that_can_not_be_compared_do_not_resume(row: str, tmp_path: Path) -> None:
    (tmp_path / "brake.jsonl").write_text(row + "\n")
    with pytest.raises(PlaceError, match=r"brake.jsonl' holds no verdicts of the brake .*restore the file, or start"):
        Brake(TrainerConfig(model="", output_dir=tmp_path, resume=True))


@pytest.mark.processes
def test_an_evaluation_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """With what it has started."""
    fifo, children = tmp_path / "fifo", tmp_path / "children"
    os.mkfifo(fifo)
    script = f"echo $$ > {children}; sleep 9999 & echo $! >> {children}; read line < {fifo}"
    settings = {"command": f"sh -c {shlex.quote(script)}", "timeout_s": 1.0}
    brake = Brake(TrainerConfig.model_validate({"model": "", "output_dir": tmp_path, "brake": settings}))
    with pytest.raises(EvaluationFailedError, match=r"version 3 did not end within brake.timeout_s, 1 s"):
        asyncio.run(brake.evaluate(3))
    started = children.read_text().split() if children.exists() else []
    until(lambda: not any(commands_of(pid) for pid in started))


def commands_of(pid: str) -> bytes:
    """The command line of a process, empty once it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Run:
    """A tiny model, its lessons, and a server whose policy is evaluated by what it has learned of them."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.changes = folder, changes
        self.model = save_tiny_model(folder / "model", "float32", tied=False)
        self.server = Server(self.model, "float32", adapters=2 if "lora_rank" in changes else 0)
        self.config = self.make_config()
        start: Any = self.server.model
        self.lessons = [make_group(start, seed) for seed in range(8)]
        tasks = []
        for group in self.lessons:
            for one in group.rollouts:
                assert one.rows is not None
                tasks.append([*one.tokens_T[:10], one.rows.token_ids_TK[10][1]])
        (folder / "tasks.json").write_text(json.dumps(tasks))
        (folder / "evaluate.py").write_text(EVALUATE)

    def make_config(self, **changes: Any) -> TrainerConfig:
        command = f"{sys.executable} {self.folder / 'evaluate.py'} {self.folder / 'tasks.json'}"
        places = {"output_dir": self.folder / "train", "weights_dir": self.folder / "weights", "device": "cpu"}
        values = {"model": str(self.model), "total_steps": 4, "lr": 1e-3, "lr_schedule": "constant", **places}
        values |= {"epochs_per_batch": 8, "brake": {"command": command}}
        return TrainerConfig.model_validate({**values, **self.changes, **changes})

    def train(self, batches: list[list[ScoredGroup]], reversed_from: int = 99, **changes: Any) -> Trainer:
        """Train on these batches; from a step on, every update has the opposite sign."""
        config = self.make_config(total_steps=len(batches), **changes)

        async def run() -> Trainer:
            async with served(self.server.handlers) as url:
                trainer = open_trainer(config.model_copy(update={"vllm_urls": [url]}))
                self.trainer = trainer
                trainer.source = ScriptedClient(config, batches)
                signed = trainer.config.lr_at
                object.__setattr__(
                    trainer.config, "lr_at", lambda step: signed(step) * (-1 if step >= reversed_from else 1)
                )
                await trainer.run()
                return trainer

        return asyncio.run(run())

    def follows(self, trainer: Trainer) -> bool:
        """Whether the server computes what the trainer's model does."""
        tokens = list(range(300, 330))
        with torch.no_grad():
            own = trainer.learner.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        own_T = own[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return bool((own_T - self.server.logprobs(tokens)).abs().max() < 1e-4)

    def verdicts(self) -> list[tuple[int, str]]:
        lines = (self.folder / "train" / "brake.jsonl").read_text().splitlines()
        return [(row["version"], row["verdict"]) for row in map(json.loads, lines)]

    def chain(self, version: int) -> list[int]:
        """The versions from which one continues, by its receipts."""
        receipts, differences = read_chain(receipt_file(self.folder / "train" / "receipts", version))
        assert not differences
        return [receipt.version for receipt in receipts]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.folder / "train" / "checkpoints").iterdir())


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "lr": 5e-3}], ids=["whole", "adapters"])
def test_a_push_with_the_sign_reversed_is_rolled_back_within_one_evaluation(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The server, the model and the optimizer go back to the best version."""
    run = Run(tmp_path, **changes)
    lessons = run.lessons
    good = run.train([lessons])
    assert run.verdicts() == [(0, "good"), (1, "good")]
    learned, moments = weights(good.learner.model), good.learner.optimizer.state_dict()["state"]
    with pytest.raises(RolledBackError, match=r"version 2 was worse .* version 1 are served again, as version 3"):
        run.train([lessons] * 4, reversed_from=1, resume=True)
    assert run.verdicts()[2:] == [(2, "bad"), (3, "rolled_back")]
    assert same(learned, weights(run.trainer.learner.model))
    assert run.follows(run.trainer)
    for number, state in run.trainer.learner.optimizer.state_dict()["state"].items():
        assert same(moments[number], state)
    assert run.server.version == 3
    assert run.checkpoints() == [0, 1, 3]
    rows = [json.loads(line) for line in (tmp_path / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[2]["brake_fall"] >= 3.5
    assert rows[3] == {"step": 3, "rolled_back": 1.0}
    resumed = run.train([[]] * 3 + [lessons[:2]], resume=True)
    assert (resumed.state.step, run.verdicts()[4:]) == (4, [(4, "good")])
    assert run.chain(4) == [4, 3, 1, 0]
    assert run.chain(2) == [2, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["save_checkpoint", "push"])
def test_a_roll_back_that_was_cut_off_is_made_up_for(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    learned = weights(run.train([run.lessons]).learner.model)
    run.server.refused_version = 3 if at == "push" else None
    original = trainer_module.save_checkpoint

    def until_it_is_killed(*args: Any) -> Any:
        if run.trainer.brake.rolling is not None and at == "save_checkpoint":
            raise Killed
        return original(*args)

    monkeypatch.setattr(trainer_module, "save_checkpoint", until_it_is_killed)
    with pytest.raises((Killed, ServerError)):
        run.train([run.lessons] * 3, reversed_from=1, resume=True, server_retry_s=0)
    monkeypatch.undo()
    assert not same(learned, weights(run.server.model))
    run.server.refused_version = None
    resumed = run.train([[]] * 4, resume=True)
    assert same(learned, weights(run.server.model))
    assert same(learned, weights(resumed.learner.model))
    assert run.verdicts()[:4] == [(0, "good"), (1, "good"), (2, "bad"), (3, "rolled_back")]
    assert [version for version in run.chain(resumed.state.step) if version < 3] == [1, 0]


class Killed(Exception):
    """What stands for SIGKILL."""


@pytest.mark.all
def test_equal_pushes_are_never_rolled_back(tmp_path: Path) -> None:
    """Twenty pushes of updates too small to be seen."""
    run = Run(tmp_path)
    run.train([run.lessons[:1]] * 20, lr=1e-12, epochs_per_batch=1, minibatches=1)
    assert {verdict for _, verdict in run.verdicts()} == {"good"}
    assert len(run.verdicts()) == 21


@pytest.mark.slow
def test_too_few_tasks_are_refused_before_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "tasks.json").write_text(json.dumps([[1, 2, 3]] * 12))
    with pytest.raises(ConfigError, match=r"12 tasks, .* evaluate at least 13"):
        run.train([run.lessons])


@pytest.mark.slow
def test_an_evaluation_that_fails_at_the_start_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "evaluate.py").write_text("import sys\nsys.exit('no world today')")
    with pytest.raises(EvaluationFailedError, match="no world today"):
        run.train([run.lessons])


def test_scores_of_another_evaluation_are_not_compared(tmp_path: Path) -> None:
    def resumed(command: str) -> Brake:
        places = {"output_dir": tmp_path, "vllm_urls": ["http://a"], "resume": True}
        return Brake(TrainerConfig.model_validate({"model": "", **places, "brake": {"command": command}}))

    first = resumed("one")
    assert first.note(version(0, *[1.0] * 16), [], 1.0) is None
    worse = version(1, *[0.0] * 16)
    assert first.note(worse, first.falls(worse), 1.0) == (1, 0)
    assert resumed("two").rolling == (1, 0)
    resumed("two").finish(resumed("two").rolling or Roll(0, 0), 2)
    assert [resumed("two").numbers, resumed("one").numbers] == [{2}, set()]


def test_after_a_roll_back_what_came_later_is_no_good_version(tmp_path: Path) -> None:
    config = {"model": "", "output_dir": tmp_path, "vllm_urls": ["http://a"], "brake": {"command": "one"}}
    brake = Brake(TrainerConfig.model_validate(config))
    for number, score in enumerate((0.5, 1.0, 0.75)):
        one = version(number, *[score] * 16)
        brake.note(one, [], 1.0)
    worse = version(3, *[0.0] * 16)
    roll = brake.note(worse, brake.falls(worse), 1.0)
    assert roll == (3, 1)
    brake.finish(roll, 4)
    assert brake.numbers == {0, 4}
    assert brake.best == version(4, *[1.0] * 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"), [("no-such-program x", "can't be started"), ("'", "No closing quotation")]
)
def test_a_command_that_is_none_is_refused(command: str, said: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises((ConfigError, ValueError), match=said):
        run.train([run.lessons], brake={"command": command})


@pytest.mark.slow
def test_an_evaluation_can_be_interrupted(tmp_path: Path) -> None:
    """The run ends as after Ctrl-C between two steps, and the resumed one begins with the evaluation."""
    run = Run(tmp_path)
    (tmp_path / "waits.py").write_text("import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(600)")
    started = tmp_path / "started"
    command = f"{sys.executable} {tmp_path / 'waits.py'} {started}"

    async def train() -> None:
        async with served(run.server.handlers) as url:
            trainer = open_trainer(run.make_config(vllm_urls=[url], brake={"command": command}))
            trainer.source = ScriptedClient(trainer.config, [run.lessons])
            running = asyncio.create_task(trainer.run())
            async with asyncio.timeout(60):
                while not started.exists():
                    assert not running.done(), running.result()
                    await asyncio.sleep(0.02)
                trainer.stop()
                await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(train())
    assert not (tmp_path / "train" / "brake.jsonl").exists()
    run.train([run.lessons])
    assert run.verdicts() == [(0, "good"), (1, "good")]
