"""Which tasks are held out for evaluation, decided by a task's id and the seed alone. Pure.

So every worker and every restart draws the same line, whatever the order of the tasks and however many are read.
"""

from collections.abc import Iterable
from hashlib import blake2b

from agentic_opd.core.types import Task


def split_tasks(tasks: Iterable[Task], fraction: float, seed: int) -> tuple[list[Task], list[Task]]:
    """Divide tasks into those to train on and those to evaluate on, each in the order given.

    Args:
        tasks: What to divide.
        fraction: Expected share of evaluation tasks, in [0, 1]; 0 holds out none, 1 holds out all. A larger fraction
            only adds to those that a smaller one holds out.
        seed: Another seed holds out others.
    """
    train: list[Task] = []
    evaluation: list[Task] = []
    for task in tasks:
        (evaluation if split_position(task.task_id, seed) < fraction else train).append(task)
    return train, evaluation


def split_position(task_id: str, seed: int) -> float:
    """A number in [0, 1), evenly spread over ids, that only depends on the id and the seed."""
    digest = blake2b(f"{seed}/{task_id}".encode(), digest_size=8).digest()
    # 53 bits are what a float holds: with more of them the quotient could be rounded up to 1.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
