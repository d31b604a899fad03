"""`agentic-opd prove` on the server that sampled the demo run, and runs in which only proven hints are scored."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import LocalServer

from agentic_opd.core.types import sampled_spans
from agentic_opd.runs.prove_file import counts_line
from agentic_opd.wire.group import ScoredGroup
from tests.support import commands
from tests.support.environment import command, read_lines
from tests.support.waiting import until

from .conftest import DemoRun

pytestmark = pytest.mark.vllm


@pytest.fixture
def groups(demo: DemoRun, tmp_path: Path) -> Path:
    """The first two of the demo run's groups, with their settings."""
    shutil.copy(demo.path.with_suffix(".run.json"), tmp_path / "groups.run.json")
    path = tmp_path / "groups.jsonl"
    path.write_bytes(b"".join(demo.path.read_bytes().splitlines(keepends=True)[:2]))
    return path


def records(path: Path) -> list[Any]:
    rollouts = [rollout for line in read_lines(path) for rollout in ScoredGroup.from_wire(line).rollouts]
    return [turn for rollout in rollouts for turn in rollout.turns or ()]


def argv(groups: Path, server: LocalServer, *flags: str) -> list[str]:
    return ["agentic_opd", "prove", str(groups), "--openai.base_url", f"{server.base_url}/v1", *flags]


def test_a_killed_command_goes_on_and_the_file_has_every_proof(
    groups: Path, vllm_server: LocalServer, tmp_path: Path
) -> None:
    hinted = sum(record.hint is not None for record in records(groups))
    running = commands.start(*argv(groups, vllm_server, "--pairs", "4"), stderr=commands.PIPE)
    until(groups.with_suffix(".proofs.jsonl").exists, 300, running)
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=60)
    journal = groups.with_suffix(".proofs.jsonl").read_bytes().split(b"\n")
    done = commands.run(*argv(groups, vllm_server, "--pairs", "4", "--unhinted", "3"), timeout_s=600)
    assert done.returncode == 0, done.stderr
    assert ("proofs of earlier runs" in done.stderr) == (len(journal) > 2), (
        "a header, proofs, and nothing or a torn line"
    )
    proofs = [record.proof for record in records(groups) if record.proof is not None]
    assert sum(proof.verdict is not None for proof in proofs) == hinted
    assert sum(proof.verdict is None for proof in proofs) == 3
    assert all(proof.weight_version == 0 and proof.not_replayed is None for proof in proofs)
    assert "refuted" not in counts_line(proofs)
    assert commands.run("agentic_opd", "validate", str(groups)).returncode == 0
    again = commands.run(*argv(groups, vllm_server), timeout_s=300)
    assert "0 turns to prove" in again.stderr
    assert [path.name for path in tmp_path.glob("groups.proofs*")] == []


def test_only_proven_hints_are_scored_in_a_run(vllm_server: LocalServer, tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    proof = json.dumps({"type": "replay", "pairs": 4, "rollouts": 16, "join": 3})
    flags = ("--env.hint.proof", proof, "--env.total_steps", "2", "--env.data_path_to_save_groups", str(path))
    done = commands.run(*command("process", vllm_server.base_url, *flags), timeout_s=600)
    assert done.returncode == 0, done.stderr
    hinted = [record for record in records(path) if record.hint is not None]
    assert hinted
    assert {record.outcome.value for record in hinted} <= {"scored", "unproven", "refuted"}
    for record in hinted:
        assert (record.outcome.value == "scored") == (record.proof.verdict == "proven"), record
    groups = [ScoredGroup.from_wire(line) for line in read_lines(path)]
    joined = [[rollout for rollout in group.rollouts if rollout.is_continuation] for group in groups]
    first_hints = [sum(r.turns[0].proof is not None for r in group.rollouts if r.turns) for group in groups]
    assert [len(rollouts) for rollouts in joined] == [3 if hints else 0 for hints in first_hints]
    for group, rollouts in zip(groups, joined, strict=True):
        assert all(rollout.turns is None and not rollout.row_positions for rollout in rollouts)
        prompts = {tuple(r.tokens_T[: sampled_spans(r.masks_T)[0][0]]) for r in group.rollouts}
        assert len(prompts) == 1, "a continuation that joins has no hint in its prompt"
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().split("\n") if line]
    played = sum((record.proof.with_hint[1] + record.proof.without_hint[1]) for record in hinted)
    assert sum(step.get("opd/proof_rollouts", 0) for step in metrics) == played
    assert commands.run("agentic_opd", "validate", str(path)).returncode == 0


def test_a_world_that_can_not_replay_is_refused_by_name_at_the_start(groups: Path, vllm_server: LocalServer) -> None:
    done = commands.run(*argv(groups, vllm_server, "--env.agent.command", "true"))
    assert done.returncode == 2
    assert "env.agent.command" in done.stderr
