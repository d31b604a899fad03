"""The bot of minigrid as a player of the world babyai: it knows the mission's parts, and sees what the agent sees."""

from minigrid.utils.baby_ai_bot import BabyAIBot

from agentic_opd_environments.babyai.game import ACTIONS, Game

_NAMES = {action: name for name, action in ACTIONS.items()}


def bot_actions(level: str, seed: int, max_steps: int | None = None) -> list[str]:
    """Return the bot's actions in a game, up to its end; None: the level's own limit of steps."""
    game = Game.begin(level, seed, max_steps)
    bot, action, names = BabyAIBot(game.env), None, list[str]()
    while not game.ended:
        action = bot.replan(action)
        names.append(_NAMES[action])
        game.act(names[-1])
    return names
