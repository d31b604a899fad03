"""One episode of a level: the actions so far, what was seen of what the mission names, and how it ended.

    level, seed -> Game -> act(name)* -> text, ended -> report

The level itself decides when its mission is done and what that is worth: 1 - 0.9 * steps / limit.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, NamedTuple, cast

import gymnasium
from minigrid.core.actions import Actions
from minigrid.core.world_object import WorldObj
from minigrid.envs.babyai.core import roomgrid_level
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.envs.babyai.core.verifier import (
    ActionInstr,
    GoToInstr,
    Instr,
    ObjDesc,
    OpenInstr,
    PickupInstr,
    PutNextInstr,
    SeqInstr,
)

from agentic_opd_environments.babyai.view import Sight, no_effect, sights, view_text

logger = logging.getLogger(__name__)

ACTIONS = {
    "turn left": Actions.left,
    "turn right": Actions.right,
    "go forward": Actions.forward,
    "pick up": Actions.pickup,
    "drop": Actions.drop,
    "toggle": Actions.toggle,
}
_LOCATIONS = {"left": "on your left", "right": "on your right", "front": "in front of you", "behind": "behind you"}
_SENTENCES: dict[type[ActionInstr], tuple[str, Sequence[str]]] = {
    GoToInstr: ("go to {}", ("desc",)),
    OpenInstr: ("open {}", ("desc",)),
    PickupInstr: ("pick up {}", ("desc",)),
    PutNextInstr: ("put {} next to {}", ("desc_move", "desc_fixed")),
}
"""What a part of a mission says, and the attributes that describe its objects."""
Ending = Literal["done", "failed", "out of steps"]


def _log_rejected(*words: object) -> None:
    logger.debug(" ".join(map(str, words)))


roomgrid_level.__dict__["print"] = _log_rejected  # minigrid prints each layout that it rejects, on stdout.


def level_names() -> list[str]:
    """Return the levels that minigrid registers."""
    return [name for name in gymnasium.registry if name.startswith("BabyAI-")]


@dataclass(slots=True)
class Target:
    """Objects that fit a description of the mission, and what was seen of them. Steps count from 0, the start."""

    words: str
    objects: Sequence[WorldObj]
    first_seen: int | None = None
    last_seen: int | None = None
    nearest: int | None = None
    """Smallest distance so far, in cells to walk without obstacles."""
    distance: int | None = None
    """Distance now: 0 if it is carried, None if nothing is left of it."""

    def update(self, env: RoomGridLevel, in_view: Sequence[Sight], step: int) -> None:
        """Look for the objects after a step."""
        if any(sight.cell is candidate for sight in in_view for candidate in self.objects):
            self.first_seen = step if self.first_seen is None else self.first_seen
            self.last_seen = step
        distances = [cells for candidate in self.objects if (cells := _distance(env, candidate)) is not None]
        self.distance = min(distances, default=None)
        self.nearest = min((cells for cells in (self.nearest, self.distance) if cells is not None), default=None)

    def report(self) -> str:
        """Return what was seen of the objects, as a sentence."""
        if self.distance is None:
            now = "is gone now"
        else:
            now = "is carried now" if self.distance == 0 else f"is {_steps(self.distance)} away now"
        subject = self.words[:1].upper() + self.words[1:]
        if self.first_seen is None:
            return f"{subject} was never seen and {now}."
        nearest = "was carried" if self.nearest == 0 else f"was never nearer than {_steps(self.nearest or 0)}"
        clauses = (f"was first seen after step {self.first_seen}", f"last seen after step {self.last_seen}", nearest)
        return f"{subject} {', '.join(clauses)}, and {now}."


def _steps(cells: int) -> str:
    return f"{cells} step{'s' * (cells != 1)}"


def _distance(env: RoomGridLevel, target: WorldObj) -> int | None:
    """Return the cells between the agent and an object, 0 if it carries it, None if the object is gone."""
    if env.carrying is target:
        return 0
    column, row = cast(tuple[int, int], target.cur_pos)
    if min(column, row) < 0 or env.grid.get(column, row) is not target:
        return None
    return int(abs(column - env.agent_pos[0]) + abs(row - env.agent_pos[1]))


class MissionPart(NamedTuple):
    """One action that a mission asks for."""

    words: str
    targets: Sequence[Target]


@dataclass(slots=True)
class Game:
    """A level being played."""

    env: RoomGridLevel
    instructions: Instr
    """The mission, with what of it is done."""
    explains: bool
    """Whether results say why an action changed nothing."""
    parts: Sequence[MissionPart]
    steps: list[str] = field(default_factory=list[str])
    """A line for each action."""
    ended: Ending | None = None
    reward: float = 0.0
    """The level's own."""

    @classmethod
    def begin(cls, level: str, seed: int, max_steps: int | None, explains: bool = True) -> "Game":
        """Return the game of a seed; equal arguments give equal games.

        Args:
            level: A name of `level_names`.
            seed: Seed of the layout and the mission, 0 or more.
            max_steps: Limit of steps; None: the level's own.
            explains: See `explains`.
        """
        env = cast(RoomGridLevel, gymnasium.make(level, max_steps=max_steps, disable_env_checker=True).unwrapped)
        env.reset(seed=seed)
        instructions: Instr = cast(Any, env).instrs
        game = cls(env, instructions, explains, [_part(action) for action, _ in _actions(instructions, False)])
        game._look()
        return game

    @property
    def mission(self) -> str:
        return self.env.mission

    @property
    def limit(self) -> int:
        """Limit of steps."""
        return self.env.max_steps

    @property
    def fingerprint(self) -> bytes:
        """A digest of layout, mission and the agent's position: games with equal ones are the same game."""
        carried = self.env.carrying and self.env.carrying.encode()
        return sha256(f"{self.env.hash(64)} {carried} {self.mission}".encode()).digest()

    def view(self) -> str:
        """Return what the agent sees and carries."""
        return view_text(self.env)

    def act(self, name: str) -> str:
        """Take one step and return what the agent reads of it.

        Args:
            name: A key of `ACTIONS`.
        """
        sentence = self.no_effect_sentence(name) if self.explains else None
        _, reward, is_over, is_cut_off, _ = self.env.step(ACTIONS[name])
        self.steps.append(f"step {len(self.steps) + 1}: {name}")
        self._look()
        if is_over:
            self.ended, self.reward = ("done", float(reward)) if reward else ("failed", 0.0)
        elif is_cut_off:
            self.ended = "out of steps"
        return " ".join(filter(None, (sentence, self._ending() or self.view())))

    def no_effect_sentence(self, name: str) -> str | None:
        """Return the sentence that says why an action would change nothing now; None if it would change something.

        Args:
            name: A key of `ACTIONS`.
        """
        reason = no_effect(self.env, ACTIONS[name])
        return reason and f"Nothing changes: {reason}."

    def _ending(self) -> str | None:
        sentences = {
            "done": "The mission is done.",
            "failed": "The mission has failed.",
            "out of steps": f"The limit of {self.limit} steps is reached.",
        }
        return self.ended and sentences[self.ended]

    def _look(self) -> None:
        in_view = sights(self.env)
        for part in self.parts:
            for target in part.targets:
                target.update(self.env, in_view, len(self.steps))

    def report(self) -> str:
        """Return how the game stands: its first line says whether the mission is done, the rest what is missing.

        It says what was seen of the missing parts' objects and how far they are, and neither a place nor an action.
        """
        count = f"after {len(self.steps)} of {self.limit} steps"
        if self.ended == "done":
            return f"The mission is done {count}; the reward is {self.reward:.2f}."
        first = "The mission has failed" if self.ended == "failed" else "The mission is not done"
        lines = [f"{first} {count}."]
        for part, (_, is_done) in zip(self.parts, _actions(self.instructions, False), strict=True):
            if len(self.parts) > 1:
                lines.append(f"{'Done' if is_done else 'Not done'}: {part.words}.")
            if not is_done:
                lines += [target.report() for target in part.targets]
        return "\n".join(lines)


def _actions(instruction: Instr, is_done: bool) -> Iterator[tuple[ActionInstr, bool]]:
    """Yield the actions of a mission in order, and whether each is done."""
    if isinstance(instruction, SeqInstr):
        sequence: Any = instruction
        yield from _actions(sequence.instr_a, sequence.a_done == "success")
        yield from _actions(sequence.instr_b, sequence.b_done == "success")
    else:
        yield cast(ActionInstr, instruction), is_done


def _part(instruction: ActionInstr) -> MissionPart:
    sentence, names = _SENTENCES[type(instruction)]
    descriptions: list[ObjDesc] = [getattr(instruction, name) for name in names]
    targets = [Target(_described(description), [*description.obj_set]) for description in descriptions]
    return MissionPart(sentence.format(*(target.words for target in targets)), targets)


def _described(description: ObjDesc) -> str:
    """Return a description as the mission words it; minigrid's own method would search for the objects again."""
    article = "a" if len(description.obj_set) > 1 else "the"
    words = [article, description.color, description.type or "object", _LOCATIONS.get(description.loc or "")]
    return " ".join(filter(None, words))
