"""The demo run, replayed: its calls again in real sandboxes, and its policy from a turn on, on a real server."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.local_server import LocalServer

from agentic_opd.core.types import Recording
from agentic_opd.env.command import name_models, read_arguments
from agentic_opd.env.opd import AgenticOPDEnv
from agentic_opd.rollout.loop import HintInsertion
from agentic_opd.rollout.replay import Continuation, ReplayOutcome
from agentic_opd.runs.recorded import RecordedEpisode
from agentic_opd.wire.group import ScoredGroup
from tests.support.places import ROOT

from .conftest import DemoRun

pytestmark = [pytest.mark.vllm, pytest.mark.sandbox]

HINT = "\n\n[user's hint / instruction]\nStart the inner loop at i + 1."


def test_the_calls_of_a_run_have_the_recorded_results(demo: DemoRun, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    argv = [sys.executable, str(ROOT / "scripts" / "checks" / "replayed"), str(demo.path), "--json", str(counts)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(counts.read_text()).values()
    assert (row["episodes"], row["share"], row["problems"]) == (32, 1.0, {})
    assert row["turns"] >= 32


async def _continuations(demo: DemoRun, url: str) -> list[tuple[Recording, int, list[Continuation]]]:
    """From some recorded turns on, the policy without a hint, again with the same seed, and with a hint."""
    argv = ("process", "--config", str(ROOT / "configs" / "demo.yaml"), "--openai.base_url", url)
    settings = read_arguments([*argv, "--env.opd_enabled", "false"])
    env = AgenticOPDEnv(settings.env, await name_models(settings.servers, 60))
    try:
        await env.setup()
        hint: Any = tuple(env.tokenizer.encode(HINT, add_special_tokens=False))
        continued: list[tuple[Recording, int, list[Continuation]]] = []
        for fields in demo.groups[:3]:
            episode = env.recorded_episodes(ScoredGroup.from_wire(fields))[0]
            assert isinstance(episode, RecordedEpisode)
            recording = episode.recording
            for turn_index, turn in enumerate(recording.turns[:3]):
                insertion = HintInsertion(turn.last_user_end, hint)
                pairs = [
                    await env.continued(recording, turn_index, insertion, is_hinted=is_hinted, seed=7)
                    for is_hinted in (False, False, True)
                ]
                continued.append((recording, turn_index, pairs))
        return continued
    finally:
        await env.close()


def test_the_policy_plays_on_from_a_turn_with_a_seed(demo: DemoRun, vllm_server: LocalServer) -> None:
    rows = asyncio.run(_continuations(demo, f"{vllm_server.base_url}/v1"))
    assert {turn_index for _, turn_index, _ in rows} >= {0, 1}
    differ = 0
    for recording, turn_index, continuations in rows:
        turn = recording.turns[turn_index]
        tokens: list[tuple[int, ...]] = []
        logprobs: list[tuple[float, ...]] = []
        for continuation in continuations:
            assert continuation.outcome is ReplayOutcome.PLAYED, continuation.error
            assert continuation.episode is not None
            trace = continuation.episode.traces[0]
            assert trace.tokens_T[: turn.start] == recording.traces[0].tokens_T[: turn.start]
            assert 0 < continuation.sampled_tokens == sum(turn.end - turn.start for turn in trace.turns[turn_index:])
            tokens.append(trace.tokens_T)
            logprobs.append(trace.logprobs_T[turn.start : trace.turns[turn_index].end])
        assert tokens[0] == tokens[1]
        # A hint in the prompt changes the probabilities, also where it does not change the sampled tokens.
        gaps = [abs(a - b) for a, b in zip(logprobs[0], logprobs[2], strict=False)]
        differ += tokens[0] != tokens[2] or max(gaps) > 1e-3
    assert differ == len(rows)
