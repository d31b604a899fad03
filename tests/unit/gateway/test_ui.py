"""The page of a gateway: who may see it, what a visitor sees, and what a form may do."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentic_opd.core.types import Message
from agentic_opd.distill.judge import JudgeReply
from agentic_opd.gateway.config import GatewayConfig, LearnersConfig
from agentic_opd.gateway.journal import SessionState
from agentic_opd.gateway.keys import digest_of_key
from agentic_opd.gateway.learners import HEADER, learner_of
from agentic_opd.gateway.ui import view
from agentic_opd.gateway.ui.routes import SESSIONS_A_PAGE
from tests.unit.distill.fakes import POSITIVE

from .fakes import AGAIN, MORE, USER, Running, ScriptedVllm, gateway_before, until
from .test_parts import PartsDistiller

pytestmark = pytest.mark.slow

KEY, OTHER_KEY = "a-key", "another-key"
EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>\" onload=x <!--"
ODD = "a\x00b\u200fc\u202ed\x1b[31me\x9bf"


def run(folder: Path, vllm: ScriptedVllm, talk: Callable[[Running], Awaitable[Any]], **settings: Any) -> Any:
    async def with_gateway() -> Any:
        async with gateway_before(vllm, folder, **{"api_keys": (KEY, OTHER_KEY), **settings}) as running:
            return await talk(running)

    return asyncio.run(with_gateway())


class HintingJudge:
    """Has the same hint for each turn."""

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        return JudgeReply((POSITIVE,) * num_votes, 0.25)

    async def close(self) -> None:
        pass


class Visitor:
    """A browser without a script."""

    def __init__(self, running: Running) -> None:
        self.url, self._http = running.url, httpx.AsyncClient(timeout=60)

    async def __aenter__(self) -> "Visitor":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str = "/ui") -> httpx.Response:
        return await self._http.get(f"{self.url}{path}")

    async def post(self, path: str, fields: dict[str, str], **headers: str) -> httpx.Response:
        headers = {"Origin": self.url, "Sec-Fetch-Site": "same-origin", **headers}
        return await self._http.post(f"{self.url}{path}", data=fields, headers=headers)

    async def sign_in(self, key: str = KEY, **fields: str) -> httpx.Response:
        return await self.post("/ui/login", {"key": key, **fields})

    async def session_page(self, name: str) -> tuple[str, str]:
        """The path and the HTML of a session's page, found in the list by its name."""
        found = re.search(rf'href="(/ui/sessions/session-[0-9a-f]+)">{re.escape(name)}<', (await self.get()).text)
        assert found is not None
        return found[1], (await self.get(found[1])).text


def form_of(page: str, number: int = 1) -> tuple[str, dict[str, str]]:
    """The address of the form of a turn, and its hidden field."""
    actions = re.findall(r'action="(/ui/sessions/[^"]+/feedback)"', page)
    token = re.search(r'name="form_token" value="([^"]+)"', page)
    assert token is not None
    return actions[number - 1], {"form_token": token[1]}


def main_of(page: str) -> str:
    return page.partition("<main")[2].partition("</main>")[0]


def test_without_a_key_nothing_is_shown(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(at: Running) -> None:
        await at.say(USER, key=KEY, session_id="mine")
        async with Visitor(at) as visitor, Visitor(at) as owner:
            await owner.sign_in()
            path, page = await owner.session_page("mine")
            action, fields = form_of(page)
            for place in ("/ui", path, f"{path}.jsonl", "/ui/events", "/ui/none", f"/ui?key={KEY}"):
                answer = await visitor.get(place)
                assert answer.status_code == 401
                assert "mine" not in answer.text
                assert "policy" not in main_of(answer.text)
                assert 'name="key"' in answer.text
            assert (await visitor.post(action, {**fields, "reward": "1"})).status_code == 401
            for wrong in ("", "a-ke", "a-key-", "Bearer a-key", "\xff"):
                answer = await visitor.sign_in(wrong)
                assert answer.status_code == 401
                assert "set-cookie" not in answer.headers
            bearer = await at.http.get(f"{at.url}/ui", headers={"Authorization": f"Bearer {KEY}"})
            assert bearer.status_code == 401, "clients' keys are no visitors' logins"
            assert await at.gateway.journal.run(lambda: at.gateway.journal.feedback(path.rpartition("/")[2])) == {}

    with caplog.at_level(logging.DEBUG):
        run(tmp_path, ScriptedVllm(tokenizer), talk)
    theirs = ("httpx", "httpcore")  # The visitor's own.
    assert not [
        record for record in caplog.records if KEY in record.getMessage() and not record.name.startswith(theirs)
    ]


def test_a_login_is_a_cookie_that_is_no_key_and_ends(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        async with Visitor(at) as visitor:
            answer = await visitor.sign_in()
            assert (answer.status_code, answer.headers["Location"]) == (303, "/ui")
            cookie = answer.headers["Set-Cookie"]
            assert {"HttpOnly", "Path=/ui", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
            assert KEY not in cookie
            page = await visitor.get()
            assert page.status_code == 200
            assert page.headers["Cache-Control"] == "no-store"
            policy = page.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; ")
            assert {"unsafe-inline", "unsafe-eval", "http", "*"}.isdisjoint(re.split(r"[ :;']+", policy))
            assert "frame-ancestors 'none'" in policy
            assert not re.search(r"(?:src|href)=\"?(?:https?:)?//", page.text)
            token = re.search(r'name="form_token" value="([^"]+)"', page.text)
            assert token is not None
            for fields, headers in (
                ({}, {}),
                ({"form_token": "guessed"}, {}),
                ({"form_token": token[1]}, {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"}),
            ):
                assert (await visitor.post("/ui/logout", fields, **headers)).status_code == 403
            assert (await visitor.get()).status_code == 200
            assert (await visitor.post("/ui/logout", {"form_token": token[1]})).status_code == 303
            assert (await visitor.get()).status_code == 401
            stolen = cookie.partition(";")[0]
            assert (await at.http.get(f"{at.url}/ui", headers={"Cookie": stolen})).status_code == 401

    run(tmp_path, ScriptedVllm(tokenizer), talk)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"},
        {"Origin": "null", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_another_page_can_neither_sign_in_nor_rate(tokenizer: Any, tmp_path: Path, headers: dict[str, str]) -> None:
    async def talk(at: Running) -> None:
        await at.say(USER, key=KEY, session_id="mine")
        async with Visitor(at) as visitor:
            assert (await visitor.post("/ui/login", {"key": KEY}, **headers)).status_code == 403
            await visitor.sign_in()
            path, page = await visitor.session_page("mine")
            action, fields = form_of(page)
            assert (await visitor.post(action, {**fields, "reward": "1"}, **headers)).status_code == 403
            assert (await visitor.post(action, {"reward": "1"})).status_code == 403
            as_json = await at.http.post(f"{at.url}{action}", json={"reward": 1})
            assert as_json.status_code == 401
            assert await at.gateway.journal.run(lambda: at.gateway.journal.feedback(path.rpartition("/")[2])) == {}

    run(tmp_path, ScriptedVllm(tokenizer), talk, cors_origins=("http://127.0.0.1:3000",))


def test_a_key_opens_its_own_sessions_only(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        await at.say(USER, key=KEY, session_id="mine")
        await at.say(USER, key=OTHER_KEY, session_id="theirs")
        async with Visitor(at) as visitor, Visitor(at) as other:
            await visitor.sign_in()
            await other.sign_in(OTHER_KEY)
            path, page = await other.session_page("theirs")
            action, _ = form_of(page)
            assert "theirs" not in (await visitor.get()).text
            for place in (path, f"{path}.jsonl"):
                assert (await visitor.get(place)).status_code == 404
            _, fields = form_of((await visitor.session_page("mine"))[1])
            assert (await visitor.post(action, {**fields, "reward": "1"})).status_code == 404
            with at.gateway.changes.watch("nobody") as watch:
                await at.say(USER, key=KEY, session_id="mine too")
                assert not watch._changed

    run(tmp_path, ScriptedVllm(tokenizer), talk)


def test_without_keys_a_page_is_opened_by_the_key_that_the_agent_sends(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        await at.say(USER, key="any word", session_id="mine")
        await at.say(USER, session_id="keyless")
        async with Visitor(at) as visitor:
            assert (await at.http.get(f"{at.url}/ui", headers={"Host": "evil.example"})).status_code == 403
            await visitor.sign_in("any word")
            assert ">mine<" in (await visitor.get()).text
            await visitor.sign_in("")
            page = (await visitor.get()).text
            assert ">keyless<" in page
            assert ">mine<" not in page

    run(tmp_path, ScriptedVllm(tokenizer), talk, api_keys=())


def test_where_clients_name_their_learner_a_visitor_names_it_too(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        for learner in ("ada", "bob"):
            await at.say(USER, key=KEY, session_id=f"of-{learner}", headers={HEADER: learner})
        async with Visitor(at) as visitor:
            assert 'name="learner"' in (await visitor.get()).text
            for wrong in ("", "Ada!", "x" * 65):
                refused = await visitor.sign_in(learner=wrong)
                assert refused.status_code == 400
                assert "names its learner in X-Learner" in refused.text
            assert (await visitor.sign_in("no key", learner="ada")).status_code == 401
            await visitor.sign_in(learner="ada")
            page = (await visitor.get()).text
            assert "learner ada" in page
            assert ">of-ada<" in page
            assert ">of-bob<" not in page
            await visitor.sign_in(OTHER_KEY, learner="ada")
            assert ">of-ada<" not in (await visitor.get()).text, "a name belongs to its key"

    run(tmp_path, ScriptedVllm(tokenizer), talk, learners=LearnersConfig(by="header"))


def test_feedback_reaches_the_turn_and_its_group(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        await at.say(USER, await at.say(USER, key=KEY, session_id="mine"), MORE, key=KEY, session_id="mine")
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            path, page = await visitor.session_page("mine")
            action, fields = form_of(page, 2)
            for wrong in ({}, {"text": " "}, {"reward": "2"}, {"reward": "1e9"}, {"text": "x" * 10_001}):
                assert (await visitor.post(action, {**fields, **wrong})).status_code == 400
            assert (await visitor.post(action, {**fields, "text": "x" * 200_000})).status_code == 413
            rated = await visitor.post(action, {**fields, "reward": "-1", "text": f"Shorter,\r\n{EVIL}"})
            assert (rated.status_code, rated.headers["Location"]) == (303, f"{path}#turn-2")
            assert "Shorter,\n&lt;/script&gt;" in (await visitor.get(path)).text
            end = await at.http.post(f"{at.url}/sessions/mine/end", headers={"Authorization": f"Bearer {KEY}"})
            assert end.status_code == 200
            await at.gateway.drained()
            late = await visitor.post(action, {**fields, "reward": "1"})
            assert late.status_code == 409
            assert "its group" not in (shown := (await visitor.get(path)).text)
            assert "/feedback" not in shown
        return await at.groups()

    (group,) = run(tmp_path, ScriptedVllm(tokenizer), talk)
    assert group["messages"][0][-1]["content"] == f"Shorter,\n{EVIL}\n(The answer was rated -1.)"


def test_texts_of_sessions_are_text(tokenizer: Any, tmp_path: Path) -> None:
    long = "assistant " * 100_000  # One line of a million characters, and few tokens.
    user = {"role": "user", "content": f"{EVIL}{ODD}", "name": EVIL}
    tool = {"role": "tool", "content": long, "tool_call_id": "c1"}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"code": EVIL})}}
    before = {"role": "assistant", "content": EVIL, "tool_calls": [call]}

    async def talk(at: Running) -> None:
        for name in (f"mine{EVIL}", "x" * 256):
            headers = {"X-Turn-Type": "main"}
            answer = await at.chat(user, before, tool, user, key=KEY, session_id=name, headers=headers)
            assert answer.status_code == 200, answer.text
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            listed = (await visitor.get()).text
            pages = [listed]
            for path in {*re.findall(r'href="(/ui/sessions/session-[0-9a-f]+)"', listed)}:
                pages.append((await visitor.get(path)).text)
                assert len((await visitor.get(f"{path}.jsonl")).text) > len(long)
            for page in pages:
                assert page.count("<script") == page.count("</script>") == 1
                assert not re.search(r"<img|<!--|<[^<>]*\son\w+=", main_of(page))
                assert not any(char in page for char in "\x00\x1b\x9b\u202e\u200f")
                assert len(page) < 400_000
            assert all('a<b class="mark">⟨NUL⟩</b>b' in page for page in pages[1:])
            assert all("980,000 more characters" in page for page in pages[1:])

    run(tmp_path, ScriptedVllm(tokenizer, lambda prompt, _: f"{EVIL}{ODD[2:]}", context=2**20), talk)


def test_only_a_page_of_sessions_and_of_turns_is_rendered(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "TURNS_A_PAGE", 2)

    async def talk(at: Running) -> None:
        first = await at.say(USER, key=KEY, session_id="long")
        for messages in ([MORE], [MORE, first, AGAIN]):
            await at.say(USER, first, *messages, key=KEY, session_id="long")
        for number in range(SESSIONS_A_PAGE + 1):
            await at.say(USER, key=KEY, session_id=f"s{number}")
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            newest, older = (await visitor.get()).text, (await visitor.get("/ui?page=2")).text
            assert [page.count("<tr id=") for page in (newest, older)] == [SESSIONS_A_PAGE, 2]
            assert ">long<" in older
            assert (await visitor.get("/ui?page=99999999")).text.count("<tr id=") == 2
            (path,) = re.findall(r'href="(/ui/sessions/session-[0-9a-f]+)">long<', older)
            last, all_first = (await visitor.get(path)).text, (await visitor.get(f"{path}?page=1")).text
            assert [re.findall(r">Turn (\d)<", page) for page in (last, all_first)] == [["3"], ["1", "2"]]

    run(tmp_path, ScriptedVllm(tokenizer), talk)


def test_an_ended_session_is_deleted_by_its_client_alone(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        await at.say(USER, key=KEY, session_id="mine")

        async def delete(key: str, name: str = "mine") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {key}"}
            answer = await at.http.delete(f"{at.url}/sessions/{name}", headers=headers)
            return answer.status_code, answer.json()

        assert (await delete(KEY))[0] == 409
        headers = {"Authorization": f"Bearer {KEY}"}
        session_id = (await at.http.post(f"{at.url}/sessions/mine/end", headers=headers)).json()["id"]
        await at.gateway.drained()
        assert [(await delete(key))[0] for key in (OTHER_KEY, "none")] == [404, 401]
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            path, _ = await visitor.session_page("mine")
            assert await delete(KEY) == (200, {"session_id": "mine", "id": session_id, "deleted": True})
            assert (await visitor.get(path)).status_code == 404
        assert (await delete(KEY))[0] == 404
        assert at.gateway.journal.turns(session_id) == []

    run(tmp_path, ScriptedVllm(tokenizer), talk)


@pytest.mark.slow
def test_the_page_of_a_thousand_sessions_is_as_small_as_that_of_fifty(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> float:
        await at.say(USER, key=KEY, session_id="mine")
        journal = at.gateway.journal
        (row,) = journal.sessions(SessionState.OPEN)
        (turn,) = journal.turns(row.session_id)
        changes = [(replace(row, session_id=f"session-{number:04x}"), number) for number in range(2, 1002)]
        await journal.run(lambda: journal.add_turns((copy, replace(turn, turn_id=number)) for copy, number in changes))
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            await visitor.get()
            start = time.perf_counter()
            page = (await visitor.get()).text
            seconds = time.perf_counter() - start
            assert "1001" in main_of(page)
            assert page.count("<tr id=") == SESSIONS_A_PAGE
            assert main_of(page).count("<") < 2500
            assert len(page) < 150_000
        return seconds

    print(f"{run(tmp_path, ScriptedVllm(tokenizer), talk):.3f} s")


def test_a_turn_shows_what_the_judge_said_before_and_after_its_group_is_made(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        first = await at.say(USER, key=KEY, session_id="mine")
        await at.say(USER, first, MORE, key=KEY, session_id="mine")
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            await asyncio.gather(*at.gateway._writer._judging)
            path, page = await visitor.session_page("mine")
            chips = re.findall(r'class="chip ?[^"]*">([^<]+)<', main_of(page))
            assert chips == ["open", "scored", "waits"]
            assert 'class="hint"' in page
            assert "next state: user" in page
            assert len(re.findall(r'data-packed="[^"]{100,}"', page)) == 2
            headers = {"Authorization": f"Bearer {KEY}"}
            await at.http.post(f"{at.url}/sessions/mine/end", json={"feedback": "No."}, headers=headers)
            await at.gateway.drained()
            page = (await visitor.get(path)).text
            chips = re.findall(r'class="chip ?[^"]*">([^<]+)<', main_of(page))
            assert chips == ["group written", "scored", "scored"]
            assert "2 of 2" in (await visitor.get()).text

    config = GatewayConfig(data_path_to_save_groups=tmp_path / "groups.jsonl", distill_topk=5)
    judge: Any = HintingJudge()
    distiller = PartsDistiller(config, judge, tokenizer)
    run(tmp_path, ScriptedVllm(tokenizer), talk, distiller=distiller, distill_topk=5)


def test_an_open_page_is_told_of_changes_and_ends_with_the_gateway(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> list[str]:
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            async with visitor._http.stream("GET", f"{at.url}/ui/events") as stream:
                lines, seen = stream.aiter_lines(), list[str]()
                assert await anext(lines) == "event: ready"
                await at.say(USER, key=OTHER_KEY, session_id="theirs")
                await at.say(USER, key=KEY, session_id="mine")
                async for line in lines:
                    seen.append(line)
                    if line.startswith('data: {"sessions"'):
                        at.gateway.changes.close()
            return seen

    seen = run(tmp_path, ScriptedVllm(tokenizer), talk)
    (changed,) = [json.loads(line.removeprefix("data: ")) for line in seen if '"sessions"' in line]
    assert len(changed["sessions"]) == 1


def test_an_answer_is_shown_while_it_is_written(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda _, choice: f"{'One' if choice else 'Two'} <b>words</b> at last.")

    async def talk(at: Running) -> None:
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            first = await at.say(USER, key=KEY, session_id="mine")
            path, _ = await visitor.session_page("mine")
            vllm.gate = asyncio.Event()
            chat = asyncio.create_task(at.chat(USER, first, MORE, key=KEY, session_id="mine", stream=True, n=2))

            async def is_begun() -> bool:
                return (await visitor.get(path)).text.count("no text yet") == 1

            await until(is_begun)
            page = main_of((await visitor.get(path)).text)
            assert page.count(">being written<") == 2
            assert MORE["content"] in page
            vllm.gate.set()
            assert (await chat).status_code == 200
            page = main_of((await visitor.get(path)).text)
            assert "being written" not in page
            assert page.count("&lt;b&gt;words&lt;/b&gt; at last.") == 3

    run(tmp_path, vllm, talk)


def test_the_trainers_evaluations_are_a_curve(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "train" / "brake.jsonl"
    file.parent.mkdir()

    async def talk(at: Running) -> None:
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            assert "Held-out score" not in (await visitor.get()).text
            verdicts = ((1, "good"), (2, "bad"))
            rows = [{"version": version, "verdict": word, "mean": 0.5, "tasks": 8} for version, word in verdicts]
            rows.append({"version": 3, "verdict": "rolled_back", "bad": 2, "to": 1})
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            page = (await visitor.get()).text
            assert "version 2: 0.500 over 8 tasks, rolled back" in page
            file.write_text("[]\n")
            assert "holds no verdicts" in (await visitor.get()).text

    run(tmp_path, ScriptedVllm(tokenizer), talk, trainer_dir=file.parent)


def test_the_evaluations_of_a_keys_learner_are_a_curve_with_its_name(tokenizer: Any, tmp_path: Path) -> None:
    config = LearnersConfig(by="key")
    learner = learner_of(digest_of_key(KEY), config)
    assert learner is not None
    file = tmp_path / "learners" / learner / "brake.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"version": 3, "verdict": "good", "mean": 0.25, "tasks": 8}) + "\n")

    async def talk(at: Running) -> None:
        async with Visitor(at) as visitor:
            await visitor.sign_in()
            page = (await visitor.get()).text
            assert learner in page
            assert "version 3: 0.250 over 8 tasks" in page

    run(tmp_path, ScriptedVllm(tokenizer), talk, learners=config)
