"""The demo policy: its training data (variants, transcripts), its measurement, and its weights in `policy/`.

It shows the machinery, not quality. `scripts/demo_policy/train` trains it from nothing. `mini_swe/` is an adapter that
teaches it another agent's format; `trajectory_judge/` and `sql_trajectory_judge/` teach both policies to judge a whole
trajectory.
"""

from pathlib import Path

POLICY_DIR = Path(__file__).parent / "policy"
"""The trained policy: config, tokenizer and weights, as `vllm serve` and transformers read them."""
SQL_POLICY_DIR = Path(__file__).parent / "sql_policy"
"""That of the SQL world, likewise."""
TRAJECTORY_JUDGES = {
    "coding": Path(__file__).parent / "trajectory_judge",
    "sql": Path(__file__).parent / "sql_trajectory_judge",
}
"""World -> the adapter, in peft's files, that teaches its policy to judge a whole trajectory."""
