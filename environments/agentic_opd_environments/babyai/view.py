"""What an agent sees in a level of minigrid, and why an action changes nothing, in words. Pure.

    cells around the agent, less what walls and doors hide -> "You see a red ball 2 steps forward and 1 step left."

The idea is that of BabyAI-Text (Carta et al. 2023, arXiv 2302.02662).
"""

from collections.abc import Iterator
from typing import NamedTuple

from minigrid.core.actions import Actions
from minigrid.core.world_object import Box, Door, WorldObj
from minigrid.minigrid_env import MiniGridEnv


class Sight(NamedTuple):
    """An object or a wall in view."""

    cell: WorldObj
    forward: int
    """Cells in front of the agent, 0 or more."""
    right: int
    """Cells to its right, negative to its left."""

    @property
    def distance(self) -> int:
        """Cells to walk without obstacles."""
        return self.forward + abs(self.right)


def sights(env: MiniGridEnv) -> list[Sight]:
    """Return what is in view, the agent's own cell left out, from near to far, walls last.

    Of walls, only the nearest one in each straight direction: forward, left, right.
    """
    grid, is_visible = env.gen_obs_grid()
    middle, own_row = env.agent_view_size // 2, env.agent_view_size - 1
    in_view = [
        Sight(cell, own_row - row, column - middle)
        for row in range(grid.height)
        for column in range(grid.width)
        if is_visible[column, row] and (column, row) != (middle, own_row) and (cell := grid.get(column, row))
    ]
    in_view.sort(key=lambda sight: (sight.cell.type == "wall", sight.distance, sight.right))
    straight_walls = dict[tuple[bool, bool], Sight]()
    for sight in in_view:
        if sight.cell.type == "wall" and 0 in (sight.forward, sight.right):
            straight_walls.setdefault((sight.right < 0, sight.right > 0), sight)
    return [sight for sight in in_view if sight.cell.type != "wall" or sight in straight_walls.values()]


def view_text(env: MiniGridEnv) -> str:
    """Return what the agent sees and carries, in one or two sentences."""
    parts = [f"{name_of(cell)} {' and '.join(_steps(forward, right))}" for cell, forward, right in sights(env)]
    text = f"You see {'; '.join(parts) or 'nothing'}."
    return f"{text} You carry {name_of(env.carrying)}." if env.carrying else text


def _steps(forward: int, right: int) -> Iterator[str]:
    for count, direction in ((forward, "forward"), (abs(right), "left" if right < 0 else "right")):
        if count:
            yield f"{count} step{'s' * (count > 1)} {direction}"


def name_of(cell: WorldObj) -> str:
    """Return a cell's content with its article, colour and state: `a wall`, `a red ball`, `a locked grey door`."""
    if cell.type == "wall":
        return "a wall"
    if isinstance(cell, Door):
        return f"{'an open' if cell.is_open else 'a locked' if cell.is_locked else 'a closed'} {cell.color} door"
    return f"a {cell.color} {cell.type}"


def no_effect(env: MiniGridEnv, action: Actions) -> str | None:
    """Return why an action would change nothing; None if it changes something."""
    front = env.grid.get(*env.front_pos)
    if action is Actions.forward:
        return f"{name_of(front)} is in the way" if front and not front.can_overlap() else None
    if action is Actions.pickup:
        if front is None or not front.can_pickup():
            return f"{name_of(front)} can't be picked up" if front else "nothing is in front of you"
        return f"you carry {name_of(env.carrying)} already" if env.carrying else None
    if action is Actions.drop:
        if env.carrying is None:
            return "you carry nothing"
        return f"{name_of(front)} is in the way" if front else None
    if action is Actions.toggle:
        if isinstance(front, Door) and front.is_locked:
            is_key = env.carrying is not None and env.carrying.type == "key" and env.carrying.color == front.color
            return None if is_key else f"the {front.color} door is locked, and you carry no {front.color} key"
        if isinstance(front, Door | Box):
            return None
        return f"{name_of(front)} can't be opened" if front else "nothing is in front of you"
    return None
