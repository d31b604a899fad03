"""The brake: evaluate pushed weights on held-out tasks, remember the good versions, and find a fall (I/O).

    push -> evaluate -> good: keep the checkpoint | bad: load the best kept version, push it as a new version, stop

A version's evaluation is a command that writes `samples.jsonl`, as `agentic-opd evaluate` does. Every verdict is a line
of `brake.jsonl`, written before the trainer acts on it, so that a killed trainer resumes where it was.
"""

import asyncio
import logging
import os
import shlex
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from agentic_opd.core.errors import ConfigError, OPDError, PlaceError
from agentic_opd.core.exit_codes import EXIT_OK, EXIT_USAGE
from agentic_opd.core.processes import end_of, end_with_parent
from agentic_opd.core.text import read_json, refuse_constant, text_lines
from agentic_opd.training.config import TrainerConfig
from agentic_opd.wire.brake import BRAKE_FILE
from agentic_opd.wire.files import JsonLines, whole_lines
from agentic_opd.wire.group import short_repr

logger = logging.getLogger(__name__)

_END_S = 10.0
"""Seconds that an interrupted evaluation may take to end."""


class EvaluationFailedError(OPDError):
    """An evaluation gave no scores of the pushed version; a later one may."""


class Fall(NamedTuple):
    """Comparison of a version with an earlier one on the same tasks."""

    version: int
    """The earlier version."""
    difference: float
    """Mean of the tasks' scores now minus then."""
    standard_errors: float
    """The difference in its standard errors; 0 if every task has the same score in both."""


class Roll(NamedTuple):
    """A roll-back, begun or done."""

    bad: int
    """The version that was found worse."""
    to: int
    """The version whose weights replace it."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version that was evaluated."""

    number: int
    scores: Mapping[str, float]
    """Mean score by task id, each in [0, 1]."""

    def __post_init__(self) -> None:
        for task, score in self.scores.items():
            check_score(task, score, f"version {self.number}")

    @property
    def mean(self) -> float:
        """Mean score over the tasks, in [0, 1]."""
        return fmean(self.scores.values())


def compare(now: Version, then: Version) -> Fall:
    """Compare the scores of two versions task by task.

    The standard error is that of the mean difference if both versions were equal: each task's difference would have
    either sign with the same probability, so the sum of n differences d has the variance sum d^2. Pairs cancel what
    distinguishes the tasks. |standard_errors| is at most sqrt(n), and a fall of at least z standard errors has a
    probability of at most exp(-z^2 / 2) between equal versions, for any n and any distribution of scores (Hoeffding,
    1963, on sums of random signs).

    Raises:
        EvaluationFailedError: the versions were evaluated on different tasks.
    """
    if now.scores.keys() != then.scores.keys():
        raise EvaluationFailedError(
            f"version {now.number} was evaluated on other tasks than version {then.number}, so they can't be compared: "
            "the evaluation's tasks must stay the same, or brake.command must change with them"
        )
    differences = [score - then.scores[task] for task, score in now.scores.items()]
    spread = sqrt(sum(difference**2 for difference in differences))
    return Fall(then.number, fmean(differences), sum(differences) / spread if spread else 0.0)


class Brake:
    """The good versions of a run, and the evaluation that decides between them.

    Only the trainer's first process uses it.
    """

    def __init__(self, config: TrainerConfig, arguments: Sequence[str] = ()) -> None:
        """Read the verdicts of the run that is resumed, if any. `arguments` are added to the command.

        Raises:
            PlaceError: the file of verdicts can't be read.
        """
        self._config, self._settings, self._arguments = config, config.brake, arguments
        self.path, self._folder = config.output_dir / BRAKE_FILE, config.output_dir / "brake"
        self._process: Process | None = None
        self._is_interrupted = False
        self.versions: list[Version] = []
        """The last good versions and the best one, at most `brake.versions_kept`, in the order of their numbers."""
        self.rolling: Roll | None = None
        """A roll-back that was begun and not finished."""
        if config.resume and self.path.exists():
            try:
                rows = [read_json(line, parse_constant=refuse_constant) for line, _ in whole_lines(self.path)]
                for row in rows:
                    self._apply(row)
            except OSError as error:
                raise PlaceError(f"cannot read {str(self.path)!r}: {error.strerror or error}") from error
            except (ValueError, LookupError, TypeError, AttributeError, StopIteration, OPDError) as error:
                raise PlaceError(
                    f"{str(self.path)!r} holds no verdicts of the brake ({error}), so the run can't be resumed with "
                    "it: restore the file, or start again with --overwrite"
                ) from error
            if self.rolling is None and any(row.get("command") != self._settings.command for row in rows[-1:]):
                self.versions = []  # Scores of another evaluation can't be compared.

    @property
    def is_on(self) -> bool:
        """Whether there is an evaluation."""
        return self._settings.command is not None

    @property
    def best(self) -> Version:
        """The kept version with the highest mean score, the newest one of several."""
        return best_of(self.versions)

    @property
    def numbers(self) -> set[int]:
        """The numbers of the kept versions, which were found good."""
        return {version.number for version in self.versions}

    async def evaluate(self, number: int) -> Version | None:
        """Evaluate the served weights, which are version `number`; None if `interrupt` ended the evaluation.

        Raises:
            ConfigError: the command refused its settings, or there are too few tasks for a fall to reach the bound.
            EvaluationFailedError: the command failed or took longer than `brake.timeout_s`, other weights were served
                meanwhile, or a score is not a number in [0, 1].
        """
        folder = self._folder / f"step-{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        log, samples = folder / "log.txt", folder / "samples.jsonl"
        samples.unlink(missing_ok=True)
        key = self._config.vllm_api_key
        variables = {**os.environ, **({"VLLM_API_KEY": key.get_secret_value()} if key else {})}
        with log.open("wb") as output:
            pipes: dict[str, Any] = {"stdin": DEVNULL, "stdout": output, "stderr": STDOUT}
            started = asyncio.create_subprocess_exec(
                *self._command(folder),
                **pipes,
                env=variables,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            try:
                self._process = process = await started
            except OSError as error:
                raise ConfigError(f"brake.command can't be started: {error}") from error
        limit_s = self._settings.timeout_s
        try:
            code = await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError as error:
            raise EvaluationFailedError(
                f"the evaluation of version {number} did not end within brake.timeout_s, {limit_s:g} s, and was "
                f"killed: evaluate fewer samples, or raise the limit. The end of {log}:\n{end_of(log)}"
            ) from error
        finally:
            self._process = None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._is_interrupted:
            return None
        if code != EXIT_OK:
            kind = ConfigError if code == EXIT_USAGE else EvaluationFailedError
            raise kind(f"the evaluation of version {number} ended with code {code}. The end of {log}:\n{end_of(log)}")
        scores = read_scores(samples, number)
        if len(scores) < self._settings.bound**2:
            raise ConfigError(
                f"brake.command evaluates {len(scores)} tasks, too few for a fall to reach brake.bound "
                f"{self._settings.bound:g}: evaluate at least {int(self._settings.bound**2) + 1} tasks, or lower the "
                "bound"
            )
        return Version(number, scores)

    def _command(self, folder: Path) -> list[str]:
        words = shlex.split(self._settings.command or "")
        if words[0] == "agentic-opd":
            words[:1] = [sys.executable, "-m", "agentic_opd"]
        urls = ",".join(f"{url.rstrip('/').removesuffix('/v1')}/v1" for url in self._config.vllm_urls)
        output = ("--env.data_dir_to_save_evals", str(folder), "--env.overwrite", "true")
        return [*words, "--openai.base_url", urls, *output, *self._arguments]

    def interrupt(self) -> bool:
        """End the evaluation under way; return whether there was one."""
        if (process := self._process) is None:
            return False
        self._is_interrupted = True
        with suppress(ProcessLookupError):
            process.terminate()
        asyncio.get_running_loop().call_later(_END_S, _kill, process)
        return True

    def falls(self, version: Version) -> list[Fall]:
        """Return the comparison with each kept version.

        Raises:
            EvaluationFailedError: the versions were evaluated on different tasks.
        """
        return [compare(version, earlier) for earlier in self.versions]

    def is_bad(self, falls: Sequence[Fall]) -> bool:
        """Return whether one of the falls reaches the bound."""
        return any(fall.standard_errors <= -self._settings.bound for fall in falls)

    def note(self, version: Version, falls: Sequence[Fall], seconds: float) -> Roll | None:
        """Record the verdict on a version durably; return the roll-back that a bad one needs."""
        row: dict[str, Any] = {"version": version.number, "verdict": "good", "mean": version.mean}
        row |= {"tasks": len(version.scores), "seconds": round(seconds, 1)}
        row["falls"] = [fall._asdict() for fall in falls]
        if self.is_bad(falls):
            row |= {"verdict": "bad", "to": self.best.number}
        self._write({**row, "scores": version.scores})
        return self.rolling

    def finish(self, roll: Roll, number: int) -> None:
        """Record that a roll-back is saved as version `number`."""
        self._write({"version": number, "verdict": "rolled_back", "bad": roll.bad, "to": roll.to})

    def _write(self, row: Mapping[str, Any]) -> None:
        lines = JsonLines(self.path, is_continued=True)
        try:
            lines.write({**row, "command": self._settings.command, "time": time.time()}, durable=True)
        finally:
            lines.close()
        self._apply(row)

    def _apply(self, row: Mapping[str, Any]) -> None:
        number = row["version"]
        if row["verdict"] == "bad":
            self.rolling = Roll(number, row["to"])
            return
        scores = row.get("scores", {})
        if row["verdict"] == "rolled_back":
            scores = next(version.scores for version in self.versions if version.number == row["to"])
            self.versions = [version for version in self.versions if version.number < row["to"]]
            self.rolling = None
        earlier = [version for version in self.versions if version.number != number]
        self.versions = with_version(earlier, Version(number, scores), limit=self._settings.versions_kept)


def best_of(versions: Sequence[Version]) -> Version:
    """Return the version with the highest mean score, the newest one of several."""
    return max(versions, key=lambda version: (version.mean, version.number))


def with_version(versions: Sequence[Version], new: Version, *, limit: int) -> list[Version]:
    """Add a good version, and drop the oldest ones beyond `limit`, but not the best one."""
    result = [*versions, new]
    best = best_of(result)
    while len(result) > limit:
        result.remove(next(version for version in result if version is not best))
    return result


def _kill(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()


def check_score(task: object, score: object, where: str) -> None:
    """Check that a task's id is a text, and its score a number in [0, 1], as rewards are.

    A number outside of it would decide the mean, and NaN would make every comparison false.

    Raises:
        EvaluationFailedError: the message names the task.
    """
    if not isinstance(task, str) or not task:
        raise EvaluationFailedError(f"{where}: task_id {short_repr(task)}, expected a text that is not empty")
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1 + _SUM_SLACK:
        raise EvaluationFailedError(f"{where}: the score of task {task!r} is {short_repr(score)}, expected 0 to 1")


_SUM_SLACK = 1e-6
"""Excess over 1 that the weights of a reward may add up to."""


def read_scores(samples: Path, version: int) -> dict[str, float]:
    """Return the mean score of each task in a file of samples, of which each was sampled by `version` alone.

    A sample whose tests gave no verdict counts as 0.

    Raises:
        EvaluationFailedError: the file can't be read, holds no sample or a wrong one, or other weights sampled one.
    """
    scores: dict[str, list[float]] = {}
    try:
        lines = text_lines(samples.read_text(encoding="utf-8"))
        for number, line in enumerate(lines, start=1):
            row = read_json(line)
            sampled_by = row.get("weight_version")
            if sampled_by is not None and (type(sampled_by) is not int or sampled_by != version):
                raise EvaluationFailedError(
                    f"version {version} was to be evaluated, and version {short_repr(sampled_by)} answered: does "
                    "another trainer push to these servers?"
                )
            # A version whose agent breaks the tests must not hide a fall.
            task, score = row["task_id"], 0.0 if row.get("no_verdict") is not None else row["score"]
            check_score(task, score, f"{str(samples)!r}, line {number}")
            scores.setdefault(task, []).append(score)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise EvaluationFailedError(f"{str(samples)!r} holds no samples of an evaluation: {error!r}") from error
    if not scores:
        raise EvaluationFailedError(f"{str(samples)!r} holds no sample")
    return {task: fmean(values) for task, values in scores.items()}
