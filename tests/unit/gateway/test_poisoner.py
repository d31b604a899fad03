"""A client who means harm: what it claims, floods and rates reaches nobody else, and its limits are clear errors.

What its own groups do to its own adapter is in tests/integration/test_poisoner.py.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.gateway.config import LearnersConfig
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.gateway import MOST_FEEDBACK
from agentic_opd.gateway.keys import digest_of_key
from agentic_opd.gateway.turns import Feedback

from .fakes import MORE, USER, Running, ScriptedVllm, gateway_before
from .test_learners import in_loop, lines, talk

ANN, EVE = "ann-secret", "eve-secret"
NAMED = {"X-Learner": "ann"}
PRAISE = {"reward": 1, "text": "Perfect!"}
FLOOD = 10_000
MOST_OPEN = 8
"""Two for each of two keys, and four for whoever comes first."""


async def asked(running: Running, method: str, path: str, key: str, body: Any = None) -> tuple[int, str | None]:
    """Status and error code of a request that claims to be Ann's learner."""
    headers = {"Authorization": f"Bearer {key}", **NAMED}
    response = await running.http.request(method, f"{running.url}{path}", json=body, headers=headers)
    return response.status_code, response.json().get("error", {}).get("code")


@pytest.mark.slow
@in_loop
async def test_a_poisoner_moves_nobody_else_and_hits_limits(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []

    async def forget(client: Any, name: str) -> None:
        forgotten.append(name)

    monkeypatch.setattr("agentic_opd.plugin.client.PluginClient.forget_learner", forget)
    settings = {"learners": LearnersConfig(by="header"), "api_keys": (ANN, EVE), "max_open_sessions": MOST_OPEN}
    async with gateway_before(ScriptedVllm(tokenizer, max_adapters=2), tmp_path, **settings) as running:
        await talk(running, "ended", ANN, **NAMED)
        first = (await running.chat(USER, key=ANN, headers={"X-Session-Id": "open", **NAMED})).json()
        await running.gateway.drained()
        learners = tmp_path / "learners"
        (ann,) = learners.iterdir()
        before = (ann / "groups.jsonl").read_bytes()

        # It claims to be Ann, with a key of its own and with none of the gateway's.
        for method, path, body in (
            ("POST", "/sessions/open/end", {"reward": -1}),
            ("POST", f"/turns/{first['id']}/feedback", {"reward": -1}),
            ("POST", f"/sessions/open/turns/{first['id']}/feedback", {"reward": -1}),
            *(("GET", "/sessions/open", None), ("DELETE", "/sessions/ended", None)),
        ):
            assert (await asked(running, method, path, EVE, body))[0] == 404, path
            assert await asked(running, method, path, "guessed", body) == (401, "invalid_api_key"), path
        assert (await asked(running, "DELETE", "/learner", EVE))[0] == 200, "that of its own key, which has nothing"
        assert forgotten != [ann.name]

        # It floods one of its turns with feedback; Ann goes on meanwhile.
        reply = (await running.chat(USER, key=EVE, headers={"X-Session-Id": "praised", **NAMED})).json()
        path, owner = f"/turns/{reply['id']}/feedback", f"{digest_of_key(EVE)}/{NAMED['X-Learner']}"

        async def flood() -> list[tuple[int, str | None]]:
            """Some through HTTP, which would take a minute for all."""
            answers = [await asked(running, "POST", path, EVE, PRAISE) for _ in range(2 * MOST_FEEDBACK)]
            for _ in range(FLOOD - len(answers)):
                try:
                    await running.gateway.give_feedback(owner, "praised", reply["id"], Feedback(1.0, None))
                except ClientError as error:
                    answers.append((error.status, error.code))
            return answers

        messages = (USER, first["choices"][0]["message"], MORE)
        answers, _ = await asyncio.gather(
            flood(), running.say(*messages, key=ANN, headers={"X-Session-Id": "open", **NAMED})
        )
        assert answers == [(200, None)] * MOST_FEEDBACK + [(429, "too_much_feedback")] * (FLOOD - MOST_FEEDBACK)

        # It opens sessions until there are no more, and asks for too much; Ann still opens one.
        opened = [
            (await running.chat(USER, key=EVE, headers={"X-Session-Id": f"flood-{number}", **NAMED})).status_code
            for number in range(MOST_OPEN)
        ]
        assert opened[-1] == 429
        await running.say(USER, key=ANN, headers={"X-Session-Id": "another", **NAMED})
        assert (await running.chat(USER, key=EVE, headers=NAMED, n=1000)).status_code == 400
        huge = {"role": "user", "content": "x" * 2 * running.gateway.config.max_body_bytes}
        assert (await running.chat(huge, key=EVE, headers=NAMED)).status_code == 413

        await asked(running, "POST", "/sessions/praised/end", EVE)
        await running.gateway.drained()
        assert (ann / "groups.jsonl").read_bytes() == before
        (eve,) = (folder for folder in learners.iterdir() if folder != ann)
        (group,) = lines(running, eve.name)
        assert group["group_overrides"]["session_id"] == "praised"
        assert (await asked(running, "GET", "/sessions/open", ANN))[0] == 200
