"""Checks of servers that only `doctor` makes: versions, rendering, judge, teacher, noise without a hint, run-api."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version
from pydantic import SecretStr

from agentic_opd.atropos.api import TrajectoryApi
from agentic_opd.core.errors import RendererError, ServerMismatchError, ServerRequestError, ServerUnreachableError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.precision import Noise, tolerance_for
from agentic_opd.core.types import Evidence, HindsightPair, Message, TeacherRequest, shared_length
from agentic_opd.distill.connect import PolicyEndpoint, connect_teacher, make_judge, questions_of
from agentic_opd.distill.evidence import ConversationTurn, WholeRollout, turn_text
from agentic_opd.distill.hints import parse_vote
from agentic_opd.distill.insertion import encode_hint
from agentic_opd.distill.trajectory import UNKNOWN_CONTEXT_CHARS, parse_answer, windows_of
from agentic_opd.env.config import AgenticOPDEnvConfig, tokenizer_names
from agentic_opd.env.setup import Note, Setup, Status
from agentic_opd.plugin.client import PluginClient
from agentic_opd.rollout.chat_format import ChatFormat

_RETRY_S, _TIMEOUT_S = 2.0, 30.0
"""Time limits in seconds, shorter than a run's, for a quick diagnosis."""
_OLDEST_VLLM, _VERSION = Version("0.32"), re.compile(r"\d+(\.\d+)*")
_SAMPLED = 32

_FIRST_MESSAGES: list[Message] = [
    {"role": "system", "content": "You are a coding agent."},
    {"role": "user", "content": "Write `double(x)` in solution.py: return twice x."},
]

_SOLUTION = "def fizzbuzz(n):\n    if n % 3 == 0:\n        return 'Fizz'\n    return 'Buzz' if n % 5 == 0 else str(n)\n"
_CALLS = [
    {"function": {"name": "write_file", "arguments": {"path": "solution.py", "content": _SOLUTION}}},
    {"function": {"name": "terminal", "arguments": {"command": "python test_solution.py"}}},
]
PAIR = HindsightPair(
    turn_index=0,
    task_text="Write `fizzbuzz(n)` in solution.py: return 'Fizz' if n is divisible by 3, 'Buzz' if by 5, 'FizzBuzz' "
    "if by both, else str(n).\n\nExamples (test_solution.py runs them):\nfizzbuzz(3) == 'Fizz'\n"
    "fizzbuzz(15) == 'FizzBuzz'",
    turn_text=turn_text({"role": "assistant", "content": "", "tool_calls": _CALLS}),
    evidence=(
        Evidence(
            "tool",
            "[write_file]\nwrote 4 lines to solution.py\n\n[terminal]\nok   fizzbuzz(3)\n"
            "FAIL fizzbuzz(15): expected 'FizzBuzz', got 'Fizz'\n1 of 2 examples passed\n[exit code 1]",
        ),
    ),
)
"""A turn with an obvious mistake, about which any judge should give a hint."""
ROLLOUT = WholeRollout(PAIR.task_text, (ConversationTurn(0, PAIR.turn_text, PAIR.evidence[0].text),), None)
"""That turn as a rollout."""


@dataclass
class DoctorSetup(Setup):
    """The set-up under diagnosis; its connections have short time limits."""

    config: AgenticOPDEnvConfig  # type: ignore[assignment]
    policy_name: str = "default"
    """The policy's model as configured."""
    is_serve: bool = False
    """Whether a missing trajectory API is a failure."""

    @classmethod
    def of(cls, config: AgenticOPDEnvConfig, servers: Sequence[Any], *, is_serve: bool) -> "DoctorSetup":
        """Build the set-up from the settings without connecting."""
        http = [connection(config, server.base_url, server.api_key) for server in servers]
        top_k = config.logprobs_asked if config.opd_enabled and config.teacher.base_url is None else None
        names = tokenizer_names(config, servers[0])
        models = [server.model_name for server in servers]
        return cls(config, http, top_k, models, names, policy_name=models[0], is_serve=is_serve)

    @property
    def policy(self) -> PolicyEndpoint:
        """The first of the policy's servers; its model is the configured one until the server has reported its own."""
        http, model = self.connections[0], self.clients[0].info.model if self.clients else self.policy_name
        return PolicyEndpoint(f"{http.base_url}/v1", model, SecretStr(http.api_key) if http.api_key else None)

    async def close(self) -> None:
        for http in self.connections:
            await http.close()


def connection(
    config: AgenticOPDEnvConfig, url: str, key: str | None = None, key_setting: str = JsonClient.key_setting
) -> JsonClient:
    """Return a connection with short time limits."""
    retry_s = min(config.server_retry_s, _RETRY_S)
    return JsonClient(url, key, timeout_s=_TIMEOUT_S, retry_s=retry_s, key_setting=key_setting)


async def check_versions(setup: DoctorSetup) -> Note:
    """Check that the servers have the plugin and a tested version of vLLM; `fetch_info` has compared the plugin's."""
    doubts: list[str] = []
    for client in setup.clients:
        info, vllm = client.info, client.info.vllm_version or await _vllm_version(client.http)
        if not info.has_plugin:
            doubts.append(
                f"{client.url} has no agentic_opd plugin, so scoring is many times slower: start it with "
                f"scripts/serve_vllm {info.model}"
            )
        if vllm is not None and (number := _VERSION.match(vllm)) and Version(number[0]) < _OLDEST_VLLM:
            doubts.append(f"{client.url} runs vLLM {vllm}; {_OLDEST_VLLM} and later are tested")
    if doubts:
        return Note("; ".join(doubts), Status.WARNING)
    infos = [client.info for client in setup.clients]
    return Note("; ".join(sorted({f"vLLM {info.vllm_version}, plugin {info.plugin_version}" for info in infos})))


async def _vllm_version(http: JsonClient) -> str | None:
    try:
        return (await http.get("/version")).get("version")
    except (ServerRequestError, AttributeError):
        return None


async def check_rendering(setup: DoctorSetup) -> Note:
    """Check that rendered ids survive the server's tokenizer, that hints can be placed, and the server's template."""
    config, chat, client = setup.config, setup.known_chat(), setup.clients[0]
    if config.opd_enabled:
        encode_hint(chat.renderer, setup.tokenizer, "A plain hint.", as_message=config.hint.placement == "end")
    await _check_ids_survive(client, chat)
    if config.renderer.tool_format != "template":
        return Note(
            f"renderer.tool_format {config.renderer.tool_format}: the server's chat template does not write the tools",
            Status.SKIPPED,
        )
    ours = list(chat.first_prompt(_FIRST_MESSAGES).token_ids)
    options = {key: value for key, value in config.renderer.options.items() if key != "tool_parser"}
    body = {"messages": _FIRST_MESSAGES, "tools": chat.tools, "add_generation_prompt": True}
    try:
        theirs = await client.token_ids(**body, chat_template_kwargs=options)
    except ServerRequestError:
        return Note("the server has no chat template, or it refuses tools", Status.SKIPPED)
    if theirs == ours:
        return Note("a first prompt has the same ids here and there")
    first = shared_length(ours, theirs)
    return Note(
        f"{type(chat.renderer).__name__} and the server's chat template render a first prompt differently, from token "
        f"{first} on ({setup.tokenizer.decode(ours[first : first + 8])!r} here, "
        f"{setup.tokenizer.decode(theirs[first : first + 8])!r} there). The policy reads what is rendered here: is "
        "env.renderer.name the model's own?",
        Status.WARNING,
    )


async def _check_ids_survive(client: PluginClient, chat: ChatFormat) -> None:
    """Check that the server decodes the ids of a rendered tool call to a text that encodes to the same ids."""
    name = chat.tools[0]["function"]["name"] if chat.tools else "run"
    call = {"id": "call_0_0", "type": "function", "function": {"name": name, "arguments": '{"command": "ls"}'}}
    turn: Message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    ids = chat.renderer.render_ids([*_FIRST_MESSAGES, turn], tools=chat.tools)  # type: ignore[list-item]
    again = await client.token_ids(prompt=await client.text(ids), add_special_tokens=False)
    if again != ids:
        raise RendererError(
            f"{client.url} reads {len(ids)} ids of a rendered tool call as a text of {len(again)} other ids: the "
            "tokenizer here is not the server's. Set env.tokenizer_name to the model that is served."
        )


async def check_judge(setup: DoctorSetup) -> Note:
    """Check that the judge answers in the protocol."""
    config = setup.config
    if not config.opd_enabled:
        return Note("distillation is off", Status.SKIPPED)
    if not config.hint.asks_judge:
        return Note(f"hint.source {', '.join(config.hint.source)} needs no judge", Status.SKIPPED)
    if config.judge.base_url is None and not setup.clients:
        return Note("needs: server", Status.SKIPPED)
    judge, num_votes = make_judge(config.judge, setup.policy, setup.connections[0].retry_s), config.prm_votes
    try:
        await judge.check()
        questions, max_turns = questions_of(config, setup.tokenizer), config.judge.max_turns
        (window,) = windows_of(ROLLOUT, questions, UNKNOWN_CONTEXT_CHARS)
        messages = questions.hint_messages(questions.question(PAIR))
        if config.judge.scope == "trajectory":
            messages = questions.trajectory_messages(window.question, max_turns)
        texts, seconds, _ = await judge.ask(messages, num_votes)
    finally:
        await judge.close()
    if config.judge.scope == "trajectory":
        readable = sum(parse_answer(text, window, max_turns).vote.kind.is_readable for text in texts)
    else:
        readable = sum(parse_vote(text).decision is not None for text in texts)
    who = f"{judge.model} at {judge.base_url}"
    if not readable:
        raise ServerMismatchError(
            f"{who}: all {num_votes} votes break the protocol; the first begins {texts[0][:120]!r}. Take "
            "another judge (env.judge.base_url, env.judge.model_name); a reasoning model needs a larger "
            "env.judge.max_tokens, or thinking switched off in env.judge.extra_body"
        )
    text = f"{who}: {readable} of {num_votes} votes in the protocol, {seconds:.1f} s"
    if 2 * readable <= num_votes:
        return Note(f"{text}. A majority can't come about like this: see env.judge.max_tokens", Status.WARNING)
    return Note(text)


async def check_teacher(setup: DoctorSetup) -> Note:
    """Check that separate teachers fit the policy."""
    config = setup.config
    if not config.opd_enabled or not config.teacher.separate:
        return Note("the policy's server scores" if config.opd_enabled else "distillation is off", Status.SKIPPED)
    teachers: list[str] = []
    for separate in config.teacher.separate:
        server = separate.server
        teacher = await connect_teacher(
            connection(
                config,
                server.base_url,
                server.api_key.get_secret_value() if server.api_key else None,
                separate.key_setting,
            ),
            setup.tokenizer,
            top_k=config.logprobs_asked,
            max_token_length=config.max_token_length,
            model_name=server.model_name,
            policy=setup.clients[0].info,
        )
        await teacher.close()
        teachers.append(separate.named(f"{teacher.info.model} at {server.base_url}"))
    return Note("; ".join(teachers))


async def check_noise(setup: DoctorSetup) -> Note:
    """Check that scoring sampled tokens without a hint reproduces the logprobs of their sampling."""
    config, client = setup.config, setup.clients[0]
    if not config.opd_enabled:
        return Note("distillation is off", Status.SKIPPED)
    if config.teacher.base_url is not None:
        return Note("the teacher is another model, so there is nothing to compare with", Status.SKIPPED)
    prompt = setup.known_chat().first_prompt(_FIRST_MESSAGES).token_ids
    (sampled,) = await client.complete(prompt, {"temperature": 1.0, "max_tokens": _SAMPLED})
    ids = sampled.token_ids
    rows = (await client.score(TeacherRequest((*prompt, *ids), len(ids), len(prompt), ()), 1)).rows
    differences = [abs(a - b) for a, b in zip(sampled.logprobs, rows.actual_R.tolist(), strict=True)]
    return judged_noise(differences, client.info.dtype)


def judged_noise(differences: Sequence[float], precision: str | None) -> Note:
    """Judge the differences (nats) between two readings of sampled tokens by the server's precision."""
    noise, tolerance = Noise.of(differences), tolerance_for(precision)
    text = (
        f"{noise.largest:.1e} nats at most, {noise.rms:.1e} root mean square, over {len(differences)} sampled tokens "
        f"in {precision or 'a precision that the server does not name'}"
    )
    if noise.exceeds(tolerance):
        return Note(
            f"{text}: more than the precision explains ({tolerance}). What else changes logprobs between sampling and "
            "scoring: a quantised KV cache, another attention backend for prompts?",
            Status.WARNING,
        )
    return Note(text)


async def check_trajectories(setup: DoctorSetup) -> Note:
    """Check that the trajectory API answers; only `serve` needs it."""
    url = setup.config.rollout_server_url
    api = TrajectoryApi(url)
    try:
        trainer = await api.info()
    except ServerUnreachableError as error:
        if setup.is_serve:
            raise
        return Note(f"{error} Only serve needs it.", Status.WARNING)
    finally:
        await api.close()
    if trainer.batch_size < 0:
        return Note(f"{url} answers; no trainer has registered yet")
    if trainer.batch_size < setup.config.group_size:
        return Note(
            f"{url}: a group of {setup.config.group_size} does not fit the trainer's batches of {trainer.batch_size}: "
            "lower env.group_size",
            Status.FAILED if setup.is_serve else Status.WARNING,
        )
    return Note(f"{url}: a trainer takes batches of {trainer.batch_size}")
