"""Which first solutions still fail after a training, and whether any hint had been about them.

    PYTHONPATH=scripts .venv/bin/python -m learning.unhinted 64 runs/learn/opd/seed-?-*

A first solution was hinted at if one of the first so many rollouts began with the same text and has a hint. What was
seen without a hint, and what was never seen, other hints alone can have mended.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from agentic_opd.wire.group import ScoredGroup
from learning.first_solutions import first_solution


def by_hint(groups: Sequence[ScoredGroup], rows: Iterable[dict[str, Any]], rollouts: int) -> Counter[str]:
    """Count the episodes that fail, by what the training had shown of their first solutions.

    Args:
        groups: What the run was trained on, in order.
        rows: Lines of the samples.jsonl measured after `rollouts` rollouts.
        rollouts: Rollouts before the measurement.

    Returns:
        Counts of "hinted", "seen" and "new".
    """
    sizes = accumulate(len(group.rollouts) for group in groups)
    trained = [group for group, _ in takewhile(lambda pair: pair[1] <= rollouts, zip(groups, sizes, strict=True))]
    hinted_before: dict[tuple[str | None, str | None], bool] = {}
    for task_id, rollout in ((group.task_id, rollout) for group in trained for rollout in group.rollouts):
        key = task_id, first_solution([{**message} for message in rollout.messages or ()])
        hinted_before[key] = hinted_before.get(key, False) or any(turn.hint for turn in rollout.turns or ())
    labels = {None: "new", False: "seen", True: "hinted"}
    failing = ((row["task_id"], first_solution(row["messages"])) for row in rows if not row["passed"])
    return Counter(labels[hinted_before.get(key)] for key in failing)


def main() -> None:
    """A line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", type=int, help="a measured point of the runs")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs that scripts/learn left")
    args = parser.parse_args()
    rollouts: int = args.rollouts
    for folder in args.runs:
        groups = [ScoredGroup.from_wire(json.loads(line)) for line in (folder / "rollouts/groups.jsonl").open()]
        rows = [json.loads(line) for line in (folder / f"eval-{rollouts:06d}" / "samples.jsonl").open()]
        count_of = by_hint(groups, rows, rollouts)
        counts = ", ".join(f"{name} {count}" for name, count in sorted(count_of.items()))
        print(f"{folder}: of {len(rows)} episodes {count_of.total()} fail; their first solutions were: {counts}")


if __name__ == "__main__":
    main()
