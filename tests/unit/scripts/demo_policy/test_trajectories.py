"""What the demo policies are taught about whole trajectories: the planted turn, and an answer that names it."""

import asyncio
import json
from random import Random

import pytest
from demo_policy.episodes import RememberingWorld
from demo_policy.projects import (
    ProjectRates,
    ProjectWorld,
    append_command,
    combinations_of,
    known_result,
    plan_project,
    project_task,
)
from demo_policy.script import RUN
from demo_policy.sql.author import sql_chat
from demo_policy.sql.trajectories import SqlTrajectories
from demo_policy.tokenizer import train_tokenizer
from demo_policy.trajectories import (
    CodingTrajectories,
    JudgedEpisode,
    TrajectoryAuthor,
    TrajectoryMix,
    examine_trajectories,
    named_turns,
    trajectory_answer,
    trajectory_messages,
    trajectory_transcript,
)
from demo_policy.variants import load_variants

from agentic_opd.core.types import ToolCall
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.coding.tools import TOOL_SPECS

pytestmark = pytest.mark.slow

PLANTED = ProjectRates(right=0.0, both=0.0, look=0.0, repair=0.0)
TOKENIZER = train_tokenizer(["solution"])


def coding() -> CodingTrajectories:
    chat = ChatFormat(load_renderer(TOKENIZER, "qwen3", {"enable_thinking": False}), TOKENIZER, TOOL_SPECS)
    return CodingTrajectories(chat, ProjectWorld(), TrajectoryMix(asked_turns=1.0))


def results_of(judged: JudgedEpisode) -> list[str]:
    return [message["content"] for message in judged.episode.messages if message["role"] == "tool"]


def test_no_combination_of_functions_is_trained_on_and_measured() -> None:
    trained, measured = combinations_of(held_out=False), combinations_of(held_out=True)
    assert not {*trained} & {*measured}
    assert len(measured) >= 12
    assert {name for combination in trained for name in combination} == {*load_variants()}


def test_the_tests_show_the_mistake_turns_after_the_one_that_holds_it() -> None:
    judged = coding().project(Random(2), PLANTED, held_out=True, examples=True)
    ((turn, _),) = judged.at_fault.items()
    *written, tested = results_of(judged)
    assert not any("FAIL" in result for result in written)
    assert "FAIL " in tested
    assert judged.distances[turn] == len(written) - turn >= 1


def test_without_examples_only_the_verdict_shows_it_and_each_turn_that_wrote_gets_it() -> None:
    judged = coding().project(Random(3), PLANTED, held_out=True, examples=False)
    verification = judged.episode.verification
    assert not any("FAIL" in result for result in results_of(judged))
    assert verification is not None
    assert verification.passed < verification.total
    assert verification.made_by == frozenset(range(len(judged.episode.turns) - 1))


def test_what_is_known_without_a_sandbox_is_what_the_tools_answer() -> None:
    task, world, real = project_task(["fizzbuzz", "flatten"], examples=True), ProjectWorld(), RememberingWorld()
    first, second = (load_variants()[name].correct[0] for name in ("fizzbuzz", "flatten"))
    calls = [
        ("write_file", {"path": "solution.py", "content": first}),
        ("terminal", {"command": append_command(second)}),
        ("patch", {"path": "solution.py", "old": "'Fizz'\n", "new": "'fizz'\n"}),
        ("read_file", {"path": "solution.py"}),
    ]
    solution: str | None = None
    for name, arguments in calls:
        call = ToolCall("1", name, arguments, "")
        assert known_result(solution, call) is not None
        result = asyncio.run(world.call(task, solution, call))
        assert result == asyncio.run(real.call(task, solution, call))
        solution = result[1]


@pytest.mark.parametrize("examples", [True, False])
def test_results_put_together_are_those_of_the_whole(examples: bool) -> None:
    names = ["fizzbuzz", "two_sum", "flatten"]
    task, world, real = project_task(names, examples=examples), ProjectWorld(), RememberingWorld()
    wrong = [load_variants()[name].faults[number].solution for number, name in enumerate(names[:2])]
    solution = "\n\n".join([*(f"{source}" for source in wrong), load_variants()["flatten"].correct[0]])
    call = ToolCall("1", *RUN, "")
    if examples:
        result = asyncio.run(world.call(task, solution, call))
        assert result == asyncio.run(real.call(task, solution, call))
        assert "FAIL two_sum(" in result[0].content
    left = {"solution.py": solution.encode()}
    verification = asyncio.run(world.verify(task, left))
    assert verification == asyncio.run(real.verify(task, left))
    assert 0 < verification.passed < verification.total


def test_a_right_project_passes() -> None:
    names = combinations_of(held_out=True)[0]
    rates = ProjectRates(right=1.0)
    steps = plan_project([load_variants()[name] for name in names], Random(0), rates, examples=True)
    episode = coding().play(project_task(names, examples=True), steps, Random(0))
    assert episode.verification is not None
    assert episode.verification.all_passed


def test_the_answer_is_read_back_as_the_turns_at_fault() -> None:
    author, rng = coding(), Random(4)
    judged = author.project(rng, ProjectRates(right=0.0, both=1.0), held_out=False, examples=True)
    assert len(judged.at_fault) == 2
    hints = {turn: texts[0] for turn, texts in judged.at_fault.items()}
    assert named_turns(trajectory_answer(hints), judged.episode) == hints
    assert named_turns(trajectory_answer({}), judged.episode) == {}
    row = trajectory_transcript(author, judged, rng)
    target = [token for token, own in zip(row.token_ids, row.is_target, strict=True) if own]
    named = named_turns(TOKENIZER.decode(target[:-1]), judged.episode)
    assert named is not None
    assert named.keys() == judged.at_fault.keys()
    assert all(row.is_target[position] for position in row.decisions)
    numbers = TOKENIZER.decode([row.token_ids[position] for position in row.decisions])
    assert all(str(turn + 1) in numbers for turn in judged.at_fault)


def test_the_reasoning_judges_each_turn_that_writes_and_quotes_what_is_wrong() -> None:
    judged = coding().project(Random(2), PLANTED, held_out=True, examples=True)
    ((wrong, _),) = judged.at_fault.items()
    names = judged.episode.task.task_id.removeprefix("project/").split("+")
    lines = judged.reasoning.removesuffix("\n").split("\n")
    assert [line.partition(":")[0] for line in lines] == [
        f"- Turn {turn} {name}" for turn, name in enumerate(names, start=1)
    ]
    assert [index for index, line in enumerate(lines) if not line.endswith(": right")] == [wrong]
    assistant_messages = [message for message in judged.episode.messages if message["role"] == "assistant"]
    ((call,), quote) = (assistant_messages[wrong].get("tool_calls") or ()), lines[wrong].partition(": wrong: ")[2]
    assert quote
    assert quote in "".join(json.loads(call["function"]["arguments"] or "{}").values())
    assert named_turns(trajectory_answer({wrong: "Return the right value."}, judged.reasoning), judged.episode) == {
        wrong: "Return the right value."
    }


def test_the_judge_of_turns_is_asked_about_the_same_episodes() -> None:
    rows = [row for number in range(6) for row in coding().write(Random(number))]
    assert {row.kind for row in rows} == {"judge_trajectory", "judge"}


def test_the_last_answer_is_at_fault_whatever_turn_it_is() -> None:
    author, rng = SqlTrajectories(sql_chat(TOKENIZER)), Random(5)
    judged = [author.planted(rng) for _ in range(12)]
    turns = {next(iter(episode.at_fault)) for episode in judged}
    assert len(turns) > 1
    for episode in judged:
        (turn,) = episode.at_fault
        assert turn == len(episode.episode.turns) - 2
        assert "## Turn" in trajectory_messages(author.questions(rng), episode.episode)[-1]["content"]


@pytest.mark.parametrize("author", [coding(), SqlTrajectories(sql_chat(TOKENIZER))])
def test_a_judge_that_always_finds_nothing_is_right_about_right_episodes_only(author: TrajectoryAuthor) -> None:
    ids = [*TOKENIZER.encode("\\boxed{-1}", add_special_tokens=False), 0]
    table = examine_trajectories(author, lambda prompts, _tokens, _temperature: [ids] * len(prompts), 12, 0.7)
    rates = {line[10:65].strip(): line[65:].split()[0] for line in table.split("\n")}
    assert rates["can be read"] == rates["right episodes: names none"] == "100%"
    assert rates["wrong episodes: names all turns at fault and no other"] == "0%"
