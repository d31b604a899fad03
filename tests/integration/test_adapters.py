"""LoRA adapters as versions on a real vLLM server: the numbers are peft's, the base stays, nothing pauses."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from local_server import LocalServer
from numpy.typing import NDArray

from tests.support.places import MODEL, ROOT
from tests.support.plugin_client import ask, check, random_ids, score
from tests.support.vllm import Forward, StartVllm

pytestmark = pytest.mark.vllm

RANK, KEPT = 8, 2


class Adapted(NamedTuple):
    """A server that keeps two adapters, and where they lie."""

    server: LocalServer
    root: Path


@pytest.fixture(scope="module")
def adapted(start_vllm: StartVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    root = tmp_path_factory.mktemp("adapters")
    flags = ("--weights-root", str(root), "--max-lora-rank", str(RANK), "--max-adapters", str(KEPT))
    with start_vllm(*flags) as server:
        yield Adapted(server, root)


def make_adapter(folder: Path, seed: int, ids: list[int]) -> NDArray[np.float32]:
    """Write an adapter that moves the policy visibly; returns the logprobs [T, V] that peft gives."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(ROOT / MODEL, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
        logits = model.eval()(input_ids=torch.tensor([ids])).logits[0]
    model.save_pretrained(folder)
    return logits.log_softmax(-1).numpy()


def load(adapted: Adapted, version: int) -> None:
    body = {"path": f"v{version}", "version": version}
    assert ask(adapted.server, "/v1/opd/load_adapter", body) == (200, {"weight_version": version})


def generated(adapted: Adapted, ids: list[int], **more: Any) -> Any:
    reply = ask(adapted.server, "/generate", {"prompt": ids, "max_tokens": 30, "ignore_eos": True, **more})
    assert reply.status == 200, reply.body
    return reply.body


def test_each_version_reads_what_prefers_it_and_the_base_stays(adapted: Adapted, forward: Forward) -> None:
    server, ids = adapted.server, random_ids(21, 200, 1000)
    expected = {version: make_adapter(adapted.root / f"v{version}", version, ids) for version in (1, 2, 3)}
    base = forward(ids)
    assert min(np.abs(one - base).max() for one in expected.values()) > 0.1
    check(score(server, [(ids, 60)])[0], ids, 60, 50, base)

    load(adapted, 1)
    check(score(server, [(ids, 60)])[0], ids, 60, 50, expected[1])
    load(adapted, 2)
    for _ in range(2):  # The second time from the cache.
        check(score(server, [(ids, 60)])[0], ids, 60, 50, expected[2])
        check(score(server, [(ids, 60)], prefer_weight_version=1)[0], ids, 60, 50, expected[1])

    chat = {"model": ask(server, "/v1/opd/info").body["model"], "prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
    rows = ask(server, "/v1/completions", chat).body["choices"][0]["prompt_logprobs"]
    by_base = [row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True)]
    np.testing.assert_allclose(by_base, base[range(len(ids) - 1), ids[1:]], atol=1e-3, rtol=0)

    with ThreadPoolExecutor(9) as pool:  # A load waits for nobody, and nobody for it.
        long = [pool.submit(generated, adapted, ids, max_tokens=400, prefer_weight_version=1) for _ in range(8)]
        loading = pool.submit(load, adapted, 3)
        loading.result()
        assert sum(one.done() for one in long) < 8
        assert {one.result()["weight_version"] for one in long} == {1}
    check(score(server, [(ids, 60)])[0], ids, 60, 50, expected[3])
    sampled = generated(adapted, ids, prefer_weight_version=2, logprobs=0)
    assert sampled["weight_version"] == 2
    whole = [*ids, *sampled["token_ids"][0]]
    (again,) = score(server, [(whole, 30)], prefer_weight_version=2)
    said = [next(iter(row[0].values())) for row in sampled["logprobs"][0]]
    np.testing.assert_allclose(again.actual_R, said, atol=1e-3, rtol=0)


def test_twenty_pushes_read_no_context_of_the_base_again(adapted: Adapted) -> None:
    """The judge asks the base: what it has read stays in the cache."""
    server, ids = adapted.server, random_ids(22, 640, 1000)
    model = ask(server, "/v1/opd/info").body["model"]

    def cached() -> int:
        body = {"model": model, "prompt": ids, "max_tokens": 1}
        usage = ask(server, "/v1/completions", body).body["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def hits() -> float:
        import urllib.request

        with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))

    cached()
    make_adapter(adapted.root / "v4", 4, ids[:10])
    for version in range(4, 24):
        folder = adapted.root / f"v{version}"
        if not folder.exists():
            folder.symlink_to(adapted.root / "v4")
        load(adapted, version)
        before = hits()
        cached()
        assert hits() - before >= 600, version


def test_an_adapter_of_another_model_is_refused_and_the_server_lives(adapted: Adapted, forward: Forward) -> None:
    from safetensors.numpy import load_file, save_file

    ids = random_ids(23, 50, 1000)
    make_adapter(adapted.root / "other", 5, ids)
    tensors = load_file(adapted.root / "other/adapter_model.safetensors")
    wrong = {name: np.zeros((*t.shape[:-1], t.shape[-1] + 8), np.float32) for name, t in tensors.items()}
    save_file(wrong, adapted.root / "other/adapter_model.safetensors")
    assert ask(adapted.server, "/v1/opd/load_adapter", {"path": "other", "version": 90}).status >= 400
    (adapted.root / "other/adapter_config.json").write_text(json.dumps({"r": 64}))
    reply = ask(adapted.server, "/v1/opd/load_adapter", {"path": "other", "version": 90})
    assert (reply.status, reply.body["error"]["field"]) == (400, "path")
    assert ask(adapted.server, "/v1/opd/info").body["weight_version"] == 23
    assert generated(adapted, ids)["weight_version"] == 23
