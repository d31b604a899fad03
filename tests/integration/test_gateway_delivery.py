"""Groups of a gateway's sessions reach the real trajectory API, whatever is killed on the way."""

from pathlib import Path
from typing import Any

from agentic_opd.wire.group import ScoredGroup
from agentic_opd.wire.receipts import GroupReceipt, line_sha256
from tests.support.environment import read_lines
from tests.support.fake_plugin import FakePlugin
from tests.support.gateway import Served, served
from tests.support.places import MODEL
from tests.support.trajectory import ids_of, trajectory_api
from tests.support.waiting import until

USER = {"role": "user", "content": "Say something."}
BATCH = 4


def flags(api_port: int, group_size: int) -> tuple[str, ...]:
    to = ("--env.rollout_server_url", f"http://127.0.0.1:{api_port}", "--env.group_size", str(group_size))
    return ("--env.opd_enabled", "false", *to)


def talk(gateway: Served, name: str, group: str | None, reward: float | None = None, n: int = 1) -> dict[str, Any]:
    headers = {"X-Session-Id": name, **({"X-Group-Id": group} if group else {})}
    gateway.client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=8, n=n, extra_headers=headers)
    return gateway.ask(f"/sessions/{name}/end", {} if reward is None else {"reward": reward})


def test_sessions_form_a_batch_of_the_trainers_size(fake_server: FakePlugin, tmp_path: Path) -> None:
    with (
        trajectory_api(tmp_path / "api.log") as api,
        served(fake_server.base_url, tmp_path, *flags(api.port, 2)) as gateway,
    ):
        for number in range(2):
            talk(gateway, f"s{number}", "g", float(number))
        talk(gateway, "alone", None, n=2)
        api.register_trainer(batch_size=BATCH, num_steps=4)
        batch = api.batch()
    # Of two groups that are made at the same time, either may be sent first.
    (pair,) = [one for one in batch if len(one["tokens"]) == 2]
    singles = [one for one in batch if one is not pair]
    assert pair["scores"] == [0.0, 1.0]
    assert [one["session_id"] for one in pair["overrides"]] == ["s0", "s1"]
    assert [len(one["tokens"]) for one in singles] == [1, 1]
    assert [one["overrides"][0]["reward"] for one in singles] == [None, None]
    written = {group["group_overrides"]["group_id"]: group for group in read_lines(tmp_path / "groups.jsonl")}
    branches = next(group for group in written.values() if group["group_overrides"].get("session_id") == "alone")
    assert sorted(one["tokens"][0] for one in singles) == sorted(branches["tokens"])
    assert pair["tokens"] == written[ids_of([pair])[0]]["tokens"]
    sent = ScoredGroup.from_wire(
        {name: value for name, value in pair.items() if value is not None and name != "env_id"}
    )
    lines = (tmp_path / "groups.jsonl").read_bytes().splitlines()
    assert GroupReceipt.of(sent).sha256 in map(line_sha256, lines), "the receipt of a group names its line"


def test_what_the_trainer_can_not_take_is_counted(fake_server: FakePlugin, tmp_path: Path) -> None:
    with trajectory_api(tmp_path / "api.log") as api:
        api.register_trainer(batch_size=1, num_steps=4, max_token_len=5)
        with served(fake_server.base_url, tmp_path, *flags(api.port, 1)) as gateway:
            talk(gateway, "long", None)
            until(lambda: gateway.metric('groups_skipped_total{reason="too_long"}') == 1)
            assert gateway.metric("groups_sent_total") == 0
        assert api.received() == 0
