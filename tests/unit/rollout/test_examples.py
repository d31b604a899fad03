"""A task may bring messages before its prompt: context that is never trained on, in every world and dataset format.

tokens   S S X X X X U U A R R E      S: system, X: the example turns, U: the prompt, R: what was sampled
masks    - - - - - - - - - R R E
"""

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import AlignmentError, DatasetError
from agentic_opd.core.types import Episode, Task
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import hindsight_pairs, shown_text
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Completion
from agentic_opd.rollout.first_prompts import too_long
from agentic_opd.rollout.loop import run_episode
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import ScoredGroup, ScoredRollout
from agentic_opd.worlds.coding.config import CodingSettings
from agentic_opd.worlds.coding.tasks.load import load_tasks
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import Checks, CustomWorld, HookedWorld, tool
from agentic_opd_environments.sql.world import SqlWorld

EXAMPLES: list[dict[str, Any]] = [
    {"role": "user", "content": "Ring twice."},
    {"role": "assistant", "tool_calls": [{"name": "ring", "arguments": {"times": 2}}]},
    {"role": "tool", "content": "ding ding"},
    {"role": "assistant", "content": "Done."},
]


class Bell(CustomWorld):
    def tasks(self) -> list[Task]:
        return [Task("one", "Ring once.", "1", examples=EXAMPLES)]

    @tool
    def ring(self, state: Any, times: int) -> str:
        """Ring the bell.

        Args:
            times: How often.
        """
        return " ".join(["ding"] * times)

    def verify(self, task: Task, state: Any) -> Checks:
        return Checks(1, 1)


class Scripted:
    """Calls once, then says that it is done."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.prompts = tokenizer, list[str]()
        self.lines = ['<tool_call>\n{"name": "ring", "arguments": {"times": 1}}\n</tool_call>', "Done."]

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        ids = tuple(self.tokenizer.encode(self.lines.pop(0) + "<|im_end|>", add_special_tokens=False))
        return Completion(ids, (-0.5,) * len(ids))


def rolled_out(tokenizer: Any) -> tuple[Episode, list[str], HookedWorld, ChatFormat]:
    world = HookedWorld(Bell(), WorldConfig())
    (task,), _ = asyncio.run(world.train_and_eval_tasks())
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, world.tools)
    policy = Scripted(tokenizer)
    return asyncio.run(run_episode(task, policy, world, chat, RolloutConfig())), policy.prompts, world, chat


def test_examples_are_read_and_not_trained_on(tokenizer: Any) -> None:
    episode, prompts, _, _ = rolled_out(tokenizer)
    assert prompts[0].index("Ring twice.") < prompts[0].index("ding ding") < prompts[0].index("Ring once.")
    assert [message["role"] for message in episode.messages[1:6]] == ["user", "assistant", "tool", "assistant", "user"]
    assert len(episode.turns) == 2
    sampled = tokenizer.decode([token for token in episode.traces[0].masks_T if token >= 0])
    assert '"times": 1' in sampled
    assert '"times": 2' not in sampled
    assert [(turn.message_index, turn.why) for turn in episode.traces[0].context_turns] == [
        (2, "not_sampled"),
        (4, "not_sampled"),
    ]


def test_the_judge_is_told_of_the_task_and_not_of_its_example(tokenizer: Any) -> None:
    episode, *_ = rolled_out(tokenizer)
    assert {pair.task_text for pair in hindsight_pairs(episode.recording, DistillConfig())} == {"Ring once."}
    assert "Ring twice." in shown_text(episode.recording), "what an example shows is no secret"


def test_a_group_with_examples_is_whole(tokenizer: Any) -> None:
    episode, *_ = rolled_out(tokenizer)
    rollout = ScoredRollout.of(episode, episode.traces[0], include_messages=True)
    group = ScoredGroup(rollouts=(rollout,), item_id="i", task_id="one")
    checked = GroupChecker().read(json.loads(json.dumps(group.to_wire())))
    assert checked.group is not None
    assert checked.group.rollouts[0].context_turns == episode.traces[0].context_turns
    assert not [problem for problem in checked.problems if "turn" in problem.message]


def test_a_long_example_counts(tokenizer: Any) -> None:
    _, _, world, chat = rolled_out(tokenizer)
    (task,), _ = asyncio.run(world.train_and_eval_tasks())
    long = replace(task, examples=[{"role": "user", "content": "x y " * 3000}, {"role": "assistant", "content": "z"}])
    assert too_long([task, long], world, chat, 2000).keys() == {task.task_id}
    assert too_long([task], world, chat, 2000) == {}


def test_what_may_be_left_out_is_filled_in() -> None:
    _, called, answered, _ = Task("t", "p", "h", examples=EXAMPLES).examples
    (call,) = called["tool_calls"]
    assert called["content"] == ""
    assert call == {"id": call["id"], "type": "function", "function": {"name": "ring", "arguments": '{"times": 2}'}}
    assert (answered["tool_call_id"], answered["name"]) == (call["id"], "ring")
    whole = Task("t", "p", "h", examples=EXAMPLES)
    assert replace(whole, prompt="q").examples == whole.examples


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"role": "system", "content": "s"}], r"examples\[0\] .*'system', expected user, assistant or tool"),
        ([{"role": "tool", "content": "s"}], r"examples\[0\] answers no call"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r"examples\[0\] .*'arguments'"),
        ([{"content": "s"}], r"examples\[0\] .*'role'"),
        (["hello"], r"examples\[0\] .*hello"),
        ([{"role": "user", "content": "s"}], "examples end with a user's message"),
    ],
)
def test_wrong_examples_name_the_message(examples: list[Any], message: str) -> None:
    with pytest.raises(AlignmentError, match=f"task 't': {message}"):
        Task("t", "p", "h", examples=examples)


ROWS = {
    "generic": {"prompt": "Write f.", "test_code": "assert f() == 1", "entry_point": "f"},
    "humaneval": {
        "task_id": "h",
        "prompt": "def f():\n",
        "test": "def check(f):\n    assert f() == 1",
        "entry_point": "f",
        "canonical_solution": "    return 1",
    },
    "mbpp": {"task_id": 1, "text": "Write f.", "test_list": ["assert f() == 1"], "code": "def f(): return 1"},
    "apps": {"question": "Add.", "input_output": json.dumps({"inputs": ["1 2"], "outputs": ["3"]})},
}


@pytest.mark.parametrize("dataset_format", ROWS)
@pytest.mark.parametrize("as_text", [True, False])
def test_every_dataset_format_has_them(tmp_path: Path, dataset_format: Any, as_text: bool) -> None:
    path = tmp_path / "tasks.jsonl"
    config = CodingSettings(dataset_name=str(path), dataset_format=dataset_format)
    row = ROWS[dataset_format]
    path.write_text(json.dumps({**row, "examples": json.dumps(EXAMPLES) if as_text else EXAMPLES}))
    assert [len(task.examples) for task in load_tasks(config)] == [4]
    path.write_text(json.dumps({**row, "examples": "see below" if as_text else [1, 2]}))
    assert [task.examples for task in load_tasks(config)] == [()], "another dataset's own field"
    path.write_text(json.dumps({**row, "examples": [{"role": "tool", "content": "?"}]}))
    with pytest.raises(DatasetError, match=r"tasks\.jsonl, line 1: field 'examples'.*answers no call"):
        load_tasks(config)


def test_questions_of_a_file_have_them(tmp_path: Path) -> None:
    folder = tmp_path / "databases" / "shop"
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "shop.sqlite")) as database:
        database.execute("CREATE TABLE t (a)")
        database.commit()
    questions = [{"db_id": "shop", "question": "All?", "query": "SELECT a FROM t", "examples": EXAMPLES}]
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    world = SqlWorld(tmp_path / "questions.json", tmp_path / "databases")
    assert [len(task.examples) for task in world.tasks()] == [4]


@pytest.mark.parametrize("listed", [True, False])
def test_padding_of_a_columnar_file_is_no_part_of_a_task(listed: bool) -> None:
    """Of the tools and of the calls; without tools the calls show it, if a call of another tool has the key."""

    def padded(name: str, **properties: Any) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"path": None, "command": None, **properties}, "required": None}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
        return {"id": call_id, "function": {"name": name, "arguments": {"path": None, "command": None, **arguments}}}

    text = {"type": "string", "enum": None}
    tools = [padded("run", command=text), padded("look", path=text)] if listed else None
    calls = [call("a", "run", command="ls"), call("b", "look", path="f.py")]
    results = [{"role": "tool", "tool_call_id": call_id, "content": call_id, "name": None} for call_id in "ba"]
    messages = [{"role": "user", "content": "u", "name": None}, {"role": "assistant", "tool_calls": calls}, *results]
    task = Task("t", "Do it.", examples=messages, messages=messages, tools=tools)
    for read in (task.examples, task.messages):
        assert [one["function"]["arguments"] for one in read[1]["tool_calls"]] == [
            '{"command": "ls"}',
            '{"path": "f.py"}',
        ]
        assert [(one["content"], one["name"]) for one in read[2:]] == [("a", "run"), ("b", "look")]
    if tools:
        assert task.tools is not None
        assert [tool["function"]["parameters"]["properties"] for tool in task.tools] == [
            {"command": {"type": "string"}},
            {"path": {"type": "string"}},
        ]
