"""`agent_command` as a person uses it: a plain `openai` script in the sandbox, in all modes, on a real server."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import commands
from tests.support.environment import command, process, read_lines, serving, validate
from tests.support.fake_plugin import FakePlugin
from tests.support.places import ROOT
from tests.support.recording_proxy import recording_proxy, seen
from tests.support.trajectory import trajectory_api

pytestmark = [pytest.mark.vllm, pytest.mark.sandbox]

SCRIPT = ROOT / "scripts" / "agents" / "openai_agent.py"
AGENT = (
    *("--env.agent.command", f"{sys.executable} {SCRIPT}"),
    *("--env.agent.mounts", json.dumps([sys.prefix, str(SCRIPT.parent)])),
)


def test_its_episodes_are_what_was_read_and_sampled(vllm_server: Any, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    with recording_proxy(vllm_server.base_url) as proxy:
        done = process(proxy.url, out, *AGENT, "--env.total_steps", "2", "--env.group_size", "2")
        sampled = seen(proxy)
    assert done.returncode == 0, done
    groups = read_lines(out)
    assert len(groups) == 2
    assert validate(out).returncode == 0
    sequences = [
        (tokens, mask) for group in groups for tokens, mask in zip(group["tokens"], group["masks"], strict=True)
    ]
    assert len(sequences) == 4
    for tokens, mask in sequences:
        turns = [(prompt, ids) for prompt, (ids,) in sampled if tokens[: len(prompt) + len(ids)] == prompt + ids]
        assert {len(prompt + ids) for prompt, ids in turns} >= {len(tokens)}, "it ends with a turn that was sampled"
        assert sum(token != -100 for token in mask) in {
            sum(len(ids) for _, ids in turns),
            # The same turn may have been sampled in two episodes.
            sum(len(ids) for ids in {len(prompt): ids for prompt, ids in turns}.values()),
        }
    for group in groups:
        for overrides in group["overrides"]:
            assert overrides["stop_reason"] in ("finished", "agent_failed", "max_turns", "context_full")
            assert set(overrides["program"]) == {"exit_code", "stopped", "output", "other_sequences", "other_tokens"}
            assert (overrides["stop_reason"] == "finished") == (overrides["program"]["exit_code"] == 0)
            assert len(overrides["opd"]["turns"]) == overrides["turns"] > 0
    evidence = {
        kind for g in groups for o in g["overrides"] for t in o["opd"]["turns"] for kind in t.get("evidence", ())
    }
    assert "verdict" in evidence
    request = next(iter(proxy.streams("/generate")))[0]
    assert request["temperature"] == 1.0


DEFLECTING = r"""
import json, os, subprocess, sys
from openai import OpenAI

OWN = '''
import http.client, json, os, socket
class At(http.client.HTTPConnection):
    def connect(self): self.sock = socket.socket(socket.AF_UNIX); self.sock.connect("/run/agentic-opd/socket")
at, said = At("x"), [{"role": "user", "content": os.environ["TASK"]}]
body = json.dumps({"model": "m", "messages": said, "max_tokens": 400})
at.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
    "Content-Type": "application/json", "X-Workspace": "anything"})
assert at.getresponse().status == 200
'''
client, said = OpenAI(), [{"role": "system", "content": "You code."}, {"role": "user", "content": os.environ["TASK"]}]
OWN += "open('solution.py', 'w').write('x = 1')"
for command in (["true"], [sys.executable, "-c", OWN], ["touch", "notes.txt"]):
    answer = client.chat.completions.create(model="m", messages=said, max_tokens=8).choices[0].message.content
    subprocess.run(command, check=True)
    said += [{"role": "assistant", "content": answer or ""}, {"role": "user", "content": "[no output]"}]
"""


def test_a_command_of_the_policy_that_asks_by_itself_changes_neither_episode_nor_verdict(
    vllm_server: Any, tmp_path: Path
) -> None:
    """The second turn's command holds a conversation of its own, then writes the solution; the third leaves a note."""
    agent, out = tmp_path / "agent", tmp_path / "groups.jsonl"
    agent.mkdir(mode=0o755)
    (agent / "agent.py").write_text(DEFLECTING)
    options = ("--env.agent.command", f"{sys.executable} {agent}/agent.py")
    options += ("--env.agent.mounts", json.dumps([sys.prefix, str(agent)]))
    done = process(vllm_server.base_url, out, *options, "--env.total_steps", "1", "--env.group_size", "2")
    assert done.returncode == 0, done.stderr
    (group,) = read_lines(out)
    for overrides in group["overrides"]:
        assert (overrides["stop_reason"], overrides["turns"]) == ("finished", 3)
        assert overrides["program"]["other_sequences"] == 1
        verdicts = ["verdict" in turn.get("evidence", ()) for turn in overrides["opd"]["turns"]]
        assert verdicts == [False, True, True]


def test_it_is_evaluated(vllm_server: Any, tmp_path: Path) -> None:
    argv = command("evaluate", vllm_server.base_url, "--env.data_dir_to_save_evals", str(tmp_path), *AGENT)
    done = commands.run(*argv, timeout_s=300)
    assert done.returncode == 0, done
    rows = read_lines(tmp_path / "samples.jsonl")
    assert len(rows) == 8
    assert any(row["checks_passed"] > 0 for row in rows)


def test_it_is_served(fake_server: FakePlugin, tmp_path: Path) -> None:
    url, few = fake_server.base_url, ("--env.group_size", "2", "--env.max_concurrent_groups", "1")
    with trajectory_api(tmp_path / "api.log") as api, serving(api.url, url, tmp_path, *AGENT, *few) as env:
        env.wait_for("waiting for a trainer")
        api.register_trainer(batch_size=2, num_steps=2)
        batch = api.batch()
        api.batch()
        assert env.process.wait(120) == 0, env.said()
    assert sum(len(group["tokens"]) for group in batch) == 2
    assert all(group["overrides"][0]["program"]["exit_code"] is not None for group in batch)


def test_a_command_that_is_none_is_said(fake_server: FakePlugin, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    done = process(fake_server.base_url, out, "--env.agent.command", "no-such-agent", "--env.total_steps", "1")
    assert done.returncode == 1
    assert "made no request on task" in done.stderr
    assert "no-such-agent: command not found" in done.stderr
    done = process(fake_server.base_url, out, *AGENT[:2], "--env.agent.mounts", '["/no/such/folder"]')
    assert done.returncode == 2
    assert "env.agent.mounts: there is no /no/such/folder" in done.stderr
