"""One of several processes in the tests: steps of the trainer on a batch that every process makes for itself.

    torchrun --nproc-per-node 2 -m tests.support.sharded_training OUT '{"NAME": {SETTING: VALUE}}'

The first process writes to OUT, for each name, what `trained` gives.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def groups() -> tuple[Any, ...]:
    """The groups of the batch."""
    from agentic_opd.training.model import load_model
    from tests.support.training import make_config, make_group

    plain = load_model(make_config(), "cpu")
    return tuple(make_group(plain, seed=seed, lengths=(24, 30, 17), prompt=6) for seed in (3, 4))


def trained(settings: dict[str, Any]) -> dict[str, Any]:
    """Each update's metrics, and at the end the probe's logprobs, those of the weights as a server in bfloat16 is sent
    them, and once more, the weights, and how many this process held. After `save_after` steps it saves to `save_to`.
    """
    from agentic_opd.training import packing
    from agentic_opd.training.batch import make_batch
    from agentic_opd.training.checkpoint import Resumed, load_checkpoint, save_checkpoint
    from agentic_opd.training.distributed import join_processes
    from agentic_opd.training.model import MovingAverage, tied_names
    from agentic_opd.training.policy import StartingPolicy, load_policy
    from agentic_opd.training.push import Probe
    from agentic_opd.training.rounding import as_sent
    from agentic_opd.training.step import read_start, train_step
    from tests.support.training import make_config

    packing.WORTH_SHARING = 4
    steps, resume, broken = (settings.pop(name, None) for name in ("steps", "resume", "broken"))
    save_to, save_after = settings.pop("save_to", None), settings.pop("save_after", None)
    config = make_config(**settings)
    batch = make_batch(groups())
    world = join_processes("cpu")
    torch.manual_seed(0)
    policy = load_policy(config, world)
    model = policy.model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=config.adam_betas)
    average = MovingAverage(model, 0.5) if config.lora_rank else None
    parts = {"model": model, "optimizer": optimizer} | ({"average": average} if average else {})
    if resume:
        load_checkpoint(Path(resume), parts, world)
    if config.loss.start_kl:
        with StartingPolicy(policy, lambda: load_policy(config, world)).reading() as start:
            batch = read_start(start, batch, config, world)
    lines = list[dict[str, float]]()
    if broken:  # One of the sequences, which one of the processes computes.
        batch.old_BT[0] = -3e38
    for step in range(1, steps + 1):
        lines.append(train_step(policy, optimizer, batch, config, world))
        if average is not None:
            average.update()
        if step == save_after:
            save_checkpoint(Path(save_to), Resumed(step, 100, {}), parts, world)
    probe = Probe.of(batch)
    own = [probe.own_logprobs(policy, world.device)]
    state = world.gather(model.state_dict())
    for is_whole in (True, False):
        with as_sent(policy, torch.bfloat16, is_whole=is_whole):
            own.append(probe.own_logprobs(policy, world.device))
    own.append(probe.own_logprobs(policy, world.device))
    averages = world.gather(average.state_dict()) if average else {}
    held = sum(part.numel() for part in world.parts_of(policy).values())
    tied = sorted(tied_names(model))
    return {"lines": lines, "own": own, "state": state, "averages": averages, "held": held, "tied": tied}


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {name: trained(settings) for name, settings in json.loads(sys.argv[2]).items()}
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, Path(sys.argv[1]))
