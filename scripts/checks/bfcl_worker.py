"""Judge conversations by this package's rules and by BFCL's checker, in a sandbox: see bfcl_conversations.py.

    python -I bfcl_worker.py < JOBS > VERDICTS

Each line of JOBS is a conversation: `apis` and `turns` as api_process.py reads them, and for BFCL's checker `made` and
`right` (calls as Python, one list a user turn) and `entry`. Each verdict is computed in a process of its own, since the
APIs share state (the precision of decimals) through their modules. A verdict is the index of the first wrong user turn,
null if there is none, or the text of what was raised.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, Callable  # noqa: UP035 - Python 3.8 or later

sys.path[:0] = [str(Path(__file__).parent), "/run/site"]

import api_process  # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker  # noqa: E402

_LIMIT_S = 20


def ours(job: dict[str, Any]) -> int | None:
    """Return the verdict of this package."""
    wrong = api_process.judge(job["apis"], job["turns"])["wrong"]
    return None if wrong is None else wrong["turn"]


def theirs(job: dict[str, Any]) -> int | None:
    """Return the verdict of BFCL's checker; each call is a step."""
    entry = job["entry"]
    steps = [[[call] for call in calls] for calls in job["made"]]
    verdict = multi_turn_checker(steps, job["right"], entry, entry["id"].rpartition("_")[0], "model")
    if verdict["valid"]:
        return None
    if "execution_result" in verdict:
        return len(verdict["execution_result"]) - 1
    return int(re.findall(r"turn (\d+)", verdict["error_message"])[0])


def in_process(judge: Callable[[dict[str, Any]], int | None], job: dict[str, Any]) -> Any:
    """Return a verdict that a forked process computes."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_LIMIT_S)
        try:
            text = json.dumps(judge(job))
        except BaseException as error:  # noqa: BLE001 - counted
            text = json.dumps(f"raises {type(error).__name__}")
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else f"ended with status {status}"


def main() -> None:
    """Judge each line."""
    output = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # The APIs' code may print.
    os.dup2(null, 2)
    for line in sys.stdin:
        job = json.loads(line)
        output.write(json.dumps([in_process(ours, job), in_process(theirs, job)]) + "\n")
        output.flush()


if __name__ == "__main__":
    main()
