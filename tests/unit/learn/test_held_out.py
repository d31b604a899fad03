"""Which held-out turns are evaluated, and of which session they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.types import Task
from agentic_opd.env.config import default_settings
from agentic_opd.learn.config import LearnConfig, train_defaults
from agentic_opd.learn.held_out import HeldOutTurn, drawn, session_of, write_turns
from agentic_opd.learn.plan import LearnPlan
from agentic_opd.logs.turns import LoggedTurn, replied_turns
from agentic_opd.rollout.chat_format import ChatFormat, Prompt
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.runs.distill_file import Line, read_lines


def test_three_turns_that_a_user_replied_to_stand_before_each_other_turn_and_the_seed_draws_them() -> None:
    roles = {str(number): "user" if number < 7 else "tool" for number in range(20)}
    turns = {
        name: LoggedTurn([{"role": role, "content": "x"} for role in ("user", "assistant", reply)], 1, ())
        for name, reply in roles.items()
    }
    names = drawn(turns, 0)
    assert [roles[name] for name in names[:9]] == [*["user"] * 3, "tool"] * 2 + ["user"]
    assert sorted(names) == sorted(turns)
    assert names == drawn(dict(reversed(turns.items())), 0) != drawn(turns, 1)


def test_the_tools_of_a_turn_are_those_that_the_log_declares_or_has_called_so_far() -> None:
    def called(name: str) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": "{}"}}]}

    declared = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    user, result = {"role": "user", "content": "Go on."}, {"role": "tool", "content": "done"}
    messages = [user, called("run"), result, called("write"), result, called("later"), result]
    turn = HeldOutTurn("s", LoggedTurn(messages, 3, ()), Task("t", tools=[declared]), Prompt((1,), 0, 0))
    assert turn.tool_names == {"look", "run", "write"}


@pytest.mark.parametrize(
    ("fields", "session"),
    [({"project": "/p", "time": "T"}, "/p T"), ({"time": "T"}, " T"), ({"project": "/p"}, "mine"), ({}, "mine")],
)
def test_branches_of_a_session_began_at_the_same_time(fields: dict[str, str], session: str) -> None:
    assert session_of(Line(1, fields, "mine")) == session


class Policy:
    """What is asked of a connected policy to choose turns: a renderer, and a context of so many tokens."""

    def __init__(self, chat: ChatFormat, context: int) -> None:
        self.chat, self.policy, self.info = chat, self, self
        self.max_model_len = context


def test_each_chosen_turn_is_a_conversation_of_its_own(tmp_path: Path, tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "Write f."},
        {"role": "assistant", "content": "def f(): pass"},
        {"role": "user", "content": "It must return 1."},
        {"role": "assistant", "content": "def f(): return 1"},
        {"role": "user", "content": "Thanks. " + "More words. " * 200},
        {"role": "assistant", "content": "You are welcome."},
        {"role": "user", "content": "Bye."},
    ]
    row = {"messages": messages, "group_overrides": {"item_id": "s"}}
    (tmp_path / "held_out.jsonl").write_text(json.dumps(row) + "\n")
    env, servers = default_settings()
    train, config = train_defaults(), LearnConfig()
    plan = LearnPlan([], "m", tmp_path, env, servers[0], is_served=False, train=train, config=config)
    policy: Any = Policy(ChatFormat(load_renderer(tokenizer, "qwen3", {}), tokenizer, ()), 300)
    assert write_turns(plan, policy) == {"turns": 2, "replied": 3}  # The last one's prompt is too long.
    rows = {line.item_id: line for line in read_lines(tmp_path / "held_out.turns.jsonl")}
    assert sorted(rows) == ["s/1", "s/3"]
    (turn,) = replied_turns(rows["s/3"].fields)
    assert (turn.message_index, turn.answer["content"], len(turn.reply)) == (3, "def f(): return 1", 1)
    assert rows["s/3"].fields["session"] == "s"
