"""Programs before the policy: whose request it is, how it is sampled, and what episode comes of it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentic_opd.core.errors import AgentError, ConfigError, SandboxError, ServerUnreachableError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import (
    Episode,
    Message,
    ProgramRun,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Verification,
    VerifyOutcome,
)
from agentic_opd.distill.evidence import author_turns
from agentic_opd.gateway.agent_process import AgentProcess
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import ServerInfo
from agentic_opd.rollout.config import AgentConfig, RolloutConfig
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.sandboxes.program import SOCKET_NAME, Program
from agentic_opd.sandboxes.protocol import Mount
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from tests.support.pictures import png, uri

from .fakes import MORE, USER, ScriptedVllm

pytestmark = pytest.mark.slow

TASK = Task("t", "Write f.", "assert f()")
ENDED = ProgramRun(0, None, "bye")


@dataclass
class Client:
    """What a program has: a key, and the way to the policy."""

    http: httpx.AsyncClient
    key: str
    files: list[str]
    """What solution.py holds; the last one counts."""

    async def chat(self, *messages: Any, key: str | None = None, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key or self.key}", "X-Workspace": "forged"}
        body = {"messages": list(messages), "model": "any", **body}
        return await self.http.post("http://policy/v1/chat/completions", json=body, headers=headers)

    async def say(self, *messages: Any, **body: Any) -> dict[str, Any]:
        response = await self.chat(*messages, **body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]


Acts = Callable[[Client], Awaitable[ProgramRun]]


@dataclass
class World:
    """A world whose programs are coroutines of a test."""

    acts: Acts
    is_broken: bool = False
    starts: int = 0
    system_prompt: str = ""
    tools: Sequence[dict[str, Any]] = ()
    runs_programs: bool = True
    files: list[str] = field(default_factory=lambda: ["empty"])
    keys: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncGenerator[Any]:
        yield self

    @asynccontextmanager
    async def program_session(self, task: Task, mounts: Sequence[Mount]) -> AsyncGenerator[Any]:
        self.starts += 1
        transport = httpx.AsyncHTTPTransport(uds=str(mounts[0].source / SOCKET_NAME))
        async with httpx.AsyncClient(transport=transport, timeout=60) as self.http:
            yield self

    async def run_program(self, program: Program) -> ProgramRun:
        assert (program.task, program.model) == (TASK.prompt, "policy")
        self.keys.append(program.api_key)
        return await self.acts(Client(self.http, program.api_key, self.files))

    async def run_tool(self, call: ToolCall) -> ToolResult:
        raise AssertionError

    async def is_over(self, messages: Sequence[Message]) -> bool:
        return False

    async def user_reply(self, messages: Sequence[Message]) -> str | None:
        return None

    async def train_and_eval_tasks(self) -> tuple[list[Task], list[Task]]:
        return [TASK], [TASK]

    async def judged_files(self) -> Mapping[str, bytes]:
        return {"solution.py": self.files[-1].encode()}

    async def collect(self, messages: Sequence[Message] = ()) -> Mapping[str, bytes]:
        return await self.judged_files()

    async def verify(self, task: Task, left: Mapping[str, bytes] | None) -> Verification:
        return Verification(VerifyOutcome.RAN, 1 if left else 0, 2, "1 of 2", "1 of 2")

    async def check(self) -> None:
        if self.is_broken:
            raise SandboxError("nothing works here")


def run(vllm: ScriptedVllm, world: Any, *, learn_from_altered: bool = False, **settings: Any) -> Episode:
    async def main() -> Episode:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", vllm.generate)
        async with TestServer(app) as server:
            client = JsonClient(str(server.make_url("")), retry_s=0.2)
            sampling = PluginClient(client, ServerInfo("policy", 1024, has_plugin=True))
            renderer = load_renderer(vllm.tokenizer, "qwen3", {"enable_thinking": False})
            config = RolloutConfig(agent=AgentConfig(command="agent"), **{"temperature": 0.9, **settings})
            agent = AgentProcess(config, world, [sampling], renderer, vllm.tokenizer)
            await agent.start()
            try:
                return await agent.run_episode(
                    TASK, sampling.url, temperature=config.temperature, learn_from_altered=learn_from_altered
                )
            finally:
                await agent.close()
                await client.close()

    return asyncio.run(main())


def in_turns(*sizes: int) -> Callable[[str, int], str]:
    return lambda prompt, choice: "word " * sizes[min(prompt.count("It fails."), len(sizes) - 1)] + f"{choice}."


async def two_turns(client: Client) -> ProgramRun:
    first = await client.say(USER)
    client.files.append("one")
    await client.say(USER, first, MORE)
    return ENDED


def test_what_a_program_asks_becomes_the_episode(tokenizer: Any) -> None:
    vllm = ScriptedVllm(tokenizer)
    episode = run(vllm, World(two_turns))
    prompt, sampled = vllm.sampled[-1]
    assert list(episode.traces[0].tokens_T) == prompt + sampled
    assert [token for token in episode.traces[0].masks_T if token != -100] == [
        token for _, ids in vllm.sampled for token in ids
    ]
    assert (episode.task, episode.stop_reason, episode.program) == (TASK, StopReason.FINISHED, ENDED)
    assert episode.changes == (frozenset({0}), frozenset())
    assert author_turns(episode.recording) == [0]
    assert (episode.tool_calls, episode.tool_errors, episode.weight_version) == (1, 0, 3)
    assert episode.reward is not None
    assert (episode.reward.correctness, episode.reward.tool_usage) == (0.5, 0.5)


def test_a_program_may_speak_any_protocol(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        async def posted(path: str, **body: Any) -> Any:
            headers = {"x-api-key": client.key}
            return await client.http.post(f"http://policy/v1/{path}", json=body, headers=headers)

        first = (await posted("responses", input="Write f.")).json()
        lost = await posted("responses", input="It fails.", previous_response_id="resp_none")
        assert lost.json()["error"]["code"] == "previous_response_not_found"
        await posted("responses", input="It fails.", previous_response_id=first["id"])
        answer = first["output"][0]["content"][0]["text"]
        said = [{"role": "assistant", "content": answer}, {"role": "user", "content": "It fails."}]
        last = await posted("messages", messages=[USER, *said], max_tokens=20)
        assert last.json()["content"][0]["text"].startswith("Said")
        return ENDED

    vllm = ScriptedVllm(tokenizer)
    episode = run(vllm, World(act))
    assert [prompt for prompt, _ in vllm.sampled[1:]] == [vllm.sampled[1][0]] * 2, "both continued the first answer"
    assert (len(episode.traces[0].turns), episode.requests) == (2, 3)


def test_its_group_is_valid_and_comes_back_as_it_was(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        await client.say(USER, {"role": "assistant", "content": "I had said so."}, MORE)
        return ProgramRun(1, None, "failed")

    episode = run(ScriptedVllm(tokenizer), World(act))
    assert episode.stop_reason is StopReason.AGENT_FAILED
    group = ScoredGroup((ScoredRollout.of(episode, episode.traces[0], include_messages=True, turns=()),), item_id="t#0")
    wire = group.to_wire()
    overrides = wire["overrides"][0]
    assert overrides["program"] == {
        **{"exit_code": 1, "stopped": None, "output": "failed", "other_sequences": 0, "other_tokens": 0}
    }
    assert overrides["opd"]["context_turns"] == [{"message": 1, "why": "not_sampled"}]
    assert overrides["tool_errors"] == 1
    assert ScoredGroup.from_wire(wire).rollouts[0].program == episode.program
    assert ScoredGroup.from_wire(wire).to_wire() == wire
    undistilled = ScoredGroup((ScoredRollout.of(episode, episode.traces[0], include_messages=True),), item_id="t#0")
    assert GroupChecker().read(undistilled.to_wire()).problems == []


def test_the_environment_decides_how_is_sampled(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        await client.say(USER, temperature=0, top_p=0.1, seed=7, max_tokens=500)
        return ENDED

    vllm = ScriptedVllm(tokenizer)
    episode = run(vllm, World(act), top_p=0.8, max_tokens_per_turn=100)
    (asked,) = vllm.asked
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"]) == (0.9, 0.8, 100)
    assert "seed" not in asked
    assert len(episode.turns) == 1, "a top_p that the environment set is none of the program's"


def test_turns_of_another_distribution_are_context(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        first = await client.say(USER, top_k=3)
        await client.say(USER, first, MORE)
        return ENDED

    episode = run(ScriptedVllm(tokenizer), World(act))
    assert [(turn.message_index, turn.why) for turn in episode.traces[0].context_turns] == [(1, "altered_sampling")]
    assert len(episode.turns) == 1
    assert len(run(ScriptedVllm(tokenizer), World(act), learn_from_altered=True).turns) == 2


async def asks_itself(client: Client, *messages: Any, turns: int = 1) -> None:
    """What a command of the policy may do, which has the program's key: a conversation of its own."""
    said = [*(messages or (MORE,))]
    for _ in range(turns):
        said += [await client.say(*said, max_tokens=500), USER]


def episode_tokens(episode: Episode) -> list[int]:
    return [token for token in episode.traces[0].masks_T if token != -100]


def test_the_episode_begins_with_the_first_request_and_all_requests_count(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        first = await client.say(USER)
        await asks_itself(client, turns=2)
        await client.say(USER, first, MORE)
        return ENDED

    vllm = ScriptedVllm(tokenizer, lambda prompt, choice: "word " * (3 if prompt.count("Write") == 1 else 60))
    episode = run(vllm, World(act), max_turns=8)
    first, own, own_next, second = (ids for _, ids in vllm.sampled)
    assert episode_tokens(episode) == first + second
    assert episode.program is not None
    assert (episode.program.other_sequences, episode.program.other_tokens) == (1, len(own + own_next))
    assert episode.reward is not None
    assert episode.reward.efficiency == pytest.approx(0.5 * (8 - 4) / 7)


@pytest.mark.parametrize("turns_after", [0, 1])
def test_a_conversation_that_repeats_the_first_prompt_is_another(tokenizer: Any, turns_after: int) -> None:
    """The policy knows its prompt word for word."""

    async def act(client: Client) -> ProgramRun:
        first = await client.say(USER)
        await asks_itself(client, USER, turns=3)
        if turns_after:
            await client.say(USER, first, MORE)
        return ENDED

    vllm = ScriptedVllm(tokenizer, in_turns(3, 50))
    episode = run(vllm, World(act), max_token_length=2048)
    sampled = [ids for _, ids in vllm.sampled]
    assert episode_tokens(episode) == sampled[0] + (sampled[4] if turns_after else [])


def test_a_long_answer_to_a_forged_history_takes_no_turn_out(tokenizer: Any) -> None:
    """It goes on from the program's own turns, so it is a branch of the same beginning."""

    async def act(client: Client) -> ProgramRun:
        first = await client.say(USER)
        second = await client.say(USER, first, MORE)
        await asks_itself(client, USER, first, {"role": "user", "content": "Say much."})
        await client.say(USER, first, MORE, second, MORE)
        return ENDED

    vllm = ScriptedVllm(tokenizer, lambda prompt, choice: "word " * (90 if "Say much." in prompt else 2))
    episode = run(vllm, World(act))
    first, second, _, third = (ids for _, ids in vllm.sampled)
    assert episode_tokens(episode) == first + second + third


def test_what_is_asked_at_the_same_time_at_the_beginning_may_be_the_episode(tokenizer: Any) -> None:
    """As agents do that have a title written beside their first turn; no answer ends before both have asked."""

    def says(prompt: str, choice: int) -> str:
        assert vllm.gate is not None
        if len(vllm.asked) > 1:
            vllm.gate.set()
        return "A text."

    async def act(client: Client) -> ProgramRun:
        title = {"role": "user", "content": "A title for it."}
        _, answer = await asyncio.gather(client.say(title), client.say(USER))
        await client.say(USER, answer, MORE)
        return ENDED

    vllm = ScriptedVllm(tokenizer, says, gate=asyncio.Event())
    assert len(run(vllm, World(act)).turns) == 2


def test_a_first_request_that_fails_is_asked_again(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        vllm.status = 400
        assert (await client.chat(USER)).status_code == 400
        vllm.status = 200
        return await two_turns(client)

    vllm = ScriptedVllm(tokenizer)
    assert len(run(vllm, World(act)).turns) == 2


def test_files_are_read_here_and_a_command_that_asks_first_hides_no_turn(tokenizer: Any) -> None:
    """The command of the first turn asks, and writes the faulty file then; the second turn appends a note."""

    async def act(client: Client) -> ProgramRun:
        first = await client.say(USER)
        await asks_itself(client)
        client.files.append("def f(): return 1\n")
        second = await client.say(USER, first, MORE)
        client.files.append(client.files[-1] + "# checked\n")
        await client.say(USER, first, MORE, second, MORE)
        return ENDED

    episode = run(ScriptedVllm(tokenizer), World(act))
    assert episode.changes == (frozenset({0}), frozenset({0}), frozenset())
    assert author_turns(episode.recording) == [0, 1]


def test_what_is_written_anew_is_the_work_of_its_last_turn(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        client.files.append("x = 0  # by the program itself, before any turn\n")
        first = await client.say(USER)
        client.files.append("def f(): return 1\n")
        second = await client.say(USER, first, MORE)
        client.files.append("def f(): return 2\n")
        await client.say(USER, first, MORE, second, MORE)
        return ENDED

    assert author_turns(run(ScriptedVllm(tokenizer), World(act)).recording) == [1]


def test_a_turn_that_is_left_out_later_leaves_the_others_in_the_episode(tokenizer: Any) -> None:
    """As mini-swe-agent does with a turn that it can't read."""

    async def act(client: Client) -> ProgramRun:
        first = await client.say(USER)
        await client.say(USER, first, MORE)
        unread = {"role": "user", "content": "No command."}
        third = await client.say(USER, first, MORE, unread)
        await client.say(USER, first, MORE, unread, third, MORE)
        return ENDED

    vllm = ScriptedVllm(tokenizer)
    episode = run(vllm, World(act))
    sampled = [ids for _, ids in vllm.sampled]
    assert [token for token in episode.traces[0].masks_T if token != -100] == sampled[0] + sampled[2] + sampled[3]
    assert episode.traces[0].context_turns == ()
    assert episode.program is not None
    assert (episode.program.other_sequences, episode.program.other_tokens) == (1, len(sampled[1]))


def test_it_gets_as_many_turns_as_an_episode_may_have(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        answers = [await client.chat(USER), await client.chat(MORE), await client.chat(USER)]
        assert [answer.status_code for answer in answers] == [200, 200, 403]
        assert "max_turns" in answers[-1].json()["error"]["message"]
        return ProgramRun(1, None, "refused")

    assert run(ScriptedVllm(tokenizer), World(act), max_turns=2).stop_reason is StopReason.MAX_TURNS


def test_it_gets_no_longer_prompt_than_an_episode_may_have(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        await client.say(USER)
        refused = await client.chat({"role": "user", "content": "x y " * 200})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        return ProgramRun(1, None, "refused")

    assert run(ScriptedVllm(tokenizer), World(act), max_token_length=64).stop_reason is StopReason.CONTEXT_FULL


@pytest.mark.parametrize(
    ("ended", "stop"),
    [
        (ProgramRun(137, "time", ""), StopReason.AGENT_TIMEOUT),
        (ProgramRun(137, "memory", ""), StopReason.AGENT_FAILED),
        (ProgramRun(0, "disk", ""), StopReason.AGENT_FAILED),
        (ProgramRun(3, None, ""), StopReason.AGENT_FAILED),
    ],
)
def test_why_it_ended(tokenizer: Any, ended: ProgramRun, stop: StopReason) -> None:
    async def act(client: Client) -> ProgramRun:
        await client.say(USER)
        return ended

    episode = run(ScriptedVllm(tokenizer), World(act))
    assert (episode.stop_reason, episode.tool_errors) == (stop, 1)
    assert episode.reward is not None
    assert episode.reward.tool_usage == 0


def test_a_program_that_asks_nothing_is_started_once_more(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        return ProgramRun(127, None, "agent: not found")

    world = World(act)
    with pytest.raises(AgentError, match=r"made no request on task 't'.*exit code 127.*agent: not found"):
        run(ScriptedVllm(tokenizer), world)
    assert world.starts == 2

    async def act_later(client: Client) -> ProgramRun:
        return await (act if world.starts == 1 else two_turns)(client)

    world = World(act_later)
    assert len(run(ScriptedVllm(tokenizer), world).turns) == 2


def test_a_program_of_which_nothing_can_be_learned_is_an_error(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        await client.say(USER, top_k=1)
        return ENDED

    world = World(act)
    with pytest.raises(AgentError, match="1 requests"):
        run(ScriptedVllm(tokenizer), world)
    assert world.starts == 1


def test_its_pictures_are_refused(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        part = {"type": "image_url", "image_url": {"url": uri(png())}}
        refused = await client.chat({"role": "user", "content": [part]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_images")
        await client.say(USER)
        return ENDED

    run(ScriptedVllm(tokenizer), World(act))


def test_a_key_opens_one_episode_while_it_runs(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        assert (await client.chat(USER, key="another")).status_code == 401
        assert (await client.http.get("http://policy/sessions/episode")).status_code == 404
        assert (await client.http.get("http://policy/metrics")).status_code == 404
        await client.say(USER)
        return ENDED

    world = World(act)
    run(ScriptedVllm(tokenizer), world)
    assert len(world.keys[0]) > 40


def test_a_policy_that_fails_makes_no_zero(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        await client.say(USER)
        vllm.status = 500
        assert (await client.chat(MORE)).status_code == 503
        return ProgramRun(1, None, "no answer")

    vllm = ScriptedVllm(tokenizer)
    episode = run(vllm, World(act))
    assert episode.stop_reason is StopReason.SERVER_ERROR
    assert isinstance(episode.error, ServerUnreachableError)
    assert episode.reward is None


@pytest.mark.parametrize("status", [400, 413])
def test_a_request_that_the_policy_refuses_voids_no_episode(tokenizer: Any, status: int) -> None:
    """Code that the model writes may ask too; what it asks wrongly must not take back what the episode earned."""

    async def act(client: Client) -> ProgramRun:
        await client.say(USER)
        vllm.status = status
        assert (await client.chat(MORE)).status_code == status
        return ENDED

    vllm = ScriptedVllm(tokenizer)
    episode = run(vllm, World(act))
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.FINISHED, 1)
    assert episode.reward is not None


def test_a_sandbox_that_dies_ends_its_episode_alone(tokenizer: Any) -> None:
    async def act(client: Client) -> ProgramRun:
        await client.say(USER)
        raise SandboxError("gone")

    episode = run(ScriptedVllm(tokenizer), World(act))
    assert episode.stop_reason is StopReason.SANDBOX_DIED
    assert episode.reward is not None
    assert episode.reward.total == 0
    with pytest.raises(SandboxError, match="nothing works here"):
        run(ScriptedVllm(tokenizer), World(act, is_broken=True))


def test_a_world_without_programs_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="NoWorld has no sandbox for env"):
        run(ScriptedVllm(tokenizer), type("NoWorld", (), {})())
