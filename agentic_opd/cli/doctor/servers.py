"""Checks of the policy's servers: reachable, recent, large enough, consistent with the local tokenizer and renderer."""

import asyncio
from functools import partial
from typing import Any

from packaging.version import InvalidVersion, Version
from transformers import AutoTokenizer

from agentic_opd import __version__
from agentic_opd.cli.doctor.diagnosis import Note, Setup, Status
from agentic_opd.core.errors import RendererError, ServerRequestError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.server_info import (
    ServerInfo,
    ask_text,
    ask_token_ids,
    check_caps,
    check_tokenizer,
    fetch_server_info,
)
from agentic_opd.core.types import Message
from agentic_opd.distill.connect import check_completions
from agentic_opd.distill.scoring import encode_hint
from agentic_opd.env.agent import name_of_tokenizer
from agentic_opd.env.command import name_models
from agentic_opd.rollout.chat import Chat
from agentic_opd.rollout.first_prompts import described, too_long
from agentic_opd.rollout.renderer import check_round_trip, configured_renderer, explained_tokenizer_errors
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.coding.tools import TOOL_SPECS
from agentic_opd.worlds.coding.world import SYSTEM_PROMPT

_OLDEST_VLLM = Version("0.32")

FIRST_MESSAGES: list[Message] = [
    {"role": "system", "content": SYSTEM_PROMPT},
    {"role": "user", "content": "Write `double(x)` in solution.py: return twice x."},
]


async def check_server(setup: Setup) -> Note:
    """Check that every server answers and is a vLLM server."""
    setup.infos = [await fetch_server_info(client) for client in setup.clients]
    await name_models(list(setup.servers), setup.retry_s)
    return Note(
        ", ".join(f"{info.model} at {client.base_url}" for info, client in zip(setup.infos, setup.clients, strict=True))
    )


async def check_versions(setup: Setup) -> Note:
    """Check the servers for this version of the plugin and a tested version of vLLM."""
    doubts: list[str] = []
    for client, info in zip(setup.clients, setup.infos, strict=True):
        vllm = info.vllm_version or await _vllm_version(client)
        if not info.has_plugin:
            doubts.append(
                f"{client.base_url} has no agentic_opd plugin, so scoring is many times slower: start it with "
                f"scripts/serve_vllm {info.model}"
            )
        elif info.plugin_version != __version__:
            doubts.append(
                f"{client.base_url} has plugin {info.plugin_version}, this is {__version__}: install the same version "
                "in vLLM's environment, and restart it"
            )
        if vllm is not None and _is_older(vllm):
            doubts.append(f"{client.base_url} runs vLLM {vllm}; {_OLDEST_VLLM} and later are tested")
    if doubts:
        return Note("; ".join(doubts), Status.WARNING)
    shown = sorted({f"vLLM {info.vllm_version}, plugin {info.plugin_version}" for info in setup.infos})
    return Note("; ".join(shown))


async def _vllm_version(client: JsonClient) -> str | None:
    try:
        return (await client.get("/version")).get("version")
    except (ServerRequestError, AttributeError):
        return None


def _is_older(vllm: str) -> bool:
    try:
        return Version(vllm) < _OLDEST_VLLM
    except InvalidVersion:
        return False


async def check_context(setup: Setup) -> Note:
    """Check that a whole episode fits each server's context."""
    needed = setup.config.max_token_length
    for client, info in zip(setup.clients, setup.infos, strict=True):
        check_caps(client.base_url, info, context=needed, vocab_size=0, top_k=None)
    return Note(f"{min(info.max_model_len for info in setup.infos)} tokens, {needed} are asked for")


async def check_logprobs(setup: Setup) -> Note:
    """Check that the policy's servers return as many logprobs as a scored row needs."""
    top_k = setup.config.logprobs_asked
    if not setup.config.opd_enabled or setup.config.teacher_base_url is not None:
        return Note("the policy's servers do not score", Status.SKIPPED)
    for client, info in zip(setup.clients, setup.infos, strict=True):
        check_caps(client.base_url, info, context=0, vocab_size=0, top_k=top_k)
        if not info.has_plugin:
            await check_completions(client, info, top_k)
    return Note(f"{top_k} a position are asked for, and returned")


async def check_tokens(setup: Setup) -> Note:
    """Check that the local tokenizer returns the same ids as each server."""
    name = name_of_tokenizer(setup.config, setup.servers[0])
    with explained_tokenizer_errors(name):
        setup.tokenizer = AutoTokenizer.from_pretrained(name)
    encode = partial(setup.tokenizer.encode, add_special_tokens=False)
    for client, info in zip(setup.clients, setup.infos, strict=True):
        check_caps(client.base_url, info, context=0, vocab_size=len(setup.tokenizer), top_k=None)
        await check_tokenizer(client, info, encode, special=setup.tokenizer.eos_token or "")
    return Note(f"{name}: the same ids here and there")


async def check_renderer(setup: Setup) -> Note:
    """Check that a tool call round-trips through ids, locally and on the server, and that hints can be placed."""
    config = setup.config
    renderer = configured_renderer(setup.tokenizer, config)
    chat = Chat(renderer, setup.tokenizer, TOOL_SPECS)
    check_round_trip(chat)
    if config.opd_enabled:
        encode_hint(renderer, setup.tokenizer, "A plain hint.", as_message=config.hint_placement == "end")
    setup.chat = chat
    client, info, name = setup.clients[0], setup.infos[0], type(renderer).__name__
    await _check_ids_survive(client, info, chat)
    ours = list(chat.first_prompt(FIRST_MESSAGES).token_ids)
    options = {key: value for key, value in config.renderer_options.items() if key != "tool_parser"}
    is_template_s = config.tool_format == "template"  # With text, the server's template does not write the tools.
    theirs = await _rendered_by(client, info, chat, options) if is_template_s else None
    if theirs is not None and theirs != ours:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        return Note(
            f"{name} and the server's chat template render a first prompt differently, from token {at} on "
            f"({setup.tokenizer.decode(ours[at : at + 8])!r} here, {setup.tokenizer.decode(theirs[at : at + 8])!r} "
            "there). The policy reads what is rendered here: is env.renderer the model's own?",
            Status.WARNING,
        )
    return Note(f"{name}: a tool call comes back as it was written")


async def check_prompts(setup: Setup) -> Note:
    """Check that every task's first prompt leaves room for an answer."""
    config = setup.config
    world = make_world(config.world, config, config.system_prompt)
    train, held_out = await world.train_and_eval_tasks()
    tasks = {task.task_id: task for task in (*train, *held_out)}
    limit = config.max_token_length
    by_program = config.agent_command is not None
    chat = Chat(setup.known_chat().renderer, setup.tokenizer, world.tools)
    long = await asyncio.to_thread(too_long, tasks.values(), world, chat, limit, by_program=by_program)
    if not long:
        return Note(f"the first prompts of all {len(tasks)} tasks fit {limit} tokens")
    what = described(long, len(tasks), limit)
    if config.dataset_skip_too_long and len(long) < len(tasks):
        return Note(f"{what}; they are left out", Status.WARNING)
    return Note(
        f"{what}. Raise env.max_token_length, or leave such tasks out with env.dataset_skip_too_long", Status.FAILED
    )


async def _check_ids_survive(client: JsonClient, info: ServerInfo, chat: Chat) -> None:
    """Check that the server decodes the ids of a rendered tool call to a text that encodes to the same ids."""
    call = {"id": "call_0_0", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    turn: Message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    ids = chat.renderer.render_ids([*FIRST_MESSAGES, turn], tools=chat.tools)  # type: ignore[list-item]
    text = await ask_text(client, info.model, ids)
    body = {"model": info.model, "prompt": text, "add_special_tokens": False}
    again = await ask_token_ids(client, body)
    if again != ids:
        raise RendererError(
            f"{client.base_url} reads {len(ids)} ids of a rendered tool call as a text of {len(again)} other ids: the "
            "tokenizer here is not the server's. Set env.tokenizer_name to the model that is served."
        )


async def _rendered_by(client: JsonClient, info: ServerInfo, chat: Chat, options: dict[str, Any]) -> list[int] | None:
    """Return the server's template rendering of a first prompt as ids; None if it has no template, or refuses tools."""
    body = {"model": info.model, "messages": FIRST_MESSAGES, "tools": chat.tools, "add_generation_prompt": True}
    try:
        return await ask_token_ids(client, {**body, "chat_template_kwargs": options})
    except ServerRequestError:
        return None
