"""A group of two rollouts, each eight tokens with two turns, of which the first is scored:

position        0     1     2     3     4     5     6     7
tokens          1     2     3    10    11     4    12    13
sampled                           x     x           x     x
turns                            [scored )         [vote_failed)
gap                            +0.4  -1.0
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentic_opd.report.read import ShownRollout, read_groups

HINT = "Check divisibility by 15 first."
TOKENS = [1, 2, 3, 10, 11, 4, 12, 13]
SCORED: dict[str, Any] = {
    "span": [3, 5],
    "outcome": "scored",
    "next_state_role": "tool",
    "votes": [{"decision": 1, "hint": HINT, "text": "yes"}, {"decision": None, "hint": None, "text": "hm"}],
    "hint": HINT,
    "hint_token_ids": [70, 71],
    "insert_at": 2,
    "error": None,
    "evidence": ["tool"],
}
UNSCORED: dict[str, Any] = {
    **SCORED,
    "span": [6, 8],
    "outcome": "vote_failed",
    "next_state_role": "verdict",
    "votes": [{"decision": -1, "hint": None, "text": "no"}, {"decision": -1, "hint": None, "text": "no"}],
    "hint": None,
    "hint_token_ids": [],
    "insert_at": None,
}
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "terminal", "arguments": "{}"}}]},
    {"role": "tool", "name": "terminal", "content": "ok"},
    {"role": "assistant", "content": "done"},
]


def group(task: str = "t", passed: Sequence[int] = (4, 1)) -> dict[str, Any]:
    def overrides(count: int) -> dict[str, Any]:
        return {
            "stop_reason": "finished",
            "tool_errors": 1,
            "reward": {"correctness": count / 4, "efficiency": 0.5},
            "verification": {"outcome": "ran", "passed": count, "total": 4},
            "opd": {"turns": [SCORED, UNSCORED]},
        }

    one = {
        "tokens": TOKENS,
        "masks": [-100, -100, -100, 10, 11, -100, 12, 13],
        "inference_logprobs": [1.0, 1.0, 1.0, -0.5, -1.5, 1.0, -0.25, -2.0],
        "messages": CHAT,
        "distill_token_ids": [[], [], [], [10, 7, 8], [11, 8, 9], [], [], []],
        "distill_logprobs": [[], [], [], [-0.1, -3.0, -4.0], [-2.5, -0.2, -5.0], [], [], []],
    }
    about = {"task_id": task, "opd": {"distill_topk": 3, "noise_floor": 2e-6}}
    whole = {name: [copy.deepcopy(value) for _ in passed] for name, value in one.items()}
    lists = {"scores": [count / 4 for count in passed], "overrides": [overrides(count) for count in passed]}
    return copy.deepcopy({**whole, **lists, "group_overrides": about})


def with_records(*records: dict[str, Any], task: str = "t") -> dict[str, Any]:
    """A group whose rollouts have other records of their two turns."""
    changed = group(task)
    for overrides in changed["overrides"]:
        overrides["opd"]["turns"] = copy.deepcopy(list(records))
    if all(record["outcome"] != "scored" for record in records):
        for name in ("distill_token_ids", "distill_logprobs"):
            changed[name] = [[[] for _ in TOKENS] for _ in changed[name]]
    return changed


def judged_as_a_whole(task: str = "t", question: str = "## Turn 1", said: str = "No \\boxed{9}.") -> dict[str, Any]:
    """A group whose rollouts the judge read as a whole: both turns are named, the second by one of three answers.

    `said` is the text of the answer that abstains.
    """
    named = {"decision": 1, "hint": HINT, "text": f"\\boxed{{1}} {HINT}"}
    late = {"decision": 1, "hint": "Run the tests before the end.", "text": "\\boxed{2} Run them."}
    changed = with_records({**SCORED, "votes": [named, named]}, {**UNSCORED, "votes": [late]}, task=task)
    changed["group_overrides"]["opd"]["judge_scope"] = "trajectory"
    votes = [
        {"kind": "named", "turns": [1], "text": "first answer"},
        {"kind": "named", "turns": [1, 2], "text": "second answer"},
        {"kind": "unknown_turn", "turns": [], "text": said},
    ]
    tokens = {"read": 300, "sampled": 60}
    for overrides in changed["overrides"]:
        window = {"first": 1, "last": 2, "question": question, "votes": votes, "judge_tokens": tokens}
        overrides["opd"]["trajectory"] = {"windows": [copy.deepcopy(window)]}
    return changed


def in_two_sequences() -> dict[str, Any]:
    """A rollout that was judged as a whole and whose second turn is in a sequence of its own, behind a rewrite."""
    whole = judged_as_a_whole()
    first, second = whole["overrides"]
    for name in ("distill_token_ids", "distill_logprobs"):
        whole[name][1] = [[] for _ in TOKENS]
    whole["masks"] = [[-100, -100, -100, 10, 11, -100, -100, -100], [-100] * 6 + [12, 13]]
    whole["inference_logprobs"][0][6:] = [1.0, 1.0]
    whole["inference_logprobs"][1][3:5] = [1.0, 1.0]
    first["opd"]["turns"], second["opd"]["turns"] = first["opd"]["turns"][:1], second["opd"]["turns"][1:]
    first["opd"]["context_turns"] = [{"message": 4, "why": "shared"}]
    second["opd"]["context_turns"] = [{"message": 2, "why": "shared"}]
    del second["opd"]["trajectory"]
    for overrides in (first, second):
        overrides["session_id"] = "r"
    return whole


def rollouts(*groups: Any) -> list[ShownRollout]:
    left_out: list[str] = []
    read = list(read_groups([json.dumps(one).encode() + b"\n" for one in groups or (group(),)], left_out))
    assert left_out == []
    return read


def write(path: Path, *lines: Any) -> Path:
    """A file of groups; a string is a line as it is."""
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path
