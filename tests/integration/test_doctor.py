"""`agentic-opd doctor` against real servers: a good one, none, a judge that talks nonsense, wrong places."""

from pathlib import Path
from typing import Any

import pytest
from bench.local_server import free_port

from tests.support.doctor import doctor, statuses
from tests.support.scripted_judge import judge_server
from tests.support.trajectory import trajectory_api

pytestmark = pytest.mark.vllm


def test_a_good_set_up_is_good(vllm_server: Any) -> None:
    code, findings = doctor(vllm_server.base_url)
    assert code == 0
    assert statuses(findings, "warning", "failed") == {"run-api"}
    assert statuses(findings, "skipped") == {"W&B", "teacher"}
    assert "3 of 3 votes in the protocol" in findings["judge"][1]
    assert "plugin" in findings["versions"][1]
    assert float(findings["noise floor"][1].split()[0]) < 1e-4
    assert "Only serve needs it" in findings["run-api"][1]


def test_serve_needs_the_trajectory_api(vllm_server: Any, tmp_path: Path) -> None:
    code, findings = doctor(vllm_server.base_url, "--serve")
    assert (code, statuses(findings, "failed")) == (1, {"run-api"})
    assert "run-api --host 127.0.0.1 --port PORT" in findings["run-api"][1]
    with trajectory_api(tmp_path / "api.log") as api:
        code, findings = doctor(vllm_server.base_url, "--serve", "--env.rollout_server_url", api.url)
        assert (code, findings["run-api"][0]) == (0, "ok")
        api.register_trainer(batch_size=2, num_steps=1)
        code, findings = doctor(vllm_server.base_url, "--serve", "--env.rollout_server_url", api.url)
        assert (code, statuses(findings, "failed")) == (1, {"run-api"})
        assert "lower env.group_size" in findings["run-api"][1]


def test_what_can_be_checked_without_a_server_is(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with judge_server(lambda body: ["\\boxed{-1}"] * body["n"]) as judge:
        code, findings = doctor(nowhere, "--env.judge.base_url", judge, "--env.judge.model_name", "judge")
    assert code == 1
    assert statuses(findings, "failed") == {"server"}
    assert "scripts/serve_vllm MODEL starts one" in findings["server"][1]
    assert statuses(findings, "ok") == {"python", "packages", "disk", "tasks", "sandbox", "session", "judge"}
    assert findings["tokenizer"] == ("skipped", "needs: server")
    assert findings["noise floor"][0] == "skipped"


def test_a_judge_that_talks_nonsense_fails(vllm_server: Any) -> None:
    with judge_server(lambda body: ["I like turtles."] * body["n"]) as judge:
        code, findings = doctor(vllm_server.base_url, "--env.judge.base_url", judge, "--env.judge.model_name", "judge")
    assert (code, statuses(findings, "failed")) == (1, {"judge"})
    assert "I like turtles." in findings["judge"][1]
    with judge_server(lambda body: ["\\boxed{-1}", "hm", "hm"]) as judge:
        code, findings = doctor(vllm_server.base_url, "--env.judge.base_url", judge, "--env.judge.model_name", "judge")
    assert (code, findings["judge"][0]) == (0, "warning")
    assert "1 of 3 votes" in findings["judge"][1]
    with judge_server(lambda body: ["\\boxed{-1}"] * body["n"]) as judge:
        code, findings = doctor(vllm_server.base_url, "--env.judge.base_url", judge, "--env.judge.model_name", "judge")
    assert (code, findings["judge"][0]) == (0, "ok")
    assert "3 of 3 votes in the protocol" in findings["judge"][1]
    with judge_server(lambda body: 401) as judge:
        code, findings = doctor(vllm_server.base_url, "--env.judge.base_url", judge, "--env.judge.model_name", "judge")
    assert (code, findings["judge"][0]) == (1, "failed")


def test_wrong_tokenizer_renderer_and_places_are_found(vllm_server: Any, tmp_path: Path) -> None:
    code, findings = doctor(vllm_server.base_url, "--env.renderer.name", "llama-3", "--env.renderer.options", "{}")
    assert statuses(findings, "failed", "warning") & {"renderer", "template"}
    assert code == (1 if statuses(findings, "failed") else 0)
    code, findings = doctor(
        *(vllm_server.base_url, "--env.tokenizer_name", "/nowhere", "--env.max_token_length", "100000"),
        *("--env.distill_topk", "900", "--env.data_path_to_save_groups", "/dev/null/groups.jsonl"),
    )
    assert code == 1
    assert statuses(findings, "failed") == {"tokenizer", "context", "logprobs", "disk"}
    assert "--max-model-len 100000" in findings["context"][1]
    assert "--max-logprobs 900" in findings["logprobs"][1]
    assert "env.tokenizer_name" in findings["tokenizer"][1]
    assert findings["judge"][0] == "ok", "the rest goes on"
