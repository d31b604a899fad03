"""Push new weights to running vLLM servers and verify each push with a probe (I/O)."""

import asyncio
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentic_opd.core.errors import ConfigError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.precision import Noise, tolerance_for
from agentic_opd.core.server_info import ServerInfo, fetch_server_info
from agentic_opd.core.types import TeacherRequest
from agentic_opd.distill.teacher import PluginTeacher
from agentic_opd.serving.process_group import Backend
from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.model import MovingAverage, merged, save_adapter, tied_names, without_aliases, write_weights
from agentic_opd.training.policy import TrainedPolicy
from agentic_opd.training.rounding import MUCH, Rounding, as_sent, common_dtype
from agentic_opd.training.transfer import WeightSender

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 512


class PushMismatchError(ServerMismatchError):
    """A server loaded the weights, but its logprobs differ from the trainer's."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids on which the logprobs of server and trainer are compared."""

    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, batch: TrainBatch) -> "Probe":
        """Take the first tokens of the batch's longest sequence, at most `_PROBE_TOKENS`."""
        longest = int(batch.attended_BT.sum(-1).argmax())
        tokens: list[int] = batch.tokens_BT[longest][batch.attended_BT[longest]].tolist()
        return cls(tuple(tokens[:_PROBE_TOKENS]))

    def own_logprobs(self, policy: TrainedPolicy, device: str) -> list[float]:
        """Return the trainer's logprobs (nats) of every token but the first.

        If the policy is sharded, all processes must call this.
        """
        tokens = torch.tensor([self.token_ids], device=device)
        there = torch.ones_like(tokens, dtype=torch.bool)
        was_training = policy.training
        policy.eval()
        with torch.no_grad():
            row: list[float] = policy(tokens, there, tokens[..., None], there).chosen_BTK[0, 1:, 0].tolist()
        policy.train(was_training)
        return row


class Pushed(NamedTuple):
    """Result of a push."""

    size_bytes: int
    """Bytes of weights that each server read."""
    difference: float | None
    """Largest difference of the probe's logprobs between server and trainer, in nats; None without a probe."""
    difference_rms: float | None
    """Root mean square of these differences, in nats; None without a probe."""
    rounded_share: float
    """Share of the update that rounding withholds: `Rounded.share`."""


class _Receivers(NamedTuple):
    """The format of weights that the servers accept."""

    dtype: torch.dtype
    has_head: bool
    """Whether any server has a separate output head; the trained model may have none."""
    takes_adapters: bool


class WeightPusher:
    """Pushes weights to all servers, and compares the logprobs of servers and trainer afterwards.

    Adapters are pushed alone if the model has adapters and every server accepts them. Otherwise whole weights are
    pushed, as checkpoints or, with `weight_transfer`, from memory.
    """

    def __init__(self, config: TrainerConfig, world: DistContext) -> None:
        """Create a client for each server; no request is sent yet."""
        self._config, self._world = config, world
        self._kept = config.pushes_kept
        self._rounding, self._averages_rounding = Rounding(), Rounding()
        self._has_warned = self._has_said_merged = False
        self._sender: WeightSender | None = None
        given = config.vllm_api_key
        key = given.get_secret_value() if given else os.environ.get("VLLM_API_KEY")
        self._clients = [JsonClient(url, key, retry_s=config.server_retry_s) for url in config.vllm_urls]

    async def push(
        self, policy: TrainedPolicy, version: int, probe: Probe | None, average: MovingAverage | None = None
    ) -> Pushed | None:
        """Write the weights as `version` in the servers' precision, load them on every server, and run the probe.

        All processes must call this; the first one writes files and sends requests.

        Args:
            policy: The trained policy.
            version: The version number of the pushed weights.
            probe: Tokens to compare servers and trainer on; None skips the comparison.
            average: Moving average to load as the teacher's adapter.

        Returns:
            Result of the push; None without servers, and in all processes but the first.

        Raises:
            ConfigError: there is an average, but a server accepts no adapters; or the model has a separate output
                head, but a server's head is tied to its embedding matrix.
            PushMismatchError: a server's logprobs differ from the trainer's.
            ServerError: a server can't load the weights.
        """
        if not self._clients:
            return None
        model, world = policy.model, self._world
        folder = self._config.weights_dir.resolve() / f"step-{version:06d}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        to = world.share(await self._receivers(model) if world.is_first else None)
        assert to is not None
        state = await asyncio.to_thread(world.whole, _pushed(model, adapters_only=to.takes_adapters))
        averages = {} if average is None else await asyncio.to_thread(world.whole, average.state_dict())
        if to.takes_adapters:
            rounded = await asyncio.to_thread(self._rounding.adapters, state, to.dtype)
        else:
            rounded = await asyncio.to_thread(self._rounding.weights, merged(model, state), to.dtype)
        sent = rounded.weights
        own = None
        if probe is not None:
            with as_sent(policy, None if to.takes_adapters else sent, to.dtype, world):
                own = probe.own_logprobs(policy, world.device)
        if not world.is_first:
            return None
        if to.takes_adapters:
            size = await self._load_adapter(folder, version, model, sent)
            if averages:
                teacher = folder.with_name(f"{folder.name}-teacher")
                averages = self._averages_rounding.adapters(averages, to.dtype).weights
                size += await self._load_adapter(teacher, version, model, averages, as_teacher=True)
        else:
            if not to.has_head:
                sent = without_aliases(model, sent)
            size = await self._load_weights(folder, version, model, sent)
        noise = None if probe is None or own is None else await self.compare(own, probe, version)
        if folder.exists():
            self._forget_old(folder)
        self._warn_of_rounding(rounded.share, to.dtype)
        return Pushed(size, noise and noise.largest, noise and noise.rms, rounded.share)

    async def _load_weights(self, folder: Path, version: int, model: Any, sent: dict[str, torch.Tensor]) -> int:
        if self._config.weight_transfer != "files":
            return await (await self._joined(self._config.weight_transfer)).send(sent, version)
        await asyncio.to_thread(write_weights, model, self._config.model, folder, sent)
        await self._ask_all("/v1/opd/reload_weights", {"path": str(folder), "version": version})
        return _size_bytes(folder)

    def _warn_of_rounding(self, share: float, dtype: torch.dtype) -> None:
        """Warn once if rounding withholds more than `MUCH` of the update."""
        if share <= MUCH or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "rounding to %s, in which the servers compute, keeps back %.0f%% of what was learned since the last push: "
            "they follow the trainer late. Take a higher lr, train adapters (lora_rank, and servers with "
            "--max-lora-rank), or serve in float32 (serve-vllm ... -- --dtype float32)",
            str(dtype).removeprefix("torch."),
            100 * share,
        )

    async def _load_adapter(
        self,
        folder: Path,
        version: int,
        model: Any,
        state: dict[str, torch.Tensor],
        *,
        as_teacher: bool = False,
    ) -> int:
        await asyncio.to_thread(save_adapter, model, folder, state)
        await self._ask_all("/v1/opd/load_adapter", {"path": str(folder), "version": version, "as_teacher": as_teacher})
        return _size_bytes(folder)

    async def _joined(self, backend: Backend) -> WeightSender:
        if self._sender is None:
            infos = await asyncio.gather(*(fetch_server_info(client) for client in self._clients))
            self._sender = await WeightSender.joined(backend, self._clients, infos, self._world.device)
        return self._sender

    async def _ask_all(self, route: str, body: dict[str, Any]) -> None:
        await asyncio.gather(*(client.post(route, body) for client in self._clients))

    async def _receivers(self, model: Any) -> _Receivers:
        """Query the servers for the format that they accept."""
        infos = await asyncio.gather(*(fetch_server_info(client) for client in self._clients))
        takes_adapters = self._takes_adapters(infos)
        if not takes_adapters and model.get_output_embeddings() is not None and not tied_names(model):
            for client, info in zip(self._clients, infos, strict=True):
                if info.tied_embeddings:
                    raise ConfigError(
                        f"{self._config.model} has an output head of its own, and that of {info.model} at "
                        f"{client.base_url} is its embedding matrix: serve a model with untied embeddings, or train "
                        "adapters (lora_rank) and start the server with --max-lora-rank"
                    )
        has_head = not all(info.tied_embeddings for info in infos)
        return _Receivers(common_dtype(info.dtype for info in infos), has_head, takes_adapters)

    def _takes_adapters(self, infos: Sequence[ServerInfo]) -> bool:
        """Return whether the model has adapters and every server accepts them."""
        rank = self._config.lora_rank
        if rank is None:
            return False
        without = [
            client.base_url
            for client, info in zip(self._clients, infos, strict=True)
            if not info.max_adapters or info.max_lora_rank < rank
        ]
        if not without:
            # A server may read the files of an adapter again while requests use it.
            most = max(info.max_adapters for info in infos)
            self._kept = max(self._config.pushes_kept, 1 + most)
            return True
        how = f"start {' and '.join(without)} with scripts/serve_vllm --max-lora-rank {rank}"
        if self._config.ema_decay is not None:
            raise ConfigError(f"ema_decay needs servers that take adapters: {how}")
        if not self._has_said_merged:
            self._has_said_merged = True
            logger.warning("whole weights are pushed, with the adapters merged in; to push adapters alone, %s", how)
        return False

    async def compare(self, own: Sequence[float], probe: Probe, version: int | None = None) -> Noise:
        """Compare the servers' logprobs of the probe with the trainer's `own`.

        Returns:
            The noise of the server with the largest difference.

        Raises:
            PushMismatchError: a difference exceeds `probe_tolerance`, or what the server's precision explains.
        """
        infos = await asyncio.gather(*(fetch_server_info(client) for client in self._clients))
        both = zip(self._clients, infos, strict=True)
        rows = await asyncio.gather(*(_served_logprobs(client, info, probe, version) for client, info in both))
        found: list[Noise] = []
        for client, info, served in zip(self._clients, infos, rows, strict=True):
            gaps = [abs(a - b) for a, b in zip(own, served, strict=True)]
            at = max(range(len(gaps)), key=gaps.__getitem__)
            found.append(Noise.of(gaps))
            trained_in = {"bf16": "bfloat16", "fp32": "float32"}[self._config.precision]
            tolerance = tolerance_for(info.dtype, trained_in, largest=self._config.probe_tolerance)
            if found[-1].exceeds(tolerance):
                raise PushMismatchError(
                    f"{client.base_url} does not compute what the trainer does, with the weights that it was sent: its "
                    f"logprobs of the probe are {found[-1]} away, where {tolerance} are expected of {info.dtype} there "
                    f"and {trained_in} here. Token {at + 1} has {served[at]:.6f} there and {own[at]:.6f} here. Is it "
                    "the same model on both sides? If more noise than this is usual there, set probe_tolerance"
                )
        return max(found, key=lambda one: one.largest)

    async def close(self) -> None:
        """Leave the weight transfer's process group, and close pooled connections."""
        if self._sender is not None:
            self._sender.group.close()
        for client in self._clients:
            await client.close()

    def _forget_old(self, newest: Path) -> None:
        """Remove all but the last `_kept` pushes up to `newest`; keep later steps, which another run wrote."""
        pushed: Sequence[Path] = sorted(newest.parent.glob("step-??????"))
        for folder in pushed[: pushed.index(newest) + 1][: -self._kept]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(folder.with_name(f"{folder.name}-teacher"), ignore_errors=True)


def _pushed(model: Any, *, adapters_only: bool) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.state_dict()
    return {name: value for name, value in state.items() if not adapters_only or ".lora_" in name}


def _size_bytes(folder: Path) -> int:
    """Return the size of the safetensors files in `folder`."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


async def _served_logprobs(client: JsonClient, info: ServerInfo, probe: Probe, version: int | None) -> list[float]:
    ids = probe.token_ids
    reply = await PluginTeacher(client, info).score(TeacherRequest(ids, len(ids) - 1, 0, (), version), top_k=1)
    return reply.rows.actual_R.tolist()
