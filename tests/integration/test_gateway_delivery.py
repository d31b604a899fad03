"""Groups of a gateway's sessions reach the real trajectory API, whatever is killed on the way."""

from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from local_server import LocalServer, free_port

from agentic_opd.cli.validate import validate
from tests.support.environment import read_lines
from tests.support.gateway import Served, served
from tests.support.places import MODEL
from tests.support.trajectory import Trajectories, ids_of, trajectory_api
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

USER = {"role": "user", "content": "Say something."}
BATCH, KILLS = 4, 4


def flags(api_port: int, group_size: int) -> tuple[str, ...]:
    to = ("--env.rollout_server_url", f"http://127.0.0.1:{api_port}", "--env.group_size", str(group_size))
    return ("--env.opd_enabled", "false", *to)


def talk(gateway: Served, name: str, group: str | None, reward: float | None = None, n: int = 1) -> dict[str, Any]:
    headers = {"X-Session-Id": name, **({"X-Group-Id": group} if group else {})}
    gateway.client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=8, n=n, extra_headers=headers)
    return gateway.ask(f"/sessions/{name}/end", {} if reward is None else {"reward": reward})


def test_sessions_form_a_batch_of_the_trainers_size(vllm_server: LocalServer, tmp_path: Path) -> None:
    with (
        trajectory_api(tmp_path / "api.log") as api,
        served(vllm_server.base_url, tmp_path, *flags(api.port, 2)) as gateway,
    ):
        for number in range(2):
            talk(gateway, f"s{number}", "g", float(number))
        talk(gateway, "alone", None, n=2)
        api.register_trainer(batch_size=BATCH, num_steps=4)
        pair, *singles = api.batch()
    assert pair["scores"] == [0.0, 1.0]
    assert [one["session_id"] for one in pair["overrides"]] == ["s0", "s1"]
    assert [len(one["tokens"]) for one in singles] == [1, 1]
    assert [one["overrides"][0]["reward"] for one in singles] == [None, None]
    written = {group["group_overrides"]["group_id"]: group for group in read_lines(tmp_path / "groups.jsonl")}
    branches = next(group for group in written.values() if group["group_overrides"].get("session_id") == "alone")
    assert sorted(one["tokens"][0] for one in singles) == sorted(branches["tokens"])
    assert pair["tokens"] == written[ids_of([pair])[0]]["tokens"]


def test_what_the_trainer_can_not_take_is_counted(vllm_server: LocalServer, tmp_path: Path) -> None:
    with trajectory_api(tmp_path / "api.log") as api:
        api.register_trainer(batch_size=1, num_steps=4, max_token_len=5)
        with served(vllm_server.base_url, tmp_path, *flags(api.port, 1)) as gateway:
            talk(gateway, "long", None)
            until(lambda: gateway.metric('groups_skipped_total{reason="too_long"}') == 1)
            assert gateway.metric("groups_sent_total") == 0
        assert api.received() == 0


def test_every_group_reaches_an_api_whatever_is_killed(vllm_server: LocalServer, tmp_path: Path) -> None:
    """Gateway and API are killed in turn. Only what an API had taken, and the trainer not yet, may be gone with it."""
    random, port, api_port = Random(11), free_port(), free_port()
    ended: list[str] = []
    taken: list[str] = []
    lost = 0

    def take(api: Trajectories) -> int:
        before = len(taken)
        while (batch := api.ask("/batch")["batch"]) is not None:
            taken.extend(ids_of(batch))
        return len(taken) - before

    with ExitStack() as apis:

        def new_api(number: int) -> Trajectories:
            api = apis.enter_context(trajectory_api(tmp_path / f"api-{number}.log", api_port))
            api.register_trainer(batch_size=1, num_steps=1000)
            return api

        api, had = new_api(-1), 0
        for kill in range(KILLS):
            with served(vllm_server.base_url, tmp_path, *flags(api_port, 1), port=port) as gateway:
                for number in range(random.randint(1, 4)):
                    ended.append(f"s{kill}-{number}")
                    talk(gateway, ended[-1], None)
                if kill % 2:
                    gateway.process.kill()
                    gateway.process.wait()
                    continue
                until(lambda api=api: api.received() > 0)
                had += take(api)
                api.kill()
                lost += api.received() - had
                api, had = new_api(kill), 0
        with served(vllm_server.base_url, tmp_path, *flags(api_port, 1), port=port) as gateway:
            until(lambda: len(read_lines(tmp_path / "groups.jsonl")) == len(ended))
            until(lambda: gateway.metric("groups_to_send") == 0)
            take(api)
    groups = read_lines(tmp_path / "groups.jsonl")
    assert validate(tmp_path / "groups.jsonl").violations == 0
    assert sorted(group["group_overrides"]["session_id"] for group in groups) == sorted(ended)
    assert {*taken} <= {*ids_of(groups)}
    assert len(groups) - len({*taken}) <= lost
    print(f"{len(groups)} groups, {len(taken)} taken, {len({*taken})} different, at most {lost} lost with an API")
