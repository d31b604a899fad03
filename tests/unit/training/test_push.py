"""Pushes into a server that computes in its own precision, with a head of its own or without."""

import asyncio
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from agentic_opd.core.errors import BrokenWeightsError, ConfigError, ServerMemoryError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.precision import Noise, tolerance_for
from agentic_opd.plugin.client import PluginClient
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.model import merged, tied_names, whole_specs, write_weights
from agentic_opd.training.policy import TrainedPolicy, load_policy
from agentic_opd.training.push import (
    Probe,
    Pushed,
    PushMismatchError,
    WeightPusher,
    WeightsReplacedError,
    release_cache,
)
from agentic_opd.training.rounding import Rounding, as_sent
from agentic_opd.training.trainer import Trainer, open_trainer
from tests.support.served_model import Server
from tests.support.tiny_model import save_tiny_model
from tests.unit.distill.fakes import served

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WORLD, PROBE = DistContext("cpu"), Probe(tuple(range(300, 400)))


def make_policy(model: Path, folder: Path, **changes: Any) -> tuple[TrainerConfig, TrainedPolicy]:
    config = TrainerConfig(model=str(model), weights_dir=folder / "weights", server_retry_s=0.2, **changes)
    return config, load_policy(config, WORLD).eval()


def move(policy: TrainedPolicy, by: float) -> None:
    """What an update of AdamW does at this learning rate, in a random direction."""
    with torch.no_grad():
        for one in policy.parameters():
            if one.requires_grad:
                one.add_(by * torch.randn_like(one).sign())


def pushes(config: TrainerConfig, policy: TrainedPolicy, server: Server, steps: list[float]) -> list[Pushed]:
    async def run() -> list[Pushed]:
        async with served(server.handlers) as url:
            pusher = WeightPusher(config.model_copy(update={"vllm_urls": [url]}), WORLD)
            try:
                await pusher.push(policy, 0, None)
                done: list[Pushed | None] = []
                for version, by in enumerate(steps, start=1):
                    move(policy, by)
                    done.append(await pusher.push(policy, version, PROBE))
                return [one for one in done if one is not None]
            finally:
                await pusher.close()

    torch.manual_seed(0)
    return asyncio.run(run())


def own(policy: TrainedPolicy) -> torch.Tensor:
    return torch.tensor(PROBE.own_logprobs(policy, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "server_is_tied"),
    [
        ("whole", "float32", False),
        ("whole", "bfloat16", True),
        ("merged", "float32", True),
        ("merged", "bfloat16", False),
        ("adapters", "float32", False),
        ("adapters", "bfloat16", True),
    ],
)
def test_after_ten_pushes_the_server_computes_what_a_tied_bf16_model_was_trained_to(
    kind: str, dtype: str, server_is_tied: bool, tmp_path: Path
) -> None:
    """A float32 server gets what was trained, one in bfloat16 its rounded form; the trainer's model stays tied."""
    model = save_tiny_model(tmp_path / "tied")
    server = Server(
        model if server_is_tied else save_tiny_model(tmp_path / "untied", tied=False),
        dtype,
        adapters=kind == "adapters",
    )
    config, policy = make_policy(model, tmp_path, lora_rank=None if kind == "whole" else 4)
    start = own(policy)
    done = pushes(config, policy, server, [3e-3 if kind == "whole" else 1e-2] * 10)
    assert tied_names(policy.model) == {"lm_head.weight": "model.embed_tokens.weight"}
    moved, served_now = own(policy) - start, server.logprobs(list(PROBE.token_ids)) - start
    assert moved.abs().mean() > 0.2
    assert float(moved @ served_now / (moved @ moved)) == pytest.approx(1.0, abs=0.05)
    assert (server.logprobs(list(PROBE.token_ids)) - own(policy)).abs().max() < (1e-4 if dtype == "float32" else 0.5)
    for one in done:
        assert one.difference is not None
        assert one.difference_rms is not None
        assert not Noise(one.difference_rms, one.difference).exceeds(tolerance_for(dtype))
        assert (one.rounded_share == 0.0) == (dtype == "float32")
        assert one.rounded_share < 0.5


def test_the_share_that_rounding_keeps_back_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights of 0.2 are 1e-3 apart in bfloat16: of steps of 1e-6 next to nothing gets through, of 1e-2 nearly all."""
    model = save_tiny_model(tmp_path / "tied")
    config, policy = make_policy(model, tmp_path)
    small, second, large = pushes(config, policy, Server(model, "bfloat16"), [1e-6, 1e-6, 1e-2])
    assert min(small.rounded_share, second.rounded_share) > 0.9
    assert large.rounded_share < 0.1
    said = [record.getMessage() for record in caplog.records if "keeps back" in record.getMessage()]
    assert len(said) == 1
    assert all(what in said[0] for what in ("bfloat16", "higher lr", "lora_rank", "float32"))
    assert not [one for one in pushes(config, policy, Server(model, "float32"), [1e-6]) if one.rounded_share]


@pytest.mark.slow
def test_adapters_get_through_where_whole_weights_do_not(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tied")
    shares = {}
    for kind, adapters in (("merged", 0), ("adapters", 2)):
        config, policy = make_policy(model, tmp_path, lora_rank=4)
        shares[kind] = pushes(config, policy, Server(model, "bfloat16", adapters=adapters), [1e-5])[0].rounded_share
    assert shares["adapters"] < 0.05
    assert shares["merged"] > 0.9


def test_a_server_that_did_not_take_the_weights_is_found_out(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tied")
    config, policy = make_policy(model, tmp_path)
    server = Server(model, "bfloat16")
    server.reload = lambda body: {}  # type: ignore[method-assign]
    with pytest.raises(PushMismatchError, match=r"does not compute what the trainer does.*expected of bfloat16"):
        pushes(config, policy, server, [3e-2])


class RestartedServer(Server):
    """It is started again before the first `restarts` probes are read: then it has other weights than the pushed."""

    restarts = 1

    def score(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.restarts > 0:
            self.restarts -= 1
            self.info["weight_version"] = 0
        return {**super().score(body), "weight_version": self.version}


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [0, 2])
def test_weights_that_a_restarted_server_lost_before_the_probe_are_sent_again_once(
    adapters: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny_model(tmp_path / "tied")
    config, policy = make_policy(model, tmp_path, lora_rank=4 if adapters else None)
    server = RestartedServer(model, "float32", adapters=adapters)
    (pushed,) = pushes(config, policy, server, [1e-2])
    assert server.version == 1
    assert pushed.difference is not None
    assert pushed.difference < 1e-3
    assert caplog.text.count("They are sent again") == 1
    server.restarts = 2
    with pytest.raises(WeightsReplacedError):
        pushes(config, policy, server, [1e-2])


def test_a_head_of_its_own_has_no_place_in_a_tied_server(tmp_path: Path) -> None:
    config, policy = make_policy(save_tiny_model(tmp_path / "untied", tied=False), tmp_path)
    server = Server(save_tiny_model(tmp_path / "tied"), "bfloat16")
    with pytest.raises(ConfigError, match=r"has a separate output head.*untied embeddings, or train adapters"):
        pushes(config, policy, server, [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "merged", "adapters"])
def test_the_policy_is_read_as_it_was_sent_and_is_then_what_it_was(kind: str, tmp_path: Path) -> None:
    config, policy = make_policy(save_tiny_model(tmp_path / "tied"), tmp_path, lora_rank=None if kind == "whole" else 4)
    move(policy, 1e-2)
    before, plain = {name: value.clone() for name, value in policy.state_dict().items()}, own(policy)
    sent = dict(Rounding().weights(merged(policy.model, policy.model.state_dict()), torch.bfloat16))
    with as_sent(policy, torch.bfloat16, is_whole=kind != "adapters"):
        rounded = own(policy)
    assert 1e-4 < (rounded - plain).abs().max() < 0.5
    assert torch.equal(own(policy), plain)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    receiver = load_policy(config.model_copy(update={"lora_rank": None}), WORLD).eval()
    if kind == "adapters":
        receiver = load_policy(config, WORLD).eval()
        sent = {name: value.to(torch.bfloat16) for name, value in policy.model.state_dict().items()}
    receiver.model.load_state_dict(sent)
    assert torch.equal(own(receiver), rounded)


def test_what_does_not_fit_in_sixteen_bits_is_a_share() -> None:
    """Between 1 and 2 bfloat16 counts in steps of 1/128: of 1/128, 1/256 and 1/512 only the first gets through."""
    rounding = Rounding()
    assert dict(rounding.weights([("w", torch.ones(4))], torch.bfloat16))["w"].tolist() == [1.0] * 4
    assert rounding.share == 0.0
    trained = torch.ones(4) + torch.tensor([1 / 128, 1 / 256, 1 / 512, 0.0])
    sent = dict(rounding.weights([("w", trained)], torch.bfloat16))
    assert sent["w"].tolist() == [1 + 1 / 128, 1.0, 1.0, 1.0]
    assert rounding.share == pytest.approx((1 / 256 + 1 / 512) / (1 / 128 + 1 / 256 + 1 / 512))
    assert len(dict(rounding.weights([("w", torch.ones(4))], torch.float32))) == 1
    assert rounding.share == 0.0


def test_the_share_of_large_tensors_is_that_of_a_sample() -> None:
    """A quarter of the elements moves by what bfloat16 keeps, another by half of it, which is withheld."""
    moves = torch.tensor([1 / 128, 1 / 256, 0.0, 0.0])[torch.randint(4, (2**19 + 7,))]
    rounding = Rounding()
    for value in (torch.ones_like(moves), torch.ones_like(moves) + moves):
        dict(rounding.weights([("w", value)], torch.bfloat16))
    assert rounding.share == pytest.approx(1 / 3, abs=0.01)


def test_the_average_of_whole_weights_goes_to_the_servers_that_teach(tmp_path: Path) -> None:
    """The policy's server has the trained weights, the teacher's 0.9 of the first and 0.1 of those."""
    model = save_tiny_model(tmp_path / "model", tied=False)
    sampling, teaching = Server(model, "float32"), Server(model, "float32")
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()

    async def run() -> Trainer:
        async with served(sampling.handlers) as url, served(teaching.handlers) as teacher_url:
            places = {"weights_dir": tmp_path / "weights", "output_dir": tmp_path / "train", "device": "cpu"}
            urls = {"vllm_urls": [url], "teacher_urls": [teacher_url]}
            trainer = open_trainer(TrainerConfig(model=str(model), ema_decay=0.9, **places, **urls))  # type: ignore[arg-type]
            await trainer.push(None)
            move(trainer.learner.policy, 0.01)
            assert trainer.learner.average is not None
            trainer.learner.average.update()
            trainer.state.step = 1
            pushed = await trainer.push(PROBE)  # Both servers are compared with the weights that they were sent.
            assert pushed is not None
            await trainer.pusher.close()
            await trainer.teacher_pusher.close()
            return trainer

    trainer = asyncio.run(run())
    trained = dict(trainer.learner.model.state_dict())
    for name, value in sampling.model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    for name, value in teaching.model.state_dict().items():
        torch.testing.assert_close(value, start[name].float().lerp(trained[name], 0.1))
    assert not torch.equal(trained["lm_head.weight"], start["lm_head.weight"].float())
    assert sorted(path.name for path in (tmp_path / "weights" / "teacher").iterdir()) == ["step-000000", "step-000001"]


@pytest.mark.parametrize(
    ("reply", "error"), [("out_of_memory", ServerMemoryError), ("broken_weights", BrokenWeightsError)]
)
@pytest.mark.parametrize("adapters", [0, 2], ids=["whole", "adapters"])
def test_a_server_without_memory_is_asked_once(
    reply: str, error: type[Exception], adapters: int, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model")
    config, policy = make_policy(model, tmp_path, lora_rank=4 if adapters else None)
    server, asked = Server(model, "float32", adapters=adapters), list[str]()
    refusal = {"error": {"field": None, "message": "this server has no memory. Leave it more", "kind": reply}}

    async def refuse(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response(refusal, status=409)

    async def run() -> None:
        handlers = {**server.handlers, "/v1/opd/reload_weights": refuse, "/v1/opd/load_adapter": refuse}
        async with served(handlers) as url:
            patient = {"vllm_urls": [url], "server_retry_s": 300.0}
            pusher = WeightPusher(config.model_copy(update=patient), WORLD)
            try:
                await pusher.push(policy, 1, None)
            finally:
                await pusher.close()

    with pytest.raises(error, match="Leave it more"):
        asyncio.run(run())
    assert len(asked) == 1


def test_a_server_with_broken_weights_is_refused_but_by_a_push(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    config, policy = make_policy(model, tmp_path)
    server = Server(model, "float32")
    server.info["broken_weights"] = "partly those of a push that failed"

    async def run() -> None:
        async with served(server.handlers) as url, JsonClient(url) as client:
            with pytest.raises(BrokenWeightsError, match="partly those of a push"):
                await PluginClient.connected(client)

    asyncio.run(run())
    assert pushes(config, policy, server, []) == []
    assert server.version == 0


@pytest.mark.parametrize(
    ("device", "gpus", "empties"),
    [
        ("cuda:0", ["GPU-1234"], True),
        ("cuda", ["GPU-0000", "1234"], True),
        ("cuda:0", ["GPU-0000"], False),
        ("cuda:0", [], False),
        ("cpu", ["GPU-1234"], False),
    ],
)
def test_the_cache_is_emptied_where_a_server_shares_the_card(
    device: str, gpus: list[str], empties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    server: Any = SimpleNamespace(info=SimpleNamespace(gpus=gpus))
    release_cache(device, [server])
    assert calls == ["empty"] * empties


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_that_is_written_tensor_by_tensor_is_one_of_transformers(tied: bool, tmp_path: Path) -> None:
    """At no time is there more than one rounded tensor, and nothing that was not named is written."""
    model = save_tiny_model(tmp_path / "model", tied=tied)
    _, policy = make_policy(model, tmp_path)
    alive = list[weakref.ref[torch.Tensor]]()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in Rounding().weights(merged(policy.model, policy.model.state_dict()), torch.bfloat16):
            assert not [reference for reference in alive[:-1] if reference() is not None]
            alive.append(weakref.ref(value))
            yield name, value

    specs = whole_specs(policy.model, torch.bfloat16, has_head=not tied)
    write_weights(policy.model, str(model), tmp_path / "written", specs, tensors())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    assert loaded.dtype == torch.bfloat16
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, policy.model.state_dict()[name].to(torch.bfloat16)), name
    with safe_open(tmp_path / "written" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(specs)
    with pytest.raises(KeyError, match="lacks"):
        write_weights(policy.model, str(model), tmp_path / "less", specs, [])
