"""The files that a task's tests left -> the verdict, and the part of their output that the agent may learn from.

The reward is in /logs/verifier: `reward.json` (a number, or an object of numbers) or `reward.txt`. Of tests that never
write one, the exit code of test.sh decides. Tests that could not run, reached a limit or wrote no number gave no
verdict: that says nothing about the agent, and no reward is made up for it.
"""

import contextlib
import errno
import math
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from agentic_opd.core.text import cut_middle, read_json, text_lines, well_formed
from agentic_opd.core.types import NoVerdict, Verification, VerifyOutcome
from agentic_opd.distill.leaks import leaks
from agentic_opd.sandboxes.protocol import CommandResult

_MOST_REWARD_BYTES = 2**16
_REPORT_CHARS = 20_000
_JUDGE_CHARS = 4_000
_MOST_FILTERED = 400
"""Lines of the output that the judge may read, from its beginning and from its end together."""
_EXCERPT_CHARS = 80
"""Characters of a file without a reward that its report shows."""
_FILTERED_CHARS = 40_000
"""Characters of these lines; the filter takes some ten microseconds for each."""
_LEFT_OUT = "[left out]"
_SHORTEST_LINE = 6
_SHORTEST_SECRET = 4
_NOT_RUN = (126, 127)
"""A shell's exit codes for a command that can't be executed, or is not found."""
_TIMED_OUT = 124
"""Exit code of the command `timeout`."""
_KILLED = range(129, 193)
"""A shell's exit codes for a command that a signal ended."""
_WRITES_REWARD = re.compile(r"reward\.(txt|json)|/logs/verifier")


def judged(
    result: CommandResult, verifier_logs: Path, hidden: Sequence[str], public: str, secrets: Collection[str]
) -> Verification:
    """Return the verdict.

    `verifier_logs` is the folder of this machine that is /logs/verifier. `hidden` are the texts of the tests' files,
    `public` is all that the agent has read or written. No report holds `secrets`, values of the verifier's variables.
    """
    outcome = _outcome(result, verifier_logs, hidden, secrets)
    output = well_formed(_without_secrets(result.text, secrets)).strip()
    details = f" {outcome.details}" if isinstance(outcome, Unjudged) and outcome.details else ""
    report = f"{outcome.text}{details}\n{cut_middle(output, _REPORT_CHARS)}".strip()
    readable = cut_middle("\n".join(_without_hidden(output, hidden, public)), _JUDGE_CHARS)
    judge_report = f"{outcome.text}\n{readable}".strip()
    if isinstance(outcome, Unjudged):
        return without_verdict(outcome.cause, report, judge_report)
    return Verification.of_score(outcome.reward, report, judge_report)


def _without_secrets(text: str, secrets: Collection[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, _LEFT_OUT) if len(secret) >= _SHORTEST_SECRET else text
    return text


def without_verdict(cause: NoVerdict, report: str, judge_report: str) -> Verification:
    """Return the result of tests that gave no verdict."""
    return Verification(VerifyOutcome.NO_VERDICT, 0, 1, report, judge_report, no_verdict=cause)


class Unjudged(NamedTuple):
    """No verdict: why, and a sentence about it."""

    cause: NoVerdict
    text: str
    details: str = ""
    """A sentence that may hold what the tests know: for a person, not for the judge."""


class Judged(NamedTuple):
    """The reward in [0, 1], and a sentence about it."""

    reward: float
    text: str


def _outcome(result: CommandResult, folder: Path, hidden: Sequence[str], secrets: Collection[str]) -> Judged | Unjudged:
    """Return what the tests said about the solution: their limits first, then their reward, then their exit code."""
    limits = (
        (result.timed_out, NoVerdict.TIMEOUT, "did not end in time"),
        (result.output_exceeded, NoVerdict.OUTPUT, "printed too much"),
        (result.disk_exceeded, NoVerdict.DISK, "took more disk space than the task has"),
        (result.memory_exceeded, NoVerdict.MEMORY, "took more memory than the task has"),
    )
    for is_exceeded, cause, text in limits:
        if is_exceeded:
            return Unjudged(cause, f"The tests {text}.")
    if (written := _written(folder, secrets)) is not None:
        return written
    code = result.exit_code
    if code in _NOT_RUN:
        return Unjudged(NoVerdict.NOT_RUN, f"A command of the tests could not run: their exit code is {code}.")
    if code == _TIMED_OUT:
        return Unjudged(NoVerdict.TIMEOUT, f"The tests ended themselves after their own time limit: exit code {code}.")
    if code in _KILLED:
        return Unjudged(NoVerdict.KILLED, f"Signal {code - 128} ended the tests.")
    if any(_WRITES_REWARD.search(text) for text in hidden):
        return Unjudged(NoVerdict.NO_REWARD, f"The tests did not write their reward; their exit code is {code}.")
    return Judged(float(code == 0), f"The tests wrote no reward; their exit code is {code}.")


def _written(folder: Path, secrets: Collection[str]) -> Judged | Unjudged | None:
    """Return the reward that the tests wrote, clipped to [0, 1]; None if there is no file of them."""
    for name, read in (("reward.json", _of_json), ("reward.txt", float)):
        expected = "a number, or an object of numbers" if name == "reward.json" else "a number"
        text = f"The tests wrote a {name} without a reward."
        try:
            content = _content(folder, name)
        except OSError as error:
            details = (
                f"It can't be read ({error.strerror}); expected a regular file that all may read, with {expected}."
            )
            return Unjudged(NoVerdict.UNREADABLE_REWARD, text, details)
        if content is None:
            continue
        try:
            reward = read(content.removeprefix("\ufeff"))
        except (ValueError, OverflowError, RecursionError):
            reward = math.nan
        if not math.isfinite(reward):
            excerpt = well_formed(_without_secrets(content, secrets)).strip()
            begins = (
                f"begins with {excerpt[:_EXCERPT_CHARS]!r}" if len(excerpt) > _EXCERPT_CHARS else f"holds {excerpt!r}"
            )
            details = f"It {begins if excerpt else 'is empty'}; expected {expected}."
            return Unjudged(NoVerdict.UNREADABLE_REWARD, text, details)
        return Judged(min(max(reward, 0.0), 1.0), f"The tests gave a reward of {reward:.15g}.")
    return None


def _of_json(text: str) -> float:
    """Return the number, or of an object its `reward`, or the mean of all of its numbers."""
    reward = read_json(text)
    if isinstance(reward, dict):
        values = cast(dict[str, Any], reward)
        numbers = [_number(value) for value in values.values()]
        if "reward" in values:
            return _number(values["reward"])
        return sum(numbers) / len(numbers) if numbers else math.nan
    return _number(reward)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _content(folder: Path, name: str) -> str | None:
    """Return the text of a file of this machine that programs in the container may have replaced by anything.

    None if there is no such file. No link is followed.

    Raises:
        OSError: it is something other than a file, or this user may not read it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as closing:
        try:
            directory = os.open(folder, flags | os.O_DIRECTORY)
            closing.callback(os.close, directory)
            file = os.open(name, flags | os.O_NONBLOCK, dir_fd=directory)
            closing.callback(os.close, file)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "it is a link") from error
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        return os.read(file, _MOST_REWARD_BYTES).decode(errors="replace")


# ------------------------------------------------------------------------------------------------------------ evidence


def _without_hidden(output: str, hidden: Sequence[str], public: str) -> Iterator[str]:
    """Yield the lines of the tests' output without lines of their code, and without data that only they have."""
    code = {_bare(line) for text in hidden for line in text_lines(text)} - {_bare(line) for line in text_lines(public)}
    lines = text_lines(output)
    if len(lines) > _MOST_FILTERED:
        lines = [*lines[: _MOST_FILTERED // 2], *lines[-_MOST_FILTERED // 2 :]]
    lines = text_lines(cut_middle("\n".join(lines), _FILTERED_CHARS))
    leaking = _leaking(lines, hidden, public)
    # `FAILED test_state.py::test_sum - assert 41 == 42`: which test it is may be known.
    leaking |= _leaking([line.partition(" - ")[0] for line in leaking], hidden, public)
    was_left_out = False
    for line in lines:
        readable = line
        if _bare(line) in code and len(_bare(line)) >= _SHORTEST_LINE:
            readable = _LEFT_OUT
        elif line in leaking:
            name, dash, _ = line.partition(" - ")
            readable = f"{name} - {_LEFT_OUT}" if dash and name not in leaking else _LEFT_OUT
        if not (readable == _LEFT_OUT and was_left_out):
            yield readable
        was_left_out = readable == _LEFT_OUT


def _leaking(texts: Collection[str], hidden: Sequence[str], public: str) -> set[str]:
    """Return the texts with data of the hidden ones. For each of these, which may be many, `public` is read once."""
    return {text for tests in hidden for text in texts if leaks(text, tests, public)}


def _bare(line: str) -> str:
    """Return a line without the marks that pytest and shells put before a line of code, and without spaces."""
    return re.sub(r"^[>E+]*|\s", "", line.strip())


def spoken(messages: Sequence[Mapping[str, Any]], prompt: str) -> str:
    """Return all that was said in a conversation."""
    texts = [prompt]
    for message in messages:
        texts.append(str(message.get("content") or ""))
        texts += [str(call.get("function", {}).get("arguments", "")) for call in message.get("tool_calls") or ()]
    return "\n".join(texts)
