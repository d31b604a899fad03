"""A vLLM server without the plugin: used, and said to be slow. A proxy hides the routes of one that has it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.doctor import doctor, statuses
from tests.support.environment import process, validate
from tests.support.recording_proxy import recording_proxy
from tests.support.vllm import SharedServer

pytestmark = pytest.mark.vllm


@pytest.fixture
def plain_url(vllm_server: SharedServer) -> Iterator[str]:
    with recording_proxy(vllm_server.base_url) as proxy:
        proxy.hidden = ("/generate", "/v1/opd/")
        yield proxy.url


def test_it_is_used_and_said_to_be_slow(plain_url: str, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"
    done = process(plain_url, out, "--env.total_steps", "2", "--env.distill_topk", "20")
    assert done.returncode == 0, done
    assert done.stderr.count("slower") == 1
    assert validate(out).returncode == 0


def test_more_logprobs_than_it_returns_are_refused(plain_url: str, tmp_path: Path) -> None:
    refused = process(plain_url, tmp_path / "x.jsonl", "--env.distill_topk", "999")
    assert refused.returncode == 1
    assert "--max-logprobs 999" in refused.stderr


def test_for_the_doctor_it_is_a_warning_unless_it_returns_too_few_logprobs(plain_url: str) -> None:
    code, findings = doctor(plain_url, "--env.distill_topk", "300")
    assert (code, statuses(findings, "failed")) == (1, {"logprobs"})
    assert "--max-logprobs 300" in findings["logprobs"][1]
    assert findings["versions"][0] == "warning"
    assert "scripts/serve_vllm" in findings["versions"][1]
    code, findings = doctor(plain_url)
    assert code == 0
    assert findings["noise floor"][0] == findings["renderer"][0] == "ok"
