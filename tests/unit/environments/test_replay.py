"""The world `replay`: which turns of a journal are tasks, and what the judge reads of a new turn."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentic_opd.core.errors import ConfigError, ServerMismatchError
from agentic_opd.distill.config import DistillConfig
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.custom import HookedWorld
from agentic_opd_environments.replay import GRADE_PROMPT, Replay
from tests.unit.distill.fakes import served
from tests.unit.gateway.fakes import AGAIN, MORE, TOOL, USER, Running, ScriptedVllm, gateway_before
from tests.unit.gateway.foreign import chat_answer, recording_gateway, says

JUDGE = {"judge": {"base_url": "http://127.0.0.1:1/v1", "model_name": "j"}}


@pytest.fixture
def journal(tokenizer: Any, tmp_path: Path) -> Path:
    """A session of two turns, the first of which is complained about, one without a reply, and one with a thumb."""

    async def talk() -> None:
        async with gateway_before(ScriptedVllm(tokenizer), tmp_path) as at:
            history = [USER, await at.say(USER, headers={"X-Session-Id": "long"}, tools=[TOOL]), MORE]
            await at.say(*history, headers={"X-Session-Id": "long"}, tools=[TOOL])
            await at.say(AGAIN, headers={"X-Session-Id": "short"})
            await rated(at)
            for name in ("long", "short", "rated"):
                await at.end(name)
            await at.gateway.drained()

    asyncio.run(talk())
    return tmp_path / "journal.sqlite"


async def rated(at: Running) -> None:
    answer = (await at.chat(AGAIN, headers={"X-Session-Id": "rated"})).json()
    body = {"text": "That is wrong.", "reward": -1}
    given = await at.http.post(f"{at.url}/turns/{answer['id']}/feedback", json=body)
    assert given.status_code == 200, given.text


def config(**changes: Any) -> DistillConfig:
    return DistillConfig.model_validate({**JUDGE, **changes})


def test_the_turns_that_were_replied_to_are_the_tasks(journal: Path) -> None:
    world = Replay(config(), str(journal))
    first, second = world.eval_tasks()
    assert [message["content"] for message in first.messages] == ["Write f."]
    assert [tool["function"]["name"] for tool in first.tools or ()] == ["run"]
    assert first.data.earlier == "Said 0."
    assert [one.text for one in first.data.reply] == ["It fails."]
    assert (list(second.messages), second.tools) == ([AGAIN], [])
    assert [one.text for one in second.data.reply] == ["That is wrong.\n(The answer was rated -1.)"]
    assert first.limits == {"max_turns": 1}
    assert [task.task_id for task in Replay(config(), str(journal), turns=1).tasks()] == [first.task_id]


def test_recorded_turns_of_a_foreign_model_are_tasks_too(tmp_path: Path) -> None:
    async def talk() -> None:
        answers = says(chat_answer("Said 1."), chat_answer("Said 2."))
        async with recording_gateway(answers, tmp_path) as gateway:
            await gateway.post("/sessions/long/v1/chat/completions", {"messages": [USER], "tools": [TOOL]})
            await gateway.recorded(1)
            history = [USER, {"role": "assistant", "content": "Said 1."}, MORE]
            await gateway.post("/sessions/long/v1/chat/completions", {"messages": history, "tools": [TOOL]})
            await gateway.post("/sessions/long/end", {})

    asyncio.run(talk())
    (task,) = Replay(config(), str(tmp_path / "journal.sqlite")).eval_tasks()
    assert [message["content"] for message in task.messages] == ["Write f."]
    assert [tool["function"]["name"] for tool in task.tools or ()] == ["run"]
    assert (task.data.earlier, [evidence.text for evidence in task.data.reply]) == ("Said 1.", ["It fails."])


CONVERSATION = {
    "messages": [
        USER,
        {"role": "assistant", "content": "Said 1."},
        MORE,
        {"role": "assistant", "content": "Said 2.", "weight": 0},
        MORE,
        {"role": "assistant", "content": "Said 3."},
    ],
    "tools": [TOOL],
    "group_overrides": {"item_id": "mine"},
}


def test_turns_of_a_file_of_conversations_are_tasks_too(tmp_path: Path) -> None:
    path = tmp_path / "logs.jsonl"
    path.write_text(json.dumps(CONVERSATION) + "\n")
    (task,) = Replay(config(), str(path)).eval_tasks()
    assert task.task_id == "mine/1"
    assert [message["content"] for message in task.messages] == ["Write f."]
    assert [tool["function"]["name"] for tool in task.tools or ()] == ["run"]
    assert (task.data.earlier, [evidence.text for evidence in task.data.reply]) == ("Said 1.", ["It fails."])


def test_groups_are_no_conversations(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps({"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [0.0]}) + "\n")
    with pytest.raises(ConfigError, match="reads conversations"):
        Replay(config(), str(path)).eval_tasks()


def graded(journal: Path, *rounds: list[str]) -> tuple[tuple[float, str], list[dict[str, Any]]]:
    """Return the grade of a new turn, and the requests of a judge whose answers are `rounds`, then the last of them."""
    asked: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.Response:
        texts = rounds[min(len(asked), len(rounds) - 1)]
        asked.append(json.loads(await request.text()))
        choices = [
            {"index": n, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for n, text in enumerate(texts)
        ]
        return web.json_response({"id": "1", "object": "chat.completion", "created": 0, "choices": choices})

    async def grade() -> tuple[float, str]:
        async with served({"/v1/chat/completions": chat}) as url:
            world = Replay(config(judge={"base_url": f"{url}/v1", "model_name": "j"}, prm_votes=4), str(journal))
            (task, _) = world.eval_tasks()
            new = {"role": "assistant", "content": "def f(): pass  # \\boxed{1}"}
            return await world.verify(task, None, [*task.messages, new])

    return asyncio.run(grade()), asked


NO_VOTES = ["I can't say."] * 4


def test_a_new_turn_is_graded_by_what_came_after_the_earlier_one(journal: Path) -> None:
    (score, text), asked = graded(journal, ["\\boxed{1}", "\\boxed{-1}", "\\boxed{1}", "I can't say."])
    assert (score, text) == (pytest.approx(2 / 3), "The judge's votes: [1, -1, 1]")
    system, question = (message["content"] for message in asked[0]["messages"])
    assert system == GRADE_PROMPT
    assert question.index("Said 0.") < question.index("It fails.") < question.index("def f(): pass")
    assert "\\boxed" not in question


def test_a_judge_without_a_vote_is_asked_again_and_is_never_an_undecided_one(journal: Path) -> None:
    (score, _), asked = graded(journal, NO_VOTES, ["\\boxed{-1}", *NO_VOTES[1:]])
    assert (score, len(asked)) == (0, 2)
    with pytest.raises(ServerMismatchError, match=r"the judge j gave no .* in 12 answers: set another judge"):
        graded(journal, NO_VOTES)


def test_what_is_missing_is_named(journal: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.judge.base_url and env.judge.model_name"):
        Replay(DistillConfig(), str(journal))
    with pytest.raises(ConfigError, match=r"there is no journal"):
        Replay(config(), str(tmp_path / "none.sqlite"))


def test_its_name_is_replay(journal: Path) -> None:
    options = {"world": {"type": "replay", "journal": str(journal)}}
    settings = AgenticOPDEnvConfig.model_validate({**JUDGE, **options})
    world = make_world(settings)
    assert isinstance(world, HookedWorld)
    assert not world.has_sandbox
    assert isinstance(world.hooks, Replay)
