"""What real agents send: one conversation of theirs is one session, whatever else they ask for beside it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from agentic_opd.core.types import Message
from agentic_opd.gateway.client import read_client
from agentic_opd.gateway.errors import ClientError
from agentic_opd.gateway.grammar import call_form, call_grammar
from agentic_opd.gateway.request import ToolChoice
from agentic_opd.gateway.turns import Feedback
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer

from .fakes import AGAIN, CALL, MORE, TOOL, USER, Running, ScriptedVllm, until
from .test_gateway import checked, run

pytestmark = pytest.mark.slow

SYSTEM = {"role": "system", "content": "You are an agent."}
HELPER = {"role": "system", "content": "You search."}
MAIN = {"X-Claude-Code-Session-Id": "main"}
OTHER_TOOL = {"type": "function", "function": {"name": "look"}}


def note(text: str) -> Message:
    return {"role": "user", "content": f"<<<BEGIN_INTERNAL_CONTEXT>>> {text}"}


def numbered(prompt: str, choice: int) -> str:
    return f"Turn {prompt.count('Turn') + 1}."


async def sessions(at: Running) -> list[Any]:
    return [*at.gateway._sessions]


async def ended(at: Running, **body: Any) -> list[dict[str, Any]]:
    for session in await sessions(at):
        await at.end(session.session_id, **body)
    return checked(await at.groups())


def test_a_last_message_that_the_next_request_does_not_hold_keeps_the_session(tokenizer: Any, tmp_path: Path) -> None:
    """An agent (OpenClaw's shape) ends each request with a note of its own, and takes it away in the next one."""
    vllm = ScriptedVllm(tokenizer, numbered)

    async def talk(at: Running) -> Any:
        history: list[Any] = [SYSTEM, USER]
        for text in ("now", "later", "last"):
            said = await at.say(*history, note(text), tools=[TOOL])
            history += [said, {"role": "user", "content": f"No, not {text}."}]
        assert len(await sessions(at)) == 1
        (session,) = await sessions(at)
        follows = [turn.follows and turn.follows.turn_id for turn in session.tree.turns.values()]
        return follows, await ended(at, reward=0.5)

    follows, (group,) = run(tmp_path, vllm, talk)
    assert follows == [None, 1, 2]
    assert group["scores"] == [0.5] * 3, "the history of the last turn continues all of them"
    learned = [[token for token in mask if token != -100] for mask in group["masks"]]
    assert sorted(learned) == sorted(ids for _, ids in vllm.sampled), "each sampled token is learned from once"
    replies = {messages[-1]["content"] for messages in group["messages"]}
    assert {"No, not now.", "No, not later."} < replies


@pytest.mark.parametrize(
    "changed",
    [
        {"content": "The client's own words."},
        {
            "content": None,
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "run", "arguments": "{}"}}],
        },
    ],
)
def test_a_rewritten_answer_keeps_the_session_where_no_other_is_meant(
    tokenizer: Any, tmp_path: Path, changed: dict[str, Any]
) -> None:
    async def talk(at: Running) -> Any:
        said = await at.say(SYSTEM, USER)
        await at.say(SYSTEM, USER, {**said, **changed}, MORE)
        assert len(await sessions(at)) == 1
        return await ended(at, reward=1.0)

    (group,) = run(tmp_path, ScriptedVllm(tokenizer, numbered), talk)
    assert group["scores"] == [1.0, 1.0]
    assert "It fails." in [messages[-1]["content"] for messages in group["messages"]]


def window(history: list[Any]) -> list[Any]:
    """Return the first user message and the last two exchanges."""
    return [*history[:2], *history[2:][-4:]]


def last_exchanges(history: list[Any]) -> list[Any]:
    """Return the last two exchanges, without the first user message."""
    return [history[0], *history[1:][-5:]]


def last_answer(history: list[Any]) -> list[Any]:
    """Return the first user message, and the last answer with what came after it."""
    return [*history[:2], *history[2:][-2:]]


def summary(history: list[Any]) -> list[Any]:
    """Return the history with a summary in place of its middle."""
    dropped = history[2:-2]
    told = [{"role": "user", "content": f"Summary of {len(dropped)} messages."}] if dropped else []
    return [*history[:2], *told, *history[2:][-2:]]


@pytest.mark.parametrize("headers", [{}, {"X-Session-Id": "one"}], ids=["unnamed", "named"])
@pytest.mark.parametrize("shorten", [window, last_exchanges, last_answer, summary])
def test_a_client_that_drops_old_turns_keeps_the_session_and_each_reply(
    tokenizer: Any, tmp_path: Path, shorten: Any, headers: dict[str, str]
) -> None:
    replies = [{"role": "user", "content": f"No, not like that, {number}."} for number in range(6)]
    count = iter(range(1, 9))

    async def talk(at: Running) -> Any:
        history: list[Any] = [SYSTEM, USER]
        for reply in replies:
            history += [await at.say(*shorten(history), headers=headers), reply]
        (session,) = await sessions(at)
        turns = session.tree.turns.values()
        return [session.tree.before(turn) for turn in turns], await ended(at, reward=0.5)

    before, (group,) = run(tmp_path, ScriptedVllm(tokenizer, lambda prompt, _: f"Turn {next(count)}."), talk)
    assert before == [None, 1, 2, 3, 4, 5]
    assert {*group["scores"]} == {0.5}, "the reward reaches each turn"
    seen = {message["content"] for messages in group["messages"] for message in messages}
    assert {reply["content"] for reply in replies[:5]} <= seen


def test_a_client_that_drops_old_turns_continues_no_session_where_two_may_be_meant(
    tokenizer: Any, tmp_path: Path
) -> None:
    async def talk(at: Running) -> Any:
        for one in ("first", "second"):
            history: list[Any] = [SYSTEM, USER]
            for _ in range(2):
                history += [await at.say(*history, headers={"X-Session-Id": one}), MORE]
        await at.say(*last_answer(history))
        return [len(session.tree.turns) for session in await sessions(at)]

    assert sorted(run(tmp_path, ScriptedVllm(tokenizer, numbered), talk)) == [1, 2, 2]


def test_user_messages_that_begin_alike_are_replies_where_none_was_taken_away(tokenizer: Any, tmp_path: Path) -> None:
    first, second = ({"role": "user", "content": f"[2026-11-25 22:05] {text}"} for text in ("Write f.", "Not so."))

    async def talk(at: Running) -> Any:
        said = await at.say(first)
        await at.say(first, {**said, "content": "Other words."}, MORE, second)
        (session,) = await sessions(at)
        return session.tree.turns[2].follows

    assert run(tmp_path, ScriptedVllm(tokenizer, numbered), talk) == (1, 2, 4)


def test_eight_rollouts_of_one_prompt_stay_eight_sessions(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: "The same words.")

    async def talk(at: Running) -> Any:
        said = await asyncio.gather(*(at.say(SYSTEM, USER) for _ in range(8)))
        for one in said:
            await at.say(SYSTEM, USER, one, MORE)
        counts = [len(session.tree.turns) for session in await sessions(at)]
        await at.say(SYSTEM, USER, {"role": "assistant", "content": "Other words."}, MORE)
        return counts, [len(session.tree.turns) for session in await sessions(at)]

    counts, later = run(tmp_path, vllm, talk)
    assert counts == [2] * 8
    assert sorted(later) == [1, *[2] * 8], "eight turns may be meant: none of them is"


def test_a_system_prompt_that_changes_with_the_time_keeps_the_session(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        history: list[Any] = [USER]
        for minute in range(3):
            said = await at.say({"role": "system", "content": f"It is 12:0{minute}."}, *history)
            history += [said, MORE]
        return len(await sessions(at))

    assert run(tmp_path, ScriptedVllm(tokenizer, numbered), talk) == 1


@pytest.mark.parametrize(
    "headers",
    [{"X-Claude-Code-Session-Id": "one"}, {"session_id": "one"}, {"session-id": "one"}, {"X-Session-Id": "one"}],
)
@pytest.mark.parametrize("title_first", [False, True])
def test_titles_beside_a_conversation_are_side_turns(
    tokenizer: Any, tmp_path: Path, headers: dict[str, str], title_first: bool
) -> None:
    vllm = ScriptedVllm(tokenizer, numbered)
    title = ({"role": "system", "content": "Write a title."}, USER)

    async def talk(at: Running) -> Any:
        if title_first:
            await at.say(*title, headers=headers)
        said = await at.say(SYSTEM, USER, tools=[TOOL], headers=headers)
        if not title_first:
            await at.say(*title, headers=headers)
        await at.say(SYSTEM, USER, said, MORE, tools=[TOOL], headers=headers)
        await at.say(SYSTEM, USER, said, MORE, {"role": "user", "content": "In short?"}, headers=headers)
        assert [len(session.tree.turns) for session in await sessions(at)] == [4]
        return await ended(at, reward=1.0)

    (group,) = run(tmp_path, vllm, talk)
    texts = [tokenizer.decode(ids) for ids in group["tokens"]]
    assert not any("Write a title." in text for text in texts)
    assert len(texts) == 2, "an answer without tools that the conversation's history leads to is part of it"


def test_a_sub_agent_is_a_session_under_its_parent(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        said = await at.say(SYSTEM, USER, tools=[TOOL], headers=MAIN)
        found = await at.say(HELPER, MORE, tools=[OTHER_TOOL], headers=MAIN)
        await at.say(HELPER, MORE, found, USER, tools=[OTHER_TOOL], headers=MAIN)
        await at.say(SYSTEM, USER, said, MORE, tools=[TOOL, OTHER_TOOL], headers=MAIN)
        await at.say(SYSTEM, USER, headers={"X-Session-Id": "third", "X-Parent-Session-Id": "main"})
        main, child, third = await sessions(at)
        assert (main.row.name, child.row.parent, third.row.parent) == ("main", main.session_id, main.session_id)
        assert [len(session.tree.turns) for session in (main, child)] == [2, 2]
        await at.end("main", reward=1.0)
        assert await sessions(at) == []
        return checked(await at.groups())

    groups = run(tmp_path, ScriptedVllm(tokenizer, numbered), talk)
    assert sorted(group["overrides"][0]["reward"] is None for group in groups) == [False, True, True]


def test_a_sub_agent_takes_no_place_in_its_parents_group(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        for name in ("one", "two"):
            headers = {"X-Claude-Code-Session-Id": name, "X-Group-Id": "g"}
            await at.say(SYSTEM, USER, tools=[TOOL], headers=headers)
            found = await at.say(HELPER, MORE, tools=[OTHER_TOOL], headers=headers)
            await at.say(HELPER, MORE, found, USER, tools=[OTHER_TOOL], headers=headers)
            await at.end(name, reward=1.0)
        return checked(await at.groups())

    groups = run(tmp_path, ScriptedVllm(tokenizer, numbered), talk, group_size=2)
    assert sorted(len(group["tokens"]) for group in groups) == [1, 1, 2]
    assert [1.0, 1.0] in [group["scores"] for group in groups]


def test_a_session_that_is_ended_twice_while_its_sub_agent_answers_is_in_one_group(
    tokenizer: Any, tmp_path: Path
) -> None:
    vllm = ScriptedVllm(tokenizer, numbered)

    async def talk(at: Running) -> Any:
        await at.say(SYSTEM, USER, tools=[TOOL], headers={**MAIN, "X-Group-Id": "g"})
        vllm.gate = asyncio.Event()
        helping = asyncio.create_task(at.say(HELPER, MORE, tools=[OTHER_TOOL], headers=MAIN))
        await until(lambda: at.becomes("open_sessions", 2))
        first = asyncio.create_task(at.end("main", reward=1.0))

        async def is_ending() -> bool:
            return any(session.is_ending for session in await sessions(at))

        await until(is_ending)
        second = await at.end("main", reward=1.0)
        vllm.gate.set()
        await helping
        return (await first).status_code, second.status_code

    assert run(tmp_path, vllm, talk, group_size=2) == (200, 404)


def test_a_session_waits_for_its_sub_agents_and_takes_them_along(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> Any:
        said = await at.say(SYSTEM, USER, tools=[TOOL], headers=MAIN)
        await at.say(HELPER, MORE, tools=[OTHER_TOOL], headers=MAIN)
        await at.say(USER, session_id="idle")
        main, helper, idle = await sessions(at)
        main.used = idle.used = helper.used - 1000
        await at.gateway._close_older(500.0)
        assert await sessions(at) == [main, helper]
        await at.say(SYSTEM, USER, said, MORE, tools=[TOOL], headers={**MAIN, "X-Session-Done": "true"})
        return len(await sessions(at))

    assert run(tmp_path, ScriptedVllm(tokenizer, numbered), talk) == 0


def test_a_reward_reaches_the_branch_that_ended_the_session(tokenizer: Any, tmp_path: Path) -> None:
    """u a1 -> a2 (abandoned) and a3 (the end): a1 and a3 are rewarded, a2 is not."""
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: f"To {prompt.count('It fails.')} {prompt.count('And now?')}.")

    async def talk(at: Running) -> Any:
        said = await at.say(USER, session_id="s")
        await at.say(USER, said, MORE, session_id="s")
        await at.say(USER, said, {"role": "user", "content": "And now?"}, session_id="s")
        await at.end("s", reward=1.0)
        return checked(await at.groups())

    (group,) = run(tmp_path, vllm, talk)
    assert [about["reward"] for about in group["overrides"]] == [{"client": 1.0}, None]
    learned = [[token for token in mask if token != -100] for mask in group["masks"]]
    assert learned == [vllm.sampled[0][1] + vllm.sampled[2][1], vllm.sampled[1][1]]


@pytest.mark.parametrize("by_answer", [False, True])
def test_feedback_for_one_turn_is_its_evidence(tokenizer: Any, tmp_path: Path, by_answer: bool) -> None:
    async def talk(at: Running) -> Any:
        response = await at.chat(USER, session_id="s")
        first = response.json()["choices"][0]["message"]
        await at.say(USER, first, MORE, session_id="s")
        path = f"/turns/{response.json()['id']}/feedback" if by_answer else "/sessions/s/turns/1/feedback"
        given = await at.http.post(f"{at.url}{path}", json={"reward": -1, "text": "This was wrong."})
        assert given.json() == {"turn": 1}
        for path, body, status in (
            ("/sessions/s/turns/1/feedback", {"reward": "much"}, 400),
            ("/sessions/s/turns/1/feedback", {}, 400),
            ("/sessions/s/turns/9/feedback", {"reward": 1}, 404),
            ("/sessions/other/turns/1/feedback", {"reward": 1}, 404),
            ("/turns/chatcmpl-none/feedback", {"reward": 1}, 404),
        ):
            assert (await at.http.post(f"{at.url}{path}", json=body)).status_code == status, path

    run(tmp_path, ScriptedVllm(tokenizer, numbered), talk)

    async def later(at: Running) -> Any:
        await at.end("s")
        return checked(await at.groups())

    (group,) = run(tmp_path, ScriptedVllm(tokenizer), later)
    assert [message["content"] for message in group["messages"][0]] == [
        *("Write f.", "Turn 1.", "It fails.", "This was wrong.\n(The answer was rated -1.)", "Turn 2.")
    ]
    assert group["overrides"][0]["reward"] == {"client": -1.0}


BAD, WORSE = {"reward": -1, "text": "Bad."}, {"reward": -2, "text": "Worse."}
GOOD = {"reward": 1, "text": "Good."}


@pytest.mark.parametrize(
    ("posts", "text", "reward"),
    [
        ([GOOD, BAD], "Bad.\n(The answer was rated -1.)", -1.0),
        ([BAD, WORSE, GOOD, GOOD], "Good.\n(The answer was rated 1.)", 1.0),
        ([{"reward": 1}, {"reward": -1}], "(The answer was rated -1.)", -1.0),
        ([{"text": "Bad."}, {"text": "Good."}], "Good.", None),
        ([{"reward": 1}, {"text": "Good."}], "Good.\n(The answer was rated 1.)", 1.0),
        ([{"text": "Bad."}, {"reward": -1}], "Bad.\n(The answer was rated -1.)", -1.0),
        ([GOOD, {"reward": -1}], "(The answer was rated -1.)", -1.0),
        ([GOOD, {"text": "Bad."}], "Bad.", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_ended", [False, True])
def test_feedback_that_a_person_changes_counts_once(
    tokenizer: Any, tmp_path: Path, posts: list[dict[str, Any]], text: str, reward: float | None, is_ended: bool
) -> None:
    """The last one counts, also behind the session's end and a restart, while its group waits for another session."""

    async def rated(at: Running, body: dict[str, Any]) -> None:
        assert (await at.http.post(f"{at.url}/sessions/s/turns/1/feedback", json=body)).json() == {"turn": 1}

    async def talk(at: Running) -> None:
        first = await at.say(USER, session_id="s", headers={"X-Group-Id": "g"})
        await at.say(USER, first, MORE, session_id="s")
        for body in posts[:1]:
            await rated(at, body)
        if is_ended:
            await at.end("s")
        for body in posts[1:-1]:
            await rated(at, body)

    async def later(at: Running) -> Any:
        await rated(at, posts[-1])
        assert at.gateway._journal.feedback((await at.http.get(f"{at.url}/sessions/s")).json()["id"]) == {
            1: [Feedback(reward, text.partition("\n")[0] if not text.startswith("(") else None)]
        }
        if not is_ended:
            await at.end("s")
        await at.say(AGAIN, session_id="t", headers={"X-Group-Id": "g"})
        await at.end("t")
        return checked(await at.groups())

    run(tmp_path, ScriptedVllm(tokenizer, numbered), talk, group_size=2)
    (group,) = run(tmp_path, ScriptedVllm(tokenizer, numbered), later, group_size=2)
    assert [message["content"] for message in group["messages"][0]][2:4] == ["It fails.", text]
    assert group["overrides"][0]["reward"] == (None if reward is None else {"client": reward})


def test_feedback_behind_the_group_is_refused_by_its_reason(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        for name, headers in ("s", {}), ("aside", {"X-Turn-Type": "side"}):
            answer = (await at.chat(USER, session_id=name, headers=headers)).json()
            await at.end(name)
            await at.groups()
            turn = 1 if name == "s" else 2
            for path in (f"/sessions/{name}/turns/{turn}/feedback", f"/turns/{answer['id']}/feedback"):
                response = await at.http.post(f"{at.url}{path}", json=GOOD)
                assert (response.status_code, response.json()["error"]["code"]) == (409, "group_made"), path
        assert (await at.http.post(f"{at.url}/sessions/s/turns/2/feedback", json=GOOD)).status_code == 404

    run(tmp_path, ScriptedVllm(tokenizer), talk)


def test_feedback_that_comes_while_the_group_is_scored_is_in_it(tokenizer: Any, tmp_path: Path) -> None:
    """The group is made again, and its turn is judged again with the feedback."""
    judge: Any = Judge()

    async def talk(at: Running) -> None:
        began, goes_on = asyncio.Event(), asyncio.Event()
        contents: list[list[str]] = []

        async def slow(closed: Any, found: Any) -> Any:
            ((branch,),) = found.values()
            contents.append([message["content"] for message in branch.trace.messages])
            began.set()
            await goes_on.wait()

        at.gateway._writer._scored = slow  # type: ignore[method-assign]
        first = await at.say(USER, session_id="s")
        await at.say(USER, first, MORE, session_id="s")
        (session,) = await sessions(at)
        await at.end("s")
        await began.wait()
        assert (await at.http.post(f"{at.url}/sessions/s/turns/1/feedback", json={"text": "No."})).status_code == 200
        assert 1 not in session.judged
        goes_on.set()
        await at.gateway.drained()
        assert contents == [
            ["Write f.", "Turn 1.", "It fails.", "Turn 2."],
            ["Write f.", "Turn 1.", "It fails.", "No.", "Turn 2."],
        ]

    run(tmp_path, ScriptedVllm(tokenizer, numbered), talk, distiller=judge)


def test_ids_that_agents_send() -> None:
    def of(headers: dict[str, str], user_id: Any = None, key: str | None = None) -> str | None:
        client = read_client({name.lower(): value for name, value in headers.items()} | headers, None, 1)
        return client.with_user_id(user_id).with_cache_key(key).agent_session

    assert of({}, user_id="user_ab_account_cd_session_0f8e7d6c-1234") == "0f8e7d6c-1234"
    assert of({}, user_id=json.dumps({"device_id": "d", "session_id": "s"})) == "s"
    assert [of({}, user_id=other) for other in ("user-1", "{", "[]", 7, None, '{"session_id": 3}')] == [None] * 6
    assert of({"User-Agent": "codex_cli_rs/1.0"}, key="k") == "k"
    assert of({"User-Agent": "OpenAI/Python 3"}, key="k") is None
    assert of({"X-Claude-Code-Session-Id": "a"}, user_id="user_session_0f8e7d6c-1234") == "a"
    with pytest.raises(ClientError):
        of({"X-Turn-Type": "mine"})
    claude = {"X-Claude-Code-Session-Id": "s", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "p"}
    helper = read_client(claude, None, 1)
    assert (helper.agent_session, helper.parent) == ("s/a", "s/p")
    codex = read_client({"thread-id": "t", "session-id": "s", "x-codex-parent-thread-id": "p"}, None, 1)
    assert (codex.agent_session, codex.parent, codex.turn_type) == ("t", "p", "main")
    assert read_client({"x-openai-subagent": "compact"}, None, 1).turn_type == "side"


# ------------------------------------------------------------------------------------------- accept, refuse and mark


def test_what_changes_nothing_is_accepted_and_what_can_not_be_is_named(tokenizer: Any, tmp_path: Path) -> None:
    neutral = {
        **{"reasoning_effort": "high", "prompt_cache_key": "k", "store": True, "service_tier": "auto", "user": "u"},
        **{"metadata": {"a": "b"}, "parallel_tool_calls": True, "safety_identifier": "s", "verbosity": "low"},
        **{"chat_template_kwargs": {"preserve_thinking": True, "enable_thinking": False}, "model": "any/name"},
        **{"audio": None, "functions": None, "web_search_options": None, "tools": [TOOL | {"id": None}]},
    }

    async def talk(at: Running) -> None:
        assert (await at.chat(USER, **neutral, session_id="s")).status_code == 200
        (session,) = await sessions(at)
        assert session.tree.turns[1].altered == ()
        for body, field in (
            ({"chat_template_kwargs": {"enable_thinking": "much"}}, "chat_template_kwargs"),
            ({"modalities": ["audio"]}, "modalities.0"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [TOOL]}, "tool_choice"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ):
            refused = await at.chat(USER, **body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text

    run(tmp_path, ScriptedVllm(tokenizer), talk)


def test_the_log_names_a_field_once_and_no_text_of_a_client(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(at: Running) -> None:
        for _ in range(2):
            await at.say(USER, chat_template_kwargs={"option_of_mine": 1, "a\nsecret of mine": 2})

    with caplog.at_level("INFO", "agentic_opd.gateway.body"):
        run(tmp_path, ScriptedVllm(tokenizer), talk)
    assert caplog.text.count("option_of_mine") == 1
    assert "secret of mine" not in caplog.text


def test_options_of_the_template_are_those_of_the_renderer(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, numbered)

    async def talk(at: Running) -> int:
        thinks = {"chat_template_kwargs": {"enable_thinking": True}}
        said = await at.say(USER, **thinks)
        await at.say(USER, said, MORE, **thinks)
        await at.say(USER)
        return len(await sessions(at))

    assert run(tmp_path, vllm, talk) == 2
    prompts = [prompt for prompt, _ in vllm.sampled]
    assert ["<think>" in tokenizer.decode(prompt) for prompt in prompts] == [False, False, True]
    assert prompts[1][: len(prompts[0])] == prompts[0]


JSON = {"type": "json_object"}


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    """A chat's choice of tools, by default the first one of a test only."""
    tools = [{"type": "function", "function": {"name": name}} for name in names or ("run",)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def allows(tokenizer: Any, structural_tag: str, *parts: str) -> bool:
    """Return whether vLLM's grammar engine lets these parts, each encoded by itself, be the whole answer."""
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer))
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(structural_tag))
    ids = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
    return all(matcher.accept_token(token) for token in [*ids, tokenizer.convert_tokens_to_ids("<|im_end|>")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "allowed", "altered"),
    [
        ({"tool_choice": "required"}, {"two", "other"}, ("tool_choice",)),
        ({"tool_choice": "any"}, {"two", "other"}, ("tool_choice",)),
        ({"tool_choice": {"type": "function", "function": {"name": "run"}}}, set(), ("tool_choice",)),
        ({"parallel_tool_calls": False}, {"other", "text", "text and call"}, ("parallel_tool_calls",)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"other"}, ("tool_choice", "parallel_tool_calls")),
        ({"tool_choice": "required", "response_format": JSON}, {"two", "other"}, ("tool_choice",)),
        ({"tool_choice": allowed_tools("required")}, {"two"}, ("tool_choice",)),
        ({"tool_choice": allowed_tools("auto")}, {"two", "text", "text and call"}, ("tool_choice",)),
        (
            {"tool_choice": allowed_tools("auto"), "parallel_tool_calls": False},
            {"text", "text and call"},
            ("tool_choice", "parallel_tool_calls"),
        ),
    ],
)
def test_forced_calls_follow_a_grammar_of_the_models_own_format(
    tokenizer: Any, tmp_path: Path, options: dict[str, Any], allowed: set[str], altered: tuple[str, ...]
) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: CALL)

    async def talk(at: Running) -> None:
        answer = await at.chat(USER, tools=[TOOL, OTHER_TOOL], **options)
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
        (session,) = await sessions(at)
        turn = session.tree.turns[1]
        assert (turn.altered, turn.span.under_grammar) == (altered, True)

    run(tmp_path, vllm, talk)
    grammar = vllm.asked[0]["structured_outputs"]["structural_tag"]
    call = '<tool_call>\n{"name": "run", "arguments": {"code": "1"}}\n</tool_call>'
    other = call.replace('"run"', f'"{OTHER_TOOL["function"]["name"]}"')
    answers = {
        "one": [call],
        "two": [f"{call}\n{call}"],
        "other": [other],
        "text": ["It is done."],
        "text and call": [f"I run it.\n{call}"],
        "by another schema": [call.replace("code", "file")],
        "a mark spelled by other tokens": [call.removesuffix("</tool_call>"), *"</tool_call>"],
        "a mark in a text": [call.replace("1", "</tool_call>")],
        "whitespace without end": [call.replace('"code"', " " * 17 + '"code"')],
    }
    assert {name for name, parts in answers.items() if allows(tokenizer, grammar, *parts)} == {"one", *allowed}


def test_all_tools_allowed_is_no_constraint_and_an_unknown_one_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: CALL)
    tools = [TOOL, OTHER_TOOL]
    names = [tool["function"]["name"] for tool in tools]

    async def talk(at: Running) -> None:
        assert (await at.chat(USER, tools=tools, tool_choice=allowed_tools("auto", *names))).status_code == 200
        refused = await at.chat(USER, tools=tools, tool_choice=allowed_tools("auto", "walk"))
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], "'walk'" in error["message"]) == (400, "tool_choice", True)
        items = [{"type": "function", **tool["function"]} for tool in tools]
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "run"}]}
        body = {"input": "a", "tools": items, "tool_choice": choice}
        assert (await at.http.post(f"{at.url}/v1/responses", json=body)).status_code == 200

    run(tmp_path, vllm, talk)
    first, second = vllm.asked
    assert "structured_outputs" not in first
    grammar = second["structured_outputs"]["structural_tag"]
    assert allows(tokenizer, grammar, CALL)
    assert not allows(tokenizer, grammar, CALL.replace('"run"', f'"{names[1]}"'))


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        (ToolChoice("required"), {"call", "thought and call", "thought and calls"}),
        (
            ToolChoice("auto", is_parallel=False),
            {"call", "thought and call", "thought and text", "thought without end"},
        ),
    ],
)
def test_a_model_that_thinks_may_think_before_its_calls(tokenizer: Any, choice: ToolChoice, allowed: set[str]) -> None:
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": True}), tokenizer, [])
    grammar = call_grammar(call_form(chat), [TOOL], choice)
    thought = "<think>\nHm, <b>.\n</think>\n\n"
    answers = {
        "call": CALL,
        "thought and call": f"{thought}{CALL}",
        "thought and calls": f"{thought}{CALL}\n{CALL}",
        "thought and text": f"{thought}It is done.",
        "thought without end": f"<think>\nHm.\n{CALL}",
    }
    assert {name for name, text in answers.items() if allows(tokenizer, grammar, text)} == allowed


SCHEMA = {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "day", "schema": SCHEMA}}


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("wanted", [JSON, BY_SCHEMA])
def test_an_answer_by_a_schema_beside_tools_is_that_or_calls(
    tokenizer: Any, tmp_path: Path, wanted: dict[str, Any], is_parallel: bool
) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: "{}")

    async def talk(at: Running) -> None:
        answer = await at.chat(USER, tools=[TOOL], response_format=wanted, parallel_tool_calls=is_parallel)
        assert answer.json()["choices"][0]["message"]["content"] == "{}"

    run(tmp_path, vllm, talk)
    grammar = vllm.asked[0]["structured_outputs"]["structural_tag"]
    call = '<tool_call>\n{"name": "run", "arguments": {"code": "1"}}\n</tool_call>'
    assert allows(tokenizer, grammar, '{"day": "Monday"}')
    assert allows(tokenizer, grammar, call)
    assert allows(tokenizer, grammar, f"{call}\n{call}") == is_parallel
    assert allows(tokenizer, grammar, "{}") == (wanted == JSON)
    assert not allows(tokenizer, grammar, "Monday")


@pytest.mark.parametrize("grammar", [{"regex": "[a-z]+"}, {"choice": ["yes", "no"]}, {"json": '{"type": "object"}'}])
def test_a_grammar_of_another_kind_is_one_of_the_whole_answer(
    tokenizer: Any, tmp_path: Path, grammar: dict[str, Any]
) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: "yes")

    async def talk(at: Running) -> None:
        await at.chat(USER, tools=[TOOL], structured_outputs=grammar)

    run(tmp_path, vllm, talk)
    assert vllm.asked[0]["structured_outputs"] == grammar


class Judge:
    """A distiller that is asked for single turns only, and remembers what followed them."""

    def __init__(self) -> None:
        self.read: list[list[str]] = []

    async def distill_turn(self, recording: Any, index: int, server: str) -> None:
        (trace,) = recording.traces
        behind = trace.turns[index].message_index
        self.read.append([message["content"] for message in trace.messages[behind:]])


def test_a_turn_is_judged_when_what_came_instead_of_its_text_arrives_and_again_with_feedback(
    tokenizer: Any, tmp_path: Path
) -> None:
    judge: Any = Judge()

    async def talk(at: Running) -> None:
        said = await at.say(SYSTEM, USER, note("now"), session_id="s")
        await at.say(SYSTEM, USER, said, MORE, note("later"), session_id="s")
        assert (await at.http.post(f"{at.url}/sessions/s/turns/1/feedback", json={"text": "No."})).status_code == 200
        (session,) = await sessions(at)
        await asyncio.gather(*session.judged.values())

    run(tmp_path, ScriptedVllm(tokenizer, numbered), talk, distiller=judge)
    assert judge.read == [["Turn 1.", "It fails."], ["Turn 1.", "It fails.", "No."]]
