"""The stages of `agentic-opd learn`, from logs to the verdict (I/O).

    split -> hints -> turns -> before -> training -> after -> grades -> result.json, report.html, adapter/

Each stage is done once; see `stages`. The vLLM server runs while there is a stage that needs it.
"""

import asyncio
import shutil
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from agentic_opd.core.console import log_console
from agentic_opd.core.errors import AlignmentError, PlaceError, ServerMismatchError
from agentic_opd.core.text import printable, read_json
from agentic_opd.core.types import Task, TurnOutcome
from agentic_opd.env.config import AgenticOPDEnvConfig
from agentic_opd.gateway.recorded import is_journal, read_recorded
from agentic_opd.learn.answers import accepted_logprob, drawn, figures_of, prompt_of, read_groups, sample_answers
from agentic_opd.learn.config import LearnConfig
from agentic_opd.learn.figures import (
    AnswerPair,
    GradedPair,
    LearnResult,
    corrections_of,
    guards_of,
    verdict_of,
)
from agentic_opd.learn.grades import grade_answers, grade_key
from agentic_opd.learn.page import ShownPair, report_page, shown_pairs
from agentic_opd.learn.processes import copy_folder, policy_server, train
from agentic_opd.learn.split import LoggedConversation, split
from agentic_opd.learn.stages import RowFile, Stages, write_json, write_rows, write_whole
from agentic_opd.logs.turns import LoggedTurn, replied_turns
from agentic_opd.runs.distill import PolicyDistiller
from agentic_opd.runs.distill_file import FileDistiller, Line, distill_lines, read_inputs, read_lines
from agentic_opd.settings.atropos import PolicyServerConfig
from agentic_opd.settings.fields import line_settings
from agentic_opd.training.config import TrainerConfig
from agentic_opd.wire.files import GroupFile
from agentic_opd.wire.group import ScoredGroup
from agentic_opd.worlds.choose import make_world, settings_model, world_class

PARTS = ("training", "held_out")
STAGES = ("split", "hints", "turns", "before", "training", "after", "grades")
"""The stages in their order."""
_TURNS = "held_out.turns.jsonl"
"""The held-out turns that are evaluated."""
_GRADES_AT_ONCE = 16
_HINTLESS_PARTS = ("start_kl", "grpo", "step_reward", "combined")
"""Parts of the loss that learn from conversations without a hint too."""
_ONLY_AT_THE_END = 10**9
"""Steps between two pushes: the trainer also pushes its first and its last weights."""


@dataclass(frozen=True, slots=True)
class LearnPlan:
    """What a run reads, where it writes, and its settings."""

    paths: Sequence[Path]
    model: str
    folder: Path
    env: AgenticOPDEnvConfig
    server: PolicyServerConfig
    """The policy's server; its `base_url` counts only with `is_served`."""
    is_served: bool
    """Whether a running server was named."""
    train: TrainerConfig
    config: LearnConfig
    mask_secrets: bool = True
    vllm_args: Sequence[str] = ()

    def settings(self) -> dict[str, Any]:
        """Return what the results depend on, as JSON data without secrets."""
        return {
            "paths": [str(path.resolve()) for path in self.paths],
            "model": self.model,
            "mask_secrets": self.mask_secrets,
            "env": line_settings(self.env),
            "train": self.train.model_dump(mode="json", exclude={"vllm_api_key"}),
            "learn": self.config.model_dump(mode="json"),
        }


class RefusedError(Exception):
    """The run ends without an adapter; the message is the reason."""


async def learn(plan: LearnPlan) -> LearnResult | dict[str, Any]:
    """Do the stages that are left; return the result, as JSON data if an earlier process wrote it.

    Raises:
        PlaceError: a path can't be read, or the folder holds a run with other settings.
        ConfigError, ServerError, OPDError: as the stages.
    """
    result_path = plan.folder / "result.json"
    check_settings(plan)
    if result_path.exists():
        return read_json(result_path.read_text())
    run = LearnRun(plan, Stages(plan.folder / "stages"))
    try:
        await run.do()
    except RefusedError as refusal:
        return await asyncio.to_thread(run.write_refusal, str(refusal))
    return await asyncio.to_thread(run.write_verdict)


def check_settings(plan: LearnPlan) -> None:
    """Store the settings of a new run, and compare those of an earlier one.

    Raises:
        PlaceError: they differ; the message names them.
    """
    path, settings = plan.folder / "settings.json", plan.settings()
    if not path.exists():
        write_json(path, settings)
        return
    try:
        earlier = read_json(path.read_text())
    except (OSError, ValueError) as error:
        raise PlaceError(f"{str(path)!r} can't be read ({error}); start again with --overwrite") from error
    now, then = _dotted(settings), _dotted(earlier)
    if changed := sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name)):
        raise PlaceError(
            f"{str(plan.folder)!r} holds a run with other settings ({', '.join(changed)}). Set them back to continue, "
            "start again with --overwrite, or choose another --out"
        )


def _dotted(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _dotted(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat


@dataclass(slots=True)
class LearnRun:
    """A run and what its stages have read so far."""

    plan: LearnPlan
    stages: Stages
    tasks: dict[str, Task] = field(default_factory=dict[str, Task])
    """The held-out turns that are evaluated, as tasks of the world that grades them, by name."""
    logged: dict[str, LoggedTurn] = field(default_factory=dict[str, LoggedTurn])
    """The same turns as the log has them."""

    def path(self, name: str) -> Path:
        """Return the path of a file of the run."""
        return self.plan.folder / name

    # ------------------------------------------------------------------------------------------------------- the stages

    async def do(self) -> None:
        """Do the stages that are left.

        Raises:
            RefusedError: there is too little to learn from or to measure with.
        """
        parts = await self.stages.run("split", partial(asyncio.to_thread, self._split))
        self._say_split(parts)
        self._check_answers(parts)
        if not self.stages.is_done(*STAGES):
            async with self._server() as url, self._connected(url) as by:
                await self._with_server(by)

    async def _with_server(self, by: PolicyDistiller) -> None:
        hints = await self.stages.run("hints", partial(self._hints, by))
        await self.stages.run("turns", partial(self._turns, by))
        prompts = await self._prompts(by)
        self._check_minimum(hints, len(prompts))
        self._say_costs(hints, len(prompts))
        await self.stages.run("before", partial(self._answers, "before", by, prompts, 0))
        training = await self.stages.run("training", partial(self._training, by))
        await by.policy.load_adapter(self.path("candidate").resolve(), training["version"])
        await self.stages.run("after", partial(self._after, by, prompts, training["version"]))
        await self.stages.run("grades", partial(self._grades, by))
        if self.plan.is_served and (first := self.path("train/weights/step-000000")).is_dir():
            await by.policy.load_adapter(first.resolve(), 0)  # It changes nothing: B of new adapters is 0.

    def _split(self) -> dict[str, Any]:
        """Read the logs and write the two parts."""
        conversations = self._read()
        parts = split(conversations, self.plan.config.held_out)
        counts: dict[str, Any] = {"projects": parts.held_out_projects}
        for name in PARTS:
            part: Sequence[LoggedConversation] = getattr(parts, name)
            write_rows(self.path(f"{name}.jsonl"), (conversation.row() for conversation in part))
            answers = sum(conversation.answers for conversation in part)
            counts[name] = {"conversations": len(part), "answers": answers}
        return counts

    def _read(self) -> list[LoggedConversation]:
        """Read the logs.

        Raises:
            PlaceError: a path can't be read, or holds groups of rollouts.
        """
        plan, conversations = self.plan, dict[str, LoggedConversation]()
        try:
            journals = [path for path in plan.paths if is_journal(path)]
            inputs = read_inputs([path for path in plan.paths if path not in journals])
            rows = [(line.item_id, line.fields) for line in inputs.lines]
            for path in journals:
                rows += [(row.name, row.fields) for row in read_recorded(path).conversations]
        except (OSError, EOFError, zlib.error) as error:
            path = getattr(error, "filename", None) or str(plan.paths[0])
            raise PlaceError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
        for sentence in inputs.summary:
            _say(sentence)
        for name, fields in rows:
            if "tokens" in fields:
                raise PlaceError(
                    f"{name} is a group of rollouts, and this command learns from conversations: `agentic-opd distill` "
                    "and `agentic-opd train --groups` take such files"
                )
            try:
                conversations[name] = LoggedConversation.of(name, fields, mask_secrets=plan.mask_secrets)
            except AlignmentError as error:
                _say(f"{name} is left out: {error}")
        if not conversations:
            raise PlaceError("; ".join(("no conversation in these paths", *inputs.summary)))
        return [*conversations.values()]

    def _say_split(self, parts: Mapping[str, Any]) -> None:
        how = f"the projects {', '.join(parts['projects'])}" if parts["projects"] else "the latest conversations"
        training, held_out = (parts[name] for name in PARTS)
        votes = self.plan.env.prm_votes
        answers = training["answers"] + held_out["answers"]
        _say(
            f"to train on: {training['answers']} answers with a reply in {training['conversations']} conversations; "
            f"held out: {held_out['answers']} in {held_out['conversations']} ({how})"
        )
        if not self.stages.is_done("hints"):
            _say(f"the judge is asked about {answers} answers, {votes} votes each")

    async def _hints(self, by: PolicyDistiller) -> dict[str, Any]:
        """Judge and score both parts."""
        result: dict[str, Any] = {}
        settings = {**line_settings(self.plan.env), "model": self.plan.model}
        for name in PARTS:
            lines = await asyncio.to_thread(list[Line], read_lines(self.path(f"{name}.jsonl")))
            file = GroupFile(self.path(f"{name}.distilled.jsonl"), settings, resume=True, setting="--out")
            with closing(file):
                distiller = FileDistiller(by, mask_secrets=self.plan.mask_secrets)
                at_once = self.plan.env.groups_at_a_time
                await distill_lines(lines, distiller, file, at_once, "the same command")
            result[name] = hint_counts(await asyncio.to_thread(read_groups, file.path))
        return {**result, "learned": await asyncio.to_thread(self._write_learned)}

    def _write_learned(self) -> dict[str, Any]:
        """Write the groups that the loss learns from: those with a hint, or all if a part of it needs no hint."""
        loss = self.plan.train.loss
        takes_all = bool(loss.custom) or any(loss.weight_of(name) for name in _HINTLESS_PARTS)
        groups = read_groups(self.path("training.distilled.jsonl"))
        learned = [group for group in groups if takes_all or _has_hint(group)]
        write_rows(self.path("training.learned.jsonl"), (group.to_wire() for group in learned))
        sequences = [rollout for group in learned for rollout in group.rollouts]
        tokens = sum(len(rollout.tokens_T) for rollout in sequences)
        return {"groups": len(learned), "sequences": len(sequences), "tokens": tokens}

    async def _turns(self, by: PolicyDistiller) -> dict[str, Any]:
        """Choose the held-out turns that are evaluated, and write each as a conversation that ends with its reply."""

        def write() -> dict[str, Any]:
            turns = {
                f"{line.item_id}/{turn.message_index}": turn
                for line in read_lines(self.path("held_out.jsonl"))
                for turn in replied_turns(line.fields)
            }
            names = drawn(turns, self.plan.config.seed)
            fitting = (name for name in names if prompt_of(turns[name].history, turns[name].tools, by) is not None)
            chosen = sorted(islice(fitting, self.plan.config.max_held_out))
            write_rows(self.path(_TURNS), (_row(name, turns[name]) for name in chosen))
            return {"turns": len(chosen), "replied": len(turns)}

        return await asyncio.to_thread(write)

    async def _prompts(self, by: PolicyDistiller) -> dict[str, Any]:
        """Read the held-out turns that are evaluated, and render their prompts."""
        for line in await asyncio.to_thread(list[Line], read_lines(self.path(_TURNS))):
            (self.logged[line.item_id],) = replied_turns(line.fields)
        if not self.logged:
            return {}
        _, tasks = await self._world(by).train_and_eval_tasks()
        self.tasks = {task.task_id.rpartition("/")[0]: task for task in tasks}
        prompts = {name: prompt_of(task.messages, task.tools or (), by) for name, task in self.tasks.items()}
        return {name: (self.tasks[name], prompt) for name, prompt in prompts.items() if prompt is not None}

    def _world(self, by: PolicyDistiller) -> Any:
        """Return the world that grades held-out turns; its judge is the policy's base weights unless one is named."""
        env = self.plan.env
        judge = env.judge
        if judge.base_url is None:
            key = by.policy.http.api_key
            changes = {"base_url": f"{by.policy_url}/v1", "api_key": SecretStr(key) if key else None}
            judge = judge.model_copy(update=changes)
        judge = judge.model_copy(update={"model_name": judge.model_name or by.policy.info.model})
        settings = {"type": "replay", "journal": str(self.path(_TURNS)), "turns": len(self.logged)}
        world = settings_model(world_class("replay")).model_validate(settings)
        return make_world(env.model_copy(update={"judge": judge, "world": world}))

    def _check_answers(self, parts: Mapping[str, Any]) -> None:
        """Refuse before the judge is asked what can only be refused later."""
        config = self.plan.config
        if (answers := parts["training"]["answers"]) < config.min_hints:
            raise RefusedError(
                f"the logs have {answers} answers with a reply to train on, and learn.min_hints is {config.min_hints}: "
                "name more sessions"
            )
        if (answers := parts["held_out"]["answers"]) < config.min_held_out:
            raise RefusedError(
                f"{answers} answers with a reply are held out, and learn.min_held_out is {config.min_held_out}: name "
                "more sessions, or raise learn.held_out"
            )

    def _check_minimum(self, hints: Mapping[str, Any], answers: int) -> None:
        config = self.plan.config
        if (number := hints["training"]["hints"]) < config.min_hints:
            raise RefusedError(
                f"{number} answers to train on have a hint, and learn.min_hints is {config.min_hints}: name more "
                "sessions in which the agent was corrected, or another judge"
            )
        if answers < config.min_held_out:
            raise RefusedError(
                f"{answers} held-out answers can be sampled anew, and learn.min_held_out is {config.min_held_out}: "
                "name more sessions, or raise learn.held_out"
            )

    def _say_costs(self, hints: Mapping[str, Any], answers: int) -> None:
        training, held_out = (hints[name] for name in PARTS)
        _say(
            f"with a hint: {training['hints']} of {training['turns']} answers to train on, {held_out['hints']} of "
            f"{held_out['turns']} held-out ones"
        )
        learned, train = hints["learned"], self.plan.train
        steps = train.groups_epochs * ceil(learned["sequences"] / train.batch_size)
        _say(
            f"to do: about {steps} steps over {self._trained_tokens(learned):,} tokens ({train.groups_epochs} passes "
            f"over {learned['groups']} conversations); {2 * answers} answers to sample, and at most as many to grade, "
            f"by {self.plan.env.prm_votes} votes each"
        )

    def _trained_tokens(self, learned: Mapping[str, Any]) -> int:
        """Return the tokens that all passes of the training read."""
        return learned["tokens"] * self.plan.train.groups_epochs * self.plan.train.epochs_per_batch

    async def _answers(self, arm: str, by: PolicyDistiller, prompts: Mapping[str, Any], version: int) -> dict[str, Any]:
        with closing(RowFile(self.path(f"answers.{arm}.jsonl"))) as file:
            await sample_answers(prompts, by, self.plan.config, file, version)
        return {"answers": len(prompts)}

    async def _training(self, by: PolicyDistiller) -> dict[str, Any]:
        """Train adapters on the conversations with hints; the last ones become `candidate`."""
        plan, folder = self.plan, self.path("train")
        learned = (self.stages.result("hints") or {})["learned"]
        resumed = any((folder / "checkpoints").glob("step-??????"))
        settings = {
            **plan.train.model_dump(mode="json", exclude_unset=True, exclude={"vllm_api_key"}),
            "model": plan.model,
            "groups": [str(self.path("training.learned.jsonl"))],
            "output_dir": str(folder),
            "weights_dir": str(folder / "weights"),
            "vllm_urls": [by.policy_url],
            "push_every": _ONLY_AT_THE_END,
        }
        is_one_sequence = learned["groups"] == learned["sequences"]
        per_pass = ceil(learned["sequences"] / plan.train.batch_size)
        steps = per_pass * plan.train.groups_epochs if is_one_sequence else None
        _say(f"training (log: {self.path('logs/train.log')})")
        await train(settings, folder, by.policy.http.api_key or "", steps, is_resumed=resumed)
        weights = max((folder / "weights").glob("step-??????"))
        await asyncio.to_thread(copy_folder, weights, self.path("candidate"))
        for name in ("final", "checkpoints"):
            await asyncio.to_thread(shutil.rmtree, folder / name, ignore_errors=True)
        version = int(weights.name.removeprefix("step-"))
        return {"version": version, "steps": version, "tokens": self._trained_tokens(learned)}

    async def _after(self, by: PolicyDistiller, prompts: Mapping[str, Any], version: int) -> dict[str, Any]:
        result = await self._answers("after", by, prompts, version)
        groups = await asyncio.to_thread(read_groups, self.path("held_out.distilled.jsonl"))
        with closing(RowFile(self.path("logprobs.jsonl"))) as file:
            logprobs = await accepted_logprob(groups, by, file)
        return {**result, "logprobs": logprobs}

    async def _grades(self, by: PolicyDistiller) -> dict[str, Any]:
        arms = self._read_answers()
        with closing(RowFile(self.path("grades.jsonl"))) as file:
            at_once = min(_GRADES_AT_ONCE, self.plan.env.judge.max_concurrent)
            await grade_answers(self.tasks, arms, self._world(by), file, self.plan.config.seed, at_once)
        rows = file.rows
        figures: dict[str, Any] = {}
        for name, task in self.tasks.items():
            before, after = (arms[arm][name] for arm in ("before", "after"))
            grades = [rows[grade_key(name, row["message"])]["grade"] for row in (before, after)]
            turn = self.logged[name]
            figures[name] = {
                "session": name.rpartition("/")[0],
                "grades": grades,
                "is_called_in_log": bool(turn.answer.get("tool_calls")),
                "has_tools": bool(task.tools),
                "figures": [figures_of(before, task).to_json(), figures_of(after, task).to_json()],
            }
        pairs = shown_pairs(
            [
                ShownPair(
                    name,
                    history=turn.history,
                    logged=turn.answer,
                    reply=turn.reply,
                    answers=(arms["before"][name]["message"], arms["after"][name]["message"]),
                    grades=(figures[name]["grades"][0], figures[name]["grades"][1]),
                )
                for name in self.tasks
                for turn in (self.logged[name],)
            ],
            self.plan.config.seed,
        )
        return {"turns": figures, "pairs": [pair.to_json() for pair in pairs]}

    def _read_answers(self) -> dict[str, Mapping[str, Any]]:
        arms: dict[str, Mapping[str, Any]] = {}
        for arm in ("before", "after"):
            with closing(RowFile(self.path(f"answers.{arm}.jsonl"))) as file:
                arms[arm] = file.rows
        return arms

    # ------------------------------------------------------------------------------------------------------- the server

    @asynccontextmanager
    async def _server(self) -> AsyncGenerator[str]:
        """Yield the URL of the policy's server: the named one, or one that ends with this block."""
        if self.plan.is_served:
            yield str(self.plan.server.base_url)
            return
        _say(f"vLLM is started (log: {self.path('logs/vllm.log')})")
        folder, rank = self.plan.folder.resolve(), self.plan.train.lora_rank or 1
        async with policy_server(self.plan.model, folder, rank, self.plan.vllm_args) as url:
            yield url

    @asynccontextmanager
    async def _connected(self, url: str) -> AsyncGenerator[PolicyDistiller]:
        """Connect to the server, and check that it serves the model's first weights and takes adapters.

        Raises:
            ServerMismatchError: it does not.
        """
        env, server = self.plan.env, self.plan.server
        tokenizers = (env.tokenizer_name, server.tokenizer_name)
        async with PolicyDistiller.connected(
            url,
            env,
            env.renderer,
            api_key=server.api_key or None,
            tokenizer_name=next((name for name in tokenizers if name not in ("", "none")), ""),
            retry_s=env.server_retry_s,
            seed=env.seed,
        ) as by:
            info, rank = by.policy.info, self.plan.train.lora_rank or 1
            if info.max_adapters == 0 or info.max_lora_rank < rank:
                raise ServerMismatchError(
                    f"{by.policy_url} takes no adapters of rank {rank}: start it with scripts/serve_vllm "
                    f"{self.plan.model} --max-lora-rank {rank} --weights-root {self.plan.folder.resolve()}"
                )
            if info.weight_version not in (None, 0) and not self.stages.is_done("before"):
                raise ServerMismatchError(
                    f"{by.policy_url} serves weights of version {info.weight_version}, and what is measured first are "
                    "those of the model: restart it"
                )
            yield by

    # ------------------------------------------------------------------------------------------------------- the result

    def write_refusal(self, reason: str) -> LearnResult:
        """Write the result of a run that ended before anything was trained."""
        result = self._result("refused", reason)
        self._write(result, ())
        return result

    def write_verdict(self) -> LearnResult:
        """Compare the answers, and write the result, the report and the adapter."""
        config, grades, after = self.plan.config, self.stages.result("grades"), self.stages.result("after")
        assert grades is not None
        assert after is not None
        rows = grades["turns"].values()
        graded = [GradedPair(row["session"], *row["grades"]) for row in rows if None not in row["grades"]]
        guards = guards_of([AnswerPair.from_json(row) for row in rows], after["logprobs"], config.guards)
        if len(graded) < config.min_held_out:
            result = self._result(
                "refused",
                f"the judge graded {len(graded)} of {len(rows)} held-out answers, and learn.min_held_out is "
                f"{config.min_held_out}: its other answers held no vote. Name another judge",
                guards=guards,
            )
        else:
            corrections = corrections_of(graded)
            verdict, reason = verdict_of(corrections, guards)
            result = self._result(verdict, reason, corrections=corrections.to_json(), guards=guards)
        if result.verdict == "adapter":
            copy_folder(self.path("candidate"), self.path("adapter"))
        self._write(result, [ShownPair.from_json(pair) for pair in grades["pairs"]])
        return result

    def _result(self, verdict: Any, reason: str, **figures: Any) -> LearnResult:
        hints = self.stages.result("hints") or {name: {"turns": 0, "hints": 0} for name in PARTS}
        training = self.stages.result("training") or {"tokens": 0, "steps": 0}
        tokens = [hints[name].get("judge_tokens") for name in PARTS]
        read = [counted for counted in tokens if counted is not None]
        costs = {
            "seconds": self.stages.seconds(STAGES),
            "judge_tokens": {name: sum(counted[name] for counted in read) for name in ("read", "sampled")}
            if read and len(read) == len(tokens)
            else None,
            "trained_tokens": training["tokens"],
            "steps": training["steps"],
        }
        turns, hinted = ({name: hints[name][key] for name in PARTS} for key in ("turns", "hints"))
        return LearnResult(verdict, reason, turns, hinted, costs, **figures)

    def _write(self, result: LearnResult, pairs: Sequence[ShownPair]) -> None:
        page = report_page(self.plan.model, result, pairs)
        write_whole(self.path("report.html"), [page.encode()])
        write_json(self.path("result.json"), result.to_json())


def hint_counts(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Count the turns of distilled groups, those with a hint, and the tokens of the judge's answers."""
    records = [record for group in groups for rollout in group.rollouts for record in rollout.turns or ()]
    tokens = [record.judge_tokens for record in records if record.votes]
    counted = [count for count in tokens if count is not None]
    return {
        "turns": len(records),
        "hints": sum(record.outcome is TurnOutcome.SCORED for record in records),
        "outcomes": {outcome.value: sum(record.outcome is outcome for record in records) for outcome in TurnOutcome},
        "judge_tokens": {
            "read": sum(count.read for count in counted),
            "sampled": sum(count.sampled for count in counted),
        }
        if len(counted) == len(tokens)
        else None,
    }


def _row(name: str, turn: LoggedTurn) -> dict[str, Any]:
    """Return a turn as a conversation of its own, in which only the turn counts."""
    history = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in turn.history]
    messages = [*history, turn.answer, *turn.reply]
    return {"messages": messages, "tools": [*turn.tools], "group_overrides": {"item_id": name}}


def _has_hint(group: ScoredGroup) -> bool:
    return any(turn.is_scored for rollout in group.rollouts for turn in rollout.turns or ())


def _say(text: str) -> None:
    log_console().print(printable(text), markup=False, highlight=False, soft_wrap=True)
