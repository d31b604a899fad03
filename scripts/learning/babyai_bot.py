"""The bot of minigrid as a player of the world babyai: it knows the mission's parts, and sees what the agent sees."""

import random
from typing import NamedTuple

from minigrid.utils.baby_ai_bot import BabyAIBot

from agentic_opd_environments.babyai.game import ACTIONS, Game

_NAMES = {action: name for name, action in ACTIONS.items()}
MISTAKEN_ACTIONS = ("go forward", "turn left", "turn right", "pick up")
"""The possible mistakes. A toggled box is gone for good, so `toggle` is not one of them."""


class BotStep(NamedTuple):
    """One step of a game."""

    action: str
    is_mistake: bool = False
    """Whether the bot would have done something else."""
    hint: str | None = None
    """The world's sentence about the first of `MISTAKEN_ACTIONS` that would change nothing here."""


def bot_steps(
    level: str, seed: int, max_steps: int | None, mistakes: float, hints: float, draws: random.Random
) -> list[BotStep]:
    """Play a game to its end with the bot, which makes mistakes and corrects them, and return its steps.

    Args:
        level: A name of `level_names`.
        seed: Seed of the game.
        max_steps: Limit of steps; None: the level's own.
        mistakes: Probability that a step is another one than the bot's, of `MISTAKEN_ACTIONS`.
        hints: Probability of a hint for a step that is no mistake, where some action would change nothing.
        draws: Decides which steps are mistakes, and which have hints.
    """
    game = Game.begin(level, seed, max_steps)
    bot, taken, steps = BabyAIBot(game.env), None, list[BotStep]()
    while not game.ended:
        right = _NAMES[bot.replan(taken)]
        others = [action for action in MISTAKEN_ACTIONS if action != right]
        if draws.random() < mistakes:
            step = BotStep(draws.choice(others), is_mistake=True)
        elif draws.random() < hints:
            step = BotStep(right, hint=next(filter(None, map(game.no_effect_sentence, others)), None))
        else:
            step = BotStep(right)
        game.act(step.action)
        steps.append(step)
        taken = ACTIONS[step.action]
    return steps
