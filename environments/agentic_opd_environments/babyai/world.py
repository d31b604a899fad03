"""The world of BabyAI: missions in rooms of a grid world, which the agent reads and plays as text.

    (level, seed) -> mission, first view -> act(action)* -> view -> verdict and reward of the level itself

minigrid makes levels from seeds, and is imported when a world is constructed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.types import Task
from agentic_opd.worlds.custom import Checks, CustomWorld, ToolError, tool

if TYPE_CHECKING:
    from agentic_opd_environments.babyai.game import Game

Action = Literal["turn left", "turn right", "go forward", "pick up", "drop", "toggle"]
Seeds = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
"""The first seed, and the one after the last."""
USUAL_LEVELS = ("BabyAI-GoToLocal-v0", "BabyAI-PickupLoc-v0", "BabyAI-PutNextLocal-v0")
"""Levels of one room."""


@dataclass(frozen=True, slots=True)
class LevelSeed:
    """Names a game."""

    level: str
    seed: int


class BabyAIWorld(CustomWorld):
    """Levels of BabyAI; see docs/babyai.md."""

    system_prompt = (
        "You move through rooms of square cells until your mission is done. Each call of act is one step. You see up "
        "to 6 steps forward and 3 to each side; walls and closed doors hide what is behind them. go forward moves one "
        "step. pick up, drop and toggle act on the cell 1 step forward; toggle opens or closes a door, a locked one "
        "with a key of its color. To go to an object, stand 1 step before it and face it. When the mission is done, "
        "answer with one word and no call."
    )

    def __init__(
        self,
        levels: tuple[str, ...] = USUAL_LEVELS,
        seeds: Seeds = (0, 256),
        eval_levels: tuple[str, ...] | None = None,
        eval_seeds: Seeds = (1_000_000, 1_000_064),
        max_steps: Annotated[int, Field(ge=1)] | None = 64,
        explain_no_effect: bool = True,
    ) -> None:
        """Check the settings; nothing is made yet.

        Args:
            levels: Levels to train on, as minigrid names them.
            seeds: First seed of these, and the one after the last; each seed of a level is a task.
            eval_levels: Levels to evaluate on. Unset: `levels`.
            eval_seeds: Seeds of these, likewise. A level that is in both must not have a seed in both, and a game that
                equals a training game is left out.
            max_steps: Steps of an episode, a call each. Null: each level's own limit.
            explain_no_effect: Say in words when an action changes nothing, and why; BabyAI-Text does not.

        Raises:
            ConfigError: minigrid is missing, a level is unknown, or the seeds are wrong.
        """
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # minigrid imports pygame, which greets on stdout.
        try:
            from agentic_opd_environments.babyai import game
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"env.world: {error}. The world babyai needs the extra: pip install 'agentic-opd[babyai]'"
            ) from error
        self._games, self._limit, self._explains = game.Game, max_steps, explain_no_effect
        self._training = _GameSplit("", levels, seeds)
        self._evaluation = _GameSplit("eval_", levels if eval_levels is None else eval_levels, eval_seeds)
        for part in (self._training, self._evaluation):
            part.check(game.level_names())
        self._training.check_apart(self._evaluation)
        self._split: tuple[list[Task], list[Task]] | None = None

    def tasks(self) -> list[Task]:
        """Return the games to train on."""
        return self._tasks()[0]

    def eval_tasks(self) -> list[Task]:
        """Return the games to evaluate on, of which none begins as a training game does."""
        return self._tasks()[1]

    def start(self, task: Task) -> "Game":
        """Return the game at its start."""
        return self._game(task.data)

    @tool
    def act(self, state: Any, action: Action) -> str:  # noqa: D417 - the policy reads this and passes no state
        """Take one step.

        Args:
            action: What to do.
        """
        if state.ended:
            raise ToolError(f"the episode is over ({state.ended}).")
        return state.act(action)

    def is_over(self, state: "Game") -> bool:
        """Return whether the mission is done, has failed, or has taken all steps."""
        return bool(state.ended)

    def judged(self, state: "Game") -> list[str]:
        """Return the steps: each of them is judged with the verdict."""
        return state.steps

    def verify(self, task: Task, state: "Game") -> Checks:
        """Return the level's verdict, one check that passes if the mission is done, and the level's reward."""
        report = state.report()
        return Checks(int(state.ended == "done"), 1, report, report, score=state.reward)

    def _tasks(self) -> tuple[list[Task], list[Task]]:
        """Return the training and the held-out games."""
        if self._split is None:
            training, training_starts = list[Task](), set[bytes]()
            for name in self._training.games():
                game = self._game(name)
                training.append(_task(name, game))
                training_starts.add(game.fingerprint)
            held_out = [
                _task(name, game)
                for name in self._evaluation.games()
                if (game := self._game(name)).fingerprint not in training_starts
            ]
            if not held_out:
                raise ConfigError(f"env.world: each game of {self._evaluation} begins as a training game does")
            self._split = training, held_out
        return self._split

    def _game(self, name: LevelSeed) -> "Game":
        return self._games.begin(name.level, name.seed, self._limit, self._explains)


def _task(name: LevelSeed, game: "Game") -> Task:
    prompt = f"Your mission: {game.mission}.\n{game.view()}"
    return Task(f"babyai/{name.level}/{name.seed}", prompt, data=name, limits={"max_turns": game.limit + 1})


@dataclass(frozen=True, slots=True)
class _GameSplit:
    """The games of training or of evaluation."""

    prefix: str
    """Prefix of its settings' names."""
    levels: tuple[str, ...]
    seeds: Seeds

    def __str__(self) -> str:
        return f"{self.prefix}levels and {self.prefix}seeds"

    def games(self) -> list[LevelSeed]:
        return [LevelSeed(level, seed) for level in self.levels for seed in range(*self.seeds)]

    def check(self, names: Sequence[str]) -> None:
        """Check that there are games.

        Args:
            names: All levels.

        Raises:
            ConfigError: A level is unknown or named twice, or there is none, or no seed.
        """
        if not self.levels or len({*self.levels}) < len(self.levels):
            raise ConfigError(f"env.world: {self.prefix}levels is {[*self.levels]}, expected names, each of them once")
        for level in self.levels:
            if level not in names:
                near = ", ".join(get_close_matches(level, names, 3, 0.0))
                raise ConfigError(
                    f"env.world: {self.prefix}levels: there is no level {level!r}. The nearest are {near}"
                )
        first, end = self.seeds
        if first >= end:
            raise ConfigError(
                f"env.world: {self.prefix}seeds is [{first}, {end}], expected the first seed and the one after the last"
            )

    def check_apart(self, evaluation: "_GameSplit") -> None:
        """Check that no game is in both parts.

        Raises:
            ConfigError: A game is in both.
        """
        both, first = {*self.levels} & {*evaluation.levels}, max(self.seeds[0], evaluation.seeds[0])
        if both and first < min(self.seeds[1], evaluation.seeds[1]):
            raise ConfigError(
                f"env.world: the seed {first} of {min(both)} is in seeds and in eval_seeds: choose other eval_seeds"
            )
