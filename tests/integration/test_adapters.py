"""LoRA adapters as versions on a real vLLM server: the numbers are peft's, the base stays, nothing pauses."""

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import pytest
from bench.local_server import LocalServer
from numpy.typing import NDArray

from agentic_opd.wire.group import ScoredGroup
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from tests.support import commands
from tests.support.environment import serving
from tests.support.places import MODEL, ROOT
from tests.support.plugin_client import ask, check, random_ids, score
from tests.support.scripted_judge import POSITIVE, judge_server
from tests.support.trajectory import trajectory_api
from tests.support.vllm import MAX_RANK, Forward, RootedServer
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

RANK, TRAINED_RANK = MAX_RANK, 2
"""Of the adapters that are made here, and of those that the trainer makes."""


class Adapted(NamedTuple):
    """A server that keeps two adapters, and a folder of its weights root for this test."""

    server: LocalServer
    root: Path


@pytest.fixture
def adapted(rooted: RootedServer, tmp_path: Path) -> Adapted:
    root = rooted.root / tmp_path.name
    root.mkdir()
    return Adapted(rooted.server, root)


def make_adapter(folder: Path, seed: int, ids: list[int]) -> NDArray[np.float32]:
    """Write an adapter that moves the policy visibly; returns the logprobs [T, V] that peft gives."""
    return write_moved(folder, seed, std=0.02)(ids)


def write_moved(folder: Path, seed: int, std: float) -> Callable[[list[int]], NDArray[np.float32]]:
    """Write an adapter whose second factors are drawn; returns what gives peft's logprobs [T, V]."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(ROOT / MODEL, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)
    model.eval().save_pretrained(folder)

    def logprobs(ids: list[int]) -> NDArray[np.float32]:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1).numpy()

    return logprobs


def load(adapted: Adapted, version: int) -> None:
    body = {"path": f"{adapted.root.name}/v{version}", "version": version}
    assert ask(adapted.server, "/v1/opd/load_adapter", body) == (200, {"weight_version": version})


def generated(adapted: Adapted, ids: list[int], **more: Any) -> Any:
    reply = ask(adapted.server, "/generate", {"prompt": ids, "max_tokens": 30, "ignore_eos": True, **more})
    assert reply.status == 200, reply.body
    return reply.body


def metric(server: LocalServer, name: str) -> float:
    """One of vLLM's own metrics, over all engines."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def test_each_version_reads_what_prefers_it_and_the_base_stays(adapted: Adapted, forward: Forward) -> None:
    server, ids = adapted.server, random_ids(21, 200, 1000)
    expected = {version: make_adapter(adapted.root / f"v{version}", version, ids) for version in (1, 2, 3)}
    base = forward(ids)
    assert min(np.abs(one - base).max() for one in expected.values()) > 0.1
    check(score(server, [(ids, 60)])[0], ids, 60, 50, base)

    load(adapted, 1)
    check(score(server, [(ids, 60)])[0], ids, 60, 50, expected[1])
    shorter = random_ids(25, 90, 1000)
    both = score(server, [(ids, 60), (shorter, 40)])  # In one batch, sequences of two lengths.
    check(both[0], ids, 60, 50, expected[1])
    assert len(both[1].actual_R) == 40
    load(adapted, 2)
    for _ in range(2):  # The second time from the cache.
        check(score(server, [(ids, 60)])[0], ids, 60, 50, expected[2])
        check(score(server, [(ids, 60)], prefer_weight_version=1)[0], ids, 60, 50, expected[1])

    chat = {"model": ask(server, "/v1/opd/info").body["model"], "prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
    rows = ask(server, "/v1/completions", chat).body["choices"][0]["prompt_logprobs"]
    by_base = [row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True)]
    np.testing.assert_allclose(by_base, base[range(len(ids) - 1), ids[1:]], atol=1e-3, rtol=0)

    of_first = {"ignore_eos": True, "prefer_weight_version": 1}
    endless = json.dumps({"prompt": ids, "max_tokens": 7000, "stream": True, **of_first}).encode()
    request = urllib.request.Request(f"{server.base_url}/generate", endless, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer, ThreadPoolExecutor(8) as pool:
        assert answer.readline()
        beside = [pool.submit(generated, adapted, ids, max_tokens=100, prefer_weight_version=1) for _ in range(8)]
        load(adapted, 3)
        assert metric(server, "vllm:num_requests_running") > 0, "the load waited for the end of a request"
        assert {one.result()["weight_version"] for one in beside} == {1}
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
        return metric(server, "vllm:prefix_cache_hits_total")

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
    make_adapter(adapted.root / "v23", 4, ids)
    load(adapted, 23)
    make_adapter(adapted.root / "other", 5, ids)
    tensors = load_file(adapted.root / "other/adapter_model.safetensors")
    wrong = {name: np.zeros((*t.shape[:-1], t.shape[-1] + 8), np.float32) for name, t in tensors.items()}
    save_file(wrong, adapted.root / "other/adapter_model.safetensors")
    assert (
        ask(adapted.server, "/v1/opd/load_adapter", {"path": f"{adapted.root.name}/other", "version": 90}).status >= 400
    )
    (adapted.root / "other/adapter_config.json").write_text(json.dumps({"r": 64}))
    reply = ask(adapted.server, "/v1/opd/load_adapter", {"path": f"{adapted.root.name}/other", "version": 90})
    assert (reply.status, reply.body["error"]["field"]) == (400, "path")
    assert ask(adapted.server, "/v1/opd/info").body["weight_version"] == 23
    assert generated(adapted, ids)["weight_version"] == 23


@pytest.mark.all
def test_an_episode_keeps_its_version_and_each_turn_says_which(adapted: Adapted, tmp_path: Path) -> None:
    """While the environment runs, versions come; each turn's logprobs are those of the version that it names.

    The test below shows it under `serve`.
    """
    from tests.support.environment import process_command

    moved = {version: write_moved(adapted.root / f"v{version}", version, std=0.002) for version in range(100, 106)}
    out = tmp_path / "groups.jsonl"
    flags = ("--config", "configs/demo.yaml", "--env.max_concurrent_groups", "2", "--env.group_size", "2")
    flags += ("--env.total_steps", "6", "--env.max_tokens_per_turn", "120", "--env.judge.model_name", "judge")
    load(adapted, 100)
    with (tmp_path / "log").open("wb") as log, judge_server(lambda body: [POSITIVE] * body["n"]) as judge:
        flags += ("--env.judge.base_url", judge)
        running = commands.start(*process_command(adapted.server.base_url, out, *flags), stdout=log, stderr=log)
        until(out.exists, 120, running, (tmp_path / "log").read_text)
        for version in range(101, 106):
            lines = out.read_bytes().count(b"\n")
            load(adapted, version)
            until(lambda before=lines: out.read_bytes().count(b"\n") > before or running.poll() is not None, 240)
        assert running.wait(240) == 0, (tmp_path / "log").read_text()
    groups = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(groups) == 6
    told = [[turn["weight_version"] for turn in one["opd"]["turns"]] for g in groups for one in g["overrides"]]
    assert len({version for versions in told for version in versions}) >= 3
    assert sum(len(set(versions)) == 1 for versions in told) >= 0.5 * len(told)
    for group in groups[:4]:
        turns = group["overrides"][0]["opd"]["turns"]
        for turn in (turns[0], turns[-1]):
            start, end = turn["span"]
            tokens = group["tokens"][0]
            expected = moved[turn["weight_version"]](tokens[:end])
            said = group["inference_logprobs"][0][start:end]
            rows = expected[range(start - 1, end - 1), tokens[start:end]]
            np.testing.assert_allclose(said, rows, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("pushes", "max_turns"), [(5, 2), pytest.param(20, 6, marks=pytest.mark.all)])
def test_serve_loses_no_episode_over_many_pushes_and_every_turn_knows_its_weights(
    adapted: Adapted, tmp_path: Path, pushes: int, max_turns: int
) -> None:
    """A push after each batch, as a trainer's; what the base has read stays in its cache."""
    first, last = 300, 300 + pushes
    moved = {n: write_moved(adapted.root / f"v{n}", n, std=0.002) for n in range(first, last + 1)}
    ids, cached, groups = random_ids(26, 640, 1000), list[int](), list[ScoredGroup]()

    def cached_by_base() -> int:
        body = {"sequences": [{"token_ids": ids, "num_scored": 1}], "top_k": 1, "read_by": "base"}
        return ask(adapted.server, "/v1/opd/score", body).body["results"][0]["num_cached_tokens"]

    load(adapted, first)
    cached_by_base()
    with (
        judge_server(lambda body: [POSITIVE] * body["n"]) as judge,
        trajectory_api(tmp_path / "api.log") as api,
        serving(
            *(api.url, adapted.server.base_url, tmp_path),
            *("--env.judge.base_url", judge, "--env.judge.model_name", "judge"),
            *("--env.group_size", "2", "--env.max_batches_offpolicy", "1", "--env.max_concurrent_groups", "1"),
            *("--env.max_turns", str(max_turns), "--env.max_tokens_per_turn", "120"),
        ) as env,
    ):
        env.wait_for("waiting for a trainer")
        api.register_trainer(batch_size=2, num_steps=100)
        for version in range(first + 1, last + 1):
            groups += map(ScoredGroup.from_wire, api.batch())
            load(adapted, version)
            cached.append(cached_by_base())
        assert "error" not in env.said().lower(), env.said()
    assert min(cached) >= 600
    assert all(len(group.rollouts) == 2 for group in groups)
    assert len({group.item_id for group in groups}) == len(groups) == last - first
    tasks = {group.task_id for group in groups}
    assert len(tasks) == min(pushes, len(builtin_tasks()))
    assert tasks <= {task.task_id for task in builtin_tasks()}
    turns = [(rollout, turn) for group in groups for rollout in group.rollouts for turn in rollout.turns or ()]
    assert len({turn.weight_version for _, turn in turns}) > pushes / 2
    versions = [{turn.weight_version for turn in one.turns or ()} for group in groups for one in group.rollouts]
    assert sum(len(of_rollout) == 1 for of_rollout in versions) >= 0.5 * len(versions), "an episode keeps its version"
    scored = [turn for _, turn in turns if turn.is_scored]
    by_its_own = [turn for turn in scored if turn.scored_version == turn.weight_version]
    assert len(by_its_own) > 0.8 * len(scored) > 0
    for rollout, turn in turns[::5]:
        start, end = turn.span
        assert turn.weight_version is not None
        logprobs_TV = moved[turn.weight_version](list(rollout.tokens_T[:end]))
        rows = logprobs_TV[range(start - 1, end - 1), list(rollout.tokens_T[start:end])]
        np.testing.assert_allclose(rollout.logprobs_T[start:end], rows, atol=1e-3, rtol=0)


def test_the_teacher_reads_by_the_base_or_by_its_own_adapter(adapted: Adapted, forward: Forward) -> None:
    server, ids = adapted.server, random_ids(24, 120, 1000)
    policy, average = (make_adapter(adapted.root / name, seed, ids) for name, seed in (("v200", 6), ("mean", 7)))
    load(adapted, 200)
    check(score(server, [(ids, 60)], read_by="base")[0], ids, 60, 50, forward(ids))
    check(score(server, [(ids, 60)], read_by="teacher")[0], ids, 60, 50, forward(ids))  # It has none yet.
    body = {"path": f"{adapted.root.name}/mean", "version": 200, "as_teacher": True}
    assert ask(server, "/v1/opd/load_adapter", body).status == 200
    check(score(server, [(ids, 60)], read_by="teacher")[0], ids, 60, 50, average)
    check(score(server, [(ids, 60)])[0], ids, 60, 50, policy)
    check(score(server, [(ids, 60)], read_by="base")[0], ids, 60, 50, forward(ids))


def test_the_base_reads_the_same_beside_requests_of_adapters(adapted: Adapted, forward: Forward) -> None:
    """With every slot in use, and requests with and without an adapter in one batch."""
    server, ids = adapted.server, random_ids(26, 60, 1000)
    for version in (301, 302, 303, 304):
        make_adapter(adapted.root / f"v{version}", version, ids[:10])
        load(adapted, version)
    has_read = Event()

    def sampling() -> set[int]:
        versions = set[int]()
        while not versions or not has_read.is_set():
            versions.add(generated(adapted, ids, max_tokens=100)["weight_version"])
        return versions

    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(sampling) for _ in range(4)]
        try:
            until(lambda: metric(server, "vllm:num_requests_running") > 0, 60)
            for seed in range(4):
                read = random_ids(30 + seed, 100, 1000)
                check(score(server, [(read, 60)], read_by="base")[0], read, 60, 50, forward(read))
        finally:
            has_read.set()
        assert [one.result() for one in beside] == [{304}] * 4


def test_the_trainer_pushes_adapters_alone_and_their_average(adapted: Adapted, tmp_path: Path) -> None:
    import asyncio

    import torch

    from agentic_opd.training.batch import make_batch
    from agentic_opd.training.model import save_weights
    from agentic_opd.training.push import Probe
    from agentic_opd.training.trainer import open_trainer
    from tests.support.training import ScriptedClient, make_config, make_group

    settings: dict[str, Any] = {
        **{"output_dir": tmp_path, "weights_dir": adapted.root, "vllm_urls": [adapted.server.base_url]},
        **{"lora_rank": TRAINED_RANK, "ema_decay": 0.5, "lr": 1e-2, "total_steps": 4, "loss": {"forward_kl": 1.0}},
    }
    trainer = open_trainer(make_config(**settings))
    group = make_group(trainer.learner.model)
    probe = Probe.of(make_batch([group]))
    trainer.source = ScriptedClient(trainer.config, [[group]] * 4)
    asyncio.run(trainer.run())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(line["push_difference"] for line in lines) < 1e-3
    save_weights(trainer.learner.model, str(ROOT / MODEL), tmp_path / "whole")
    whole = (tmp_path / "whole/model.safetensors").stat().st_size
    alone = (adapted.root / "step-000004/adapter_model.safetensors").stat().st_size
    assert lines[-1]["push_bytes"] == 2 * alone
    assert alone <= whole / 20, (alone, whole)

    ids = list(probe.token_ids)
    start = torch.tensor(probe.own_logprobs(open_trainer(make_config(lora_rank=TRAINED_RANK)).learner.policy, "cpu"))
    now = torch.tensor(probe.own_logprobs(trainer.learner.policy, "cpu"))
    assert trainer.learner.average is not None
    trainer.learner.model.load_state_dict(trainer.learner.average.state_dict(), strict=False)
    mean = torch.tensor(probe.own_logprobs(trainer.learner.policy, "cpu"))
    assert min((now - mean).abs().max(), (mean - start).abs().max()) > 0.05
    for reader, expected in (("policy", now), ("teacher", mean), ("base", start)):
        (rows,) = score(adapted.server, [(ids, len(ids) - 1)], read_by=reader)
        torch.testing.assert_close(torch.tensor(rows.actual_R), expected, atol=1e-3, rtol=0)
    kept = sorted(path.name for path in adapted.root.glob("step-*"))
    assert kept == [f"step-{step:06d}{end}" for step in (1, 2, 3, 4) for end in ("", "-teacher")]
