"""Weights into a real vLLM server after a step on the demo policy: merged adapters, and training in bfloat16."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentic_opd.core.precision import tolerance_for
from agentic_opd.training.batch import make_batch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.policy import TrainedPolicy, load_policy
from agentic_opd.training.push import Probe, PushMismatchError, WeightPusher, WeightsReplacedError
from agentic_opd.training.step import train_step
from agentic_opd.training.trainer import open_trainer
from tests.support.plugin_client import score
from tests.support.training import ScriptedClient, make_config, make_group, make_rollout
from tests.support.vllm import RootedServer

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Run:
    """A model, and steps that move it far enough to be seen."""

    def __init__(self, rooted: RootedServer, url: str | None = None, **changes: Any) -> None:
        urls = [url or rooted.base_url]
        self.config = make_config(weights_dir=rooted.root, vllm_urls=urls, loss={"forward_kl": 1.0}, **changes)
        self.policy = load_policy(self.config, DistContext("cpu"))
        self.batch = make_rollout(self.policy.model)
        self.probe = Probe.of(self.batch)
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.config.lr)

    def step(self) -> None:
        train_step(self.policy, self.optimizer, self.batch, self.config, DistContext("cpu"))

    def own(self, precision: str | None = None) -> torch.Tensor:
        policy = self.policy if precision is None else TrainedPolicy(self.policy.model, precision)
        return torch.tensor(self.probe.own_logprobs(policy, "cpu"))


def pushing(config: TrainerConfig, ask: Callable[[WeightPusher], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        pusher = WeightPusher(config, DistContext("cpu"))
        try:
            return await ask(pusher)
        finally:
            await pusher.close()

    return asyncio.run(run())


def served(rooted: RootedServer, probe: Probe) -> torch.Tensor:
    ids = list(probe.token_ids)
    return torch.tensor(score(rooted.server, [(ids, len(ids) - 1)])[0].actual_R)


@pytest.mark.parametrize("changes", [{"lora_rank": 4, "lr": 1e-2}, {}], ids=["lora", "whole"])
def test_what_was_trained_is_what_is_served(
    rooted: RootedServer, without_adapters: str, changes: dict[str, Any]
) -> None:
    run = Run(rooted, without_adapters, **changes)
    before = run.own()
    run.step()
    after = run.own()
    assert (after - before).abs().max() > 0.1
    assert pushing(run.config, lambda pusher: pusher.push(run.policy, 1, run.probe)).difference < 1e-3
    torch.testing.assert_close(served(rooted, run.probe), after, atol=1e-3, rtol=0)
    assert torch.equal(run.own(), after)  # Merging the adapters for the push leaves the trained model as it was.
    run.step()
    with pytest.raises(PushMismatchError, match="does not compute what the trainer does"):
        pushing(run.config, lambda pusher: pusher.compare(run.own().tolist(), run.probe))
    with pytest.raises(WeightsReplacedError, match="sent the weights of version 2, and answered the probe with ver"):
        pushing(run.config, lambda pusher: pusher.compare(run.own().tolist(), run.probe, 2))


def test_in_bfloat16_the_tolerance_covers_the_rounding_and_not_missed_steps(rooted: RootedServer) -> None:
    """The weights stay float32, so what is served (float32 on the CPU) differs by the forward pass's rounding only."""
    run = Run(rooted, precision="bf16")
    run.step()
    pushed = pushing(run.config, lambda pusher: pusher.push(run.policy, 1, run.probe))
    assert 1e-3 < pushed.difference < tolerance_for("bfloat16").largest
    assert pushed.rounded_share == 0.0
    torch.testing.assert_close(served(rooted, run.probe), run.own("fp32"), atol=1e-3, rtol=0)
    for _ in range(5):
        run.step()
    with pytest.raises(PushMismatchError, match="expected of float32 there and bfloat16 here"):
        pushing(run.config, lambda pusher: pusher.compare(run.own().tolist(), run.probe))


def test_what_was_trained_is_pushed_though_the_step_of_the_push_brought_nothing(
    rooted: RootedServer, tmp_path: Path
) -> None:
    """A push is due at every third step, and the third batch and the last were lost."""
    config = make_config(
        output_dir=tmp_path, weights_dir=rooted.root, vllm_urls=[rooted.base_url], push_every=3, total_steps=5
    )
    trainer = open_trainer(config)
    group = make_group(trainer.learner.model)
    trainer.source = ScriptedClient(trainer.config, [[group], [group], [], [group], []])
    asyncio.run(trainer.run())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["groups"], "push_difference" in line) for line in lines] == [
        (1, False),
        (1, False),
        (0, True),
        (1, False),
        (0, True),
    ]
    probe = Probe.of(make_batch([group]))
    own = torch.tensor(probe.own_logprobs(trainer.learner.policy, "cpu"))
    torch.testing.assert_close(served(rooted, probe), own, atol=1e-3, rtol=0)
