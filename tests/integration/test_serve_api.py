"""`GroupServer`, `Membership` and `TrainerClient` against the real trajectory API, with groups that cost nothing.

What no fake API would show: which ids it hands out after a restart, what it does with a group whose answer was lost.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import free_port

from agentic_opd.atropos.api import EnvDescription, TrainerDescription, TrajectoryApi
from agentic_opd.atropos.outbox import Membership
from agentic_opd.atropos.trainer import TrainerClient
from agentic_opd.core.errors import ConfigError, NotSentError
from agentic_opd.core.types import Task
from agentic_opd.runs.config import RunConfig
from agentic_opd.runs.environment import FinishedGroup
from agentic_opd.runs.evaluate import Evaluator
from agentic_opd.runs.metric_log import RunMetrics
from agentic_opd.runs.serve import GroupServer, ServeCounts
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TaskItem
from tests.support.environment import read_lines
from tests.support.recording_proxy import RecordingProxy, recording_proxy
from tests.support.trajectory import Trajectories, handed_out, ids_of, sent, trajectory_api
from tests.support.waiting import until

GROUP_SIZE, BATCH_SIZE = 2, 4


def describe(name: str, weight: float = 1.0) -> EnvDescription:
    return EnvDescription(name, 64, weight, GROUP_SIZE, None)


@asynccontextmanager
async def member(url: str, name: str, weight: float = 1.0) -> AsyncGenerator[Membership]:
    api = TrajectoryApi(url)
    try:
        yield Membership(api, describe(name, weight))
    finally:
        await api.close()


def env_id(one: Membership) -> int:
    assert one.registration is not None
    return one.registration.env_id


def test_after_a_restart_no_environment_takes_the_place_of_another(tmp_path: Path) -> None:
    """The second one is the first to come back and gets id 0, which had been the other's."""
    port = free_port()

    async def run() -> None:
        url = f"http://127.0.0.1:{port}"
        async with member(url, "heavy", 3.0) as heavy, member(url, "light", 1.0) as light:
            with trajectory_api(tmp_path / "first.log", port) as api:
                api.register_trainer(batch_size=BATCH_SIZE, num_steps=9)
                await heavy.status()
                assert (await light.status()).env_weight == 0.25
                assert (await heavy.status()).env_weight == 0.75
                assert (env_id(heavy), env_id(light)) == (0, 1)
                api.kill()
            with trajectory_api(tmp_path / "second.log", port) as api:
                api.register_trainer(batch_size=BATCH_SIZE, num_steps=9)
                await light.status()
                assert env_id(light) == 0
                assert (await heavy.status()).env_weight == 0.75
                assert env_id(heavy) == 1
                assert (await light.status()).env_weight == 0.25

    asyncio.run(run())


def test_a_restarted_api_gets_no_group_before_its_trainer(tmp_path: Path) -> None:
    """It would make a queue for the group, take the trainer for registered, and never start."""
    port = free_port()

    async def run() -> None:
        async with member(f"http://127.0.0.1:{port}", "env") as env:
            with trajectory_api(tmp_path / "first.log", port) as api:
                api.register_trainer(batch_size=GROUP_SIZE, num_steps=9)
                await env.status()
                await env.send(body := await env.body(scripted_group(1)))
                api.kill()
            with trajectory_api(tmp_path / "second.log", port) as api:
                await asyncio.sleep(0.05)  # The loop reads the end of the connection, which came long ago.
                assert env.is_sure, "it has not asked since"
                with pytest.raises(NotSentError):
                    await env.send(body)
                assert not env.is_sure
                assert api.received() == 0
                api.register_trainer(batch_size=GROUP_SIZE, num_steps=9)
                await env.status()
                await env.send(await env.body(scripted_group(1)))
                assert api.batch()

    asyncio.run(run())


def test_where_only_the_connection_was_lost_the_old_place_is_given_back(tmp_path: Path) -> None:
    """Else an environment would compete with itself for the rest of the run."""

    async def run(api: Trajectories, proxy: RecordingProxy) -> None:
        api.register_trainer(batch_size=BATCH_SIZE, num_steps=9)
        async with member(proxy.url, "env") as env:
            await env.status()
            proxy.to_lose += ["/status-env"] * 2  # An HTTP client may ask once more by itself.
            assert (await env.status()).env_weight == 1.0
            assert not proxy.to_lose
            assert env_id(env) > 0
            await env.leave()

    with trajectory_api(tmp_path / "api.log") as api, recording_proxy(api.url) as proxy:
        asyncio.run(run(api, proxy))


def test_a_trainer_that_has_gone_back_is_a_new_api(tmp_path: Path) -> None:
    """A restart that nobody was looking at shows in the trainer's step, however quick it was."""

    async def run(api: Trajectories) -> None:
        api.register_trainer(batch_size=GROUP_SIZE, num_steps=9)
        async with member(api.url, "env") as env:
            await env.status()
            await env.send(await env.body(scripted_group(1)))
            assert api.batch()
            assert (await env.status()).current_step == 1
            api.reset()
            api.register_trainer(batch_size=GROUP_SIZE, num_steps=9)
            async with member(api.url, "other", 3.0) as other:
                await other.status()
                assert (await env.status()).env_weight == 0.25
                assert (env_id(other), env_id(env)) == (0, 1)

    with trajectory_api(tmp_path / "api.log") as api:
        asyncio.run(run(api))


# ----------------------------------------------------------------------------------------------------------- counting


def scripted_group(number: int) -> ScoredGroup:
    return ScoredGroup(
        tuple(ScoredRollout([number, 1, 2], [-100, 1, 2], [1.0, -0.1, -0.2], score) for score in (0.0, 1.0))
    )


@dataclass
class Loop:
    """`GroupServer` and `TrainerClient` in one event loop, both through one proxy; the loop is the environment."""

    folder: Path
    steps: int
    trainer_s: float = 0.0
    batch_size: int = BATCH_SIZE
    ahead: int = 3
    before: dict[int, Callable[[], None]] = field(default_factory=dict)
    """What is done before the trainer asks for the batch of a step."""
    counts: ServeCounts = field(default_factory=ServeCounts)
    trained: list[str] = field(default_factory=list)
    duplicates: int = 0
    lost_batches: int = 0
    made: int = 0
    version: int | None = 0
    """What the trainer pushed last; None: the policy's server does not say."""
    pushes: bool = True
    resume: bool = False
    name = "env"
    tokenizer: Any = None
    config: RunConfig = field(default_factory=RunConfig)

    async def run(self, url: str) -> ServeCounts:
        async with asyncio.timeout(120):
            counts, _ = await asyncio.gather(self.serve(url), self.train(url))
            return counts

    async def serve(self, url: str) -> ServeCounts:
        self.config = RunConfig(
            rollout_server_url=url,
            group_size=GROUP_SIZE,
            max_batches_offpolicy=self.ahead,
            data_path_to_save_groups=str(self.folder / "groups.jsonl"),
            resume=self.resume,
        )
        metrics = RunMetrics(self.config, lambda ids: "", list)
        evaluation = Evaluator([], self.no_episode, self.no_episode, self.policy_versions, self.config, metrics)
        async with asyncio.timeout(120):
            server = GroupServer(self, metrics, evaluation, 64)
            self.counts = server.counts
            try:
                return await server.run()
            finally:
                metrics.close()

    async def no_episode(self, *arguments: Any) -> Any:
        raise AssertionError("there is no task to evaluate")

    def items(self) -> Iterator[TaskItem]:
        while True:
            self.made += 1
            yield TaskItem(Task(str(self.made), "p", "assert f()"), 0)

    async def collect(self, item: TaskItem) -> FinishedGroup:
        group = scripted_group(int(item.task.task_id))
        group = replace(group, item_id=item.item_id, weight_version=self.version)
        await asyncio.sleep(0.02)
        return FinishedGroup(group, (), None)

    def born(self) -> dict[str, int | None]:
        """With which weights each written group was begun, by its id."""
        groups = [ScoredGroup.from_wire(line) for line in read_lines(self.folder / "groups.jsonl")]
        return {group.group_id or "": group.weight_version for group in groups}

    def roles(self) -> dict[str, str]:
        return {"policy": "none"}

    def line_settings(self) -> dict[str, Any]:
        return {}

    async def policy_versions(self) -> list[int]:
        return [] if self.version is None else [self.version]

    async def train(self, url: str) -> None:
        client = trainer_client(url, self.steps, self.batch_size)
        try:
            async with asyncio.timeout(120):
                await client.register(0)
                for step in range(self.steps):
                    self.before.get(step, lambda: None)()
                    self.trained += [group.group_id or "" for group in await client.batch(step)]
                    await asyncio.sleep(self.trainer_s)
                    self.version = step + 1 if self.pushes else 0
        finally:
            self.duplicates, self.lost_batches = client.duplicates, client.lost_batches
            await client.close()


def trainer_client(url: str, steps: int, batch_size: int = BATCH_SIZE, *, is_known: bool = False) -> TrainerClient:
    client = TrainerClient(url, TrainerDescription("g", "p", batch_size, 16384, "", 1, 0, steps))
    if is_known:
        client.resume(steps, {})
    return client


def registrations(proxy: RecordingProxy) -> int:
    return sum(one.answer["status"] == "success" for one in proxy.of("/register-env"))


def test_a_group_whose_answer_was_lost_is_queued_twice_and_trained_on_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=4)
    with trajectory_api(tmp_path / "api.log") as api, recording_proxy(api.url) as proxy:
        proxy.to_lose.append("/scored_data")
        counts = asyncio.run(loop.run(proxy.url))
        received = sent(proxy.exchanges)
        assert (counts.repeated, counts.unsent, loop.duplicates) == (1, 0, 1)
        assert len(received) == counts.sent + 1 == len(set(received)) + 1
        assert len(set(loop.trained)) == len(loop.trained) == 4 * BATCH_SIZE // GROUP_SIZE - 1
        assert counts.sent == len(loop.trained) + api.left_over()
        assert registrations(proxy) == 2


def test_a_resumed_run_goes_on_with_the_tasks_that_its_file_lacks(tmp_path: Path) -> None:
    for resume in (False, True):
        with trajectory_api(tmp_path / "api.log") as api:
            asyncio.run(Loop(tmp_path, steps=2, resume=resume).run(api.url))
    items = [ScoredGroup.from_wire(line).item_id for line in read_lines(tmp_path / "groups.jsonl")]
    assert len(items) >= 2 * 2 * BATCH_SIZE // GROUP_SIZE
    assert len(set(items)) == len(items)


def test_counts_agree_over_a_killed_api_whose_queue_is_lost(tmp_path: Path) -> None:
    port = free_port()
    loop = Loop(tmp_path, steps=12, trainer_s=0.3)
    with recording_proxy(f"http://127.0.0.1:{port}") as proxy, ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: asyncio.run(loop.run(proxy.url)))
        with trajectory_api(tmp_path / "first.log", port) as api:
            is_killed = False
            while not is_killed:
                until(lambda: len(sent(proxy.exchanges)) > len(handed_out(proxy.exchanges)) >= 6)
                with proxy.between_exchanges() as before:
                    is_killed = len(sent(before)) > len(handed_out(before))  # Else the trainer took all meanwhile.
                    if is_killed:
                        api.kill()
                        proxy.disconnect()
            assert api.received() == len(sent(before))
        with trajectory_api(tmp_path / "second.log", port) as api:
            counts = running.result(120)
            left = api.left_over()
            assert api.received() == len(sent(proxy.exchanges)) - len(sent(before))
    after = proxy.exchanges[len(before) :]
    lost = set(sent(before)) - set(handed_out(before))
    assert 0 < len(lost) <= 2 * 3 * BATCH_SIZE // GROUP_SIZE  # What was queued, and batches made up of it before.
    assert sorted(loop.trained) == sorted(handed_out(before) + handed_out(after))
    assert len(set(loop.trained)) == len(loop.trained) == 12 * BATCH_SIZE // GROUP_SIZE
    assert not lost & set(loop.trained)
    assert len(sent(after)) == len(handed_out(after)) + left
    assert counts.sent == len(sent(before)) + len(sent(after)) == len(loop.trained) + len(lost) + left
    assert (counts.unsent, counts.failed, loop.duplicates) == (0, 0, 0)
    assert registrations(proxy) == 2


def test_a_trainer_that_comes_back_at_an_earlier_step_gets_all_its_batches(tmp_path: Path) -> None:
    """The one before it was killed with a batch in hand: the API counts that one, and would end one batch early."""
    loop = Loop(tmp_path, steps=12)
    with trajectory_api(tmp_path / "api.log") as api, recording_proxy(api.url) as proxy:
        api.register_trainer(batch_size=BATCH_SIZE, num_steps=12)
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(lambda: asyncio.run(loop.serve(proxy.url)))
            in_hand = ids_of(api.batch())
            asyncio.run(loop.train(proxy.url))
            counts = serving.result(60)
        assert len(loop.trained) == 12 * BATCH_SIZE // GROUP_SIZE
        assert not set(in_hand) & set(loop.trained)
        assert counts.sent == len(sent(proxy.exchanges)) == api.received()


def test_nothing_is_sampled_ahead_of_the_trainer_where_that_is_asked_for(tmp_path: Path) -> None:
    size = BATCH_SIZE // GROUP_SIZE
    with trajectory_api(tmp_path / "api.log") as api:
        loop = Loop(tmp_path / "none", steps=6, trainer_s=0.5, ahead=0)
        ahead = Loop(tmp_path / "one", steps=6, trainer_s=0.5, ahead=1)
        assert asyncio.run(loop.run(api.url)).sent == 6 * size == loop.made
        born = loop.born()
        assert [born[group] for group in loop.trained] == [step for step in range(6) for _ in range(size)]
    with trajectory_api(tmp_path / "api.log") as api:
        asyncio.run(ahead.run(api.url))
        born = ahead.born()
        assert max(step - born[group] for step, group in enumerate(ahead.trained[::size])) >= 1


def test_a_trainer_that_does_not_push_what_is_waited_for_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentic_opd.runs.serve._PUSH_S", 0.5)
    loop = Loop(tmp_path, steps=3, ahead=0, pushes=False)

    async def run(url: str) -> None:
        running = asyncio.create_task(loop.run(url))
        await asyncio.to_thread(until, lambda: "the trainer is at step 1, the policy has version [0]" in caplog.text)
        assert len(loop.trained) == BATCH_SIZE // GROUP_SIZE
        loop.version = 1
        await asyncio.to_thread(until, lambda: len(loop.trained) == 2 * BATCH_SIZE // GROUP_SIZE)
        running.cancel()
        await asyncio.wait([running])

    with trajectory_api(tmp_path / "api.log") as api:
        asyncio.run(run(api.url))
    assert caplog.text.count("waiting for the policy's weights, as env.max_batches_offpolicy 0 asks for") == 1


def test_a_policy_that_does_not_say_its_weights_is_refused_where_they_are_waited_for(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=1, ahead=0, version=None)
    with trajectory_api(tmp_path / "api.log") as api:
        api.register_trainer(batch_size=BATCH_SIZE, num_steps=1)
        with pytest.raises(ConfigError, match="max_batches_offpolicy 0 needs a policy server that says"):
            asyncio.run(loop.serve(api.url))
    assert loop.made == 0


def test_without_ahead_a_trainer_that_comes_back_at_an_earlier_step_is_served(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=4, ahead=0)
    with trajectory_api(tmp_path / "api.log") as api:
        api.register_trainer(batch_size=BATCH_SIZE, num_steps=4)
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(lambda: asyncio.run(loop.serve(api.url)))
            api.batch()  # In the hands of a trainer that is killed.
            asyncio.run(loop.train(api.url))
            serving.result(60)
    born = loop.born()
    assert [born[group] for group in loop.trained] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_batch_of_nothing_new_is_a_step_too(tmp_path: Path) -> None:
    """The API counts it, and `serve` ends by that count: a trainer that asked for another one would wait forever."""
    loop = Loop(tmp_path, steps=4, batch_size=GROUP_SIZE)
    with trajectory_api(tmp_path / "api.log") as api, recording_proxy(api.url) as proxy:
        proxy.to_lose.append("/scored_data")
        counts = asyncio.run(loop.run(proxy.url))
        assert (counts.repeated, loop.duplicates) == (1, 1)
        assert len(set(loop.trained)) == len(loop.trained) == 3


def test_a_batch_whose_answer_was_lost_is_a_step_too(tmp_path: Path) -> None:
    """The API counts it. `serve` has ended by that count, with groups for six batches: all steps are taken still."""
    size = BATCH_SIZE // GROUP_SIZE
    with trajectory_api(tmp_path / "api.log") as api, recording_proxy(api.url) as proxy, ThreadPoolExecutor(1) as pool:
        loop = Loop(tmp_path, steps=6, ahead=6, before={2: lambda: proxy.to_lose.extend(["/batch"] * 2)})
        # The held one opens the API; the next finds all groups there, and cuts them into six batches.
        proxy.to_hold.append("/batch")
        running = pool.submit(lambda: asyncio.run(loop.run(proxy.url)))
        until(lambda: api.queue_size() == 6 * size)
        proxy.release.set()
        counts = running.result(120)
        assert not proxy.to_lose
        handed = handed_out(proxy.exchanges)
        assert len(set(handed)) == len(handed) == 6 * size
        assert loop.lost_batches == 2
        assert loop.trained == handed[: 2 * size] + handed[4 * size :]
        assert counts.sent == len(handed) + api.left_over()
        assert not proxy.of("/reset_data")


def test_a_trainer_that_nobody_serves_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentic_opd.atropos.trainer._LONG_S", 0.5)
    loop = Loop(tmp_path, steps=1)

    async def run(url: str) -> None:
        training = asyncio.create_task(loop.train(url))
        await asyncio.to_thread(until, lambda: "waiting for a batch: none for 0.5 s" in caplog.text)
        await asyncio.gather(training, loop.serve(url))

    with trajectory_api(tmp_path / "api.log") as api:
        asyncio.run(run(api.url))
    assert caplog.text.count("waiting for a batch: none for 0.5 s") == 1
    assert "no longer waiting for a batch" in caplog.text


def test_many_groups_in_a_row_that_are_not_sent_are_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer's step does not change then, so that no other line would come."""
    loop = Loop(tmp_path, steps=9)

    async def run(url: str) -> None:
        serving = asyncio.create_task(loop.serve(url))
        await asyncio.to_thread(until, lambda: "the last 40 groups were all not sent" in caplog.text)
        serving.cancel()
        await asyncio.wait([serving])

    with trajectory_api(tmp_path / "api.log") as api:
        api.register_trainer(batch_size=BATCH_SIZE, num_steps=9, max_token_len=3)
        asyncio.run(run(api.url))
        assert api.received() == loop.counts.sent == 0
    assert caplog.text.count("groups were all not sent") == loop.counts.skipped["too_long"] // 20
    assert caplog.text.count("groups that the trainer can't take are not sent (too_long)") == 1


def test_another_run_of_the_trainer_is_told_to_the_environments(tmp_path: Path) -> None:
    """An API that has a queue takes no second registration in, and would tell them the earlier run's last step."""

    async def run(api: Trajectories) -> None:
        api.register_trainer(batch_size=BATCH_SIZE, num_steps=1, max_token_len=16384)
        async with member(api.url, "env") as env:
            await env.status()
            await env.send(await env.body(scripted_group(1)))
            for is_known, last_step, queued in ((True, 1, 1), (False, 80, 0)):
                client = trainer_client(api.url, 80, is_known=is_known)
                await client.register(0)
                assert api.ask("/batch") == {"batch": None}  # Opens the API to environments.
                await client.close()
                assert api.queue_size() == queued
                async with member(api.url, "new") as new:
                    assert (await new.ensure()).num_steps == last_step

    with trajectory_api(tmp_path / "api.log") as api:
        asyncio.run(run(api))


def test_what_is_finished_is_sent_and_the_place_given_back_when_a_request_is_cancelled(tmp_path: Path) -> None:
    """The cancelled request takes its connection along; the API behind the next one is asked who it is first."""
    loop = Loop(tmp_path, steps=50)

    async def run(url: str) -> None:
        serving = asyncio.create_task(loop.serve(url))
        await asyncio.to_thread(until, lambda: not proxy.to_hold)
        await asyncio.to_thread(until, lambda: (tmp_path / "groups.jsonl").read_bytes().count(b"\n") > 2)
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()

    with trajectory_api(tmp_path / "api.log") as api, recording_proxy(api.url) as proxy:
        api.register_trainer(batch_size=BATCH_SIZE, num_steps=50)
        proxy.to_hold.append("/scored_data")
        try:
            asyncio.run(run(proxy.url))
        finally:
            proxy.release.set()
        assert loop.counts.sent > 1
        assert (loop.counts.repeated, loop.counts.unsent) == (1, 0)
        assert api.received() == loop.counts.sent + 1
        gone = {one.request["env_id"] for one in proxy.of("/disconnect-env")}
        assert gone == {one.answer["env_id"] for one in proxy.of("/register-env") if one.answer["status"] == "success"}
