"""Worlds of generated SQL questions, for `env.world`: scripts/demo_policy/sql_world.py:GeneratedSql (docs/sql.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo_policy.sql.world import GeneratedSql

__all__ = ["Exam", "GeneratedSql", "Lessons"]


class Lessons(GeneratedSql):
    """What the learning experiment trains on."""

    num_eval_tasks = 0


class Exam(GeneratedSql):
    """What the learning experiment measures: never trained on."""

    num_tasks, num_eval_tasks = 1, 192
