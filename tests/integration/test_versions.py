"""Gaps on a real vLLM server whose weights change between sampling and scoring, and controls beside them.

The judge is asked after the last turn was sampled and before the first is scored: so it is the judge who pushes.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.local_server import LocalServer
from safetensors.numpy import load_file, save_file

from agentic_opd.env.opd import AgenticOPDEnv
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TaskItem, TurnRecord
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from tests.support import commands
from tests.support.environment import serving
from tests.support.places import MODEL, ROOT
from tests.support.plugin_client import ask
from tests.support.scripted_judge import POSITIVE, judge_server
from tests.support.trajectory import trajectory_api
from tests.support.vllm import Forward, RootedServer

from .test_numbers import check_rows, make_env

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-3
WRITTEN = 1e-4
"""Of numbers with four decimals."""


class Pushes:
    """Checkpoints near the demo policy, pushed one after the other; version n is the n-th of them, 0 the policy."""

    def __init__(self, server: RootedServer) -> None:
        self._server, self._rng, self.due = server, np.random.default_rng(0), False
        self.paths = [ROOT / MODEL]

    def push(self) -> None:
        """Give the server its next weights."""
        path = self._server.root / f"pushed-{len(self.paths)}"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(ROOT / MODEL, path)
        weights = load_file(path / "model.safetensors")
        moved = {name: w + 0.05 * w.std() * self._rng.standard_normal(w.shape) for name, w in weights.items()}
        as_before = {name: moved[name].astype(w.dtype) for name, w in weights.items()}
        save_file(as_before, path / "model.safetensors", metadata={"format": "pt"})
        reply = ask(self._server.server, "/v1/opd/reload_weights", {"path": path.name, "version": len(self.paths)})
        assert reply.status == 200, reply.body
        self.paths.append(path)

    def judged(self, body: dict[str, Any]) -> list[str]:
        """The judge's answer, with a push before the first one that follows `due`."""
        if self.due:
            self.push()
            self.due = False
        return [POSITIVE] * body["n"]


@contextmanager
def pushing_judge(rooted: RootedServer) -> Iterator[tuple[Pushes, str]]:
    pushes = Pushes(rooted)
    with judge_server(pushes.judged) as judge:
        yield pushes, judge


def scored_turns(rollout: ScoredRollout) -> list[TurnRecord]:
    return [turn for turn in rollout.turns or () if turn.is_scored]


def expected(forward: Forward, rollout: ScoredRollout, turn: TurnRecord, model: Path, hint: Any = ()) -> np.ndarray:
    """What the checkpoint says at the turn's tokens [R, V] with these ids where the turn's hint was read."""
    (start, end), tokens = turn.span, list(rollout.tokens_T)
    place = start if turn.insert_at is None else turn.insert_at
    return forward([*tokens[:place], *hint, *tokens[place:end]], model)[start - end - 1 : -1]


def largest(of: Any, among: Any) -> float:
    return float(np.abs(np.asarray(of) - np.asarray(among)).max())


NO_HINT = f"{ROOT}/scripts/learning/hint_sources.py:no_hint"


@pytest.mark.parametrize(
    "hint_source", [pytest.param(NO_HINT, marks=pytest.mark.all), "judge"], ids=["no_hint", "judge"]
)
def test_a_push_between_sampling_and_scoring_is_not_in_the_gap(
    rooted: RootedServer, forward: Forward, hint_source: str
) -> None:
    """An empty hint's gap is the engine's noise after each of three pushes; what was sampled before it says something
    else. With a hint the gap is its own; the test below has the empty one under `serve`.
    """

    async def roll() -> None:
        env: AgenticOPDEnv = make_env(rooted.server, judge, group_size=1, hint={"source": hint_source})
        await env.setup()
        try:
            for version in range(1, 4):
                pushed.due = True
                group = (await env.collect(TaskItem(builtin_tasks()[version % 8], 0))).group
                (rollout,) = group.rollouts
                assert not GroupChecker().read(group.to_wire()).problems
                moved.append(check(rollout, version))
                assert group.distillation is not None
                assert group.distillation.noise_floor is not None
                assert group.distillation.noise_floor < TOLERANCE
        finally:
            await env.close()

    def check(rollout: ScoredRollout, version: int) -> float:
        """How far the pushed weights are from those that sampled, at the tokens of the rollout."""
        turns, far = scored_turns(rollout), 0.0
        assert turns
        assert rollout.rows is not None
        for turn in turns:
            span, ids = slice(*turn.span), list(rollout.tokens_T[slice(*turn.span)])
            rows = np.arange(len(ids))
            assert (turn.weight_version, turn.scored_version) == (version - 1, version)
            now = expected(forward, rollout, turn, pushed.paths[version])[rows, ids]
            then = expected(forward, rollout, turn, pushed.paths[version - 1])[rows, ids]
            assert largest(rollout.baseline_T[span], now) < WRITTEN
            assert largest(rollout.logprobs_T[span], then) < WRITTEN
            hinted = expected(forward, rollout, turn, pushed.paths[version], turn.hint_token_ids)[rows, ids]
            teacher = [row[0] for row in rollout.rows.logprobs_TK[span]]
            assert largest(teacher, hinted) < TOLERANCE
            gap = largest(teacher, rollout.baseline_T[span])
            assert gap < TOLERANCE if hint_source == NO_HINT else gap > TOLERANCE
            far = max(far, largest(rollout.baseline_T[span], rollout.logprobs_T[span]))
        return far

    moved: list[float] = []
    with pushing_judge(rooted) as (pushed, judge):
        asyncio.run(roll())
    assert min(moved) > 10 * TOLERANCE


class OftenPushed(Pushes):
    """Pushes with every third question, then with every twelfth: the API may hand out none of the first groups."""

    def __init__(self, server: RootedServer, pushes: int) -> None:
        super().__init__(server)
        self.questions, self.pushes = 0, pushes

    def judged(self, body: dict[str, Any]) -> list[str]:
        self.questions += 1
        self.due = self.questions % (3 if len(self.paths) <= self.pushes else 12) == 0
        return super().judged(body)


@pytest.mark.parametrize("pushes", [4, pytest.param(20, marks=pytest.mark.all)])
def test_pushes_under_serve_are_not_in_the_gap(
    rooted: RootedServer, forward: Forward, tmp_path: Path, pushes: int
) -> None:
    """`serve` with episodes beside each other: some turns are scored by the weights that sampled them, others not."""
    pushed = OftenPushed(rooted, pushes)
    with judge_server(pushed.judged) as judge, trajectory_api(tmp_path / "api.log") as api:
        own = ("--env.judge.base_url", judge, "--env.judge.model_name", "judge", "--env.hint.source", NO_HINT)
        own += ("--env.group_size", "2")
        with serving(api.url, rooted.server.base_url, tmp_path, *own) as env:
            env.wait_for("waiting for a trainer")
            api.register_trainer(batch_size=4, num_steps=100)
            turns, rebased = list[tuple[ScoredRollout, TurnRecord]](), list[tuple[ScoredRollout, TurnRecord]]()
            while not (
                0 < len(rebased) < len(turns)
                and len({turn.scored_version for _, turn in turns}) > 3
                and len(pushed.paths) > pushes
            ):
                rollouts = [one for group in api.batch() for one in ScoredGroup.from_wire(group).rollouts]
                turns += [(rollout, turn) for rollout in rollouts for turn in scored_turns(rollout)]
                rebased = [(rollout, turn) for rollout, turn in turns if turn.weight_version != turn.scored_version]
                assert len(turns) < 1000, "turns of four versions, some scored by those that sampled them"
    for rollout, turn in turns:
        span, ids = slice(*turn.span), list(rollout.tokens_T[slice(*turn.span)])
        assert turn.scored_version is not None
        assert rollout.rows is not None
        now = expected(forward, rollout, turn, pushed.paths[turn.scored_version])[np.arange(len(ids)), ids]
        assert largest(rollout.baseline_T[span], now) < WRITTEN
        assert largest([row[0] for row in rollout.rows.logprobs_TK[span]], rollout.baseline_T[span]) < TOLERANCE
    spans = [(rollout, slice(*turn.span)) for rollout, turn in rebased]
    moved = sorted(largest(rollout.baseline_T[span], rollout.logprobs_T[span]) for rollout, span in spans)
    # Of a turn that is all but certain, a push moves little.
    assert moved[len(moved) // 2] > TOLERANCE
    assert moved[-1] > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("control", "top_k"),
    [
        ("other", 20),
        pytest.param("same_task", 1, marks=pytest.mark.all),
        pytest.param("neutral", 5, marks=pytest.mark.all),
    ],
)
def test_a_control_is_what_the_teacher_says_under_another_hint(
    rooted: RootedServer, forward: Forward, control: str, top_k: int
) -> None:
    """Half of the groups are scored by other weights than sampled them; baseline and control are of one reading."""

    async def roll() -> list[str]:
        env = make_env(rooted.server, judge, group_size=1, hint={"control": control}, distill_topk=top_k)
        await env.setup()
        kinds: list[str] = []
        try:
            for number in range(4):
                pushed.due = number % 2 == 1
                group = (await env.collect(TaskItem(builtin_tasks()[number], 0))).group
                assert not GroupChecker().read(group.to_wire()).problems
                kinds += check(group.rollouts[0])
        finally:
            await env.close()
        return kinds

    def check(rollout: ScoredRollout) -> list[str]:
        turns = scored_turns(rollout)
        assert turns
        assert rollout.rows is not None
        for turn in turns:
            assert turn.control is not None
            assert turn.scored_version is not None
            assert turn.control.hint_token_ids != turn.hint_token_ids
            model = pushed.paths[turn.scored_version]
            exact_RV = expected(forward, rollout, turn, model, turn.control.hint_token_ids)
            ids_RK = rollout.rows.token_ids_TK[slice(*turn.span)]
            for exact_V, ids, row in zip(exact_RV, ids_RK, turn.control.logprobs_RK, strict=True):
                known = [(exact_V[token], got) for token, got in zip(ids, row, strict=True) if got is not None]
                assert largest(*zip(*known, strict=True)) < TOLERANCE
                # What is not known is less likely than the control's own top 2 K.
                least = np.sort(exact_V)[-2 * top_k]
                unknown = [token for token, got in zip(ids, row, strict=True) if got is None]
                assert all(exact_V[token] < least + TOLERANCE for token in unknown)
        return [turn.control.kind for turn in turns if turn.control is not None]

    with pushing_judge(rooted) as (pushed, judge):
        kinds = asyncio.run(roll())
    # The judge has one hint for all turns, so that no accepted hint is another one.
    assert set(kinds) == {"neutral"}


def test_two_hints_are_each_others_controls(rooted: RootedServer) -> None:
    said = iter(range(10**6))

    def answer(body: dict[str, Any]) -> list[str]:
        return [f"\\boxed{{1}}\n[HINT_START]Hint number {next(said)} of the judge.[HINT_END]"] * body["n"]

    async def roll() -> list[tuple[str, TurnRecord]]:
        env = make_env(
            rooted.server,
            judge,
            group_size=1,
            hint={"control": "other", "source": f"{ROOT}/scripts/learning/hint_sources.py:wrong_hint"},
        )
        await env.setup()
        found: list[tuple[str, TurnRecord]] = []
        try:
            for task in builtin_tasks()[:4]:
                group = (await env.collect(TaskItem(task, 0))).group
                assert not GroupChecker().read(group.to_wire()).problems
                found += [(task.task_id, turn) for turn in group.rollouts[0].turns or ()]
        finally:
            await env.close()
        return found

    with judge_server(answer) as judge:
        records = asyncio.run(roll())
    task_of = {vote.hint: task for task, turn in records for vote in turn.votes}
    scored = [(task, turn) for task, turn in records if turn.is_scored]
    # The first task finds no accepted hint of another one; a closing turn whose work passed is not judged.
    first = {turn.outcome.value for task, turn in records if task == records[0][0]}
    assert "vote_failed" in first
    assert first <= {"vote_failed", "no_next_state"}
    assert {turn.control.kind for _, turn in scored if turn.control} == {"neutral", "other"}
    for task, turn in scored:
        assert turn.control is not None
        tasks = [task, task_of[turn.hint], *([task_of[turn.control.hint]] if turn.control.kind == "other" else [])]
        assert len(set(tasks)) == len(tasks)


def test_each_kind_of_task_is_scored_by_its_own_teacher(
    vllm_server: LocalServer, rooted: RootedServer, forward: Forward, tmp_path: Path
) -> None:
    """Two kinds; the second server holds other weights than the policy's, and teaches one of them."""
    rows = [
        {"task_id": name, "task": f"Write `{name}(x)`, which returns x.", "test_code": f"assert {name}(4) == 4"}
        for name in ("same", "again")
    ]
    dataset, out = tmp_path / "tasks.jsonl", tmp_path / "groups.jsonl"
    dataset.write_text("\n".join(json.dumps({**row, "kind": f"kind-{row['task_id']}"}) for row in rows) + "\n")
    pushes = Pushes(rooted)
    pushes.push()
    teachers = {"kind-again": {"base_url": rooted.base_url}}
    with judge_server(lambda body: [POSITIVE] * body["n"]) as judge:
        env = make_env(
            *(vllm_server, judge),
            **{
                "teacher": {"by_kind": teachers},
                "world": {"dataset_name": str(dataset)},
                "eval": {"fraction": 0.0},
                "group_size": 2,
            },
            data_path_to_save_groups=str(out),
        )
        asyncio.run(env.process_manager())
    of_task = {group["group_overrides"]["task_id"]: group for group in map(json.loads, out.read_text().splitlines())}
    usual, own = of_task["same"], of_task["again"]
    assert ("teacher" in usual["group_overrides"]["opd"], own["group_overrides"]["opd"]["teacher"]) == (
        False,
        "kind-again",
    )
    assert check_rows(usual, forward) >= 2
    assert check_rows(own, partial(forward, model=pushes.paths[1])) >= 2
    theirs = ("--kind", "kind-again")
    for flags, code in (
        ((vllm_server.base_url,), 0),
        ((rooted.base_url, *theirs), 0),
        ((vllm_server.base_url, *theirs), 1),
    ):
        validated = commands.run("agentic_opd", "validate", str(out), "--server", *flags)
        assert validated.returncode == code, (flags, validated.stdout + validated.stderr)
