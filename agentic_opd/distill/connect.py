"""Settings -> connected and checked servers for distillation: a judge and teachers (I/O)."""

import logging
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import SecretStr
from renderers import Renderer

from agentic_opd.core.attachments.files import AttachedFiles
from agentic_opd.core.errors import ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.text import control_tokens
from agentic_opd.distill.config import DistillConfig, JudgeConfig, TeacherServer
from agentic_opd.distill.hints import JudgedBy, Questions
from agentic_opd.distill.insertion import HintEncoder
from agentic_opd.distill.judge import OpenAIJudge
from agentic_opd.distill.prompts import (
    JUDGE_QUESTION,
    JUDGE_STEP_PROMPT,
    JUDGE_SYSTEM_PROMPT,
    TRAJECTORY_QUESTION,
    TRAJECTORY_SYSTEM_PROMPT,
)
from agentic_opd.distill.servers import DistillServers
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.info import ServerInfo, check_model, fetch_info
from agentic_opd.plugin.scoring import ReadBy

logger = logging.getLogger(__name__)

READ_BY: dict[str, ReadBy] = {"live": "policy", "frozen": "base", "ema": "teacher"}
"""`TeacherConfig.weights` -> the weights that read."""


@dataclass(frozen=True, slots=True)
class PolicyEndpoint:
    """The policy's server, which is also the judge and the teacher unless settings name others."""

    base_url: str
    model: str
    api_key: SecretStr | None = None
    files: AttachedFiles | None = None
    """The files of the attachments in its conversations, which a teacher reads too."""

    @classmethod
    def of(cls, server: PluginClient) -> Self:
        key = SecretStr(server.http.api_key) if server.http.api_key else None
        return cls(server.url, server.info.model, key, server.attached.files)


async def connect(
    config: DistillConfig,
    policy: PolicyEndpoint,
    renderer: Renderer,
    tokenizer: Any,
    *,
    max_token_length: int,
    retry_s: float,
    asks_judge: bool = True,
) -> DistillServers:
    """Connect to judge and teacher, and check that they fit sequences of `max_token_length` tokens.

    Without `asks_judge` the judge is not checked: it is never asked, and may be gone.

    Raises:
        RendererError: the chat template can't take a hint at `config.hint.placement`.
        ServerMismatchError: the teacher does not fit; the message says how to restart it.
        ServerRequestError: a server refused a request, for example because of a wrong key.
        ServerUnreachableError: a server is unreachable.
    """
    hint_encoder = HintEncoder(renderer, tokenizer)
    for hint in ("A plain hint.", config.hint.neutral):
        hint_encoder.encode(hint, as_message=config.hint.placement == "end")
    separate = {teacher.kind: teacher for teacher in config.teacher.separate}
    usual = separate.pop(None, None)
    policy_info = None
    if config.teacher.separate:
        async with JsonClient(policy.base_url, _plain(policy.api_key), retry_s=retry_s) as client:
            policy_info = await fetch_info(client)
    async with AsyncExitStack() as undo:

        async def connected(
            server: TeacherServer, policy_server: ServerInfo | None, read_by: ReadBy, key_setting: str
        ) -> PluginClient:
            teacher = await connect_teacher(
                JsonClient(server.base_url, _plain(server.api_key), retry_s=retry_s, key_setting=key_setting),
                tokenizer,
                top_k=config.logprobs_asked,
                max_token_length=max_token_length,
                model_name=server.model_name,
                policy=policy_server,
                max_concurrent=config.teacher.max_concurrent,
                read_by=read_by,
                files=policy.files,
            )
            undo.push_async_callback(teacher.close)
            return teacher

        of_policy = TeacherServer(
            base_url=policy.base_url, model_name=config.teacher.model_name, api_key=policy.api_key
        )
        own_key = JsonClient.key_setting
        teacher = await connected(
            usual.server if usual else of_policy,
            policy_info if usual else None,
            READ_BY[config.teacher.weights],
            usual.key_setting if usual else own_key,
        )
        is_policy = usual is None and config.teacher.weights == "live"
        has_student = config.teacher.support != "teacher" and bool(separate or not is_policy)
        student = await connected(of_policy, None, "policy", own_key) if has_student else None
        teachers = {
            kind: await connected(of_kind.server, policy_info, "policy", of_kind.key_setting)
            for kind, of_kind in separate.items()
            if kind is not None
        }
        judge = make_judge(config.judge, policy, retry_s)
        undo.push_async_callback(judge.close)
        if asks_judge and config.hint.asks_judge:
            await judge.check()
        undo.pop_all()
        return DistillServers(
            policy_url=policy.base_url,
            judge=JudgedBy(
                judge, questions_of(config, tokenizer), is_policy=config.judge.base_url is None, context=judge.context
            ),
            teacher=teacher,
            hint_encoder=hint_encoder,
            teacher_is_policy=is_policy,
            teachers=teachers,
            student=student,
        )


def questions_of(config: DistillConfig, tokenizer: Any) -> Questions:
    """Build the judge's questions from the settings.

    Spellings of the control tokens of `tokenizer`, the policy's, are broken in questions, because the policy may be the
    judge; without one, those of common model families.
    """
    return Questions(
        secret=secrets.token_bytes(16),
        system_prompt=config.judge.system_prompt or JUDGE_SYSTEM_PROMPT,
        step_prompt=config.judge.step_prompt or JUDGE_STEP_PROMPT,
        template=config.judge.question or JUDGE_QUESTION,
        trajectory_prompt=config.judge.trajectory_prompt or TRAJECTORY_SYSTEM_PROMPT,
        trajectory_template=config.judge.trajectory_question or TRAJECTORY_QUESTION,
        control_tokens=() if tokenizer is None else tuple(control_tokens(tokenizer).values()),
    )


async def connect_teacher(
    http: JsonClient,
    tokenizer: Any,
    *,
    top_k: int,
    max_token_length: int,
    model_name: str | None = None,
    policy: ServerInfo | None = None,
    max_concurrent: int = 32,
    read_by: ReadBy = "policy",
    files: AttachedFiles | None = None,
) -> PluginClient:
    """Connect to a scoring server and check that it fits; on failure, close `http`.

    The server must serve `model_name` (None: any model) and give the same ids as `tokenizer`. `policy` is the policy
    server's info, if the teacher is another server. `files` are those of the attachments in prompts.

    Raises:
        ServerMismatchError, ServerRequestError, ServerUnreachableError: as `connect`.
    """
    async with AsyncExitStack() as undo:
        undo.push_async_callback(http.close)
        info = await fetch_info(http)
        if model_name is not None:
            await check_model(http, info, model_name, "env.teacher.model_name")
        if read_by != "policy" and not info.max_adapters:
            raise ServerMismatchError(
                f"{http.base_url} holds one set of weights, which new ones replace, so env.teacher.weights must be "
                "live there. Restart it with scripts/serve_vllm --max-lora-rank N and train adapters (lora_rank), or "
                "set env.teacher.base_url."
            )
        if not info.has_plugin:
            info = replace(info, model=model_name or info.model)
            logger.warning(
                "%s has no agentic_opd plugin: scoring through /v1/completions, which is many times slower. "
                "scripts/serve_vllm MODEL starts a server that has it.",
                http.base_url,
            )
        # The policy can't learn ids outside of its vocabulary.
        sizes = [size for size in (info.vocab_size, policy.vocab_size if policy else None) if size is not None]
        limited = replace(info, vocab_size=min(sizes, default=None))
        teacher = PluginClient(http, limited, read_by, max_concurrent)
        teacher.attached.files = files
        await teacher.check_scores(top_k)
        teacher.check_caps(context=max_token_length, vocab_size=len(tokenizer), top_k=top_k)
        await teacher.check_tokenizer(tokenizer)
        undo.pop_all()
        return teacher


def make_judge(config: JudgeConfig, policy: PolicyEndpoint, retry_s: float) -> OpenAIJudge:
    """Return the configured judge; without one, the policy's server is the judge."""
    return OpenAIJudge(
        config.base_url or policy.base_url.rstrip("/").removesuffix("/v1") + "/v1",
        config.model_name or policy.model,
        config.api_key if config.base_url else policy.api_key,
        config,
        retry_s,
    )


def _plain(key: SecretStr | None) -> str | None:
    return key.get_secret_value() if key else None
