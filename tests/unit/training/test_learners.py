"""A trainer of several learners: each has weights of its own groups, wherever it is killed and whatever is deleted."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentic_opd.cli.validate import main as validate
from agentic_opd.core.errors import OutputError
from agentic_opd.core.text import json_line
from agentic_opd.training import learners as learners_module
from agentic_opd.training import trainer as trainer_module
from agentic_opd.training.brake import Brake, Version
from agentic_opd.training.checkpoint import checkpoints, load_checkpoint, read_progress
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.learner_queue import LearnerQueue, QueueChangedError, spaced_steps
from agentic_opd.training.learners import LearnersTrainer, open_learners
from agentic_opd.training.push import WeightPusher, WeightsReplacedError
from agentic_opd.training.train_when import TrainWhen
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.learners import remove_files, remove_sessions
from agentic_opd.wire.receipts import line_sha256, read_chain, receipt_file
from tests.support.tiny_model import save_tiny_model
from tests.support.training import make_group

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), dtype="float32")


@pytest.fixture(scope="module")
def lines(model: Path) -> Callable[..., bytes]:
    """The line of a group of a session; each name has groups of its own."""
    from transformers import AutoModelForCausalLM

    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    made: dict[str, bytes] = {}

    def line(session: str) -> bytes:
        if session not in made:
            group = make_group(policy, seed=sum(session.encode()), lengths=(16, 18))
            named = replace(group, item_id=f"item-{session}", group_id=f"group-{session}", session_id=session)
            made[session] = json_line(named.to_wire())
        return made[session]

    return line


class Folder:
    """The folder of the learners of a test, in which sessions write groups."""

    def __init__(self, root: Path, line: Callable[[str], bytes], model: Path) -> None:
        self.root, self._line, self._model = root, line, model

    def talk(self, learner: str, *sessions: str) -> None:
        path = self.root / "learners" / learner / "groups.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.writelines(self._line(session) for session in sessions)

    def delete(self, learner: str, *sessions: str) -> None:
        remove_sessions(self.root / "learners" / learner, [f"group-{name}" for name in sessions], ())

    def config(self, **changes: Any) -> TrainerConfig:
        settings = {"model": str(self._model), "device": "cpu", "vllm_urls": [], "lora_rank": 2, "lr": 1e-2}
        settings |= {"learners": {"folder": str(self.root / "learners")}, "weights_dir": str(self.root / "weights")}
        settings |= {"batch_size": 2, "epochs_per_batch": 1, "minibatches": 1, **changes}
        return TrainerConfig.model_validate(settings)

    def train(self, **changes: Any) -> LearnersTrainer:
        """Train until no learner has anything to do."""
        trainer = open_learners(self.config(**changes))

        async def run() -> None:
            while await trainer.take_turns(None):
                pass
            await trainer.train_when.close()

        try:
            asyncio.run(run())
        finally:
            trainer.lock.release()
        return trainer

    def saved(self, learner: str) -> list[Path]:
        return checkpoints(self.root / "learners" / learner / "checkpoints")

    def trained(self, learner: str) -> list[str]:
        """The sessions that the newest weights were trained on, step by step."""
        by_digest = {read_sha(row): row["group_overrides"]["session_id"] for row in self.rows(learner)}
        steps = read_progress(self.saved(learner)[-1]).source["trained"]
        return [by_digest[digest] for step in steps for digest in step]

    def rows(self, learner: str) -> list[dict[str, Any]]:
        path = self.root / "learners" / learner / "groups.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def state(self, learner: str) -> dict[str, Tensor]:
        """All tensors of the newest checkpoint: adapters and optimizer."""
        trainer = open_learners(self.config())
        try:
            load_checkpoint(self.root / "learners" / learner / "checkpoints", trainer.learner.parts, trainer.world)
            adapters = {name: value for name, value in trainer.learner.model.state_dict().items() if ".lora_" in name}
            moments = trainer.learner.optimizer.state_dict()["state"]
            return {
                **{name: value.clone() for name, value in adapters.items()},
                **{f"{number}.{name}": value for number, state in moments.items() for name, value in state.items()},
            }
        finally:
            trainer.lock.release()


def read_sha(row: dict[str, Any]) -> str:
    return line_sha256(json_line(ScoredGroup.from_wire(row).to_wire()))


@pytest.fixture
def folders(tmp_path: Path, lines: Callable[[str], bytes], model: Path) -> Callable[[str], Folder]:
    return lambda name: Folder(tmp_path / name, lines, model)


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_each_learner_has_the_weights_that_it_would_have_alone(folders: Callable[[str], Folder]) -> None:
    together, alone = folders("together"), folders("alone")
    together.talk("ann", "a1", "a2", "a3")
    together.talk("ben", "b1", "b2")
    together.train()
    together.talk("ben", "b3")
    together.train()
    alone.talk("ben", "b1", "b2", "b3")
    alone.train()
    assert together.trained("ann") == ["a1", "a2", "a3"]
    assert together.trained("ben") == ["b1", "b2", "b3"]
    assert equal(together.state("ben"), alone.state("ben"))
    assert not equal(together.state("ben"), together.state("ann"))


def test_a_batch_is_complete_once_it_has_its_sequences(folders: Callable[[str], Folder]) -> None:
    folder = folders("one")
    folder.talk("ann", "a1")
    folder.train(batch_size=4)
    assert not folder.saved("ann")
    folder.talk("ann", "a2", "a3")
    folder.train(batch_size=4)
    assert read_progress(folder.saved("ann")[-1]).step == 1
    assert folder.trained("ann") == ["a1", "a2"]


@pytest.mark.parametrize("deleted", ["a1", "a3", "a5"])
def test_deleted_sessions_leave_the_weights_of_a_run_that_never_saw_them(
    deleted: str, folders: Callable[[str], Folder]
) -> None:
    sessions = [f"a{number}" for number in range(1, 6)]
    folder, never = folders("folder"), folders("never")
    folder.talk("ann", *sessions)
    folder.train()
    folder.delete("ann", deleted)
    folder.train()
    never.talk("ann", *(name for name in sessions if name != deleted))
    never.train()
    assert equal(folder.state("ann"), never.state("ann"))
    assert folder.trained("ann") == [name for name in sessions if name != deleted]
    texts = [path.read_bytes() for path in folder.root.rglob("*") if path.is_file()]
    assert not any(f"group-{deleted}".encode() in text for text in texts), "no file names it any more"
    receipts, differences = read_chain(receipt_file(folder.root / "learners/ann/receipts", 4))
    assert not differences
    assert len(receipts) == 5
    path = folder.root / "learners" / "ann"
    assert validate(["--receipt", str(path), str(path / "groups.jsonl")]) == 0


def test_the_version_before_a_deleted_session_is_served_before_the_next_step_waits_for_its_time(
    folders: Callable[[str], Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    async def push(pusher: WeightPusher, policy: Any, version: int, *_: Any) -> None:
        events.append(f"push {version}")

    async def forget_learner(pusher: WeightPusher) -> None:
        events.append("forget")

    async def until_open(train_when: TrainWhen) -> None:
        events.append("wait")

    monkeypatch.setattr(WeightPusher, "push", push)
    monkeypatch.setattr(WeightPusher, "forget_learner", forget_learner)
    folder = folders("folder")
    folder.talk("ann", "a1", "a2")
    folder.train(vllm_urls=["http://127.0.0.1:1"])
    folder.delete("ann", "a2")
    folder.talk("ann", "a3")
    events.clear()
    monkeypatch.setattr(TrainWhen, "until_open", until_open)
    folder.train(vllm_urls=["http://127.0.0.1:1"])
    assert events == ["forget", "push 1", "wait", "push 2"]
    assert folder.trained("ann") == ["a1", "a3"]


def test_servers_are_looked_at_though_there_are_batches_all_the_time(
    folders: Callable[[str], Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, events = open_learners(folders("folder").config()), list[str]()

    async def take_turns(trainer: LearnersTrainer, limit: int | None) -> bool:
        events.append("turns")
        trainer.is_stopping = events.count("turns") == 3
        return True

    async def serve_all(trainer: LearnersTrainer) -> None:
        events.append("servers")

    monkeypatch.setattr(LearnersTrainer, "take_turns", take_turns)
    monkeypatch.setattr(LearnersTrainer, "_serve_all", serve_all)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(trainer.run())
    assert events == ["servers", "turns", "servers", "turns", "servers", "turns"]


def test_a_deleted_learner_leaves_nothing_and_others_keep_theirs(folders: Callable[[str], Folder]) -> None:
    folder = folders("folder")
    folder.talk("ann", "a1", "a2")
    folder.talk("ben", "b1")
    folder.train()
    before = folder.state("ben")
    remove_files(folder.root / "learners" / "ann")
    folder.train()
    assert not [
        path for path in (folder.root / "learners" / "ann").rglob("*") if path.is_file() and path.stat().st_size
    ]
    assert equal(folder.state("ben"), before)
    folder.talk("ann", "a2")
    folder.train()
    assert folder.trained("ann") == ["a2"]


def test_a_learner_that_is_deleted_during_its_visit_ends_no_training(
    folders: Callable[[str], Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("folder")
    folder.talk("ann", "a1")
    folder.talk("ben", "b1")
    folder.train()
    for name in ("ann", "ben"):
        folder.talk(name, f"{name}-2")
    compare, is_deleted = learners_module.standing, False

    def standing(path: Path, queue: LearnerQueue) -> Any:
        nonlocal is_deleted
        now = compare(path, queue)
        if path.name == "ann" and not is_deleted:
            is_deleted = True
            remove_files(path)
        return now

    monkeypatch.setattr(learners_module, "standing", standing)
    folder.train()
    assert is_deleted
    assert not folder.saved("ann")
    assert folder.trained("ben") == ["b1", "ben-2"]


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_server_that_lost_a_push_before_the_probe_ends_no_training(
    is_deleted: bool, folders: Callable[[str], Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ann is deleted, or the server is started again, while her second version is pushed."""
    folder = folders("folder")
    folder.talk("ann", "a1", "a2")
    folder.talk("ben", "b1", "b2")
    is_lost = False

    async def push(pusher: WeightPusher, policy: Any, version: int, *_: Any) -> None:
        nonlocal is_lost
        if pusher._learner == "ann" and version == 2 and not is_lost:
            is_lost = True
            if is_deleted:
                remove_files(folder.root / "learners" / "ann")
            raise WeightsReplacedError("it answered with version 0")

    async def forget_learner(pusher: WeightPusher) -> None:
        assert pusher._learner == "ann"

    monkeypatch.setattr(WeightPusher, "push", push)
    monkeypatch.setattr(WeightPusher, "forget_learner", forget_learner)
    folder.train(vllm_urls=["http://127.0.0.1:1"])
    assert is_lost
    assert folder.trained("ben") == ["b1", "b2"]
    if is_deleted:
        assert not folder.saved("ann")
    else:
        assert folder.trained("ann") == ["a1", "a2"]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("where", ["step", "receipt", "checkpoint", "after"])
def test_a_kill_loses_no_group_and_trains_on_none_twice(
    where: str, folders: Callable[[str], Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of four steps ends at each of these places; the next run makes the weights of an undisturbed one."""
    whole, killed = folders("whole"), folders("killed")
    for folder in (whole, killed):
        folder.talk("ann", "a1", "a2")
        folder.talk("ben", "b1", "b2")
    whole.train()
    count = 0

    def third(original: Any, *, is_before: bool) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3 and is_before:
                raise Killed
            result = await original(*arguments, **named)
            if count == 3:
                raise Killed
            return result

        return call

    with monkeypatch.context() as patched:
        if where == "step":
            patched.setattr(trainer_module.Trainer, "learn", third(trainer_module.Trainer.learn, is_before=True))
        elif where == "receipt":
            patched.setattr(trainer_module.Trainer, "_step", third(trainer_module.Trainer._step, is_before=False))
        elif where == "checkpoint":
            patched.setattr(trainer_module.Trainer, "save", third(trainer_module.Trainer.save, is_before=True))
        else:
            patched.setattr(trainer_module.Trainer, "learn", third(trainer_module.Trainer.learn, is_before=False))
        with pytest.raises(Killed):
            killed.train()
    killed.train()
    for learner in ("ann", "ben"):
        assert killed.trained(learner) == whole.trained(learner)
        assert equal(killed.state(learner), whole.state(learner))


def test_the_brake_rolls_back_the_learner_that_falls_and_its_groups_are_not_trained_again(
    folders: Callable[[str], Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ann's second version falls on all 16 turns that are held out; Ben has none held out."""
    folder = folders("folder")
    folder.talk("ann", "a1", "a2", "a3")
    folder.talk("ben", "b1", "b2", "b3")
    held_out = folder.root / "learners" / "ann" / "held_out.jsonl"
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}] * 17
    held_out.write_text(json.dumps({"item_id": "s/0", "messages": turns}) + "\n")
    asked: list[list[str]] = []

    async def evaluate(brake: Brake, number: int) -> Version:
        asked.append(brake._command(Path("out")))
        score = 0.0 if number == 2 else 1.0
        return Version(number, {f"turn {turn}": score for turn in range(16)})

    monkeypatch.setattr(Brake, "evaluate", evaluate)
    settings = {"brake": {"command": "agentic-opd evaluate"}, "vllm_urls": ["http://127.0.0.1:1"]}

    async def no_push(*arguments: Any, **named: Any) -> None:
        trainer_module.logger.debug("not pushed")

    monkeypatch.setattr(trainer_module.WeightPusher, "push", no_push)
    monkeypatch.setattr(trainer_module.WeightPusher, "forget_learner", no_push)
    original = trainer_module.Trainer._step

    async def step(trainer: trainer_module.Trainer, groups: Sequence[ScoredGroup]) -> None:
        trainer.state.pushes += 1  # As if a server had taken the weights.
        await original(trainer, groups)

    monkeypatch.setattr(trainer_module.Trainer, "_step", step)
    folder.train(**settings)
    rows = [json.loads(line) for line in (folder.root / "learners/ann/brake.jsonl").read_text().splitlines()]
    assert [(row["version"], row["verdict"]) for row in rows] == [
        *((0, "good"), (1, "good"), (2, "bad"), (3, "rolled_back"), (4, "good")),
    ]
    assert folder.trained("ann") == ["a1", "a3"]
    assert folder.trained("ben") == ["b1", "b2", "b3"]
    assert not (folder.root / "learners/ben/brake.jsonl").exists()
    assert asked[0][-6:] == [
        *("--env.world.journal", str(held_out), "--env.world.turns", "16", "--env.eval.learner", "ann"),
    ]


def test_a_new_learner_starts_from_a_named_one_and_a_deletion_there_reaches_it(
    folders: Callable[[str], Folder],
) -> None:
    """Eve starts from Ann's two groups; then Ann's first one is deleted."""
    folder, never = folders("folder"), folders("never")
    start = {"learners": {"folder": str(folder.root / "learners"), "start": "ann"}}
    folder.talk("ann", "a1", "a2")
    folder.train(**start)
    folder.talk("eve", "e1")
    folder.train(**start)
    for sessions, name in ((("a1", "a2", "e1"), "all"), (("a2", "e1"), "rest")):
        never.talk(name, *sessions)
    never.train()
    assert equal(folder.state("eve"), never.state("all"))
    assert not read_chain(receipt_file(folder.root / "learners/eve/receipts", 3)).differences
    folder.delete("ann", "a1")
    folder.train(**start)
    assert equal(folder.state("eve"), never.state("rest"))
    assert not equal(folder.state("ann"), folder.state("eve"))


def test_kept_checkpoints_are_few_and_those_needed_later_are_kept_now() -> None:
    kept = {0}
    for step in range(1, 200):
        now = {*spaced_steps(step)}
        assert now <= kept | {step}
        kept = now
    assert len(kept) <= 16
    assert {199, 198, 196, 192} <= kept


def test_a_deletion_while_a_learner_is_read_is_seen(folders: Callable[[str], Folder]) -> None:
    folder = folders("folder")
    folder.talk("ann", "a1", "a2")
    path = folder.root / "learners" / "ann"
    for change in (lambda: folder.delete("ann", "a1"), lambda: remove_files(path)):
        queue = LearnerQueue(path, 2, 1000)
        change()
        with pytest.raises(QueueChangedError):
            queue.next_batch()


def test_an_away_learner_is_not_opened(folders: Callable[[str], Folder], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders("folder")
    folder.talk("ann", "a1")
    folder.talk("ben", "b1")
    trainer = open_learners(folder.config())
    opened: list[str] = []
    original = LearnersTrainer.visit

    async def visit(trainer: LearnersTrainer, name: str) -> bool:
        opened.append(name)
        return await original(trainer, name)

    monkeypatch.setattr(LearnersTrainer, "visit", visit)

    async def run() -> None:
        while await trainer.take_turns(None):
            pass
        opened.clear()
        folder.talk("ben", "b2")
        while await trainer.take_turns(None):
            pass

    asyncio.run(run())
    trainer.lock.release()
    assert {*opened} == {"ben"}


def test_two_trainers_of_one_folder_are_refused_and_so_are_settings_without_adapters(
    folders: Callable[[str], Folder],
) -> None:
    folder = folders("folder")
    trainer = open_learners(folder.config())
    with pytest.raises(OutputError, match=r"learners\.folder"):
        open_learners(folder.config())
    trainer.lock.release()
    for changes, problem in (
        ({"lora_rank": None}, "lora_rank"),
        ({"lr_schedule": "linear"}, "constant"),
        ({"resume": True, "ema_decay": 0.9}, "ema_decay, resume"),
    ):
        with pytest.raises(ValueError, match=problem):
            folder.config(**changes)
    assert learners_module.count_held_out(folder.root / "nothing") == 0
