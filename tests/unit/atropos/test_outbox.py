"""What an environment sends to a trajectory API: items that it can batch, each once, also when an answer is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentic_opd.atropos.api import EnvDescription, TrajectoryApi
from agentic_opd.atropos.outbox import Membership, Outbox, SentCounts, parts
from agentic_opd.core.errors import ConfigError
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from tests.unit.distill.fakes import Refused, Script, served


def rollout(session: str | None, sampled: int) -> ScoredRollout:
    ids = list(range(sampled))
    return ScoredRollout([7, *ids], [-100, *ids], [1.0, *[-0.5] * sampled], 0.5, session_id=session)


def items(group_size: int, *rollouts: ScoredRollout) -> list[tuple[str | None, list[int]]]:
    """(group id, sampled tokens of each sequence) of each item."""
    session = "s" if rollouts[0].session_id is None else None
    found = parts(ScoredGroup(rollouts, group_id="g", session_id=session), group_size)
    return [(one.group_id, [len(rollout.tokens_T) - 1 for rollout in one.rollouts]) for one in found]


def test_a_group_of_the_right_size_goes_as_it_is() -> None:
    assert items(1, rollout(None, 3)) == [("g", [3])]
    assert items(2, rollout("a", 3), rollout("b", 2)) == [("g", [3, 2])]


def test_further_branches_and_incomplete_groups_go_sequence_by_sequence() -> None:
    assert items(1, rollout(None, 2), rollout(None, 3)) == [("g/0", [3]), ("g/1", [2])]
    several = (rollout("a", 2), rollout("a", 5), rollout("b", 4))
    assert items(2, *several) == [("g/0", [5, 4]), ("g/1", [2])]
    assert items(4, *several) == [("g/0", [2]), ("g/1", [5]), ("g/2", [4])]


# ------------------------------------------------------------------------------------------------------------- sending


class FakeApi:
    """An API that numbers registrations and answers each group with the next entry of a script."""

    def __init__(self, *answers: Any, max_token_len: int = 64) -> None:
        self.registered = 0
        self.groups, self.left = Script(*answers), Script({})
        self.routes = {
            "/register-env": Script(self.register),
            "/info": Script({"batch_size": 4, "max_token_len": max_token_len}),
            "/scored_data": self.groups,
            "/disconnect-env": self.left,
        }

    def register(self, body: dict[str, Any]) -> dict[str, Any]:
        self.registered += 1
        name = f"{body['desired_name']}_{self.registered - 1}"
        return {"env_id": self.registered + 6, "wandb_name": name, "starting_step": 0, "num_steps": 9}

    def sent(self) -> list[tuple[str, int]]:
        """(group id, environment's id) of each group that came in."""
        return [(body["group_overrides"]["group_id"], body["env_id"]) for body in self.groups.bodies]


def sending(api: FakeApi, use: Callable[[Outbox], Awaitable[None]], group_size: int = 1) -> SentCounts:
    counts = SentCounts()

    async def run() -> None:
        async with served(api.routes) as url, asyncio.timeout(60):
            client = TrajectoryApi(url)
            member = Membership(client, EnvDescription("env", 64, 1.0, group_size, None))
            try:
                await member.ensure()
                await use(Outbox(member, counts))
            finally:
                await client.close()

    asyncio.run(run())
    return counts


def group(group_id: str, sampled: int = 3) -> ScoredGroup:
    return ScoredGroup((rollout(None, sampled),), group_id=group_id)


def test_a_lost_answer_repeats_its_group_under_a_new_registration() -> None:
    """The API may have the group already: the next one waits, and the repetition has the same id."""
    api = FakeApi({}, "hang up", {})

    async def use(outbox: Outbox) -> None:
        for name in "abc":
            outbox.add(group(name))
        await outbox.send()
        assert len(outbox) == 2, "sending stops at the lost answer"
        await outbox.send()
        assert len(api.groups.bodies) == 2, "and waits for a new registration"
        await outbox.send_all()

    counts = sending(api, use)
    assert api.sent() == [("a", 7), ("b", 7), ("b", 8), ("c", 8)]
    assert api.left.bodies == [{"env_id": 7}], "else the first registration would count in the weights"
    assert (counts.sent, counts.repeated) == (3, 1)


def test_what_the_trainer_can_not_take_is_counted_and_not_sent() -> None:
    api = FakeApi(Refused(), {}, max_token_len=6)

    async def use(outbox: Outbox) -> None:
        for name, sampled in (("refused", 3), ("long", 5), ("sent", 4)):
            outbox.add(group(name, sampled))
        await outbox.send_all()

    counts = sending(api, use)
    assert [name for name, _ in api.sent()] == ["refused", "sent"]
    assert str(counts) == "1 groups sent (0 twice), 1 skipped (refused), 1 skipped (too_long)"


def test_a_group_that_fits_no_batch_is_a_wrong_setting() -> None:
    async def use(outbox: Outbox) -> None:
        raise AssertionError("it is registered")

    with pytest.raises(ConfigError, match="a group of 5 rollouts does not fit the trainer's batches of 4"):
        sending(FakeApi({}), use, group_size=5)
