"""Batches from files of groups: which groups a batch has, what is refused, and that a resumed run goes on with them."""

import asyncio
import gzip
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.atropos.trainer import TrainerClient
from agentic_opd.core.errors import ConfigError, OPDError, PlaceError
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.losses import TABLE
from agentic_opd.training.sources import GroupFiles, open_source, registration
from agentic_opd.training.trainer import open_trainer
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.validation import validate
from tests.support import commands
from tests.support.environment import read_lines
from tests.support.places import ROOT
from tests.support.training import make_config, make_group
from tests.unit.wire.sample import group

RECORDED = ROOT / "tests/recordings/first/process/groups.jsonl"


def write(path: Path, groups: Sequence[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in groups)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def named(name: str, sequences: int = 2) -> dict[str, Any]:
    line = group()
    of_sequence = [key for key, value in line.items() if isinstance(value, list) and len(value) == len(line["tokens"])]
    line |= {key: [line[key][0]] * sequences for key in of_sequence}
    return line | {"group_overrides": {"opd": {"distill_topk": 2}, "item_id": name, "weight_version": 7}}


def config_of(*files: Path, **changes: Any) -> TrainerConfig:
    return make_config(groups=list(files), output_dir=files[0].parent / "train", **changes)


@contextmanager
def opened(config: TrainerConfig, **changes: Any) -> Iterator[GroupFiles]:
    source = GroupFiles(config.model_copy(update=changes))
    try:
        yield source
    finally:
        asyncio.run(source.close())


def batches(config: TrainerConfig) -> list[list[str | None]]:
    """The item ids of all batches."""
    with opened(config) as source:
        read = [asyncio.run(source.batch(step)) for step in range(source.steps)]
    assert all(line.weight_version is None for batch in read for line in batch), "it counts another run's pushes"
    return [[line.item_id for line in batch] for batch in read]


def test_a_pass_has_each_group_once_and_its_last_batch_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path / "groups.jsonl", [named(str(number)) for number in range(7)])
    first, second = (batches(config_of(path, batch_size=4, seed=seed)) for seed in (0, 1))
    assert [len(batch) for batch in first] == [2, 2, 2, 1]
    assert sorted(chain(*first)) == [str(number) for number in range(7)]
    assert first != second
    twice = batches(config_of(path, batch_size=4, groups_epochs=2))
    assert twice[:4] == first
    assert sorted(chain(*twice[4:])) == sorted(chain(*first))
    assert twice[4:] != first
    assert batches(config_of(path, batch_size=4, groups_epochs=2, total_steps=3)) == first[:3]
    assert batches(config_of(path, batch_size=4, total_steps=99)) == first, "total_steps adds no pass"


def test_groups_stay_whole(tmp_path: Path) -> None:
    sizes = {"a": 3, "b": 1, "c": 6, "d": 2, "e": 1}
    path = write(tmp_path / "groups.jsonl", [named(name, size) for name, size in sizes.items()])
    for seed in range(20):
        for batch in batches(config_of(path, batch_size=4, seed=seed)):
            assert sum(sizes[name or ""] for name in batch) <= 4 or batch == ["c"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_several_files_are_one_set(tmp_path: Path, suffix: str) -> None:
    """A group in both is trained on once; one that is too long for the policy is left out, and both are counted."""
    long = named("long")
    after = {"tokens": 4, "masks": -100, "inference_logprobs": 1.0, "distill_token_ids": [], "distill_logprobs": []}
    long |= {name: [[*row, value] for row in long[name]] for name, value in after.items()}
    files = [write(tmp_path / f"a{suffix}", [named("a"), named("b")]), write(tmp_path / "b.jsonl", [named("b"), long])]
    config = config_of(*files, max_token_len=16).model_copy(update={"max_token_len": len(long["tokens"][0]) - 1})
    with opened(config) as source:
        assert source.metrics == {"duplicates": 1, "too_long": 1}
    assert sorted(batches(config)[0], key=str) == ["a", "b"]
    with pytest.raises(PlaceError, match="no group remains to train on: all 1 have a sequence that is longer"):
        GroupFiles(config.model_copy(update={"groups": [write(tmp_path / "c.jsonl", [long])]}))


def test_what_validate_refuses_is_refused_by_its_words(tmp_path: Path) -> None:
    wrong = named("b")
    wrong["masks"][1] = wrong["masks"][1][:-1]
    other_version = {**named("c"), "tokens": "1 2 3"}
    lines = [json.dumps(named("a")), json.dumps(wrong), json.dumps(other_version), '{"tokens":', json.dumps(named("a"))]
    path = tmp_path / "groups.jsonl"
    path.write_text("\n".join(lines) + "\n")
    report = validate(path)
    assert report.violations >= 4
    with pytest.raises(PlaceError) as refused:
        GroupFiles(config_of(path))
    assert re.search(re.escape("; ".join(report.listed[:3])) + "; and [0-9]+ more", str(refused.value))
    assert repr(str(path)) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("empty.jsonl", b"", "line 1: the file holds no group"),
        ("blank.jsonl", b"\n\n", "line 1: the file holds no group"),
        ("text.jsonl", b"\xff\xfe", "cannot read .*can't decode byte"),
        ("cut.jsonl.gz", gzip.compress(b"{}\n" * 99, mtime=0)[:-9], "cannot read .*ended before"),
        ("plain.jsonl.gz", b"{}\n", "cannot read .*Not a gzipped file"),
        ("missing.jsonl", None, "cannot read .*No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(
        PlaceError, match=f"{name}.*{problem}|{problem.replace('cannot read .*', f'cannot read .*{name}.*')}"
    ):
        GroupFiles(config_of(tmp_path / name))


def test_a_loss_of_rows_alone_needs_a_group_with_rows(tmp_path: Path) -> None:
    plain = {name: value for name, value in named("a").items() if not name.startswith("distill")}
    plain = {**plain, "group_overrides": {"item_id": "a"}, "overrides": [{}] * len(plain["tokens"])}
    path = write(tmp_path / "groups.jsonl", [plain])
    alone = {part.name for part in TABLE if part.where == "scored"}
    assert alone == {"token_advantage", "forward_kl", "reverse_kl", "jensen_shannon"}
    for part in alone:
        with pytest.raises(ConfigError, match=r"no group has distillation arrays.*agentic-opd distill"):
            GroupFiles(config_of(path, loss={part: 1.0}))
    assert batches(config_of(path, loss={"forward_kl": 1.0, "grpo": 1.0})) == [["a"]]


def test_only_the_run_of_the_same_groups_is_resumed(tmp_path: Path) -> None:
    path = write(tmp_path / "groups.jsonl", [named("a"), named("b")])
    more = write(tmp_path / "more.jsonl", [named("c")])
    config = config_of(path, more, batch_size=2)
    with opened(config) as source:
        state = json.loads(json.dumps(source.state))
    with opened(config, groups_epochs=3) as source:
        source.resume(3, state)
    packed = write(tmp_path / "groups.jsonl.gz", [named("a"), named("b")])
    with opened(config, groups=[packed, more]) as source:
        source.resume(3, state)
    refused: list[tuple[dict[str, Any], type[OPDError], str]] = [
        ({"groups": [path]}, PlaceError, "the checkpoint's run trained on .*more.jsonl"),
        ({"groups": [more, path]}, PlaceError, "more.jsonl' does not have the contents of .*groups.jsonl"),
        ({"batch_size": 4}, ConfigError, "batch_size was 2 and is 4"),
        ({"seed": 1}, ConfigError, "seed was 0 and is 1"),
    ]
    for change, kind, message in refused:
        with opened(config, **change) as source, pytest.raises(kind, match=message):
            source.resume(3, state)
    with opened(config) as source, pytest.raises(ConfigError, match="took its batches from the trajectory API"):
        source.resume(3, {})
    with opened(config) as source, pytest.raises(ConfigError, match="the checkpoint is a learner's"):
        source.resume(3, {"trained": [], "left_out": []})
    with pytest.raises(ConfigError, match=r"trained on the files .*groups.jsonl"):
        TrainerClient(config.api_url, registration(config)).resume(3, state)
    with path.open("a") as file:
        file.write(json.dumps(named("d")) + "\n")
    with opened(config) as source, pytest.raises(PlaceError, match=r"groups.jsonl' does not have the contents"):
        source.resume(3, state)


def test_a_file_that_changes_under_a_run_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "groups.jsonl", [named("a")])
    with opened(config_of(path)) as source:
        with path.open("a") as file:
            file.write(json.dumps(named("later")) + "\n")
        assert [line.item_id for line in asyncio.run(source.batch(0))] == ["a"]
        path.write_bytes(path.read_bytes().replace(b'"a"', b'"z"'))
        with pytest.raises(PlaceError, match=r"groups.jsonl', line 1, was changed since this run began"):
            asyncio.run(source.batch(0))


class Second(DistContext):
    """The second of two processes, to which the first one's values come."""

    def __init__(self, *values: Any) -> None:
        super().__init__("cpu", rank=1, size=2)
        object.__setattr__(self, "values", iter(values))

    __slots__ = ("values",)

    def share(self, value: Any) -> Any:
        assert value is None, "only the first reads"
        return next(self.values)


def test_the_other_processes_read_no_file(tmp_path: Path) -> None:
    config = config_of(tmp_path / "on_another_machine.jsonl")
    state = {"files": [["f", "d"]], "batch_size": 32, "max_token_len": 16384, "seed": 0}
    source, told = open_source(config, Second(None, (state, 5)))
    assert (told.total_steps, source.state) == (5, state)
    source.resume(5, state)
    with pytest.raises(ConfigError, match="seed was 1 and is 0"):
        source.resume(5, {**state, "seed": 1})
    with pytest.raises(PlaceError, match="as the first said"):
        open_source(config, Second(PlaceError("as the first said")))
    with pytest.raises(ConfigError, match=r"warmup_steps \(5\) must be below the 5 steps"):
        open_source(config.model_copy(update={"warmup_steps": 5}), Second(None, (state, 5)))


SHORT: dict[str, Any] = {
    "vllm_urls": [],
    "epochs_per_batch": 1,
    "minibatches": 1,
    "micro_tokens": 4096,
    "save_every": 1,
}


def own_groups(folder: Path) -> list[ScoredGroup]:
    model = open_trainer(make_config(output_dir=folder / "none", **SHORT)).learner.model
    return [replace(make_group(model, seed), group_id=str(seed)) for seed in range(4)]


def final(folder: Path) -> bytes:
    return (folder / "final/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_on_files_that_was_stopped_ends_with_the_same_weights(tmp_path: Path) -> None:
    """A file that `process` wrote, and one of this test's: five groups, two passes, stopped before the fourth step."""
    mine = write(tmp_path / "mine.jsonl", [line.to_wire() for line in own_groups(tmp_path)])
    shutil.copy(RECORDED, tmp_path / "recorded.jsonl")
    files = [tmp_path / "recorded.jsonl", mine]
    whole = make_config(output_dir=tmp_path / "whole", groups=files, groups_epochs=2, batch_size=4, **SHORT)
    asyncio.run(open_trainer(whole).run())
    lines = read_lines(tmp_path / "whole/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert sum(line["groups"] for line in lines) == 10
    assert all("loss" in line and line["scored_tokens"] > 0 and "staleness" not in line for line in lines)
    assert lines[-1]["lr"] == pytest.approx(whole.lr / 6), "the schedule ends with the files"

    parts = whole.model_copy(update={"output_dir": tmp_path / "parts"})
    trainer = open_trainer(parts)
    batch = trainer.source.batch

    async def stopped(step: int) -> list[ScoredGroup]:
        if step == 3:
            trainer.stop()
            await asyncio.Event().wait()
        return await batch(step)

    trainer.source.batch = stopped  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(trainer.run())
    packed = tmp_path / "mine.jsonl.gz"
    packed.write_bytes(gzip.compress(mine.read_bytes()))
    resumed = open_trainer(parts.model_copy(update={"resume": True, "groups": [files[0], packed]}))
    assert resumed.state.step == 3
    asyncio.run(resumed.run())
    assert final(tmp_path / "parts") == final(tmp_path / "whole")
    theirs = read_lines(tmp_path / "parts/metrics.jsonl")
    assert [line["loss"] for line in theirs] == [line["loss"] for line in lines]

    mine.write_text(mine.read_text().replace('"scores": [0.0', '"scores": [0.5'))
    with pytest.raises(PlaceError, match=r"mine.jsonl' does not have the contents"):
        open_trainer(parts.model_copy(update={"resume": True}))


@pytest.mark.all
@pytest.mark.processes
def test_the_command_trains_in_two_processes_as_in_one(tmp_path: Path) -> None:
    """Without a server, from the files alone; an error of a file ends all processes with its words."""
    mine = write(tmp_path / "mine.jsonl", [line.to_wire() for line in own_groups(tmp_path)])
    flags = (
        "--model",
        str(ROOT / "scripts/demo_policy/policy"),
        "--device",
        "cpu",
        "--batch_size",
        "4",
        "--lr",
        "1e-3",
    )
    flags += ("--minibatches", "1", "--groups", str(mine))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    losses: list[list[float]] = []
    for name, start in (("one", ()), ("two", torchrun)):
        done = commands.run(*start, "agentic_opd.training", *flags, "--output_dir", str(tmp_path / name), real=True)
        assert done.returncode == 0, done
        losses.append([line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(losses[0]) == 2
    mine.write_text("{}\n")
    module = (*torchrun, "agentic_opd.training")
    done = commands.run(*module, *flags, "--output_dir", str(tmp_path / "three"), real=True)
    assert done.returncode != 0
    assert "mine.jsonl' violates the wire format: line 1" in done.stderr
