"""The trainer's client against an API that follows a script: what is read of its answers, and what is an error."""

import asyncio
from typing import Any

import pytest

from agentic_opd.atropos.api import TrainerDescription
from agentic_opd.atropos.trainer import TrainerClient
from agentic_opd.core.errors import ServerMismatchError, WireError
from agentic_opd.core.text import json_line
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.packed import packed
from agentic_opd.wire.receipts import GroupReceipt, line_sha256
from tests.unit.distill.fakes import Script, served

STATUS, INFO = {"current_step": 0, "queue_size": 0}, {"batch_size": 2, "max_token_len": 64}


def made(group_id: str | None = None, version: int | None = None, **changes: Any) -> dict[str, Any]:
    """A group of two sequences as the API hands it out: what nobody sent is null."""
    about = {"group_id": group_id, "weight_version": version}
    return {
        "tokens": [[1, 2, 3]] * 2,
        "masks": [[-100, -100, 3]] * 2,
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, 1.0, -0.5]] * 2,
        "group_overrides": {name: value for name, value in about.items() if value is not None} or None,
        **dict.fromkeys(("messages", "overrides", "distill_token_ids", "distill_logprobs", "images")),
        **changes,
    }


def batches(*answers: Any, count: int = 1, **routes: Any) -> tuple[list[list[ScoredGroup]], TrainerClient]:
    """The trainer's first `count` batches, from an API that answers /batch so."""
    script = {
        "/batch": Script(*answers),
        "/status": Script(routes.get("status", STATUS)),
        "/info": Script(routes.get("info", INFO)),
        "/register": Script({"uuid": 1}),
    }

    async def run() -> tuple[list[list[ScoredGroup]], TrainerClient]:
        async with served(script) as url, asyncio.timeout(60):
            client = TrainerClient(url, TrainerDescription("g", "p", 2, 64, "", 1, 0, 9))
            client.resume(9, {})
            try:
                await client.register(0)
                return [await client.batch(0) for _ in range(count)], client
            finally:
                await client.close()

    return asyncio.run(run())


def test_a_batch_is_read_and_a_group_that_comes_twice_is_handed_out_once() -> None:
    first = {"batch": [made("a", version=3), made(None), made("a")]}
    (one, two), client = batches({"batch": None}, first, {"batch": [made("a"), made("b")]}, count=2)
    assert [group.group_id for group in one] == ["a", None]
    assert [group.group_id for group in two] == ["b"]
    assert (client.duplicates, client.lost_batches) == (2, 0)
    assert (one[0].weight_version, one[0].scores, one[0].rollouts[0].rows) == (3, [0.0, 1.0], None)


def test_the_receipt_of_a_group_names_the_line_that_was_sent() -> None:
    """The API adds null for each field that nobody sent, and the number of its environment."""
    written = ScoredGroup.from_wire({**made("a", version=3), "overrides": [{}, {}], "mine": 1}).to_wire()
    (((group,),), _) = batches({"batch": [{**made("a", version=3), "mine": 1, "env_id": 0}]})
    assert GroupReceipt.of(group).sha256 == line_sha256(json_line({k: v for k, v in written.items() if v is not None}))


def test_rows_that_were_sent_as_text_arrive_as_rows() -> None:
    rows = {"distill_token_ids": [[[], [], [3, 4]]] * 2, "distill_logprobs": [[[], [], [-0.5, -1.25]]] * 2}
    sent = packed({**made("a"), **rows})
    (((one,),), _) = batches({"batch": [made(**{"group_overrides": sent["group_overrides"]})]})
    assert one.to_wire()["distill_logprobs"] == rows["distill_logprobs"]
    assert one.group_id == "a"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (made(masks=[[3]] * 2), "group 1 of the batch for step 1, sequence 0: rollout: lengths differ"),
        (made(tokens=[["a"] * 3] * 2), "group 1 of the batch for step 1, sequence 0: tokens: expected token ids"),
        (made(inference_logprobs=None), "group 1 of the batch for step 1: inference_logprobs: None, expected a list"),
        (made(overrides=[{"opd": {"turns": [{}]}}] * 2), "sequence 0, turn 0: record: span, outcome, "),
        (7, "group 1 of the batch for step 1: 7, expected an object"),
    ],
)
def test_a_group_that_can_not_be_read_is_named_and_not_dropped(bad: Any, said: str) -> None:
    with pytest.raises(WireError, match=said):
        batches({"batch": [made("a"), bad]})


@pytest.mark.parametrize("answer", [[], "3", {"groups": []}, {"batch": 3}, {"batch": {}}])
def test_a_batch_of_another_form_is_a_typed_error(answer: Any) -> None:
    with pytest.raises(ServerMismatchError, match="is not a trajectory API of this version"):
        batches(answer)


@pytest.mark.parametrize("routes", [{"status": {}}, {"status": []}, {"info": {"batch_size": "x"}}, {"info": None}])
def test_what_answers_otherwise_is_not_a_trajectory_api(routes: dict[str, Any]) -> None:
    with pytest.raises(ServerMismatchError, match="is not a trajectory API of this version"):
        batches({"batch": None}, **routes)


def test_an_api_that_was_restarted_is_told_of_the_trainer_again(caplog: pytest.LogCaptureFixture) -> None:
    unknown = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
    ((one,), client) = batches(unknown, {"batch": [made("a")]})
    assert [group.group_id for group in one] == ["a"]
    assert "knows no trainer" in caplog.text
    assert client.lost_batches == 0
