"""Two `serve` processes with one trajectory API and one vLLM server: each gets its part of the trainer's batches."""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import free_port

from tests.support.environment import Serving, serving
from tests.support.fake_plugin import FakePlugin
from tests.support.trajectory import trajectory_api
from tests.support.waiting import until

GROUP_SIZE, BATCH_SIZE = 2, 8
GROUPS = BATCH_SIZE // GROUP_SIZE
"""Groups of a batch."""


class Pair:
    """A process with weight 3 and one with weight 1, and who made which group."""

    def __init__(self, folder: Path, heavy: Serving, light: Serving) -> None:
        self.folder, self.both = folder, (heavy, light)

    def wait_for(self, text: str) -> None:
        for one in self.both:
            one.wait_for(text)

    def of_light(self, batch: Sequence[dict[str, Any]]) -> int:
        """How many groups of a batch the light one made, by its own file; the others must be the heavy one's."""
        made = {name: written(self.folder / name / "groups.jsonl") for name in ("heavy", "light")}
        ids = {group["group_overrides"]["group_id"] for group in batch}
        assert len(ids) == len(batch)
        assert ids <= made["heavy"] | made["light"]
        return len(ids & made["light"])


def written(path: Path) -> set[str]:
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {json.loads(line)["group_overrides"]["group_id"] for line in whole}


PairOf = Callable[..., Any]


@pytest.fixture
def pair(fake_server: FakePlugin, tmp_path: Path) -> PairOf:
    """`pair(api_url, *flags of the light one)`: both, without distillation, which would only take time here."""

    @contextmanager
    def start(api_url: str, *light_flags: str) -> Generator[Pair]:
        flags = ("--env.opd_enabled", "false", "--env.group_size", str(GROUP_SIZE), "--env.max_batches_offpolicy", "2")
        heavy_flags = ("--env.inference_weight", "3", "--env.seed", "1")
        with (
            serving(api_url, fake_server.base_url, tmp_path / "heavy", *flags, *heavy_flags) as heavy,
            serving(api_url, fake_server.base_url, tmp_path / "light", *flags, *light_flags) as light,
        ):
            yield Pair(tmp_path, heavy, light)

    return start


def test_batches_hold_groups_of_both_environments(pair: PairOf, tmp_path: Path) -> None:
    """The weights set how many groups each has in progress (tests/unit/runs/test_serve.py).

    How many of them a batch holds also depends on how quickly each process works.
    """
    with trajectory_api(tmp_path / "api.log") as api, pair(api.url) as both:
        both.wait_for("waiting for a trainer")
        api.register_trainer(batch_size=BATCH_SIZE, num_steps=999)
        both.wait_for("registered at")
        counts = [both.of_light(api.batch()) for _ in range(18)][2:]
    assert 0 < sum(counts) < GROUPS * len(counts), counts


def test_an_allocation_holds_in_every_batch_and_after_a_restart_of_the_api(pair: PairOf, tmp_path: Path) -> None:
    """The light one is promised half of each batch, which is more than its weight says.

    The API cuts its whole queue into batches when it is asked for one and hands out the last of them first. That one is
    made of what was left, and one group of the light one is enough for it; the others keep the promise. Of a full queue
    half or less is the heavy one's, and less where the light one was quicker.
    """
    port = free_port()
    with pair(f"http://127.0.0.1:{port}", "--env.min_batch_allocation", "0.5") as both:
        for name, said in (("first", "registered at"), ("second", "registered again")):
            with trajectory_api(tmp_path / f"{name}.log", port) as api:
                both.wait_for("waiting for a trainer")
                api.register_trainer(batch_size=BATCH_SIZE, num_steps=999)
                both.wait_for(said)
                promised: list[int] = []
                while len(promised) < 2:
                    until(lambda: sum(api.queued_by_env()) >= 2 * GROUPS, timeout_s=120)
                    before = api.batches_made()
                    assert both.of_light(api.batch()) >= 1
                    promised += [both.of_light(api.batch()) for _ in range(api.batches_made() - before - 1)]
                assert min(promised) >= GROUPS // 2, promised
                api.kill()
