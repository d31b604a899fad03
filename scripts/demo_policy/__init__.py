"""The demo policy: its training data (variants, transcripts), its measurement, and its weights in `policy/`.

It shows the machinery, not quality. `scripts/demo_policy/train` trains it from nothing. `mini_swe/` is an adapter that
teaches it another agent's format; `trajectory_judge/` and `sql_trajectory_judge/` teach both policies to judge a whole
trajectory.
"""

import json
from pathlib import Path
from typing import NamedTuple

POLICY_DIR = Path(__file__).parent / "policy"
"""The trained policy: config, tokenizer and weights, as `vllm serve` and transformers read them."""
SQL_POLICY_DIR = Path(__file__).parent / "sql_policy"
"""That of the SQL world, likewise."""


class TrajectoryJudge(NamedTuple):
    """An adapter, in peft's files, that teaches a policy to judge a whole trajectory."""

    adapter: Path
    temperature: float
    """`judge.temperature` at which it was measured."""

    @property
    def rank(self) -> int:
        """The adapter's rank."""
        return json.loads((self.adapter / "adapter_config.json").read_text())["r"]


TRAJECTORY_JUDGES = {
    "coding": TrajectoryJudge(Path(__file__).parent / "trajectory_judge", 0.3),
    "sql": TrajectoryJudge(Path(__file__).parent / "sql_trajectory_judge", 0.7),
}
"""World -> the judge that its policy becomes."""
