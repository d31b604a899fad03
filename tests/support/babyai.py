"""Games of BabyAI without mistakes."""

import random

from learning.babyai_bot import bot_steps


def bot_actions(level: str, seed: int, max_steps: int | None = None) -> list[str]:
    """Return the bot's actions in a game without mistakes, up to its end; None: the level's own limit of steps."""
    return [step.action for step in bot_steps(level, seed, max_steps, 0.0, 0.0, random.Random(seed))]
