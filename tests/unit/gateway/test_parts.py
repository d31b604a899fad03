"""Open sessions that are judged every few turns: their parts, and what is left at their end."""

import asyncio
import json
import re
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentic_opd.core.errors import OutputError, ServerRequestError, ServerUnreachableError
from agentic_opd.core.types import JudgeTokens, Message
from agentic_opd.distill.config import JudgeConfig, TeacherConfig
from agentic_opd.distill.distiller import Distiller
from agentic_opd.distill.hints import JudgedBy, Questions
from agentic_opd.distill.insertion import HintEncoder
from agentic_opd.distill.judge import JudgeReply
from agentic_opd.distill.servers import DistillServers
from agentic_opd.gateway import groups
from agentic_opd.gateway.config import GatewayConfig, LearnersConfig
from agentic_opd.gateway.journal import Journal, SessionState
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.wire.learners import learner_names
from tests.unit.distill.fakes import HINT, TableTeacher

from .fakes import USER, Running, ScriptedVllm, gateway_before, until
from .test_gateway import checked

NONE_AT_FAULT = "\\boxed{-1}"
WHOLE = JudgeConfig(scope="trajectory")
EVERY_TWO = {"judge": WHOLE, "judge_every_turns": 2, "prm_votes": 1}


class FirstTurnJudge:
    """Names the first numbered turn of each question."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        question = messages[-1]["content"]
        self.questions.append(question)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        first = next(label for label in turns_of(question) if label.isdecimal())
        return JudgeReply(
            (f"\\boxed{{{first}}}[HINT_START]{HINT}[HINT_END]",) * num_votes, 0.25, tokens=JudgeTokens(100, 10)
        )

    async def close(self) -> None:
        pass


def turns_of(question: str) -> list[str]:
    """Return the labels of the turns that a question shows in full."""
    return re.findall(r"^## Turn (C?\d+) \[", question, re.MULTILINE)


class PartsDistiller(Distiller):
    """Has one judge and one teacher for all policy servers."""

    def __init__(self, config: GatewayConfig, judge: FirstTurnJudge, tokenizer: Any) -> None:
        super().__init__(config, max_token_length=1024, retry_s=0.1)
        client: Any = judge
        teacher: Any = TableTeacher()
        encoder = HintEncoder(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer)
        self.all_servers = DistillServers(
            policy_url="http://policy/v1",
            judge=JudgedBy(client, Questions(b"secret"), is_policy=True),
            teacher=teacher,
            hint_encoder=encoder,
            teacher_is_policy=True,
        )

    def servers_of(self, policy_url: str) -> DistillServers:
        return self.all_servers


class Talk:
    """A client of one session, whose user says a number each time."""

    def __init__(self, running: Running, name: str = "s") -> None:
        self.running, self.name = running, name
        self.messages: list[Any] = [USER]
        self.said = 0

    async def say(self, count: int = 1) -> None:
        for _ in range(count):
            if self.said:
                self.messages.append({"role": "user", "content": f"Number {self.said}."})
            self.messages.append(await self.running.say(*self.messages, session_id=self.name))
            self.said += 1

    async def rate(self, turn: int, **feedback: Any) -> Any:
        url = f"{self.running.url}/sessions/{self.name}/turns/{turn}/feedback"
        return await self.running.http.post(url, json=feedback)


def says(prompt: str, choice: int) -> str:
    return f"Turn {prompt.count('assistant')}."


@asynccontextmanager
async def parted(tokenizer: Any, folder: Path, client: FirstTurnJudge, **settings: Any) -> AsyncGenerator[Running]:
    settings = {**EVERY_TWO, "distill_topk": 5, **settings}
    config = GatewayConfig(data_path_to_save_groups=folder / "groups.jsonl", **settings)
    distiller = PartsDistiller(config, client, tokenizer)
    async with gateway_before(ScriptedVllm(tokenizer, says), folder, distiller, **settings) as running:
        yield running


def windows_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    return [window for entry in group["overrides"] for window in entry["opd"].get("trajectory", {}).get("windows", ())]


def test_turns_of_an_open_session_become_groups_and_none_is_judged_or_scored_twice(
    tokenizer: Any, tmp_path: Path
) -> None:
    judge = FirstTurnJudge()

    async def talk() -> Any:
        async with parted(tokenizer, tmp_path, judge) as running:
            client = Talk(running)
            await client.say(2)
            assert await running.groups() == [], "the second turn has no next state yet"
            await client.say()
            in_time = await running.groups()
            assert (await running.http.get(f"{running.url}/sessions/s")).json()["state"] == "open"
            await client.say(3)
            await running.groups()
            await running.end("s", reward=0.5)
            return in_time, await running.groups(), await running.metric('parts_total{state="written"}')

    in_time, written, num_parts = asyncio.run(talk())
    assert (len(in_time), num_parts) == (1, 2)
    first, second, rest = checked(written)
    assert first == in_time[0]
    later = ["C1", "C2", "1", "2"]
    assert [turns_of(question) for question in judge.questions] == [
        ["1", "2"],
        later,
        ["C1", "C2", "C3", "C4", "1", "2"],
    ]
    spans = [[turn["span"] for turn in group["overrides"][0]["opd"]["turns"]] for group in written]
    assert [len(of_group) for of_group in spans] == [2, 2, 2]
    all_spans = [tuple(span) for of_group in spans for span in of_group]
    assert len({*all_spans}) == 6, "each turn is in one group"
    outcomes = [[turn["outcome"] for turn in group["overrides"][0]["opd"]["turns"]] for group in written]
    assert outcomes == [["scored", "vote_failed"], ["scored", "vote_failed"], ["scored", "no_next_state"]]
    longest = rest["tokens"][0]
    assert all(longest[: len(group["tokens"][0])] == group["tokens"][0] for group in written)
    assert [group["overrides"][0]["stop_reason"] for group in written] == ["open", "open", "closed"]
    assert [group["overrides"][0]["reward"] for group in written] == [None, None, {"client": 0.5}]
    assert {group["group_overrides"]["session_id"] for group in written} == {"s"}
    assert len({group["group_overrides"]["item_id"] for group in written}) == 3
    for group, question in zip(written, judge.questions, strict=True):
        (window,) = windows_of(group)
        assert (window["question"], window["judge_tokens"]) == (question, {"read": 100, "sampled": 10})
    assert "Number 2." in judge.questions[0], "what the user said last is evidence about the part's last turn"
    assert [context["why"] for context in second["overrides"][0]["opd"]["context_turns"]] == ["shared", "shared"]


def test_a_gateway_that_starts_again_asks_nothing_twice_and_learns_from_no_turn_twice(
    tokenizer: Any, tmp_path: Path
) -> None:
    judge = FirstTurnJudge()

    async def first_run() -> None:
        async with parted(tokenizer, tmp_path, judge) as running:
            client = Talk(running)
            await client.say(3)
            assert len(await running.groups()) == 1
            judge.gate.clear()
            await client.say(2)

            async def is_asked() -> bool:
                return len(judge.questions) == 2

            await until(is_asked)  # It is killed while the judge reads the second part.

    async def second_run() -> Any:
        judge.gate = asyncio.Event()
        judge.gate.set()
        async with parted(tokenizer, tmp_path, judge) as running:
            resumed = await running.groups()
            await running.end("s")
            return resumed, await running.groups()

    asyncio.run(first_run())
    resumed, written = asyncio.run(second_run())
    assert len(resumed) == 2
    checked(written)
    asked = [turns_of(question) for question in judge.questions]
    assert asked == [["1", "2"], ["C1", "C2", "1", "2"], ["C1", "C2", "1", "2"]], "what was not kept is asked again"
    assert [len(group["overrides"][0]["opd"]["turns"]) for group in written] == [2, 2, 1]
    assert [len(windows_of(group)) for group in written] == [1, 1, 0], "the last turn has no next state"

    async def third_run() -> Any:
        async with parted(tokenizer, tmp_path, judge) as running:
            return await running.groups()

    with sqlite3.connect(tmp_path / "journal.sqlite") as db:  # Killed when the groups were written, and not noted yet.
        db.execute("UPDATE sessions SET state = 'closed'")
        db.execute("UPDATE parts SET state = 'closed'")
    assert asyncio.run(third_run()) == written
    assert len(judge.questions) == 3


def test_a_part_is_finished_after_its_session_has_ended(tokenizer: Any, tmp_path: Path) -> None:
    judge = FirstTurnJudge()

    async def first_run() -> None:
        async with parted(tokenizer, tmp_path, judge) as running:
            judge.gate.clear()
            await Talk(running).say(3)
            await running.end("s")
            await until(lambda: running.becomes('sessions_total{state="written"}', 1))

    async def second_run() -> Any:
        judge.gate = asyncio.Event()
        judge.gate.set()
        async with parted(tokenizer, tmp_path, judge) as running:
            return await running.groups()

    asyncio.run(first_run())
    rest, part = asyncio.run(second_run())
    assert [len(group["overrides"][0]["opd"]["turns"]) for group in (rest, part)] == [1, 2]


def test_feedback_reaches_a_turn_until_it_is_in_a_group(tokenizer: Any, tmp_path: Path) -> None:
    judge = FirstTurnJudge()

    async def talk() -> Any:
        async with parted(tokenizer, tmp_path, judge) as running:
            client = Talk(running)
            await client.say(2)
            assert (await client.rate(2, text="Too short.", reward=0.0)).status_code == 200
            await client.say()
            part = await running.groups()
            refused = [await client.rate(turn, reward=1.0) for turn in (1, 2)]
            assert (await client.rate(3, reward=1.0)).status_code == 200
            await running.end("s")
            refused.append(await client.rate(1, reward=1.0))
            return part, refused, await running.groups()

    (part,), refused, written = asyncio.run(talk())
    assert "Too short." in judge.questions[0]
    assert part["overrides"][0]["reward"] == {"client": 0.0}
    assert [(response.status_code, response.json()["error"]["code"]) for response in refused] == [
        (409, "group_made")
    ] * 3
    assert written[1]["overrides"][0]["reward"] == {"client": 1.0}


def test_only_parts_that_failed_are_judged(tokenizer: Any, tmp_path: Path) -> None:
    judge = FirstTurnJudge()
    failed_only = JudgeConfig(scope="trajectory", when="failed")

    async def talk() -> Any:
        async with parted(tokenizer, tmp_path, judge, judge=failed_only) as running:
            client = Talk(running)
            await client.say(2)
            await client.rate(2, reward=1.0)
            await client.say(2)
            await running.groups()
            await client.rate(4, reward=-1.0)
            await client.say()
            await running.groups()
            await running.end("s")
            return await running.groups()

    praised, blamed, _ = checked(asyncio.run(talk()))
    assert {turn["outcome"] for turn in praised["overrides"][0]["opd"]["turns"]} == {"not_judged"}
    assert [turn["outcome"] for turn in blamed["overrides"][0]["opd"]["turns"]] == ["scored", "vote_failed"]
    assert len(judge.questions) == 1


def test_a_part_waits_for_a_server_that_is_gone(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "RETRY_S", 0.01)
    judge = FirstTurnJudge()
    judge.error = ServerUnreachableError("gone")

    async def talk() -> Any:
        async with parted(tokenizer, tmp_path, judge) as running:
            await Talk(running).say(3)

            async def is_retried() -> bool:
                return len(judge.questions) > 1

            await until(is_retried)
            judge.error = None
            return await running.groups()

    (part,) = asyncio.run(talk())
    assert part["overrides"][0]["opd"]["turns"][0]["outcome"] == "scored"


def test_a_part_that_fails_is_counted_and_its_session_goes_on(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object) -> None:
        raise ServerRequestError("HTTP 400: no", 400)

    async def talk() -> Any:
        async with parted(tokenizer, tmp_path, FirstTurnJudge()) as running:
            client = Talk(running)
            with monkeypatch.context() as patch:
                patch.setattr(Distiller, "close_group", refuse)
                await client.say(3)
                await until(lambda: running.becomes('parts_total{state="failed"}', 1))
            await client.say(2)
            return await running.groups()

    (part,) = asyncio.run(talk())
    assert len(part["overrides"][0]["opd"]["turns"]) == 2
    assert "no group is made of session-" in caplog.text
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        states = db.execute("SELECT state, error FROM parts ORDER BY rowid").fetchall()
    assert states == [("failed", "ServerRequestError: HTTP 400: no"), ("written", None)]


def test_turns_stay_in_their_session_while_the_journal_takes_no_part(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = FirstTurnJudge()

    def refuse(*_: object) -> None:
        raise OutputError("the disk is full")

    async def talk() -> Any:
        async with parted(tokenizer, tmp_path, judge) as running:
            client = Talk(running)
            with monkeypatch.context() as patch:
                patch.setattr(Journal, "add_part", refuse)
                await client.say(3)
                assert await running.groups() == []
            await client.say()
            return await running.groups()

    (part,) = asyncio.run(talk())
    assert len(part["overrides"][0]["opd"]["turns"]) == 3


def test_deleting_a_session_deletes_its_parts(tokenizer: Any, tmp_path: Path) -> None:
    judge = FirstTurnJudge()

    async def talk() -> None:
        async with parted(tokenizer, tmp_path, judge) as running:
            await Talk(running).say(3)
            assert len(await running.groups()) == 1

    asyncio.run(talk())
    journal = Journal(tmp_path / "journal.sqlite")
    try:
        (group_id,) = journal.unsent_groups()
        assert group_id == json.loads((tmp_path / "groups.jsonl").read_text())["group_overrides"]["group_id"]
        (session,) = (row for row in journal.sessions(SessionState.OPEN))
        journal.delete(session.session_id)
        assert (journal.unsent_groups(), journal.grouped_turns(session.session_id)) == ([], set())
    finally:
        journal.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"judge_every_turns": 2}, "with scope turn, each turn of an open session is judged as soon as"),
        ({"judge_every_turns": 2, "judge": WHOLE, "group_size": 2}, "group_size compares whole sessions"),
        ({"judge_every_turns": -1, "judge": WHOLE}, "greater than or equal to 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        GatewayConfig(**settings)


def test_a_session_is_not_deleted_while_a_part_of_it_is_begun(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the part's group is written after the deletion, and the learner is trained on it."""

    async def forget(client: Any, name: str) -> None:
        pass

    monkeypatch.setattr("agentic_opd.plugin.client.PluginClient.forget_learner", forget)
    of_key = {"learners": LearnersConfig(by="key"), "teacher": TeacherConfig(weights="frozen")}

    async def talk() -> None:
        has_begun, may_go_on = asyncio.Event(), asyncio.Event()
        async with parted(tokenizer, tmp_path, FirstTurnJudge(), **of_key) as running:
            journal = running.gateway._journal
            run = journal.run

            async def run_slowly(call: Any) -> Any:
                if getattr(call, "func", None) == journal.add_part:
                    has_begun.set()
                    await may_go_on.wait()
                return await run(call)

            monkeypatch.setattr(journal, "run", run_slowly)
            client, url = Talk(running), f"{running.url}/sessions/s"
            saying = asyncio.create_task(client.say(3))
            await has_begun.wait()
            (session,) = running.gateway._sessions
            deleting = asyncio.create_task(running.http.delete(url))

            async def is_deleting() -> bool:
                return session.is_ending

            await until(is_deleting)
            may_go_on.set()
            refused = await deleting
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_busy")
            await saying
            await client.say()  # The session is still open.
            await running.gateway.drained()
            (name,) = learner_names(tmp_path / "learners")
            file = tmp_path / "learners" / name / "groups.jsonl"
            assert file.read_text()
            assert (await running.http.delete(url)).status_code == 200
            assert not file.read_text()

    asyncio.run(talk())
