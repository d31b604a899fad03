"""One run of the experiment on one machine: run-api, `serve` and the trainer as processes, then a pass rate a point.
With talk, `serve`'s place is taken by the gateway and a user of it.

In: a `Run` (mode, seed, setting, rollouts). Out: its curve. The policy's vLLM server is shared by all runs: each starts
by giving it the first weights again.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import yaml
from agents.demo_gateway import gateway
from bench.local_server import LocalServer, child_process
from demo_policy import TRAJECTORY_JUDGES, TrajectoryJudge
from openai import AsyncOpenAI, OpenAIError

from agentic_opd.core.processes import end_of
from agentic_opd.core.text import text_lines
from agentic_opd.core.types import Task
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.runs.evaluate import sample_file
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from learning.gauges import OVER_CALLING, SAMPLES, TASKS, Gauges, irrelevance_settings, of_samples
from learning.person import TEMPERATURE, Person, PersonExaminer, person_tasks
from learning.progress import Progress, cut_back, forget_weights, trained_steps
from learning.talk import TalkFailedError, User, WireProtocol, converse

if TYPE_CHECKING:
    from agentic_opd.env.opd import AgenticOPDEnv

ROOT = Path(__file__).parents[2]
LORA_RANK = 16
TRAJECTORY_JUDGE = "trajectory"
"""Name of the adapter that judges whole trajectories, on the expert's server."""
SOURCES_FILE = Path(__file__).with_name("hint_sources.py")
WRONG_HINT, NO_HINT = f"{SOURCES_FILE}:wrong_hint", f"{SOURCES_FILE}:no_hint"
MODES: dict[str, dict[str, dict[str, object]]] = {
    "opd": {"loss": {"forward_kl": 1.0}},
    "grpo": {"loss": {"grpo": 1.0, "route_by_turn": False}, "env": {"opd_enabled": "false"}},
    "opd+grpo": {"loss": {"forward_kl": 1.0, "grpo": 1.0}},
    "wrong-hint": {"loss": {"forward_kl": 1.0}, "env": {"hint.source": WRONG_HINT}},
    "no-hint": {"loss": {"forward_kl": 1.0}, "env": {"hint.source": NO_HINT}},
    "next-state": {"loss": {"forward_kl": 1.0}, "env": {"hindsight.evidence": "next_state"}},
    "feedback": {"loss": {"forward_kl": 1.0}, "env": {"hint.source": "feedback"}},
    "sibling": {"loss": {"forward_kl": 1.0}, "env": {"hint.source": "sibling"}},
    "reference": {"loss": {"forward_kl": 1.0}, "env": {"hint.source": "reference"}},
    "step-reward": {"loss": {"forward_kl": 1.0, "step_reward": 1.0}, "env": {"judge.step_votes": 3}},
    "on-policy": {"loss": {"forward_kl": 1.0}, "env": {"max_batches_offpolicy": 0}},
    "held": {"loss": {"forward_kl": 1.0, "start_kl": 1.0}},
    "live": {"loss": {"forward_kl": 1.0}, "env": {"teacher.base_url": "null"}},
    "live-held": {"loss": {"forward_kl": 1.0, "start_kl": 1.0}, "env": {"teacher.base_url": "null"}},
    "ema": {"loss": {"forward_kl": 1.0}, "trainer": {"ema_decay": 0.9}},
    "contrast": {"loss": {"forward_kl": 1.0, "contrast": True}, "env": {"hint.control": "neutral"}},
    "contrast-other": {"loss": {"forward_kl": 1.0, "contrast": True}, "env": {"hint.control": "other"}},
    "wrong-hint-contrast": {
        "loss": {"forward_kl": 1.0, "contrast": True},
        "env": {"hint.control": "neutral", "hint.source": WRONG_HINT},
    },
    "wrong-hint-contrast-other": {
        "loss": {"forward_kl": 1.0, "contrast": True},
        "env": {"hint.control": "other", "hint.source": WRONG_HINT},
    },
    "bf16": {"loss": {"forward_kl": 1.0}, "trainer": {"precision": "bf16"}},
    "lora": {"loss": {"forward_kl": 1.0}, "trainer": {"lora_rank": LORA_RANK}},
    "lora-live": {
        "loss": {"forward_kl": 1.0},
        "trainer": {"lora_rank": LORA_RANK},
        "env": {"teacher.base_url": "null"},
    },
    "lora-ema": {
        "loss": {"forward_kl": 1.0},
        "trainer": {"lora_rank": LORA_RANK, "ema_decay": 0.9},
        "env": {"teacher.base_url": "null", "teacher.weights": "ema"},
    },
}
"""What each mode changes: the trainer's loss, whose divergence the sweep weights, its other settings, and the
environment's. The teacher is the expert unless a mode says otherwise."""
PARTS_FILE = Path(__file__).with_name("loss_parts.py")
OBJECTIVES: dict[str, dict[str, dict[str, object]]] = {
    "opd": MODES["opd"],
    "overlap-sequence": {"loss": {"forward_kl": 1.0}, "env": {"hint.selection": "overlap"}},
    "student-support": {"loss": {"forward_kl": 1.0}, "env": {"teacher.support": "student"}},
    "union-support": {"loss": {"forward_kl": 1.0}, "env": {"teacher.support": "union"}},
    "token-advantage": {"loss": {"token_advantage": 1.0}},
    "reward": {"loss": {"grpo": 1.0, "route_by_turn": False}},
    "rlsd": {"loss": {"custom": {f"{PARTS_FILE}:rlsd": 1.0}}},
    "sdar": {"loss": {"grpo": 1.0, "custom": {f"{PARTS_FILE}:sdar": 1.0}, "route_by_turn": False}},
    "rlcsd": {"loss": {"custom": {f"{PARTS_FILE}:rlcsd": 1.0}, "contrast": True}, "env": {"hint.control": "other"}},
    "combined": {"loss": {"combined": 1.0}, "env": {"judge.step_votes": 3}},
    "combined-outcome": {"loss": {"combined": 1.0}},
    "combined-normalized": {"loss": {"combined": 1.0, "step_scores": "normalized"}, "env": {"judge.step_votes": 3}},
    "rejection": {"loss": {"custom": {f"{PARTS_FILE}:rejection": 1.0}}},
    "eopd": {"loss": {"reverse_kl": 1.0, "forward_kl": 1.0, "forward_above_entropy": 0.8}},
    "clipped": {"loss": {"forward_kl": 1.0, "entry_clip": 1.0}},
    "by-turn": {"loss": {"forward_kl": 1.0, "mean": "turn"}},
    "annealed": {
        "loss": {
            **{"forward_kl": 1.0, "grpo": 1.0, "route_by_turn": False},
            "schedules": {"forward_kl": {"decay_steps": 8}, "grpo": {"warmup_steps": 7}},
        }
    },
}
"""Modes that `--objectives` compares; each is compared at its best learning rate."""
USUAL_OBJECTIVES = ("opd", "reward", "combined", "rlsd", "overlap-sequence", "rlcsd", "sdar", "rejection")
"""The most informative first: what is missing last is missed least."""
MODES |= OBJECTIVES
MODES |= {
    "trajectory": {"loss": {"forward_kl": 1.0}, "env": {"judge.scope": "trajectory"}},
    "trajectory-failed": {
        "loss": {"forward_kl": 1.0},
        "env": {"judge.scope": "trajectory", "judge.when": "failed"},
    },
}
MODES |= {"binary": {"loss": {"step_reward": 1.0}, "env": {"judge.step_votes": 1}}}
_PROOF = {"hint.proof.type": "replay", "hint.proof.pairs": 8, "hint.proof.rollouts": 48}
MODES |= {
    "proof": {"loss": {"forward_kl": 1.0}, "env": _PROOF},
    "wrong-hint-proof": {"loss": {"forward_kl": 1.0}, "env": {**_PROOF, "hint.source": WRONG_HINT}},
}
MODES |= {"opd-judge": {"loss": {"forward_kl": 1.0}}, "opd-full": {"loss": {"forward_kl": 1.0}}}
USUAL_FUNCTION_MODES = ("opd", "grpo", "wrong-hint", "no-hint")
USUAL_PERSON_MODES = ("opd", "binary", "combined", "no-hint")
USUAL_MODES = ("opd", "grpo", "opd+grpo", "wrong-hint", "no-hint")
TALK_MODES = (
    *("opd", "no-hint", "next-state", "feedback", "held", "live", "live-held", "ema", "contrast", "bf16"),
    *("lora", "lora-live", "lora-ema", "trajectory", "trajectory-failed"),
)
"""Modes of talk: nobody gives a reward there, no hint is known to be one of another task, no user waits for a batch,
and no conversation can be replayed."""
TUNED_AS = {
    "wrong-hint": "opd",
    "no-hint": "opd",
    "proof": "opd",
    "wrong-hint-proof": "opd",
    "next-state": "opd",
    "feedback": "opd",
    "sibling": "opd",
    "reference": "opd",
    "on-policy": "opd",
    "held": "opd",
    "live": "opd",
    "live-held": "opd",
    "ema": "opd",
    "opd-judge": "opd",
    "trajectory": "opd",
    "trajectory-failed": "opd",
    "bf16": "opd",
    "lora-live": "lora",
    "lora-ema": "lora",
    "wrong-hint-contrast": "contrast",
    "wrong-hint-contrast-other": "contrast-other",
}
"""Modes that take another one's setting, from which they are to differ in one thing alone."""


class Subject(NamedTuple):
    """What is learned: a world with its demo policy."""

    config: str
    """The environment's settings, below configs/."""
    model: str
    env: dict[str, object]
    """Settings of the training environment beside those."""
    exam: dict[str, object]
    """Settings of the measuring one."""
    exam_tasks: int
    """Tasks that it measures."""
    modes: Mapping[str, dict[str, dict[str, object]]] = MappingProxyType({})
    """What modes change in this world, as `MODES`; without it each of them is possible, as `MODES` has it."""
    exam_temperature: float = 1.0
    has_scripted_judge: bool = False
    divergence: Mapping[str, object] = MappingProxyType({})
    """Settings of the loss beside the weight of a divergence."""
    measured: str = "pass rate without hints, temperature 1"
    """What a point of a curve is."""
    trajectory_judge: TrajectoryJudge | None = None
    """The adapter that judges whole trajectories, on the expert's server; None: its weights do."""
    has_person: bool = False
    """The rollouts are a person's sessions at the gateway, who gives no reward."""
    judge_model: str = "verbatim"
    """The scripted judge's way to answer, unless a mode names another."""
    has_conversations: bool = False
    """Points are shares of user turns, and of whole conversations beside them."""
    irrelevance: Path | None = None
    """Questions for which no call is right: gauges are measured before and after each run. None: no gauges."""
    has_supervised_start: bool = False
    """The experiment first makes the start from the model, by right episodes."""
    start_questions: Sequence[str] = ()
    """Files of BFCL's questions of one turn, of which the start imitates some too."""
    start_worlds: Sequence[Mapping[str, object]] = (MappingProxyType({}),)
    """What differs in the worlds of the episodes that the start imitates, one world after the other."""
    start_lr: float = 2e-4
    """Learning rate of the supervised start."""
    context: int = 4096
    """Tokens of the servers' context."""
    kv_cache_gib: int = 1
    """On CPUs, of each server; one that is too small for the episodes at the same time reads their prompts again."""
    usual_modes: Sequence[str] = ()
    """Modes without --modes."""

    def needs_expert(self, mode: str) -> bool:
        """Return whether a mode judges or teaches by a second server, which keeps the first weights."""
        is_frozen = self.distilling(mode).get("teacher.weights") == "frozen"
        return not self.has_scripted_judge or not (is_frozen or "grpo" in MODES[mode]["loss"])

    def judge_adapter(self, mode: str) -> TrajectoryJudge | None:
        """Return the adapter that a mode's judge is; None if its server's weights are."""
        return self.trajectory_judge if self.distilling(mode).get("judge.scope") == "trajectory" else None

    def needs_teacher(self, mode: str) -> bool:
        """Return whether a mode is taught by a third server, which receives the moving average of whole weights."""
        trainer = self.trainer(mode)
        return "ema_decay" in trainer and "lora_rank" not in trainer

    def trainer(self, mode: str) -> dict[str, object]:
        """Return a mode's settings of the trainer."""
        return {**MODES[mode].get("trainer", {}), **self.modes.get(mode, {}).get("trainer", {})}

    def distilling(self, mode: str) -> dict[str, object]:
        """Return a mode's settings of the environment."""
        return {**MODES[mode].get("env", {}), **self.modes.get(mode, {}).get("env", {})}


BFCL = ROOT / "runs" / "bfcl" / "bfcl_eval" / "data"
"""Where configs/functions.yaml has its questions."""
_FROZEN: dict[str, object] = {"teacher.weights": "frozen"}
_WHOLE_WEIGHTS: dict[str, object] = {"micro_tokens": 2048}
_ADAPTERS: dict[str, object] = {**_WHOLE_WEIGHTS, "lora_rank": LORA_RANK}
_FUNCTION_MODES: dict[str, dict[str, dict[str, object]]] = {
    "opd": {"trainer": _ADAPTERS, "env": {**_FROZEN, "hint.source": "judge"}},
    "feedback": {"trainer": _ADAPTERS, "env": _FROZEN},
    "opd-judge": {"trainer": _ADAPTERS, "env": {**_FROZEN, "hint.source": "judge", "judge.model_name": "words"}},
    "grpo": {"trainer": _ADAPTERS},
    "wrong-hint": {"trainer": _ADAPTERS, "env": _FROZEN},
    "no-hint": {"trainer": _ADAPTERS, "env": _FROZEN},
    "contrast": {"trainer": _ADAPTERS, "env": {**_FROZEN, "hint.source": "judge"}},
    "contrast-other": {"trainer": _ADAPTERS, "env": {**_FROZEN, "hint.source": "judge"}},
    "opd-full": {"trainer": _WHOLE_WEIGHTS, "env": {"hint.source": "judge"}},
    **{
        mode: {"trainer": _ADAPTERS, "env": {**_FROZEN, "hint.source": "judge"}}
        for mode in ("trajectory", "trajectory-failed")
    },
}
_MULTITURN_MODES = {
    mode: {"trainer": _ADAPTERS, "env": {**_FROZEN, **({} if mode in USUAL_MODES[3:] else {"hint.source": "judge"})}}
    for mode in ("opd", "held", *USUAL_MODES[1:], "next-state")
}
_GAME_MODES = {**_MULTITURN_MODES, "trajectory": _MULTITURN_MODES["opd"]}
_GPU_ADAPTERS: dict[str, object] = {"lora_rank": 32, "max_token_len": 16384, "precision": "bf16"}
_PERSON: dict[str, dict[str, object]] = {"trainer": _ADAPTERS, "env": {**_FROZEN, "judge.model_name": "person"}}
SUBJECTS = {
    "coding": Subject(
        "demo.yaml", "scripts/demo_policy/policy", {}, {}, 8, trajectory_judge=TRAJECTORY_JUDGES["coding"]
    ),
    # What is measured is never trained on: other schemas, other combinations.
    "sql": Subject(
        "sql.yaml",
        "scripts/demo_policy/sql_policy",
        {"world": f"{ROOT}/scripts/demo_policy/sql_world.py:Lessons"},
        {"world": f"{ROOT}/scripts/demo_policy/sql_world.py:Exam"},
        192,
        trajectory_judge=TRAJECTORY_JUDGES["sql"],
    ),
    # What is measured shares no function and no question with what is trained on. The teacher of adapters is the same
    # server without them; that of whole weights is a second server.
    "functions": Subject(
        "functions.yaml",
        "runs/models/smollm2-135m-instruct",
        {},
        {},
        200,
        _FUNCTION_MODES,
        0.0,
        has_scripted_judge=True,
        divergence={"teacher_temperature": 0.3},  # That of the rollouts.
        measured="pass rate without hints, most likely answers",
        irrelevance=BFCL / "BFCL_v4_irrelevance.json",
        usual_modes=USUAL_FUNCTION_MODES,
    ),
    # Two classes of APIs are held out: no rollout has their functions. The start imitates conversations of the others.
    "multiturn": Subject(
        "functions_multiturn_small.yaml",
        "runs/models/smollm2-135m-instruct",
        {},
        {"max_concurrent_episodes": 24},
        200,
        _MULTITURN_MODES,
        0.0,
        has_scripted_judge=True,
        divergence={"teacher_temperature": 0.7},  # That of the rollouts.
        measured="user turns right without hints, most likely answers",
        judge_model="conversation",
        has_conversations=True,
        irrelevance=BFCL / "BFCL_v4_irrelevance.json",
        kv_cache_gib=3,
        has_supervised_start=True,
        start_questions=(
            *("BFCL_v4_simple_python.json", "BFCL_v4_multiple.json"),
            *("BFCL_v4_live_simple.json", "BFCL_v4_live_multiple.json"),
        ),
        usual_modes=tuple(_MULTITURN_MODES),
    ),
    # The same for models that call functions as they are, on a GPU: all four categories, and whole documents.
    "multiturn-gpu": Subject(
        "functions_multiturn.yaml",
        "runs/models/qwen3-0.6b",
        {},
        {},
        264,
        {mode: {**settings, "trainer": _GPU_ADAPTERS} for mode, settings in _MULTITURN_MODES.items()},
        0.0,
        has_scripted_judge=True,
        measured="user turns right without hints, most likely answers",
        judge_model="conversation",
        has_conversations=True,
        irrelevance=BFCL / "BFCL_v4_irrelevance.json",
        context=20480,
        usual_modes=tuple(_MULTITURN_MODES),
    ),
    # The start imitates levels with one object first, then those with eight, whose way is often blocked. What is
    # measured are games of other seeds.
    "babyai": Subject(
        "babyai.yaml",
        "runs/models/smollm2-135m-instruct",
        {},
        {"max_concurrent_episodes": 24},
        200,
        _GAME_MODES,
        0.0,
        has_scripted_judge=True,
        divergence={"teacher_temperature": 0.7},  # That of the rollouts.
        measured="missions done without hints, most likely answers",
        judge_model="game",
        kv_cache_gib=3,
        has_supervised_start=True,
        start_worlds=({"levels": ["BabyAI-GoToRedBallNoDists-v0", "BabyAI-GoToObj-v0"]}, {}),
        start_lr=5e-4,
        usual_modes=("opd", "held", "trajectory", "grpo"),
    ),
    # The judge repeats what the person replied.
    "person": Subject(
        "person.yaml",
        "runs/models/smollm2-135m-instruct",
        {},
        {},
        40,
        dict.fromkeys(USUAL_PERSON_MODES, _PERSON),
        has_scripted_judge=True,
        divergence={"teacher_temperature": TEMPERATURE},
        measured="score of first answers",
        has_person=True,
        usual_modes=USUAL_PERSON_MODES,
    ),
}
THREADS = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "PASSIVE"}
"""The trainer may use every core: threads that do not wait in busy loops take little from vLLM."""
PATIENCE_S = 3600.0
"""A trainer that says nothing new for so long ends the experiment."""


@contextmanager
def scripted_judge(port: int, log: Path) -> Generator[str]:
    """Run the judge of the world of function calls; yield its address."""
    with child_process([sys.executable, "-m", "learning.scripted_judge", str(port)], log, cwd=ROOT):
        yield f"http://127.0.0.1:{port}"


run_part = partial(child_process, last_signal=signal.SIGKILL)
"""Run a process of a run: it dies at once with this one, because a resumed run has the same ports and folders."""


class RunFailedError(Exception):
    """A process of a run ended badly; the message holds the end of its log."""


class Setting(NamedTuple):
    """What the sweep chooses."""

    lr: float
    """Learning rate of the first batch."""
    batch_size: int
    weight: float
    """Of the divergence, which beside GRPO decides the mix: both are divided by the sampled tokens."""

    def __str__(self) -> str:
        return f"lr {self.lr:g}, batch {self.batch_size}, weight {self.weight:g}"


class Run(NamedTuple):
    """One training run."""

    mode: str
    seed: int
    setting: Setting
    rollouts: int

    @property
    def name(self) -> str:
        """The run's folder."""
        lr, batch_size, weight = self.setting
        return f"{self.mode}/seed-{self.seed}-lr-{lr:g}-batch-{batch_size}-weight-{weight:g}"

    @property
    def loss(self) -> dict[str, object]:
        """The trainer's loss."""
        parts = MODES[self.mode]["loss"]
        return {**parts, **({"forward_kl": self.setting.weight} if "forward_kl" in parts else {})}

    @property
    def steps(self) -> int:
        """Batches that it trains on."""
        return self.rollouts // self.setting.batch_size


def settings_of(mode: str, settings: Sequence[Setting]) -> list[Setting]:
    """Those that differ for the mode, as the sweep's first of each: one without a divergence has nothing to weight."""
    if "forward_kl" in MODES[mode]["loss"]:
        return list(settings)
    return list({setting._replace(weight=1.0): None for setting in settings})


def merge_adapter(start: Path, adapter: Path, to: Path) -> Path:
    """Write a checkpoint with an adapter merged into weights, in float32, and return its folder, `to`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(start, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(to)
    return to


@dataclass(frozen=True, slots=True)
class Laboratory:
    """What all runs share.

    The expert is a second server, which keeps the first weights: it judges and it is the teacher. A policy this small
    that judges its own turns while it trains forgets how to judge, and its hints with it.
    """

    vllm: LocalServer
    expert_url: str
    """Where the teacher is asked, and the judge without a `judge_url`."""
    model: Path
    out: Path
    eval_samples: int
    epochs: int
    """Passes over each batch."""
    minibatches: int
    """Optimizer updates of each pass."""
    lr_schedule: str
    """Of the trainer."""
    examples: bool
    """The tasks have their public examples."""
    talk: bool = False
    """Rollouts are sessions of a user who complains, without a reward; else they are the environment's episodes."""
    subject: Subject = SUBJECTS["coding"]
    group_size: int = 4
    """Rollouts of one task, whose scores GRPO compares."""
    through: WireProtocol = "chat"
    """With talk: the protocol that the user speaks."""
    judge_url: str | None = None
    """Where the scripted judge is asked."""
    average: LocalServer | None = None
    """The server of modes whose teacher is the moving average of whole weights."""
    api_port: int = 8001
    """Of run-api."""
    exam_tasks: int | None = None
    """Held-out tasks that are measured, the first in a seeded order; None: all."""
    precision: str = "fp32"
    """Of the trainer, unless a mode has its own."""

    @property
    def weights(self) -> Path:
        """The server's --weights-root."""
        return self.out / "weights"

    def load(self, folder: Path, server: LocalServer | None = None) -> None:
        """Let the policy's server, or another one, take a checkpoint below its weights root.

        An adapter is merged into the first weights: on a CPU the server samples a fifth of the tokens with an adapter.
        """
        if (folder / "adapter_config.json").exists():
            folder = merge_adapter(self.start, folder, self.weights / "merged")
        body = json.dumps({"path": str(folder.resolve()), "version": 0}).encode()
        request = urllib.request.Request(
            f"{(server or self.vllm).base_url}/v1/opd/reload_weights", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600):
                pass
        except urllib.error.HTTPError as error:
            raise RunFailedError(f"{folder} can't be loaded: {error.read().decode()}") from error

    @property
    def start(self) -> Path:
        """The first weights below the weights root: with a head if the server had to give a tied model one."""
        start = self.weights / f"{self.model.name}-untied"
        if not start.exists():
            start = self.weights / "start"
        if not start.exists():
            shutil.copytree(self.model, start)
        return start

    def load_start(self) -> None:
        """Let the servers take the first weights again."""
        self.load(self.start)
        if self.average is not None:
            self.load(self.start, self.average)

    def groups(self, run: Run) -> Iterator[ScoredGroup]:
        """What a run was trained on, in the order in which it was made."""
        with self.group_file(run).open() as lines:
            yield from (ScoredGroup.from_wire(json.loads(line)) for line in lines)

    def group_file(self, run: Run) -> Path:
        """Where they are."""
        return self.out / run.name / ("groups.jsonl" if self.talk else "rollouts/groups.jsonl")

    def forget_checkpoints(self, run: Run) -> None:
        """Remove what a run would have continued from."""
        shutil.rmtree(self.out / run.name / "checkpoints", ignore_errors=True)

    async def train(self, run: Run, points: Sequence[int], stepped: Callable[[dict[str, float]], None]) -> Path:
        """Run the loop to the trainer's last step, from the last checkpoint of an earlier process if there is one.

        Args:
            run: The run.
            points: Rollouts after which the weights are kept.
            stepped: Called with each new step's metrics.

        Returns:
            The folder of the weights at each point, `step-NNNNNN`.

        Raises:
            RunFailedError: a process ended badly.
        """
        folder, weights = self.out / run.name, self.weights / run.name
        if (trained := trained_steps(folder)) == run.steps:
            return weights
        if trained:
            cut_back(folder, self.group_file(run), trained, run.setting.batch_size)
            for journal in folder.glob("journal.sqlite*"):  # Its unsent groups would fill the first batch.
                journal.unlink()
        else:
            for old in (folder, weights):
                shutil.rmtree(old, ignore_errors=True)
            folder.mkdir(parents=True)
        self.load_start()
        api = f"http://127.0.0.1:{self.api_port}"
        kept_steps = [point // run.setting.batch_size for point in points]
        progress, since = Progress.of(folder, run.setting.batch_size), time.monotonic()
        source = self._talking if self.talk else self._serving
        async with AsyncExitStack() as parts:
            parts.enter_context(run_part(self.api_command(api), folder / "api.log", cwd=ROOT))
            check = await parts.enter_async_context(source(run, api, lambda: len(progress.seconds)))
            command = self.trainer_command(run, api, weights)
            trainer = parts.enter_context(run_part(command, folder / "trainer.log", THREADS, ROOT))
            metrics = folder / "metrics.jsonl"
            while (code := trainer.poll()) is None:
                check()
                if time.monotonic() - since > PATIENCE_S:
                    raise RunFailedError(f"{run.name}: the trainer waits:\n{end_of(folder / 'trainer.log')}")
                lines = text_lines(metrics.read_text()) if metrics.exists() else []
                for line in lines[len(progress.seconds) :]:
                    step: dict[str, float] = json.loads(line)
                    if step["lost_batches"]:
                        raise RunFailedError(
                            f"{run.name}: step {step['step']} lost its batch, as if it had learned less"
                        )
                    progress = progress.stepped(time.monotonic() - since)
                    progress.write(folder)
                    forget_weights(weights, kept_steps)
                    forget_weights(weights / "teacher", ())
                    since = time.monotonic()
                    stepped(step)
                await asyncio.sleep(0.2)
        if code != 0:
            raise RunFailedError(f"{run.name}: the trainer ended with code {code}:\n{end_of(folder / 'trainer.log')}")
        return weights

    @asynccontextmanager
    async def _serving(self, run: Run, api: str, _trained: Callable[[], int]) -> AsyncGenerator[Callable[[], None]]:
        """`serve`; what is yielded raises RunFailedError once it has ended badly."""
        log = self.out / run.name / "serve.log"
        with run_part(self.serve_command(run, api), log, cwd=ROOT) as serve:

            def check() -> None:
                if serve.poll() not in (None, 0):
                    raise RunFailedError(f"{run.name}: serve ended:\n{end_of(log)}")

            yield check

    @asynccontextmanager
    async def _talking(self, run: Run, api: str, trained: Callable[[], int]) -> AsyncGenerator[Callable[[], None]]:
        """A gateway and its user; what is yielded raises RunFailedError once one of them has failed."""
        folder = self.out / run.name
        config = f"configs/{self.subject.config if self.subject.has_person else 'demo_gateway.yaml'}"
        with gateway(self.vllm.base_url, *self.gateway_flags(run, api), folder=folder, config=config) as served:
            if self.subject.has_person:
                user, tasks = Person.connected(served, self.vllm.model), person_tasks()
            else:
                user, tasks = (
                    User.connected(served, self.vllm.model, self.through),
                    builtin_tasks(with_examples=self.examples),
                )
            batches = range(trained(), run.steps)
            talking = asyncio.create_task(converse(user, tasks, batches, run.setting.batch_size, trained))

            def check() -> None:
                if not talking.done():
                    return
                try:
                    talking.result()
                except (TalkFailedError, OpenAIError, OSError) as error:
                    raise RunFailedError(f"{run.name}: {error}\n{end_of(folder / 'gateway.log')}") from error

            try:
                yield check
            finally:
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)
                await user.client.close()

    @staticmethod
    def api_command(api: str) -> list[str]:
        """run-api on loopback."""
        port = api.rpartition(":")[2]
        return [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", port]

    def serve_command(self, run: Run, api: str) -> list[str]:
        """`serve`, one batch ahead of the trainer at most."""
        settings = {
            "rollout_server_url": api,
            "data_path_to_save_groups": self.out / run.name / "rollouts" / "groups.jsonl",
            "resume": "true",
            "group_size": self.group_size,
            "max_batches_offpolicy": 1,
            "max_concurrent_groups": run.setting.batch_size // self.group_size,
            "seed": run.seed,
            "steps_per_eval": 0,
            **{f"world.{name}": value for name, value in self.world_settings().items() if name != "type"},
            **self.subject.env,
            **self._distilling(run),
        }
        flags = [text for name, value in settings.items() for text in (f"--env.{name}", str(value))]
        script = [sys.executable, "-m", "agentic_opd.env", "serve"]
        config = ["--config", str(ROOT / "configs" / self.subject.config)]
        config += ["--openai.base_url", f"{self.vllm.base_url}/v1", "--openai.model_name", str(self.model)]
        return [*script, *config, *flags]

    def world_settings(self) -> dict[str, object]:
        """Return the configured settings of the world, with a split in a file beside the results."""
        world = yaml.safe_load((ROOT / "configs" / self.subject.config).read_text())["env"].get("world", "coding")
        settings = {"type": world} if isinstance(world, str) else dict(world)
        if settings["type"] == "coding":
            return {**settings, "builtin_examples": str(self.examples).lower()}
        has_split = settings["type"] == "functions" and not self.subject.has_conversations
        return {**settings, "split_file": str(self.out / "split.json")} if has_split else settings

    def gateway_flags(self, run: Run, api: str) -> list[str]:
        """Return the gateway's flags: each session is a group."""
        settings = {
            "rollout_server_url": api,
            "data_path_to_save_groups": self.out / run.name / "groups.jsonl",
            **self._distilling(run),
        }
        return [text for name, value in settings.items() for text in (f"--env.{name}", str(value))]

    def _distilling(self, run: Run) -> dict[str, object]:
        of_mode, is_scripted = self.subject.distilling(run.mode), self.judge_url is not None
        settings: dict[str, object] = {
            "judge.base_url": f"{self.judge_url or self.expert_url}/v1",
            "judge.model_name": self.subject.judge_model if is_scripted else self.model,
        }
        if (judge := self.subject.judge_adapter(run.mode)) is not None:
            settings |= {"judge.model_name": TRAJECTORY_JUDGE, "judge.temperature": judge.temperature}
        if self.average is not None and self.subject.needs_teacher(run.mode):
            settings["teacher.base_url"] = f"{self.average.base_url}/v1"
        elif of_mode.get("teacher.weights") != "frozen":
            settings["teacher.base_url"] = f"{self.expert_url}/v1"
        return {**settings, **of_mode}

    def trainer_command(self, run: Run, api: str, weights: Path) -> list[str]:
        """The reference trainer; it keeps the weights of every step."""
        settings = {
            "model": self.model,
            "output_dir": self.out / run.name,
            "weights_dir": weights,
            "api_url": api,
            "vllm_urls": f"[{self.vllm.base_url}]",
            "pushes_kept": run.steps + 1,
            "total_steps": run.steps,
            "batch_size": run.setting.batch_size,
            "seed": run.seed,
            "warmup_steps": 0,
            "lr": run.setting.lr,
            "lr_schedule": self.lr_schedule,
            "epochs_per_batch": self.epochs,
            "minibatches": self.minibatches,
            "precision": self.precision,
            "save_every": 1,
            "resume": str(trained_steps(self.out / run.name) > 0).lower(),
            "loss": json.dumps({**run.loss, **(self.subject.divergence if "forward_kl" in run.loss else {})}),
            **self.subject.trainer(run.mode),
        }
        if self.average is not None and self.subject.needs_teacher(run.mode):
            settings["teacher_urls"] = f"[{self.average.base_url}]"
        flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        script = [sys.executable, "-m", "agentic_opd.training"]
        return [*script, "--config", str(ROOT / "configs" / "train_demo.yaml"), *flags]


def first_tasks(tasks: Sequence[Task], count: int | None) -> list[Task]:
    """Return the first `count` tasks in an order that is the same in every run; None: all."""
    return [*tasks] if count is None else random.Random(0).sample([*tasks], min(count, len(tasks)))


def examiner(laboratory: Laboratory) -> "Examiner | PersonExaminer":
    """Return what measures the weights that the server has."""
    if not laboratory.subject.has_person:
        return Examiner(laboratory)
    client = AsyncOpenAI(base_url=f"{laboratory.vllm.base_url}/v1", api_key="EMPTY", timeout=600)
    return PersonExaminer(client, laboratory.vllm.model, laboratory.eval_samples)


class Examiner:
    """Measures pass rates without hints: the package's own evaluation, in this process."""

    def __init__(self, laboratory: Laboratory) -> None:
        """Prepare; the first measurement connects."""
        self.laboratory = laboratory
        self.env = self._env(laboratory.eval_samples, laboratory.subject.exam_temperature)

    def _env(self, samples: int, temperature: float | None = None, **changed: object) -> "AgenticOPDEnv":
        """Return the environment of the world, or of `changed` settings; temperature None: that of rollouts."""
        laboratory = self.laboratory
        settings = yaml.safe_load((ROOT / "configs" / laboratory.subject.config).read_text())["env"]
        settings |= {"world": laboratory.world_settings(), **laboratory.subject.exam, **changed}
        temperature = settings["temperature"] if temperature is None else temperature
        settings["eval"] = {**settings.get("eval", {}), "samples": samples, "temperature": temperature}
        from agentic_opd.env.opd import AgenticOPDEnv  # Atropos and torch: seconds that --help need not take.

        config = AgenticOPDEnvConfig(
            **{**settings, "data_path_to_save_groups": None, "opd_enabled": False, "data_dir_to_save_evals": None}
        )
        server = PolicyServerConfig(base_url=f"{laboratory.vllm.base_url}/v1", model_name=str(laboratory.model))
        return AgenticOPDEnv(config, [server])

    async def gauges(self) -> Gauges:
        """Return the gauges of the weights that the server has (gauges.py), which take an evaluation each."""
        questions = self.laboratory.subject.irrelevance
        assert questions is not None
        world = irrelevance_settings(self.laboratory.world_settings(), questions)
        of_world, needless = self._env(SAMPLES), self._env(1, 0.0, world=world)
        try:
            for env, count in ((of_world, TASKS), (needless, None)):
                await env.setup()
                env.eval_tasks = first_tasks(env.eval_tasks, self._count(count))
            sampled = await of_world.evaluation().measure()
            refused = await needless.evaluation().measure()
        finally:
            await of_world.close()
            await needless.close()
        return {**of_samples(sampled.metrics), OVER_CALLING: refused.metrics[f"eval/{OVER_CALLING}"]}

    def _count(self, tasks: int | None) -> int | None:
        return min((count for count in (tasks, self.laboratory.exam_tasks) if count is not None), default=None)

    async def pass_rate(self, folder: Path) -> tuple[float, int]:
        """The share of episodes that pass, of conversations that of user turns, and how many episodes there were.

        Each of them goes to samples.jsonl in `folder`.
        """
        if not self.env.eval_tasks:
            await self.env.setup()
            self.env.eval_tasks = first_tasks(self.env.eval_tasks, self.laboratory.exam_tasks)
        file = sample_file(folder)
        try:
            evaluated = await self.env.evaluation().measure(lambda sample: file.write(sample.to_row()))
        finally:
            file.close()
        samples = evaluated.samples
        if self.laboratory.subject.has_conversations:
            verdicts = [sample.verification for sample in samples]
            turns = sum(verdict.passed for verdict in verdicts) / sum(verdict.total for verdict in verdicts)
            return turns, len(samples)
        return sum(sample.passed for sample in samples) / len(samples), len(samples)

    async def close(self) -> None:
        """Close connections."""
        await self.env.close()
