"""Turns of a file: which are chosen, what is said, what stops the run, and what is kept then."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentic_opd.cli import prove
from agentic_opd.core.console import LiveBar
from agentic_opd.core.errors import ServerRequestError, ServerUnreachableError
from agentic_opd.core.types import ProofVerdict, Recording
from agentic_opd.rollout.loop import HintInsertion
from agentic_opd.rollout.replay import Continuation, ReplayError, ReplayOutcome
from agentic_opd.runs.proof_journal import ProofJournal, TurnPosition
from agentic_opd.runs.prove_file import (
    FileTurns,
    Proving,
    check_file,
    counts_line,
    proof_table,
    turns_of_file,
    version_warning,
)
from agentic_opd.runs.recorded import RecordedEpisode
from agentic_opd.wire.group import ProofRecord, ScoredGroup
from tests.support.proofs import continuation
from tests.unit.distill.fakes import make_recording
from tests.unit.wire.sample import group

PROVEN = ProofRecord((0, 4), (4, 4), ProofVerdict.PROVEN, 1.0, (0.25, 1.0))


class FakeEnvironment:
    """Episodes of two turns each, whose continuations pass if and only if the hint is in the prompt.

    All episodes are of different tasks, or of `task`.
    """

    def __init__(
        self, failing: Callable[[int], Exception | None] = lambda played: None, task: str | None = None
    ) -> None:
        self.played: list[tuple[int, HintInsertion | None, bool]] = []
        self._failing, self._names = failing, map(str, count()) if task is None else repeat(task)

    def recorded_episodes(self, group: ScoredGroup) -> list[RecordedEpisode | ReplayError]:
        if group.task_id == "gone":
            return [ReplayError(ReplayOutcome.TASK_MISSING, "the group names the task 'gone'")] * len(group.rollouts)
        recordings = [replace(make_recording(), name=next(self._names)) for _ in group.rollouts]
        return [RecordedEpisode(recording, (index,)) for index, recording in enumerate(recordings)]

    def room(self, recording: Recording, turn_index: int, hint: HintInsertion | None) -> int:
        return 512

    async def continued(
        self,
        recording: Recording,
        turn_index: int,
        hint: HintInsertion | None = None,
        *,
        is_hinted: bool = True,
        seed: int | None = None,
    ) -> Continuation:
        self.played.append((turn_index, hint, is_hinted))
        if (error := self._failing(len(self.played))) is not None:
            raise error
        return continuation(is_hinted)


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """Two groups of two rollouts, each with a turn with a hint and one without; a group of another world; no group."""
    gone = group()
    gone["group_overrides"]["task_id"] = "gone"
    path = tmp_path / "groups.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (group(), {"no": "group"}, gone, group())))
    return path


def run(groups: Path, env: FakeEnvironment, limit: int | None = None) -> tuple[Proving, str]:
    console = Console(record=True, width=200)
    turns = turns_of_file(groups, env)
    journal = ProofJournal(groups)
    bar = LiveBar("turns", 4, console=console)
    proving = Proving(turns.chosen(0.0, limit, 0), env, journal, 16, turns.proofs, bar)
    asyncio.run(proving.run(1))
    journal.close()
    return proving, console.export_text()


def test_turns_with_a_hint_and_a_sample_of_the_others_are_chosen(groups: Path) -> None:
    turns = turns_of_file(groups, FakeEnvironment())
    assert turns.left_out == {
        "lines that are no group (agentic-opd validate says why)": 1,
        "rollouts: task_missing": 2,
    }
    assert [turn.position for turn in turns.hinted] == [(line, sequence, 0) for line in (1, 4) for sequence in (0, 1)]
    assert {turn.hint for turn in turns.hinted} == {HintInsertion(2, (70, 71))}
    assert [turn.position for turn in turns.unhinted] == [(line, sequence, 1) for line in (1, 4) for sequence in (0, 1)]
    chosen = [len(turns.chosen(unhinted, limit, 0)) for unhinted, limit in ((0, None), (0.5, None), (3, None), (99, 5))]
    assert chosen == [4, 6, 7, 5]
    assert turns.chosen(2, 3, 0) == turns.chosen(2, 3, 0) != turns.chosen(2, 3, 1)


def test_proofs_are_made_once_and_written_with_a_table(groups: Path) -> None:
    proving, said = run(groups, env := FakeEnvironment())
    assert (proving.finished, proving.stopped, len(env.played)) == (4, None, 32)
    assert proving.expected == (32, 128)
    assert "s a continuation so far: 1 to 1 minutes in all" in said
    assert counts_line(proving.proofs) == "4 proven"
    again, _ = run(groups, env := FakeEnvironment())
    assert (again.finished, env.played, counts_line(again.proofs)) == (0, [], "4 proven")
    console = Console(record=True, width=200)
    console.print(proof_table(proving.proofs))
    assert "16 of 16" in console.export_text()
    assert len(turns_of_file(groups, env, again=True).hinted) == 4


def test_turns_of_one_prompt_share_continuations(groups: Path) -> None:
    proving, _ = run(groups, env := FakeEnvironment(task="t"))
    assert (proving.finished, proving.expected, len(env.played), counts_line(proving.proofs)) == (
        4,
        (8, 32),
        8,
        "4 proven",
    )
    assert proving.outcomes.total() == 8


def test_a_dead_server_stops_the_run_and_what_is_proven_is_kept(groups: Path) -> None:
    proving, _ = run(groups, FakeEnvironment(lambda played: ServerUnreachableError("gone") if played > 12 else None))
    assert isinstance(proving.stopped, ServerUnreachableError)
    assert (proving.finished, len(turns_of_file(groups, FakeEnvironment()).proofs)) == (1, 1)
    rest, _ = run(groups, FakeEnvironment())
    assert (rest.finished, len(rest.proofs)) == (3, 4)


def test_a_turn_that_fails_alone_is_said_and_the_others_go_on(groups: Path) -> None:
    def failing(played: int) -> Exception | None:
        return ServerRequestError("HTTP 400: too long", 400) if played == 1 else None

    proving, said = run(groups, FakeEnvironment(failing))
    assert (proving.finished, proving.failed) == (3, {TurnPosition(1, 0, 0): "HTTP 400: too long"})
    assert "line 1, turn 1 failed: HTTP 400: too long" in said


def test_a_cancellation_keeps_what_is_proven(groups: Path) -> None:
    runs: list[asyncio.Task[Any]] = []

    def failing(played: int) -> Exception | None:
        if played > 12:
            runs[0].cancel()
        return None

    async def cancelled() -> Proving:
        env, journal = FakeEnvironment(failing), ProofJournal(groups)
        bar = LiveBar("turns", 4, console=Console(record=True))
        proving = Proving(turns_of_file(groups, env).hinted, env, journal, 16, [], bar)
        runs.append(asyncio.create_task(proving.run(1)))
        await asyncio.wait(runs)
        journal.close()
        return proving

    proving = asyncio.run(cancelled())
    assert isinstance(proving.stopped, asyncio.CancelledError)
    assert len(turns_of_file(groups, FakeEnvironment()).proofs) == 1


def test_a_file_without_records_is_refused_before_a_server_is_asked(
    tmp_path: Path, groups: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_file(groups)
    (path := tmp_path / "no_groups.jsonl").write_text("{}\n")
    assert prove.main([str(path), "--openai.base_url", "http://127.0.0.1:9/v1", "--env.server_retry_s", "3600"]) == 2
    assert "holds no record of a turn" in capsys.readouterr().err


def test_other_weights_than_those_that_sampled_are_named_once(groups: Path) -> None:
    turns = turns_of_file(groups, FakeEnvironment())
    versions = Counter(turn.weight_version for turn in turns.hinted)
    (version,) = versions
    assert version_warning(turns.hinted, [] if version is None else [version]) is None
    assert version_warning(turns.hinted, []) is None


def test_the_version_that_plays_is_in_the_warning(groups: Path) -> None:
    lines: list[dict[str, Any]] = [group()]
    lines[0]["group_overrides"]["weight_version"] = 3
    groups.write_text("".join(json.dumps(line) + "\n" for line in lines))
    warning = version_warning(turns_of_file(groups, FakeEnvironment()).hinted, [7, 7])
    assert warning is not None
    assert "2 of 2 turns (2 by version 3)" in warning
    assert "as it is now, version 7" in warning


def test_nothing_is_chosen_of_nothing() -> None:
    assert FileTurns().chosen(0.5, 3, 0) == []
    assert counts_line([PROVEN, ProofRecord((0, 0), not_replayed="why")]) == "1 proven, 1 not replayed"
