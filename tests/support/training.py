"""The trainer as a person runs it, and what it is given where no environment makes it."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from bench.local_server import free_port
from demo_policy import POLICY_DIR

from agentic_opd.atropos.trainer import TrainerClient
from agentic_opd.training.batch import TrainBatch, make_batch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.sources import registration
from agentic_opd.wire.group import ScoredGroup

from . import commands
from .environment import read_lines
from .places import ROOT


def trainer(folder: Path, api_url: str, vllm_url: str, *changes: str, processes: int = 1) -> list[str]:
    """A short run in `folder`: a module and its arguments."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m")
    return [
        *(torchrun if processes > 1 else ()),
        "agentic_opd.training",
        *("--config", str(ROOT / "configs" / "train_demo.yaml")),
        *(f"--output_dir={folder / 'train'}", f"--weights_dir={folder / 'weights'}", f"--api_url={api_url}"),
        *(f"--vllm_urls=[{vllm_url}]", "--total_steps=3", "--batch_size=8", "--save_every=1"),
        *("--epochs_per_batch=1", "--minibatches=1", *changes),
    ]


def run_together(module: str, *arguments: str, processes: int, log: Path) -> None:
    """Run `python -m MODULE ARGUMENTS` in forks, each with the variables that torchrun sets; all must succeed."""
    variables = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with log.open("w") as output, ExitStack() as stack:
        more: dict[str, Any] = {"stdout": output, "stderr": output, "kind": "train", **variables}
        started = [
            stack.enter_context(commands.start(module, *arguments, **more, RANK=str(rank), LOCAL_RANK=str(rank)))
            for rank in range(processes)
        ]
        try:
            assert [process.wait(900) for process in started] == [0] * processes, log.read_text()[-3000:]
        finally:
            for process in started:
                process.kill()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What it has logged."""
    return read_lines(folder / "train" / "metrics.jsonl")


def make_config(**changes: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": str(POLICY_DIR), "lr": 1e-3, "micro_tokens": 64, **changes})


def own_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)


def make_rollout(model: Any) -> TrainBatch:
    return make_batch([make_group(model)])


def make_group(model: Any, seed: int = 3, lengths: Sequence[int] = (24, 30), prompt: int = 0) -> ScoredGroup:
    """Sequences of the model's own making, which start with the same `prompt` tokens; in each, the teacher would rather
    see another token at one place.
    """
    torch.manual_seed(seed)
    group: dict[str, Any] = {name: [] for name in ("tokens", "masks", "inference_logprobs", "distill_token_ids")}
    group |= {"distill_logprobs": [], "scores": [0.0, *(1.0 for _ in lengths[1:])]}
    for length in lengths:
        tokens = torch.randint(300, 1500, (length,)).tolist()
        tokens[:prompt] = range(300, 300 + prompt)
        tokens[10], other = own_logprobs(model, tokens[:10])[-1].topk(2).indices.tolist()
        rows = own_logprobs(model, tokens)
        sampled = range(8, length)
        group["tokens"].append(tokens)
        group["masks"].append([token if p in sampled else -100 for p, token in enumerate(tokens)])
        logprobs = [float(rows[p - 1, tokens[p]]) if p in sampled else 1.0 for p in range(length)]
        group["inference_logprobs"].append(logprobs)
        group["distill_token_ids"].append([[tokens[p], other] if p == 10 else [] for p in range(length)])
        group["distill_logprobs"].append([[-8.0, -0.01] if p == 10 else [] for p in range(length)])
    return ScoredGroup.from_wire(group)


class ScriptedClient(TrainerClient):
    """These batches, and then none for ever."""

    def __init__(self, config: TrainerConfig, batches: list[list[ScoredGroup]]) -> None:
        super().__init__(config.api_url, registration(config))
        self.batches = batches
        self.asked = [asyncio.Event() for _ in range(len(batches) + 1)]

    async def register(self, step: int) -> None:
        pass

    async def batch(self, step: int) -> list[ScoredGroup]:
        self.asked[step].set()
        if step == len(self.batches):
            await asyncio.Event().wait()
        return self.batches[step]
