"""Push new weights to running vLLM servers and verify each push with a probe (I/O)."""

import asyncio
import logging
import os
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentic_opd.core.attachments.files import ImageFolders
from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.errors import ConfigError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.precision import Noise, tolerance_for
from agentic_opd.core.types import PlacedImage, TeacherRequest
from agentic_opd.plugin.client import PluginClient
from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.distributed import DistContext
from agentic_opd.training.model import MovingAverage, merged, save_adapter, tied_names, whole_specs, write_weights
from agentic_opd.training.policy import TrainedPolicy
from agentic_opd.training.rounding import MUCH, Rounding, as_sent, common_dtype
from agentic_opd.training.transfer import WeightSender

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 512


class PushMismatchError(ServerMismatchError):
    """A server loaded the weights, but its logprobs differ from the trainer's."""


class WeightsReplacedError(PushMismatchError):
    """A server no longer had the pushed version when the probe was read: a learner was deleted, or others pushed."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids on which the logprobs of server and trainer are compared."""

    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()
    """The pictures among the ids, in order."""

    @classmethod
    def of(cls, batch: TrainBatch) -> "Probe":
        """Take the first tokens of the batch's longest sequence, of those with pictures if there are any.

        There are `_PROBE_TOKENS` at most, or more up to the end of the first picture.
        """
        lengths: list[int] = batch.attended_BT.sum(-1).tolist()
        images_B = batch.images_B or ((),) * len(lengths)
        longest = max(range(len(lengths)), key=lambda index: (bool(images_B[index]), lengths[index]))
        tokens: list[int] = batch.tokens_BT[longest][batch.attended_BT[longest]].tolist()
        images = images_B[longest]
        end = max(_PROBE_TOKENS, images[0].end + 1 if images else 0)
        end = next((image.offset for image in images if image.offset < end < image.end), end)
        return cls(tuple(tokens[:end]), tuple(image for image in images if image.offset < end))

    def own_logprobs(self, policy: TrainedPolicy, device: str) -> list[float]:
        """Return the trainer's logprobs (nats) of every token but the first.

        If the policy is sharded, all processes must call this.
        """
        tokens = torch.tensor([self.token_ids], device=device)
        attended = torch.ones_like(tokens, dtype=torch.bool)
        was_training = policy.training
        policy.eval()
        with torch.no_grad():
            images_B = (self.images,) if self.images else None
            computed = policy(tokens, attended, tokens[..., None], attended, images_B=images_B)
            row: list[float] = computed.chosen_BTK[0, 1:, 0].tolist()
        policy.train(was_training)
        return row


class Pushed(NamedTuple):
    size_bytes: int
    """Bytes of weights that each server read."""
    difference: float | None
    """Largest difference of the probe's logprobs between server and trainer, in nats; None without a probe."""
    difference_rms: float | None
    """Root mean square of these differences, in nats; None without a probe."""
    rounded_share: float
    """Share of the update that rounding withholds: `Rounding.share`."""
    folder: Path | None
    """The weights as the servers read them; None if they went from memory to memory."""


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

    def __init__(self, config: TrainerConfig, world: DistContext, learner: str | None = None) -> None:
        """Create a client for each server; no request is sent yet.

        With a `learner` its adapters are pushed, beside those of others.
        """
        self._config, self._world, self._learner = config, world, learner
        self._push_limit = config.pushes_kept
        self._rounding = Rounding()
        self._has_warned = self._has_said_merged = False
        self._sender: WeightSender | None = None
        secret = config.vllm_api_key
        key = secret.get_secret_value() if secret else os.environ.get("VLLM_API_KEY")
        self._connections = [
            JsonClient(url, key, retry_s=config.server_retry_s, key_setting="vllm_api_key or the variable VLLM_API_KEY")
            for url in config.vllm_urls
        ]

    async def push(
        self,
        policy: TrainedPolicy,
        version: int,
        probe: Probe | None,
        average: MovingAverage | None = None,
    ) -> Pushed | None:
        """Write the weights as `version` in the servers' precision, load them on every server, and run the probe.

        All processes must call this; the first one writes files and sends requests. `average` is loaded as the
        teacher's adapter. The result is None without servers, and in all processes but the first.

        Raises:
            ConfigError: there is an average, but a server accepts no adapters; or the model has a separate output
                head, but a server's head is tied to its embedding matrix.
            PushMismatchError: a server's logprobs differ from the trainer's.
            WeightsReplacedError: a server lost the weights before the probe, as by a restart: of a learner, from
                memory, or twice.
            ServerError: a server can't load the weights.
        """
        if not self._connections:
            return None
        model, world = policy.model, self._world
        folder = self._config.weights_dir.resolve() / f"step-{version:06d}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        servers = await self._servers() if world.is_first else []
        to = world.share(self._receivers(model, servers) if world.is_first else None)
        assert to is not None
        release_cache(world.device, servers)
        logprobs = None
        if probe is not None:
            with as_sent(policy, to.dtype, is_whole=not to.takes_adapters):
                logprobs = probe.own_logprobs(policy, world.device)
        if to.takes_adapters:
            size = await self._push_adapters(servers, folder, version, model, average, to.dtype)
        else:
            size = await self._push_whole(servers, folder, version, model, to)
        if not world.is_first:
            return None
        has_files = to.takes_adapters or self._config.weight_transfer == "files"
        noise = None
        if probe is not None and logprobs is not None:
            try:
                noise = await self.compare(logprobs, probe, version)
            except WeightsReplacedError as error:
                # A learner that was deleted must not be served again.
                if self._learner is not None or not has_files:
                    raise
                logger.warning("%s. They are sent again", error)
                await self._load_again(servers, folder, version, to)
                noise = await self.compare(logprobs, probe, version)
        if folder.exists():
            self._forget_old(folder)
        share = self._rounding.share
        self._warn_of_rounding(share, to.dtype)
        return Pushed(size, noise and noise.largest, noise and noise.rms, share, folder if has_files else None)

    async def _servers(self) -> list[PluginClient]:
        """Return clients with the servers' current properties."""
        servers = await gather_all(PluginClient.connected(http, may_be_broken=True) for http in self._connections)
        return servers if self._learner is None else [server.of_learner(self._learner) for server in servers]

    async def _push_adapters(
        self,
        servers: Sequence[PluginClient],
        folder: Path,
        version: int,
        model: Any,
        average: MovingAverage | None,
        dtype: torch.dtype,
    ) -> int:
        """Load the adapters, and the average as the teacher's, on all servers; return their size in bytes."""
        world = self._world
        state = {name: value for name, value in model.state_dict().items() if ".lora_" in name}
        state = await asyncio.to_thread(world.gather, state)
        averages = {} if average is None else await asyncio.to_thread(world.gather, average.state_dict())
        if not world.is_first:
            return 0
        factors = await asyncio.to_thread(self._rounding.adapters, state, dtype)
        await asyncio.to_thread(save_adapter, model, folder, factors)
        await gather_all(server.load_adapter(folder, version) for server in servers)
        size = _size_bytes(folder)
        if averages:
            teacher = folder.with_name(f"{folder.name}-teacher")
            averages = {name: value.to(dtype) for name, value in averages.items()}
            await asyncio.to_thread(save_adapter, model, teacher, averages)
            await gather_all(server.load_adapter(teacher, version, as_teacher=True) for server in servers)
            size += _size_bytes(teacher)
        return size

    async def _push_whole(
        self, servers: Sequence[PluginClient], folder: Path, version: int, model: Any, to: _Receivers
    ) -> int:
        """Load whole weights on all servers; return their size in bytes.

        Each tensor is gathered, merged and rounded on its device, and gone before the next one.
        """
        specs = whole_specs(model, to.dtype, has_head=to.has_head)
        rounded = self._rounding.weights(merged(model, model.state_dict()), to.dtype)
        if not self._world.is_first:
            await asyncio.to_thread(deque, rounded, 0)  # Takes part in gathering.
            return 0
        sent = ((name, value) for name, value in rounded if name in specs)
        try:
            if self._config.weight_transfer == "files":
                await asyncio.to_thread(write_weights, model, self._config.model, folder, specs, sent)
                await gather_all(server.load_weights(folder, version) for server in servers)
                return _size_bytes(folder)
            if self._sender is None:
                self._sender = await WeightSender.joined(self._config.weight_transfer, servers, self._world.device)
            return await self._sender.send(specs, sent, version)
        finally:
            if self._world.size > 1:  # The other processes gather all tensors, also of a push that failed.
                await asyncio.to_thread(deque, rounded, 0)

    async def _load_again(self, servers: Sequence[PluginClient], folder: Path, version: int, to: _Receivers) -> None:
        """Load the files of the push under way on all servers once more."""
        if not to.takes_adapters:
            await gather_all(server.load_weights(folder, version) for server in servers)
            return
        await gather_all(server.load_adapter(folder, version) for server in servers)
        teacher = folder.with_name(f"{folder.name}-teacher")
        if teacher.exists():
            await gather_all(server.load_adapter(teacher, version, as_teacher=True) for server in servers)

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

    def _receivers(self, model: Any, servers: Sequence[PluginClient]) -> _Receivers:
        """Return the format that the servers accept."""
        takes_adapters = self._takes_adapters(servers)
        if not takes_adapters and model.get_output_embeddings() is not None and not tied_names(model):
            for server in servers:
                if server.info.tied_embeddings:
                    raise ConfigError(
                        f"{self._config.model} has a separate output head, and that of {server.info.model} at "
                        f"{server.url} is its embedding matrix: serve a model with untied embeddings, or train "
                        "adapters (lora_rank) and start the server with --max-lora-rank"
                    )
        has_head = not all(server.info.tied_embeddings for server in servers)
        return _Receivers(common_dtype(server.info.dtype for server in servers), has_head, takes_adapters)

    def _takes_adapters(self, servers: Sequence[PluginClient]) -> bool:
        """Return whether the model has adapters and every server accepts them."""
        rank = self._config.lora_rank
        if rank is None:
            return False
        without = [server.url for server in servers if not server.info.max_adapters or server.info.max_lora_rank < rank]
        if not without:
            # A server may read the files of an adapter again while requests use it.
            adapters = max(server.info.max_adapters for server in servers)
            self._push_limit = max(self._config.pushes_kept, 1 + adapters)
            return True
        if self._learner is not None:
            how = f"start {' and '.join(without)} with scripts/serve_vllm --max-lora-rank {rank}"
            raise ConfigError(f"learners have adapters: {how}")
        how = f"start {' and '.join(without)} with scripts/serve_vllm --max-lora-rank {rank}"
        if self._config.ema_decay is not None:
            raise ConfigError(f"ema_decay needs servers that take adapters: {how}")
        if not self._has_said_merged:
            self._has_said_merged = True
            logger.warning("whole weights are pushed, with the adapters merged in; to push adapters alone, %s", how)
        return False

    async def compare(self, logprobs: Sequence[float], probe: Probe, version: int | None = None) -> Noise:
        """Compare the servers' logprobs of the probe with the trainer's `logprobs`; return the largest noise.

        Raises:
            PushMismatchError: a difference exceeds `probe_tolerance`, or what the server's precision explains.
            WeightsReplacedError: a server answered with another version.
        """
        trained_in = {"bf16": "bfloat16", "fp32": "float32"}[self._config.precision]
        servers = await self._servers()
        request = TeacherRequest(probe.token_ids, len(probe.token_ids) - 1, 0, (), version, attachments=probe.images)
        for server in servers:
            server.attached.files = ImageFolders(self._config.picture_folders)
        replies = await asyncio.gather(*(server.score(request, top_k=1) for server in servers))
        noises: list[Noise] = []
        for server, reply in zip(servers, replies, strict=True):
            if version is not None and reply.weight_version not in (None, version):
                raise WeightsReplacedError(
                    f"{server.url} was sent the weights of version {version}, and answered the probe with version "
                    f"{reply.weight_version}: it was started again, or somebody else changed its weights meanwhile"
                )
            served, precision = reply.rows.actual_R.tolist(), server.info.dtype
            gaps = [abs(a - b) for a, b in zip(logprobs, served, strict=True)]
            position = max(range(len(gaps)), key=gaps.__getitem__)
            noises.append(Noise.of(gaps))
            tolerance = tolerance_for(precision, trained_in, largest=self._config.probe_tolerance)
            if noises[-1].exceeds(tolerance):
                raise PushMismatchError(
                    f"{server.url} does not compute what the trainer does, with the weights that it was sent: its "
                    f"logprobs of the probe are {noises[-1]} away, where {tolerance} are expected of {precision} there "
                    f"and {trained_in} here. Token {position + 1} has {served[position]:.6f} there and "
                    f"{logprobs[position]:.6f} here. Is it the same model on both sides? If more noise than this is "
                    "usual there, set probe_tolerance"
                )
        return max(noises, key=lambda noise: noise.largest)

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Load an adapter that was pushed before, on all servers; raises ServerError."""
        await gather_all(server.load_adapter(folder, version) for server in await self._servers())

    async def forget_learner(self) -> None:
        """Make all servers forget the learner's adapters; raises ServerError."""
        assert self._learner is not None
        await gather_all(server.forget_learner(self._learner) for server in await self._servers())

    async def served_learners(self) -> list[dict[str, int]]:
        """Return the newest version of each learner that a server has, of each server; raises ServerError."""
        return [server.info.learners for server in await self._servers()]

    async def close(self) -> None:
        """Leave the weight transfer's process group, and close pooled connections."""
        if self._sender is not None:
            self._sender.group.close()
        for http in self._connections:
            await http.close()

    def _forget_old(self, newest: Path) -> None:
        """Remove all but the last `_push_limit` pushes up to `newest`; keep later steps, which another run wrote."""
        pushed: Sequence[Path] = sorted(newest.parent.glob("step-??????"))
        for folder in pushed[: pushed.index(newest) + 1][: -self._push_limit]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(folder.with_name(f"{folder.name}-teacher"), ignore_errors=True)


def release_cache(device: str, servers: Sequence[PluginClient]) -> None:
    """Give the memory that torch keeps for later back to the GPU, if a server computes on the same one."""
    if not device.startswith("cuda"):
        return
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    if any(uuid == gpu.removeprefix("GPU-") for server in servers for gpu in server.info.gpus):
        torch.cuda.empty_cache()


def _size_bytes(folder: Path) -> int:
    """Return the size of the safetensors files in `folder`."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
