"""Checks of distillation: the judge's protocol, the teacher's fit, the noise without a hint, and the trajectory API."""

from collections.abc import Sequence

from agentic_opd.atropos.api import TrajectoryApi
from agentic_opd.cli.doctor.diagnosis import Note, Setup, Status
from agentic_opd.cli.doctor.servers import FIRST_MESSAGES
from agentic_opd.core.errors import ServerMismatchError, ServerUnreachableError
from agentic_opd.core.precision import Noise, tolerance_for
from agentic_opd.core.types import Evidence, HindsightPair, TeacherRequest
from agentic_opd.distill.config import TeacherServer
from agentic_opd.distill.connect import connect_teacher, make_judge, make_teacher, questions_of
from agentic_opd.distill.hints import parse_vote
from agentic_opd.distill.teacher import TeacherClient
from agentic_opd.distill.turns import turn_text
from agentic_opd.env.policy_server import PolicyServer, ServedPolicy

_SAMPLED = 32

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


async def check_judge(setup: Setup) -> Note:
    """Check that the judge answers in the protocol."""
    if not setup.config.opd_enabled:
        return Note("distillation is off", Status.SKIPPED)
    if not setup.config.asks_judge:
        return Note(f"hint_source {', '.join(setup.config.hint_source)} needs no judge", Status.SKIPPED)
    if setup.config.judge_base_url is None and not setup.infos:
        return Note("needs: server", Status.SKIPPED)
    judge, asked = make_judge(setup.config, setup.policy, setup.retry_s), setup.config.prm_votes
    try:
        await judge.check()
        questions = questions_of(setup.config, setup.tokenizer)
        texts, seconds = await judge.ask(questions.hint_messages(questions.question(PAIR)), asked)
    finally:
        await judge.close()
    votes = [parse_vote(text) for text in texts]
    readable = [vote for vote in votes if vote.decision is not None]
    who = f"{judge.model} at {judge.base_url}"
    if not readable:
        raise ServerMismatchError(
            f"{who}: none of {asked} votes keeps to the protocol; the first begins {votes[0].text[:120]!r}. Take "
            "another judge (env.judge_base_url, env.judge_model_name); a reasoning model needs a larger "
            "env.judge_max_tokens, or thinking switched off in env.judge_extra_body"
        )
    text = f"{who}: {len(readable)} of {asked} votes in the protocol, {seconds:.1f} s"
    if 2 * len(readable) <= asked:
        return Note(f"{text}. A majority can't come about like this: see env.judge_max_tokens", Status.WARNING)
    return Note(text)


async def check_teacher(setup: Setup) -> Note:
    """Check that separate teachers fit the policy."""
    config = setup.config
    separate = dict(config.teachers)
    if (usual := config.usual_teacher) is not None:
        separate = {"": usual, **separate}
    if not config.opd_enabled or not separate:
        return Note("the policy's server scores" if config.opd_enabled else "distillation is off", Status.SKIPPED)
    found: list[str] = []
    for kind, server in separate.items():
        teacher = await _separate_teacher(setup, server)
        await teacher.close()
        found.append(f"{f'{kind}: ' if kind else ''}{teacher.info.model} at {server.base_url}")
    return Note("; ".join(found))


async def _separate_teacher(setup: Setup, server: TeacherServer) -> TeacherClient:
    config, key = setup.config, server.api_key
    return await connect_teacher(
        setup.client(server.base_url, key.get_secret_value() if key else None),
        setup.tokenizer,
        top_k=config.logprobs_asked,
        max_token_length=config.max_token_length,
        model_name=server.model_name,
        policy=setup.infos[0],
    )


async def check_noise(setup: Setup) -> Note:
    """Check that scoring sampled tokens without a hint reproduces the logprobs of their sampling."""
    config = setup.config
    if not config.opd_enabled:
        return Note("distillation is off", Status.SKIPPED)
    if config.teacher_base_url is not None:
        return Note("the teacher is another model, so there is nothing to compare with", Status.SKIPPED)
    prompt = setup.known_chat().first_prompt(FIRST_MESSAGES).token_ids
    server = PolicyServer(setup.servers[0].model_copy())
    server.client.retry_s, server.has_plugin = setup.retry_s, setup.infos[0].has_plugin
    server.config.model_name = setup.infos[0].model
    try:
        sampled = await ServedPolicy(server, {"temperature": 1.0}).sample(prompt, _SAMPLED)
    finally:
        await server.client.close()
    ids = sampled.token_ids
    request = TeacherRequest((*prompt, *ids), len(ids), len(prompt), ())
    rows = (await make_teacher(setup.clients[0], setup.infos[0]).score(request, 1)).rows
    differences = [float(a) - b for a, b in zip(rows.actual_R, sampled.logprobs, strict=True)]
    return judged_noise(differences, setup.infos[0].dtype)


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


async def check_trajectories(setup: Setup) -> Note:
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
