"""The world babyai against the state of minigrid itself: what is said to be in view, verdicts, hostile calls."""

import asyncio
import random
import re
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import pytest
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT
from minigrid.core.world_object import Box, Wall

from agentic_opd.core.errors import ConfigError
from agentic_opd.core.types import Task, ToolCall, ToolResult, Verification
from agentic_opd.env.config import AgentEnvConfig
from agentic_opd.worlds.choose import make_world
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import HookedWorld
from agentic_opd_environments import babyai
from agentic_opd_environments.babyai import world as world_module
from agentic_opd_environments.babyai.game import ACTIONS, Game, level_names
from agentic_opd_environments.babyai.view import no_effect
from agentic_opd_environments.babyai.world import USUAL_LEVELS, BabyAIWorld
from tests.support.babyai import bot_actions

pytestmark = pytest.mark.slow

LEVELS = (
    *USUAL_LEVELS,
    *("BabyAI-KeyInBox-v0", "BabyAI-PutNextS5N2Carrying-v0", "BabyAI-UnlockLocal-v0", "BabyAI-BossLevel-v0"),
    *("BabyAI-ActionObjDoor-v0", "BabyAI-OpenTwoDoors-v0"),
)
BEYOND_THE_BOT = {f"BabyAI-PutNext{size}Carrying-v0" for size in ("S5N2", "S6N3", "S7N4")} | {"BabyAI-KeyInBox-v0"}
"""Levels that minigrid's bot can not solve, by its own words."""
NEVER_DONE = {"BabyAI-OpenDoorsOrderN2Debug-v0", "BabyAI-OpenDoorsOrderN4Debug-v0"}
"""Levels in which minigrid 3.2 takes the first of two right doors for a wrong second one."""
STATES = ("open", "closed", "locked")
PART = re.compile(
    r"an? (?P<name>[a-z ]+?)(?: (?P<forward>\d+) steps? forward)?(?: and)?"
    r"(?: (?P<side>\d+) steps? (?P<way>left|right))?"
)


def world_of(**settings: Any) -> HookedWorld:
    return HookedWorld(BabyAIWorld(**settings), WorldConfig())


def task_of(world: HookedWorld, index: int = 0) -> Task:
    return asyncio.run(world.train_and_eval_tasks())[0][index]


def played(world: HookedWorld, task: Task, *calls: Any) -> tuple[list[ToolResult], Verification]:
    """Make calls, each the arguments of `act` or a whole call, and verify."""

    async def episode() -> tuple[list[ToolResult], Verification]:
        async with world.session(task) as session:
            made = [call if isinstance(call, ToolCall) else ToolCall("c", "act", call, "") for call in calls]
            results = [await session.run_tool(call) for call in made]
            return results, await world.verify(task, await session.collect())

    return asyncio.run(episode())


def random_games(count: int, steps: int) -> Iterator[tuple[Game, str]]:
    """Yield games, and the next of many random actions, which the caller takes."""
    for seed, level in product(range(count), LEVELS):
        chosen, game = random.Random(f"{level}/{seed}"), Game.begin(level, seed, None)
        for _ in range(steps):
            if not game.ended:
                yield game, chosen.choice([*ACTIONS, *["go forward"] * 2, "toggle", "pick up"])


# ------------------------------------------------------------------------------------------------------- what is seen


def test_what_is_said_to_be_in_view_is_what_minigrid_observes() -> None:
    views = 0
    for game, name in random_games(2, 30):
        env, image = game.env, game.env.gen_obs()["image"]
        observed = {
            (6 - row, column - 3): (IDX_TO_OBJECT[kind], IDX_TO_COLOR[color], STATES[state])
            for column in range(7)
            for row in range(7)
            for kind, color, state in [map(int, image[column, row])]
            if IDX_TO_OBJECT[kind] not in ("unseen", "empty") and (column, row) != (3, 6)
        }
        things = {place: thing for place, thing in observed.items() if thing[0] != "wall"}
        said, carried = re.fullmatch(r"You see (.+?)\.(?: You carry (.+)\.)?", game.view()).groups()  # type: ignore[union-attr]
        told = {place: words for words, place in map(read_part, said.split("; ") if said != "nothing" else ())}
        assert len(told) == (said.count(";") + 1 if said != "nothing" else 0), "no cell twice"
        walls = {place for place, words in told.items() if words == "wall"}
        assert {place: named(thing) for place, thing in things.items()} == {
            place: words for place, words in told.items() if place not in walls
        }
        for forward, right in walls:
            assert observed[forward, right][0] == "wall"
            assert 0 in (forward, right)
            column, row = env.agent_pos + forward * env.dir_vec + right * env.right_vec
            assert isinstance(env.grid.get(column, row), Wall)
        assert len({(forward > 0, right > 0) for forward, right in walls}) == len(walls), "one in each direction"
        assert (carried or None) == (env.carrying and f"a {env.carrying.color} {env.carrying.type}")
        views += 1
        game.act(name)
    assert views > 200


def read_part(text: str) -> tuple[str, tuple[int, int]]:
    match = PART.fullmatch(text)
    assert match, text
    side = int(match["side"] or 0) * (-1 if match["way"] == "left" else 1)
    return match["name"], (int(match["forward"] or 0), side)


def named(thing: tuple[str, str, str]) -> str:
    kind, color, state = thing
    return f"{state} {color} {kind}" if kind == "door" else f"{color} {kind}"


def test_a_view_in_words() -> None:
    game = Game.begin("BabyAI-GoToLocal-v0", 3, 64)
    assert game.mission == "go to the red key"
    assert game.view() == (
        "You see a green box 2 steps forward; a red box 1 step forward and 1 step right; a grey ball 3 steps forward; "
        "a red key 3 steps forward and 2 steps right; a red box 2 steps forward and 3 steps right; a red ball 4 steps "
        "forward and 3 steps right; a wall 1 step left; a wall 6 steps forward."
    )


@pytest.mark.slow
def test_an_action_has_a_reason_to_change_nothing_exactly_if_it_changes_nothing() -> None:
    reasons = set[str]()
    for game, name in random_games(4, 80):
        before, reason = state(game), no_effect(game.env, ACTIONS[name])
        text = game.act(name)
        assert (reason is None) == (state(game) != before), (name, reason)
        assert text.startswith("Nothing changes: ") == (reason is not None)
        if reason:
            reasons.add(re.sub("red|green|blue|purple|yellow|grey", "C", reason))
    assert {"nothing is in front of you", "you carry nothing", "a wall is in the way"} <= reasons
    assert {"a wall can't be picked up", "a wall can't be opened", "a C ball is in the way"} <= reasons
    assert {"the C door is locked, and you carry no C key", "you carry a C key already"} <= reasons
    assert {"a closed C door is in the way", "a C ball can't be opened", "a locked C door is in the way"} <= reasons


def state(game: Game) -> object:
    env = game.env
    inside = [thing.contains and thing.contains.encode() for thing in env.grid.grid if isinstance(thing, Box)]
    return env.hash(64), env.carrying and env.carrying.encode(), inside


# ------------------------------------------------------------------------------------------------------------ verdicts


def test_the_bots_actions_through_the_tool_have_the_mission_done_and_the_levels_reward() -> None:
    world = world_of(seeds=(0, 6), eval_seeds=(6, 7))
    tasks, _ = asyncio.run(world.train_and_eval_tasks())
    assert len(tasks) == 18
    for task in tasks:
        actions = bot_actions(task.data.level, task.data.seed, 64)
        results, verdict = played(world, task, *({"action": name} for name in actions))
        assert not any(result.is_error for result in results)
        assert results[-1].content == "The mission is done."
        assert (verdict.all_passed, verdict.total) == (True, 1)
        assert verdict.correctness == pytest.approx(1 - 0.9 * len(actions) / 64)
        assert verdict.report.startswith(f"The mission is done after {len(actions)} of 64 steps; the reward is 0.")
        assert verdict.made_by == frozenset(range(len(actions))), "each step is judged with the verdict"


@pytest.mark.slow
def test_every_level_is_played_to_its_end_by_the_bot() -> None:
    games = {level: Game.begin(level, 1, None) for level in level_names() if level not in BEYOND_THE_BOT | NEVER_DONE}
    assert len(games) == 90
    for level, game in games.items():
        for name in bot_actions(level, 1):
            game.act(name)
        assert game.ended == "done", level
        assert game.reward == pytest.approx(1 - 0.9 * len(game.steps) / game.limit)


TURN, GO, PICK, DROP = ({"action": name} for name in ("turn left", "go forward", "pick up", "drop"))
GO_TO, PUT = "BabyAI-GoToLocal-v0", "BabyAI-PutNextLocal-v0"


def test_a_mission_that_is_left_has_no_reward_and_says_what_was_seen_of_it() -> None:
    world = world_of(levels=[GO_TO], seeds=(3, 4))
    _, verdict = played(world, task_of(world))
    assert (verdict.correctness, verdict.made_by) == (0.0, None)
    assert verdict.judge_report == verdict.report
    assert verdict.report.split("\n") == [
        "The mission is not done after 0 of 64 steps.",
        "The red key was first seen after step 0, last seen after step 0, was never nearer than 5 steps, and is 5 "
        "steps away now.",
    ]
    _, verdict = played(world, task_of(world), GO, TURN, TURN)
    assert "first seen after step 0, last seen after step 1, was never nearer than 4 steps, and" in verdict.report


def test_the_limit_of_steps_ends_an_episode_and_no_call_runs_after_it() -> None:
    world = world_of(levels=[GO_TO], seeds=(3, 4), max_steps=2)
    task = task_of(world)
    assert task.limits == {"max_turns": 3}
    results, verdict = played(world, task, TURN, TURN, GO)
    assert [result.is_error for result in results] == [False, False, True]
    assert results[1].content == "The limit of 2 steps is reached."
    assert results[2].content == "Error: the episode is over (out of steps)."
    assert (verdict.correctness, verdict.report.partition("\n")[0]) == (
        0.0,
        "The mission is not done after 2 of 2 steps.",
    )


def test_a_step_too_many_is_no_step_of_a_mission_that_is_done() -> None:
    world = world_of(levels=[GO_TO], seeds=(3, 4))
    calls = [{"action": name} for name in bot_actions(GO_TO, 3)]
    results, verdict = played(world, task_of(world), *calls, TURN)
    assert results[-1].content == "Error: the episode is over (done)."
    assert verdict.correctness == pytest.approx(1 - 0.9 * len(calls) / 64)


def test_what_is_carried_and_what_is_never_seen() -> None:
    actions = bot_actions(PUT, 3)
    game = Game.begin(PUT, 3, 64)
    for name in actions[: actions.index("pick up") + 1]:
        game.act(name)
    first, moved, fixed = game.report().split("\n")
    assert first == f"The mission is not done after {len(game.steps)} of 64 steps."
    assert moved.startswith("The red key was first seen")
    assert moved.endswith(", was carried, and is carried now.")
    assert fixed.startswith("The grey key was first seen")
    never = Game.begin("BabyAI-FindObjS5-v0", 1, 64)
    assert never.report().endswith("\nThe key was never seen and is 6 steps away now.")


def test_a_box_that_was_opened_is_gone() -> None:
    seed = next(seed for seed in range(50) if "box" in Game.begin(GO_TO, seed, 64).mission)
    game = Game.begin(GO_TO, seed, 64)
    (target,) = game.parts[0].targets
    for key in target.objects:
        game.env.grid.set(*key.cur_pos, None)
    game.act("turn left")
    assert game.report().endswith(" and is gone now.")


def test_the_parts_of_a_mission_are_told_apart() -> None:
    level = "BabyAI-OpenRedBlueDoors-v0"
    game, actions = Game.begin(level, 0, None), bot_actions(level, 0)
    assert [part.words for part in game.parts] == ["open the red door", "open the blue door"]
    for name in actions[: actions.index("toggle") + 1]:
        game.act(name)
    assert [line for line in game.report().split("\n")[1:] if "one:" in line] == [
        "Done: open the red door.",
        "Not done: open the blue door.",
    ]


def test_a_mission_that_has_failed() -> None:
    level = "BabyAI-OpenDoorsOrderN2Debug-v0"
    for seed in range(20):  # Play the other door first: the debug levels end there.
        game = Game.begin(level, seed, None)
        if len(game.parts) == 2 and ", then " in game.mission:
            break
    wrong = game.parts[1].targets[0].objects[0]
    column, row = wrong.cur_pos
    game.env.agent_pos, game.env.agent_dir = next(
        ((column - dx, row - dy), way)
        for way, (dx, dy) in enumerate(((1, 0), (0, 1), (-1, 0), (0, -1)))
        if 0 <= column - dx < game.env.width and 0 <= row - dy < game.env.height
        if game.env.grid.get(column - dx, row - dy) is None
    )
    assert game.act("toggle") == "The mission has failed."
    assert (game.ended, game.reward) == ("failed", 0.0)
    assert game.report().startswith("The mission has failed after 1 of ")


# -------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"action": "jump"},
            "Error: act can't be called like this. action: input should be 'turn left', 'turn right',",
        ),
        ({"action": "done"}, "Error: act can't be called like this. action: input should be"),
        ({"action": 2}, "Error: act can't be called like this. action: input should be"),
        ({"action": ["go forward"]}, "Error: act can't be called like this. action: input should be"),
        ({}, "Error: act can't be called like this. action: field required."),
        (
            {"action": "drop", "times": 2},
            "Error: act can't be called like this. times: extra inputs are not permitted.",
        ),
        (ToolCall("c", "turn left", {}, ""), 'Error: the name must be "act".'),
        (ToolCall("c", "act", None, "{", "no JSON"), "Error: no JSON."),
    ],
)
def test_a_call_that_is_no_action_takes_no_step(arguments: Any, said: str) -> None:
    world = world_of(levels=[GO_TO], seeds=(3, 4))
    (wrong, _), verdict = played(world, task_of(world), arguments, TURN)
    assert (wrong.is_error, wrong.is_change) == (True, False)
    assert wrong.content.startswith(said)
    assert verdict.report.startswith("The mission is not done after 1 of 64 steps.")


def test_steps_without_an_effect_are_steps_and_are_explained_unless_told_not_to() -> None:
    world = world_of(levels=[GO_TO], seeds=(3, 4), explain_no_effect=False)
    task = task_of(world)
    (plain,), verdict = played(world, task, DROP)
    assert (plain.is_error, plain.content) == (False, task.prompt.partition("\n")[2])
    assert verdict.report.startswith("The mission is not done after 1 of 64 steps.")
    (explained,), _ = played(world_of(levels=[GO_TO], seeds=(3, 4)), task, DROP)
    assert explained.content == f"Nothing changes: you carry nothing. {plain.content}"


def test_the_tool_has_the_actions_of_the_game() -> None:
    (spec,) = world_of().tools
    assert (
        spec["function"]["parameters"]["properties"]["action"]["enum"] == [*ACTIONS] == [*get_args(world_module.Action)]
    )


# -------------------------------------------------------------------------------------------------------------- tasks


def test_held_out_games_are_none_that_are_trained_on(capfd: pytest.CaptureFixture[str]) -> None:
    small = "BabyAI-GoToObjS4-v0"
    world = world_of(levels=[small, GO_TO], seeds=(0, 40), eval_seeds=(40, 80))
    tasks, held_out = asyncio.run(world.train_and_eval_tasks())
    assert [task.task_id for task in tasks[::40]] == [f"babyai/{small}/0", f"babyai/{GO_TO}/0"]
    kept = [task.data.seed for task in held_out if task.data.level == small]
    assert 0 < len(kept) < 40, "a room of 2 x 2 cells has few games, and some seeds repeat one"
    assert sum(task.data.level == GO_TO for task in held_out) == 40
    starts = {Game.begin(task.data.level, task.data.seed, 64).fingerprint for task in tasks}
    assert not starts & {Game.begin(task.data.level, task.data.seed, 64).fingerprint for task in held_out}
    assert capfd.readouterr().out == "", "minigrid prints each layout that it rejects"
    assert tasks[-1].prompt.startswith("Your mission: go to a green ball.\nYou see a green ball 2 steps forward; ")


def test_levels_that_are_held_out_may_have_the_same_seeds() -> None:
    world = world_of(levels=[GO_TO], eval_levels=["BabyAI-PickupLoc-v0"], seeds=(0, 2), eval_seeds=(0, 3))
    tasks, held_out = asyncio.run(world.train_and_eval_tasks())
    assert ({task.data.level for task in tasks}, len(tasks), len(held_out)) == ({GO_TO}, 2, 3)


def test_each_level_has_its_own_limit_without_a_common_one() -> None:
    world = world_of(levels=[GO_TO, PUT], seeds=(0, 1), max_steps=None)
    assert [task.limits for task in asyncio.run(world.train_and_eval_tasks())[0]] == [
        {"max_turns": 65},
        {"max_turns": 129},
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"levels": ["BabyAI-GoToLokal-v0"]},
            "levels: there is no level 'BabyAI-GoToLokal-v0'. .* BabyAI-GoToLocal-v0",
        ),
        ({"eval_levels": ["MiniGrid-Empty-5x5-v0"]}, "eval_levels: there is no level 'MiniGrid-Empty-5x5-v0'"),
        ({"levels": []}, r"levels is \[\], expected names"),
        ({"levels": [GO_TO, GO_TO]}, "expected names, each of them once"),
        ({"seeds": [4, 4]}, r"seeds is \[4, 4\], expected the first seed and the one after the last"),
        ({"eval_seeds": [9, 5]}, r"eval_seeds is \[9, 5\], expected the first"),
        ({"seeds": [-1, 4]}, "(?s)seeds.*greater than or equal to 0"),
        ({"seeds": [4]}, "seeds"),
        ({"max_steps": 0}, "(?s)max_steps.*greater than or equal to 1"),
        ({"eval_seeds": [255, 300]}, "the seed 255 of BabyAI-GoToLocal-v0 is in seeds and in eval_seeds: choose other"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        make_world(AgentEnvConfig.model_validate({"world": {"type": "babyai", **settings}}))


def test_an_evaluation_without_games_of_its_own_is_refused() -> None:
    small = "BabyAI-GoToRedBallNoDists-v0"
    world = BabyAIWorld(levels=[small], seeds=(0, 3), eval_seeds=(3, 4))
    seen = Game.begin(small, 0, 64)
    world._game = lambda data: seen  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="each game of eval_levels and eval_seeds begins as a training game does"):
        world.eval_tasks()


def test_without_minigrid_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "minigrid"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("game", "view"):
        monkeypatch.delitem(sys.modules, f"{babyai.__name__}.{name}")
        monkeypatch.delattr(babyai, name)
    with pytest.raises(
        ConfigError, match=r"minigrid.*The world babyai needs the extra: pip install 'agentic-opd.babyai.'"
    ):
        BabyAIWorld()


def test_equal_seeds_are_equal_games() -> None:
    for level in LEVELS:
        first, second = Game.begin(level, 5, None), Game.begin(level, 5, None)
        assert first.fingerprint == second.fingerprint != Game.begin(level, 6, None).fingerprint
        for name in random.Random(level).choices([*ACTIONS], k=40):
            if not first.ended:
                assert first.act(name) == second.act(name)
        assert (first.report(), first.steps) == (second.report(), second.steps)
