"""The bot of minigrid as a player of the world babyai: it knows the mission's parts, and sees what the agent sees."""

import random
from typing import NamedTuple

from minigrid.utils.baby_ai_bot import BabyAIBot

from agentic_opd_environments.babyai.game import ACTIONS, Game
from agentic_opd_environments.babyai.view import no_effect

_NAMES = {action: name for name, action in ACTIONS.items()}
MISTAKEN_ACTIONS = ("go forward", "turn left", "turn right", "pick up")
"""What a mistake may be. A box that is toggled is gone, which the bot can't repair."""


class BotStep(NamedTuple):
    """One step of a game."""

    action: str
    is_mistake: bool = False
    """Whether the bot would have done something else."""
    hint: str | None = None
    """What the world says of the first of `MISTAKEN_ACTIONS` that would have changed nothing in place of this one."""


def bot_steps(
    level: str, seed: int, max_steps: int | None, mistakes: float, hints: float, draws: random.Random
) -> list[BotStep]:
    """Return the steps of a game in which the bot makes mistakes and goes on from where they led, up to its end.

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
        step = BotStep(_NAMES[bot.replan(taken)])
        if draws.random() < mistakes:
            others = [action for action in MISTAKEN_ACTIONS if action != step.action]
            step = BotStep(draws.choice(others), is_mistake=True)
        elif draws.random() < hints:
            reasons = [no_effect(game.env, ACTIONS[action]) for action in MISTAKEN_ACTIONS if action != step.action]
            if reason := next(filter(None, reasons), None):
                step = step._replace(hint=f"Nothing changes: {reason}.")
        game.act(step.action)
        steps.append(step)
        taken = ACTIONS[step.action]
    return steps


def bot_actions(level: str, seed: int, max_steps: int | None = None) -> list[str]:
    """Return the bot's actions in a game without mistakes, up to its end; None: the level's own limit of steps."""
    return [step.action for step in bot_steps(level, seed, max_steps, 0.0, 0.0, random.Random(seed))]
