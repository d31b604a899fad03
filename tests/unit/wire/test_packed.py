"""Rows as text for the way through a trajectory API, and back."""

import base64
import json
from typing import Any

import pytest

from agentic_opd.core.errors import WireError
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.packed import packed, unpacked
from tests.support.groups import group, rollout


def test_what_arrives_is_what_was_sent() -> None:
    sent = group(rollout("a hint", None), rollout(None, "another")).to_wire()
    sent["distill_logprobs"][0][1] = [-0.1, -1e-7]
    on_the_way = json.loads(json.dumps(packed(sent)))
    assert "distill_token_ids" not in on_the_way
    assert "distill_logprobs" not in on_the_way
    assert unpacked(on_the_way, "g") == sent


def test_a_group_without_rows_has_nothing_to_pack() -> None:
    sent = {name: value for name, value in group().to_wire().items() if not name.startswith("distill_")}
    assert packed(sent) == sent
    assert unpacked(sent, "g") == sent


@pytest.mark.parametrize("value", [None, [], {"tokens": []}, {"group_overrides": None}])
def test_what_is_not_packed_is_left_to_the_reader(value: Any) -> None:
    assert unpacked(value, "g") is value


def text(*values: int) -> str:
    return base64.b64encode(b"".join(value.to_bytes(4, "little", signed=True) for value in values)).decode()


@pytest.mark.parametrize(
    "rows",
    [
        3,
        [{}],
        [{"lengths": "no base64", "token_ids": "", "logprobs": ""}],
        [{"lengths": text(2), "token_ids": text(1), "logprobs": ""}],
        [{"lengths": text(1, -1), "token_ids": "", "logprobs": ""}],
    ],
)
def test_rows_that_cannot_be_read_are_an_error_that_names_the_group(rows: object) -> None:
    line = packed(ScoredGroup(group().rollouts).to_wire())
    line["group_overrides"]["packed_rows"] = rows
    with pytest.raises(WireError, match="group 3: group_overrides: packed_rows can't be read"):
        unpacked(line, "group 3")
