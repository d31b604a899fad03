"""The trainer over several processes (FSDP2 on gloo): the same numbers as in one, whatever they train.

Two by default, and half of what is trained; `--all` has the other half too, and four processes, which save what two and
one go on from.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentic_opd.training.model import load_model
from tests.support.tiny_model import save_tiny_model
from tests.support.training import make_config, run_together

RELATIVE = 1e-5
LOSS = {"loss": {"forward_kl": 1.0, "grpo": 1.0}, "steps": 1}
ONE_STEP: dict[str, dict[str, Any]] = {
    "packed": {},
    "adapters": {"lora_rank": 4},
    "tied": {},
}
"""`tied` gets its model from the fixture."""
WITH_ALL: dict[str, dict[str, Any]] = {
    "padded": {"pack": False, "micro_tokens": 4096},
    "token advantage": {"loss": {"token_advantage": 1.0}},
    "checkpointing": {"gradient_checkpointing": True},
}
KINDS = [pytest.param("whole", marks=pytest.mark.all), "adapter"]
Results = dict[int, dict[str, Any]]
"""By the number of processes, then by the name of what they trained."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Results:
    folder = tmp_path_factory.mktemp("sharded")
    ONE_STEP["tied"]["model"] = str(save_tiny_model(folder / "tiny"))
    is_all = pytestconfig.getoption("--all")
    one_step = ONE_STEP | (WITH_ALL if is_all else {})
    kinds: dict[str, dict[str, Any]] = {"adapter": {"lora_rank": 4}} | ({"whole": {}} if is_all else {})
    curve = {"curve": {"steps": 4, "lr": 3e-4}}
    saves = {name: {"save_to": str(folder / name), "save_after": 2} for name in kinds}
    saving = {f"save {name}": {**one, "steps": 2, **saves[name]} for name, one in kinds.items()}
    resuming = {f"resume {name}": {**one, "steps": 2, "resume": str(folder / name)} for name, one in kinds.items()}
    straight = {
        f"straight {name}": {**one, "steps": 4, **({} if is_all else saves[name])} for name, one in kinds.items()
    }
    bf16: dict[str, Any] = {"bf16 adapters": {"steps": 5, "lr": 3e-3, "precision": "bf16", "lora_rank": 4}}
    bf16 |= {"bf16": {"steps": 4, "lr": 3e-4, "precision": "bf16"}} if is_all else {}
    start_kl = {"forward_kl": 1.0, "start_kl": 1.0, "route_by_turn": False}
    broken = {"broken": {"broken": True}}
    held = {f"held {name}": {**one, "steps": 3, "loss": start_kl} for name, one in kinds.items()}
    four = {4: trained(folder, 4, one_step | curve | saving)} if is_all else {}
    return four | {
        2: trained(folder, 2, one_step | curve | straight | resuming | bf16 | held | broken),
        1: trained(folder, 1, one_step | curve | resuming | bf16 | held),
    }


def trained(folder: Path, processes: int, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    out = folder / f"{processes}.pt"
    settings = json.dumps({name: LOSS | changes for name, changes in runs.items()})
    log = folder / f"{processes}.log"
    run_together("tests.support.sharded_training", str(out), settings, processes=processes, log=log)
    return torch.load(out)


@pytest.mark.parametrize("name", [*ONE_STEP, *(pytest.param(name, marks=pytest.mark.all) for name in WITH_ALL)])
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.all)])
def test_several_processes_compute_what_one_does(results: Results, name: str, processes: int) -> None:
    alone, sharded = results[1][name], results[processes][name]
    (mine,), (theirs,) = sharded["lines"], alone["lines"]
    compared = theirs.keys() - {"computed_tokens", "logprob_drift"}  # What begins alike is computed once a part.
    for metric in compared:
        assert mine[metric] == pytest.approx(theirs[metric], rel=RELATIVE, abs=1e-6), metric
    assert mine["logprob_drift"] == pytest.approx(theirs["logprob_drift"], abs=1e-5)
    read, sent, sent_by_itself, again = (torch.tensor(one) for one in sharded["own"])
    torch.testing.assert_close(read, torch.tensor(alone["own"][0]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sent, torch.tensor(alone["own"][1]), atol=0.02, rtol=0)
    torch.testing.assert_close(sent_by_itself, torch.tensor(alone["own"][2]), atol=0.02, rtol=0)
    assert min((sent - read).abs().max(), (sent_by_itself - read).abs().max()) > 1e-3
    assert torch.equal(again, read)
    assert sharded["tied"] == alone["tied"] == (["lm_head.weight"] if name == "tied" else [])
    assert sharded["state"].keys() == alone["state"].keys()
    for tensor, value in sharded["state"].items():
        torch.testing.assert_close(value, alone["state"][tensor], atol=1e-4, rtol=1e-3)
    assert sharded["held"] <= alone["held"] / processes * 1.02


def test_all_processes_skip_an_update_that_is_not_finite_in_one_of_them(results: Results) -> None:
    (line,) = results[2]["broken"]["lines"]
    assert line["skipped_updates"] == 1.0
    (fresh,) = results[1]["packed"]["lines"]
    assert fresh["skipped_updates"] == 0.0
    start = load_model(make_config(), "cpu").state_dict()
    for tensor, value in results[2]["broken"]["state"].items():
        torch.testing.assert_close(value, start[tensor], rtol=0, atol=0)


def test_four_steps_are_the_same_curve(results: Results) -> None:
    one, *several = ([line["loss"] for line in results[n]["curve"]["lines"]] for n in sorted(results))
    assert one[-1] < 0.5 * one[0]
    for curve in several:
        assert curve == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_hold_the_policy_where_one_does(results: Results, kind: str) -> None:
    one, two = ([line["loss/start_kl"] for line in results[n][f"held {kind}"]["lines"]] for n in (1, 2))
    assert abs(one[0]) < 1e-6, "nothing has moved yet"
    assert one[2] > 10 * abs(one[0])
    assert two == pytest.approx(one, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_several_saved_two_and_one_go_on_from_exactly(results: Results, kind: str) -> None:
    straight = results[2][f"straight {kind}"]
    expected = [line["loss"] for line in straight["lines"][2:]]
    for processes in (1, 2):
        resumed = results[processes][f"resume {kind}"]
        assert [line["loss"] for line in resumed["lines"]] == pytest.approx(expected, rel=1e-4)
        for name, value in straight["averages"].items():
            torch.testing.assert_close(resumed["averages"][name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.all
def test_bfloat16_is_near_and_masters_stay_float32(results: Results) -> None:
    assert {value.dtype for value in results[2]["bf16"]["state"].values()} == {torch.float32}
    first = results[1]["packed"]["lines"][0]["loss"]
    for processes in (1, 2):
        losses = [line["loss"] for line in results[processes]["bf16"]["lines"]]
        assert losses[0] == pytest.approx(first, rel=0.05)
        assert losses[-1] < 0.5 * first


def test_bfloat16_adapters_beside_frozen_weights_kept_in_it(results: Results) -> None:
    first = results[1]["adapters"]["lines"][0]["loss"]
    for processes in (1, 2):
        state = results[processes]["bf16 adapters"]["state"]
        dtypes = {(".lora_" in name, value.dtype) for name, value in state.items()}
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
        losses = [line["loss"] for line in results[processes]["bf16 adapters"]["lines"]]
        assert losses[0] == pytest.approx(first, rel=0.05)
        assert losses[-1] < 0.8 * first
