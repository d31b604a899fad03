"""Split tasks into training and evaluation by a hash of the task id and the seed. Pure.

The split is the same in every worker and after every restart. It does not depend on the order or number of tasks.
"""

from collections.abc import Iterable
from hashlib import blake2b

from agentic_opd.core.types import Task


def split_tasks(tasks: Iterable[Task], fraction: float, seed: int) -> tuple[list[Task], list[Task]]:
    """Return the tasks to train on and those to evaluate on, each in the given order.

    `fraction` is the expected share of evaluation tasks; a larger one holds out the tasks of a smaller one and adds
    others.
    """
    train: list[Task] = []
    evaluation: list[Task] = []
    for task in tasks:
        (evaluation if split_position(task.task_id, seed) < fraction else train).append(task)
    return train, evaluation


def split_position(task_id: str, seed: int) -> float:
    """Return a number in [0, 1), uniform over ids and determined by the id and the seed."""
    digest = blake2b(f"{seed}/{task_id}".encode(), digest_size=8).digest()
    # A float holds 53 bits; with more bits the quotient could be rounded up to 1.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
