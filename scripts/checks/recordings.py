"""The shelf of recordings: files of small runs of this version, which each later version reads or refuses by name.

The runs are those of a user: `process`, `evaluate` and the gateway on the demo policy, and the trainer on a tiny model,
whose checkpoints are small. tests/recordings/README.md says when to add a recording.
"""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from agents.demo_gateway import gateway
from bench.local_server import local_server
from install.active_environment import command_parser

from agentic_opd.wire.group import ScoredGroup

ROOT = Path(__file__).resolve().parents[2]
SHELF = ROOT / "tests" / "recordings"
POLICY = "scripts/demo_policy/policy"
SMALL = ("--env.distill_topk", "3", "--env.max_turns", "3", "--env.seed", "1")
VOCAB = 64


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser(__doc__, "scripts/checks/make_recordings")
    parser.add_argument("name", help="name of the recording, for example today's date and what has changed")
    folder = SHELF / parser.parse_args(argv).name
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch, local_server(POLICY, log=Path(scratch) / "vllm.log") as server:
        record_process(server.base_url, folder / "process")
        record_evaluation(server.base_url, folder / "evaluate")
        record_gateway(server.base_url, folder / "gateway", Path(scratch))
    record_training(folder / "train")
    for file in folder.rglob("*.lock"):
        file.unlink()
    print(f"{folder}: {sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()):,} bytes")


def record_process(server_url: str, folder: Path) -> None:
    """Record one group of two rollouts, with its settings and metrics."""
    out = str(folder / "groups.jsonl")
    flags = ("--env.total_steps", "1", "--env.group_size", "2", "--env.data_path_to_save_groups", out, *SMALL)
    _run("process", server_url, *flags, "--env.judge.step_votes", "1", "--env.report", "false")


def record_evaluation(server_url: str, folder: Path) -> None:
    _run("evaluate", server_url, "--env.data_dir_to_save_evals", str(folder), "--env.eval.fraction", "0.4", *SMALL)


def record_gateway(server_url: str, folder: Path, scratch: Path) -> None:
    """Record a journal with a session of each kind: written, with feedback, and open when the gateway was killed."""
    folder.mkdir()
    flags = ("--env.data_path_to_save_groups", str(folder / "groups.jsonl"), "--env.distill_topk", "3")
    with gateway(server_url, *flags, folder=folder) as served:
        for session, turns in (("ended", 2), ("rated", 1), ("open", 2)):
            messages: list[dict[str, Any]] = []
            for number in range(turns):
                messages.append({"role": "user", "content": f"Say something short, {session} {number}."})
                body = {"model": POLICY, "messages": messages, "max_tokens": 12, "seed": number}
                answer = served.ask(f"/sessions/{session}/v1/chat/completions", body)
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                if session == "rated":
                    feedback = {"reward": 0.5, "text": "Shorter."}
                    served.ask(f"/sessions/rated/turns/{answer['id']}/feedback", feedback)
        served.ask("/sessions/ended/end", {"reward": 1.0, "feedback": "Good."})
        while served.ask("/sessions/ended")["state"] != "written":
            time.sleep(0.2)
        os.kill(served.pid, signal.SIGKILL)
    (folder / "gateway.log").unlink()
    with closing(sqlite3.connect(folder / "journal.sqlite")) as journal:  # One file without its log of writes.
        journal.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        journal.execute("VACUUM")
        journal.commit()


def record_training(folder: Path) -> None:
    """Record the first two of four steps on a tiny model: checkpoints, metrics, and verdicts of the brake."""
    from agentic_opd.training.brake import Brake, Version
    from agentic_opd.training.config import TrainerConfig

    model = folder / "model"
    save_model(model)
    config = TrainerConfig.model_validate(settings_of(folder))
    brake = Brake(config)
    batches = [[lesson(step)] for step in range(2)]
    asyncio.run(_trained(config, batches))
    for number, score in enumerate((0.5, 0.75)):
        version = Version(number, {f"task {task}": score for task in range(16)})
        brake.note(version, brake.falls(version), 1.0)
    shutil.rmtree(config.output_dir / "checkpoints/step-000001")


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of the recorded training run, of which the files are in `folder`."""
    paths = {"model": str(folder / "model"), "output_dir": folder / "run", "weights_dir": folder / "weights"}
    loss = {"forward_kl": 1.0, "grpo": 0.5, "route_by_turn": False}
    numbers = {"total_steps": 4, "save_every": 1, "lr": 1e-3, "loss": loss, "batch_size": 2}
    return {**paths, **numbers, "device": "cpu", "vllm_urls": [], "epochs_per_batch": 1, "minibatches": 1}


def save_model(folder: Path) -> None:
    with warnings.catch_warnings():  # torch's and transformers' own deprecations
        warnings.simplefilter("ignore")
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": VOCAB}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
        Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)


def lesson(step: int) -> ScoredGroup:
    """Return a group of two sequences, in which the teacher prefers another token at each sampled position."""
    tokens = [[1, 2, 3, 20 + step, 21, 22], [1, 2, 3, 30 + step, 31, 32]]
    is_sampled = [position >= 3 for position in range(6)]
    masks = [[token if s else -100 for token, s in zip(row, is_sampled, strict=True)] for row in tokens]
    ids = [[[token, 40] if s else [] for token, s in zip(row, is_sampled, strict=True)] for row in tokens]
    return ScoredGroup.from_wire(
        {
            "tokens": tokens,
            "masks": masks,
            "inference_logprobs": [[-4.0 if s else 1.0 for s in is_sampled] for _ in tokens],
            "distill_token_ids": ids,
            "distill_logprobs": [[[-3.0, -0.1] if s else [] for s in is_sampled] for _ in tokens],
            "scores": [1.0, 0.0],
            "group_overrides": {"item_id": f"lesson#{step}"},
        }
    )


async def _trained(config: Any, batches: list[list[ScoredGroup]]) -> None:
    from agentic_opd.training.trainer import open_trainer

    trainer = open_trainer(config)
    waiting = iter(batches)

    async def register(step: int) -> None:
        pass

    async def batch(step: int) -> list[ScoredGroup]:
        if (groups := next(waiting, None)) is None:
            trainer.stop()
            await asyncio.Event().wait()
        return groups or []

    trainer.source.register, trainer.source.batch = register, batch  # type: ignore[method-assign]
    with suppress(asyncio.CancelledError):  # How a run ends that was stopped.
        await trainer.run()


def _run(mode: str, server_url: str, *flags: str) -> None:
    command = [sys.executable, "-m", "agentic_opd", mode, "--config", "configs/demo.yaml"]
    subprocess.run([*command, "--openai.base_url", f"{server_url}/v1", *flags], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
