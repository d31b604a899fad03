"""Worlds of one's own in every mode, on a real server: the documented one, and one that the demo policy can use."""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.support import commands
from tests.support.doctor import doctor, statuses
from tests.support.environment import command, process, read_lines, serving, validate
from tests.support.fake_plugin import CALL, FakePlugin, fake_plugin
from tests.support.scripted_judge import POSITIVE, judge_server
from tests.support.trajectory import trajectory_api
from tests.support.vllm import SharedServer
from tests.unit.environments.test_functions import CONVERT, STOP, written
from tests.unit.worlds.test_custom import documented

FILES = '''\
from agentic_opd.worlds.custom import Checks, CustomWorld, Task, tool


class Files(CustomWorld):
    """The tools that the demo policy knows, on a dict; a user who asks once more."""

    system_prompt = "You write functions."

    def tasks(self):
        yield Task("fizz", "Write `fizzbuzz(n)` in solution.py.", "nobody knows", files={"notes.txt": "none"})
        yield Task("broken", "Write `two_sum(nums, target)` in solution.py.", "nobody knows")

    def eval_tasks(self):
        yield Task("flat", "Write `flatten(nested)` in solution.py.", "nobody knows")

    async def start(self, task):
        return {"files": {}, "replies": 0, "task": task.task_id}

    @tool
    async def write_file(self, state, path: str, content: str) -> str:
        """Write a file.

        Args:
            path: Where.
            content: What.
        """
        state["files"][path] = content
        return f"wrote {path}"

    @tool
    async def terminal(self, state, command: str) -> str:
        """Run a command.

        Args:
            command: The line.
        """
        if state["task"] == "broken":
            raise KeyError("a fault of this world")
        return "a shell that says nothing"

    async def verify(self, task, state):
        if task.task_id == "broken":
            raise KeyError("a fault of this world")
        return Checks(passed=int("solution.py" in state["files"]), total=1, judge_report="It was read by nobody.")

    def judged(self, state):
        return state["files"]

    async def user_reply(self, task, state, messages):
        state["replies"] += 1
        return "Is that all?" if state["replies"] == 1 else None
'''


def evaluated(server_url: str, folder: Path, *flags: str) -> list[str]:
    """The tasks that `evaluate` has samples of."""
    argv = command("evaluate", server_url, "--env.data_dir_to_save_evals", str(folder), *flags)
    done = commands.run(*argv, timeout_s=300)
    assert done.returncode == 0, done
    return [row["task_id"] for row in read_lines(folder / "samples.jsonl")]


def test_the_documented_world_runs_in_every_mode(fake_server: FakePlugin, tmp_path: Path) -> None:
    world, out = documented(tmp_path, 1), tmp_path / "groups.jsonl"
    own = ("--env.world", world, "--env.eval.fraction", "0.5", "--env.max_turns", "2")
    with judge_server(lambda body: [POSITIVE] * body["n"]) as judge:
        done = process(fake_server.base_url, out, *own, "--env.judge.base_url", judge, "--env.report", "true")
        assert done.returncode == 0, done
        groups = read_lines(out)
        # The demo policy knows none of these tools, and is told so.
        messages = [message for group in groups for one in group["messages"] for message in one]
        shown = [message["content"] for message in messages if message["role"] == "tool"]
        assert any(text == 'Error: the name must be one of "ask", "add".' for text in shown)
        assert any(rows for group in groups for rows in group["distill_token_ids"])
        assert validate(out).returncode == 0
        assert (tmp_path / "groups.html").exists()
        held_out = evaluated(fake_server.base_url, tmp_path / "evals", *own)
        assert held_out
        assert not {*held_out} & {group["group_overrides"]["task_id"] for group in groups}
        with trajectory_api(tmp_path / "api.log") as api:
            flags = (*own, "--env.judge.base_url", judge)
            with serving(api.url, fake_server.base_url, tmp_path / "serve", *flags) as env:
                env.wait_for("waiting for a trainer")
                api.register_trainer(batch_size=4, num_steps=1)
                (group,) = api.batch()
                assert group["group_overrides"]["task_id"] in {one["group_overrides"]["task_id"] for one in groups}
                assert env.process.wait(120) == 0, env.said()


def test_no_call_is_missed_where_there_are_no_tools(fake_server: FakePlugin, tmp_path: Path) -> None:
    head, hooks = "from agentic_opd.worlds.custom import CustomWorld, Task\n", "return [Task('t', 'Say it.')]"
    world = f"class Talk(CustomWorld):\n    def tasks(self): {hooks}\n    def verify(self, task, state): return 1\n"
    (tmp_path / "talk.py").write_text(head + world)
    own = ("--env.world", f"{tmp_path / 'talk.py'}:Talk", "--env.eval.fraction", "0", "--env.opd_enabled", "false")
    done = process(fake_server.base_url, tmp_path / "groups.jsonl", *own)
    assert done.returncode == 0, done
    assert "no tool call" not in done.stderr


def test_a_user_replies_a_fault_is_named_and_the_rest_goes_on(fake_server: FakePlugin, tmp_path: Path) -> None:
    (tmp_path / "files.py").write_text(FILES)
    world, out = f"{tmp_path / 'files.py'}:Files", tmp_path / "groups.jsonl"
    with judge_server(lambda body: [POSITIVE] * body["n"]) as judge:
        own = ("--env.world", world, "--env.judge.base_url", judge, "--env.group_size", "8")
        done = process(fake_server.base_url, out, *own)
    assert done.returncode == 1
    assert "world Files: " in done.stderr
    assert "raised KeyError: 'a fault of this world'" in done.stderr
    assert "1 groups failed" in done.stderr
    (group,) = read_lines(out)
    assert group["group_overrides"]["task_id"] == "fizz"
    users = [[m["content"] for m in one if m["role"] == "user"] for one in group["messages"]]
    assert any("Is that all?" in some for some in users)
    evidence = {kind for one in group["overrides"] for turn in one["opd"]["turns"] for kind in turn.get("evidence", ())}
    assert {"tool", "user"} <= evidence
    assert validate(out).returncode == 0


def test_doctor_knows_the_world(vllm_server: SharedServer, tmp_path: Path) -> None:
    _, findings = doctor(vllm_server.base_url, "--env.world", documented(tmp_path, 1), "--env.eval.fraction", "0.5")
    assert "3 tasks" in findings["prompts"][1]
    assert not statuses(findings, "failed") & {"tasks", "prompts", "renderer"}, findings


def calls(prompt: str, choice: int) -> str:
    """An unknown function, a mistyped call, then a call with the right value or, in about half of them, a wrong one."""
    said = prompt.count("<|im_start|>assistant") - 1
    value = 2 + (next(wrong) if said == 2 else 0)
    return (
        CALL.format("converter", "{}"),
        CALL.format("convert", '{"value": "2"}'),
        CALL.format("convert", json.dumps({"value": value, "unit": "km"})),
    )[said]


wrong = cycle((0, 1))


def test_function_calls_are_answered_judged_and_distilled(tmp_path: Path) -> None:
    allowed = {"value": [2.0], "unit": ["km", "leagues"]}
    rows = [(f"How far is {n} of 2 miles in kilometres?", [CONVERT, STOP], [{"convert": allowed}]) for n in "ab"]
    options = written(tmp_path, *rows)
    out = tmp_path / "groups.jsonl"
    asked: list[str] = []

    def judged(body: dict[str, Any]) -> list[str]:
        asked.append(json.dumps(body["messages"]))
        return [POSITIVE] * body["n"]

    with fake_plugin(says=calls) as server, judge_server(judged) as judge:
        flags = ("--env.world", json.dumps({"type": "functions", **options}), "--env.total_steps", "2")
        done = process(server.base_url, out, *flags, "--env.group_size", "2", "--env.judge.base_url", judge)
    assert done.returncode == 0, done
    groups = read_lines(out)
    assert len(groups) == 2
    conversations = [messages for group in groups for messages in group["messages"]]
    for messages in conversations:
        said = [message["content"] for message in messages if message["role"] == "tool"]
        assert [text[:33] for text in said] == [
            'Error: the name must be one of "c',
            "Error: convert can't be called li",
            '{"status": "ok"}',
        ]
    scores = [score for group in groups for score in group["scores"]]
    assert len({*scores}) > 1, "every other last call has a wrong value"
    assert any(rows for group in groups for rows in group["distill_token_ids"])
    assert asked
    assert not any("leagues" in text for text in asked), "the judge reads no allowed value"
    assert validate(out).returncode == 0
