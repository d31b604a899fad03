"""What a task's tests left behind -> the verdict, and the part of their output that the agent may learn from.

The reward is in /logs/verifier: `reward.json` (a number, or an object of numbers) or `reward.txt`; without these, the
exit code of test.sh decides.
"""

import contextlib
import math
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from agentic_opd.core.leaks import leaks
from agentic_opd.core.text import cut_middle, read_json, text_lines, well_formed
from agentic_opd.core.types import Verification, VerifyOutcome
from agentic_opd.sandboxes.protocol import CommandResult

_MOST_REWARD_BYTES = 2**16
_REPORT_CHARS = 20_000
_JUDGE_CHARS = 4_000
_MOST_FILTERED = 400
"""Lines of the output that the judge may read, from its beginning and from its end together."""
_FILTERED_CHARS = 40_000
"""Characters of these lines; the filter takes some ten microseconds for each."""
_LEFT_OUT = "[left out]"
_SHORTEST_LINE = 6
_SHORTEST_SECRET = 4


def judged(
    result: CommandResult, verifier_logs: Path, hidden: Sequence[str], public: str, secrets: Collection[str]
) -> Verification:
    """Return the verdict.

    `verifier_logs` is the folder of this machine that is /logs/verifier. `hidden` are the texts of the tests' files,
    `public` is all that the agent has read or written. No report holds `secrets`, values of the verifier's variables.
    """
    reward, said, outcome = _reward(result, verifier_logs)
    share = Fraction(min(max(reward, 0.0), 1.0)).limit_denominator(1000)
    output = result.text
    for secret in sorted(secrets, key=len, reverse=True):
        output = output.replace(secret, _LEFT_OUT) if len(secret) >= _SHORTEST_SECRET else output
    output = well_formed(output).strip()
    report = f"{said}\n{cut_middle(output, _REPORT_CHARS)}".strip()
    shown = cut_middle("\n".join(_without_hidden(output, hidden, public)), _JUDGE_CHARS)
    return Verification(outcome, share.numerator, share.denominator, report, f"{said}\n{shown}".strip())


def _reward(result: CommandResult, folder: Path) -> tuple[float, str, VerifyOutcome]:
    """Return the reward as the tests gave it, a sentence about it, and how the tests ended."""
    if result.timed_out:
        return 0.0, "The tests did not end in time.", VerifyOutcome.TIMEOUT
    if result.is_over_limit:
        what = "printed too much" if result.output_exceeded else "took more memory than the task has"
        return 0.0, f"The tests {what}.", VerifyOutcome.CRASHED
    for name, read in (("reward.json", _of_json), ("reward.txt", float)):
        content = _content(folder, name)
        if content is None:
            continue
        try:
            reward = read(content)
        except (ValueError, OverflowError, RecursionError):
            reward = math.nan
        if not math.isfinite(reward):
            return 0.0, f"The tests wrote a {name} without a reward.", VerifyOutcome.CRASHED
        return reward, f"The tests gave a reward of {reward:g}.", VerifyOutcome.RAN
    reward = float(result.exit_code == 0)
    return reward, f"The tests wrote no reward; their exit code is {result.exit_code}.", VerifyOutcome.RAN


def _of_json(text: str) -> float:
    """Return the number, or of an object its `reward`, or the mean of all of its numbers."""
    found = read_json(text)
    if isinstance(found, dict):
        values = cast(dict[str, Any], found)
        numbers = [_number(value) for value in values.values()]
        if "reward" in values:
            return _number(values["reward"])
        return sum(numbers) / len(numbers) if numbers else math.nan
    return _number(found)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _content(folder: Path, name: str) -> str | None:
    """Return the text of a file of this machine that programs in the container may have replaced by anything.

    None if there is no such file, or something else. No link is followed.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as closing, contextlib.suppress(OSError):
        place = os.open(folder, flags | os.O_DIRECTORY)
        closing.callback(os.close, place)
        file = os.open(name, flags | os.O_NONBLOCK, dir_fd=place)
        closing.callback(os.close, file)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return os.read(file, _MOST_REWARD_BYTES).decode(errors="replace")
    return None


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
        shown = line
        if _bare(line) in code and len(_bare(line)) >= _SHORTEST_LINE:
            shown = _LEFT_OUT
        elif line in leaking:
            name, dash, _ = line.partition(" - ")
            shown = f"{name} - {_LEFT_OUT}" if dash and name not in leaking else _LEFT_OUT
        if not (shown == _LEFT_OUT and was_left_out):
            yield shown
        was_left_out = shown == _LEFT_OUT


def _leaking(texts: Collection[str], hidden: Sequence[str], public: str) -> set[str]:
    """Return the texts with data of the hidden ones. For each of these, which may be many, `public` is read once."""
    return {text for tests in hidden for text in texts if leaks(text, tests, public)}


def _bare(line: str) -> str:
    """Return a line without the marks that pytest and shells put before a line of code, and without spaces."""
    return re.sub(r"^[>E+]*|\s", "", line.strip())


def spoken(messages: Sequence[Mapping[str, Any]], prompt: str) -> str:
    """Return all that was said in a conversation."""
    said = [prompt]
    for message in messages:
        said.append(str(message.get("content") or ""))
        said += [str(call.get("function", {}).get("arguments", "")) for call in message.get("tool_calls") or ()]
    return "\n".join(said)
