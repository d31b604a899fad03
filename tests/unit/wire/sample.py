"""The group that everything here starts from, two sequences like this:

position        0     1     2     3     4     5     6     7
tokens          1     2     3    10    11     4    12    13
sampled                           x     x           x     x
turns                            [scored )         [vote_failed)
rows, K=2       .     .     .     x     x     .     .     .
"""

import copy
from typing import Any

TOKENS = [1, 2, 3, 10, 11, 4, 12, 13]
MASKS = [-100, -100, -100, 10, 11, -100, 12, 13]
STUDENT = [1.0, 1.0, 1.0, -0.5, -1.5, 1.0, -0.25, -2.0]
HINT = "Check divisibility by 15 first."
SCORED = {
    "span": [3, 5],
    "outcome": "scored",
    "next_state_role": "tool",
    "votes": [{"decision": 1, "hint": HINT, "text": "..."}, {"decision": None, "hint": None, "text": "hm"}],
    "hint": HINT,
    "hint_token_ids": [70, 71],
    "insert_at": 2,
    "error": None,
}
UNSCORED = {
    **SCORED,
    "span": [6, 8],
    "outcome": "vote_failed",
    "next_state_role": "verdict",
    "votes": [{"decision": -1, "hint": None, "text": "..."}],
    "hint": None,
    "hint_token_ids": [],
    "insert_at": None,
}
CONTROL = {
    "kind": "other",
    "hint": "Return the list in reverse.",
    "hint_token_ids": [72],
    "logprobs": [[-0.4, -2.0], [-1.25, None]],
}
KNOWN_MORE = {
    **SCORED,
    "evidence": ["tool", "later"],
    "question": "What does the next state show?",
    "step_votes": [1, None, 0, -1, 1],
    "truncated": True,
    "baseline_logprobs": [-0.75, -1.25],
    "unhinted_logprobs": [-0.5, -0.5],
    "control": CONTROL,
    "step_score": 1,
    "weight_version": 3,
    "scored_version": 4,
    "judge_tokens": {"read": 812, "sampled": 96},
    "hints": [
        {"hint": "Name it.", "hint_token_ids": [73], "insert_at": 2, "overlap": 0.25, "gap": -0.5, "entropy": 0.75},
        {"hint": HINT, "hint_token_ids": [70, 71], "insert_at": 2, "overlap": 0.5, "gap": 0.85, "entropy": 0.5},
    ],
}
"""The scored turn with every field that a record may have."""
IDS = [[], [], [], [10, 7], [11, 8], [], [], []]
LOGPROBS = [[], [], [], [-0.1, -3.0], [-0.2, -2.5], [], [], []]
CHAT = [{"role": role, "content": ""} for role in ("system", "user", "assistant", "tool", "assistant")]


def group() -> dict[str, Any]:
    one = {
        "tokens": TOKENS,
        "masks": MASKS,
        "scores": 0.5,
        "inference_logprobs": STUDENT,
        "messages": CHAT,
        "overrides": {"opd": {"turns": [SCORED, UNSCORED]}},
        "distill_token_ids": IDS,
        "distill_logprobs": LOGPROBS,
    }
    whole: dict[str, Any] = {name: [copy.deepcopy(value), copy.deepcopy(value)] for name, value in one.items()}
    outcomes = {"scored": 2, "vote_failed": 2, "leaked": 0}
    return {**whole, "group_overrides": {"task_id": "t", "opd": {"distill_topk": 2, "outcomes": outcomes}}}


TRAJECTORY = {
    "windows": [
        {
            "first": 1,
            "last": 2,
            "question": "Which turns went wrong?",
            "votes": [
                {"kind": "named", "turns": [1], "text": "..."},
                {"kind": "none", "turns": [], "text": "\\boxed{-1}"},
                {"kind": "too_many_turns", "turns": [], "text": "..."},
            ],
            "judge_tokens": {"read": 1200, "sampled": 96},
        }
    ]
}
"""The questions about a rollout as a whole."""


def known_more() -> dict[str, Any]:
    """The group, with every field that its records may have."""
    one = group()
    about = {"hint_placement": "end", "noise_floor": 2e-06, "gap_baseline": "teacher", "hint_source": "judge"}
    about |= {"noise_rms": 8e-07, "precision": "float32", "judge_scope": "trajectory", "judge_when": "failed"}
    one["group_overrides"]["opd"] |= about
    for overrides in one["overrides"]:
        overrides["opd"]["turns"] = copy.deepcopy([KNOWN_MORE, {**UNSCORED, "weight_version": 3}])
        overrides["opd"]["trajectory"] = copy.deepcopy(TRAJECTORY)
    return one


def k_1_group() -> dict[str, Any]:
    one = group()
    one["group_overrides"]["opd"]["distill_topk"] = 1
    one["distill_token_ids"] = [[[token] for token in TOKENS]] * 2
    one["distill_logprobs"] = [[[0.0], [0.0], [0.0], [-0.1], [-0.2], [0.0], [-0.25], [-2.0]] for _ in range(2)]
    return one
