"""The stages of `agentic-opd learn`, from logs to the verdict (I/O).

    split -> hints -> turns -> before -> training -> after -> grades -> result.json, report.html, adapter/

Each stage is done once; see `stages`. The vLLM server runs while there is a stage that needs it.
"""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from agentic_opd.core.errors import ConfigError, ServerMismatchError
from agentic_opd.core.text import read_json
from agentic_opd.core.types import TurnOutcome
from agentic_opd.learn.answers import accepted_logprob, figures_of, read_groups, sample_answers
from agentic_opd.learn.figures import LearnResult
from agentic_opd.learn.grades import grade_answers, grade_key
from agentic_opd.learn.held_out import HeldOutTurn, grading_world, read_turns, write_turns
from agentic_opd.learn.page import ShownPair, shown_pairs
from agentic_opd.learn.plan import PARTS, STAGES, LearnPlan, check_settings, say
from agentic_opd.learn.processes import copy_folder, policy_server, train
from agentic_opd.learn.reading import read_conversations
from agentic_opd.learn.result import write_refusal, write_verdict
from agentic_opd.learn.split import LoggedConversation, split
from agentic_opd.learn.stages import RowFile, Stages, write_rows
from agentic_opd.plugin.info import check_model
from agentic_opd.runs.distill import PolicyDistiller
from agentic_opd.runs.distill_file import FileDistiller, Line, distill_lines, read_lines
from agentic_opd.serving.launch import why_no_model
from agentic_opd.settings.fields import line_settings
from agentic_opd.wire.files import GroupFile
from agentic_opd.wire.group import ScoredGroup

_GRADES_AT_ONCE = 16
_HINTLESS_PARTS = ("start_kl", "grpo", "step_reward", "combined")
"""Parts of the loss that learn from conversations without a hint too."""
_ONLY_AT_THE_END = 10**9
"""Steps between two pushes: the trainer also pushes its first and its last weights."""


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
    if (wrong := why_no_model(plan.model)) is not None:
        raise ConfigError(f"--model {plan.model}: {wrong}")
    run = LearnRun(plan, Stages(plan.folder / "stages"))
    try:
        await run.do()
    except RefusedError as refusal:
        return await asyncio.to_thread(write_refusal, plan, run.stages, str(refusal))
    return await asyncio.to_thread(write_verdict, plan, run.stages)


@dataclass(frozen=True, slots=True)
class LearnRun:
    """A run; each stage reads what the stages before it wrote."""

    plan: LearnPlan
    stages: Stages

    def _path(self, name: str) -> Path:
        return self.plan.path(name)

    async def do(self) -> None:
        """Do the stages that are left.

        Raises:
            RefusedError: there is too little to learn from or to measure with.
        """
        parts = await self.stages.run("split", partial(asyncio.to_thread, self._split))
        self._say_split(parts)
        self._check_answers(parts)
        if not self.stages.is_done("hints"):
            answers = sum(parts[name]["answers"] for name in PARTS)
            say(f"the judge is asked about {answers} answers, {self.plan.env.prm_votes} votes each")
        if not self.stages.is_done(*STAGES):
            async with self._server() as url, self._connected(url) as by:
                await self._with_server(by)

    async def _with_server(self, by: PolicyDistiller) -> None:
        hints = await self.stages.run("hints", partial(self._hints, by))
        await self.stages.run("turns", partial(self._turns, by))
        turns = await read_turns(self.plan, by)
        self._check_minimum(hints, len(turns))
        self._say_costs(hints, len(turns))
        await self.stages.run("before", partial(self._answers, "before", by, turns, 0))
        training = await self.stages.run("training", partial(self._training, by))
        for name in ("final", "checkpoints"):
            await asyncio.to_thread(shutil.rmtree, self._path("train") / name, ignore_errors=True)
        await by.policy.load_adapter(self._path("candidate").resolve(), training["version"])
        await self.stages.run("after", partial(self._after, by, turns, training["version"]))
        await self.stages.run("grades", partial(self._grades, by, turns))
        if self.plan.is_served and (first := self._path("train/weights/step-000000")).is_dir():
            await by.policy.load_adapter(first.resolve(), 0)  # It changes nothing: B of new adapters is 0.

    def _split(self) -> dict[str, Any]:
        """Read the logs and write the two parts."""
        conversations = read_conversations(self.plan)
        parts = split(conversations, self.plan.config.held_out)
        counts: dict[str, Any] = {"projects": parts.held_out_projects}
        for name in PARTS:
            part: Sequence[LoggedConversation] = getattr(parts, name)
            write_rows(self._path(f"{name}.jsonl"), (conversation.row() for conversation in part))
            answers = sum(conversation.answers for conversation in part)
            counts[name] = {"conversations": len(part), "answers": answers}
        return counts

    def _say_split(self, parts: Mapping[str, Any]) -> None:
        how = f"the projects {', '.join(parts['projects'])}" if parts["projects"] else "the latest conversations"
        training, held_out = (parts[name] for name in PARTS)
        say(
            f"to train on: {training['answers']} answers with a reply in {training['conversations']} conversations; "
            f"held out: {held_out['answers']} in {held_out['conversations']} ({how})"
        )

    async def _hints(self, by: PolicyDistiller) -> dict[str, Any]:
        """Judge and score both parts."""
        result: dict[str, Any] = {}
        settings = {**line_settings(self.plan.env), "model": self.plan.model}
        for name in PARTS:
            lines = await asyncio.to_thread(list[Line], read_lines(self._path(f"{name}.jsonl")))
            file = GroupFile(self._path(f"{name}.distilled.jsonl"), settings, resume=True, setting="--out")
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
        groups = read_groups(self._path("training.distilled.jsonl"))
        learned = [group for group in groups if takes_all or _has_hint(group)]
        write_rows(self._path("training.learned.jsonl"), (group.to_wire() for group in learned))
        sequences = [rollout for group in learned for rollout in group.rollouts]
        tokens = sum(len(rollout.tokens_T) for rollout in sequences)
        return {"groups": len(learned), "sequences": len(sequences), "tokens": tokens}

    def _check_answers(self, parts: Mapping[str, Any]) -> None:
        """Refuse a run with too few answers before the judge is asked."""
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
            failed = hints["training"]["outcomes"][TurnOutcome.JUDGE_ERROR]
            raise RefusedError(
                f"{number} answers to train on have a hint ({failed} were not judged, because the judge failed), and "
                f"learn.min_hints is {config.min_hints}: name more sessions in which the agent was corrected, or "
                "another judge"
            )
        if answers < config.min_held_out:
            raise RefusedError(
                f"{answers} held-out answers can be sampled anew, and learn.min_held_out is {config.min_held_out}: "
                "name more sessions, or raise learn.held_out"
            )

    def _say_costs(self, hints: Mapping[str, Any], answers: int) -> None:
        training, held_out = (hints[name] for name in PARTS)
        say(
            f"with a hint: {training['hints']} of {training['turns']} answers to train on, {held_out['hints']} of "
            f"{held_out['turns']} held-out ones"
        )
        learned, train = hints["learned"], self.plan.train
        steps = train.groups_epochs * ceil(learned["sequences"] / train.batch_size)
        say(
            f"to do: about {steps} steps over {self._trained_tokens(learned):,} tokens ({train.groups_epochs} passes "
            f"over {learned['groups']} conversations); {2 * answers} answers to sample, and at most as many to grade, "
            f"by {self.plan.env.prm_votes} votes each"
        )

    def _trained_tokens(self, learned: Mapping[str, Any]) -> int:
        """Return the tokens that all passes of the training read."""
        return learned["tokens"] * self.plan.train.groups_epochs * self.plan.train.epochs_per_batch

    async def _turns(self, by: PolicyDistiller) -> dict[str, Any]:
        return await asyncio.to_thread(write_turns, self.plan, by)

    async def _answers(
        self, arm: str, by: PolicyDistiller, turns: Mapping[str, HeldOutTurn], version: int
    ) -> dict[str, Any]:
        with closing(RowFile(self._path(f"answers.{arm}.jsonl"))) as file:
            await sample_answers(turns, by, self.plan.config, file, version)
        return {"answers": len(turns)}

    async def _training(self, by: PolicyDistiller) -> dict[str, Any]:
        """Train adapters on the conversations with hints; the last ones become `candidate`."""
        plan, folder = self.plan, self._path("train")
        learned = (self.stages.result("hints") or {})["learned"]
        resumed = any((folder / "checkpoints").glob("step-??????"))
        settings = {
            **plan.train.model_dump(mode="json", exclude_unset=True, exclude={"vllm_api_key"}),
            "model": plan.model,
            "groups": [str(self._path("training.learned.jsonl"))],
            "output_dir": str(folder),
            "weights_dir": str(folder / "weights"),
            "vllm_urls": [by.policy_url],
            "push_every": _ONLY_AT_THE_END,
        }
        is_one_sequence = learned["groups"] == learned["sequences"]
        per_pass = ceil(learned["sequences"] / plan.train.batch_size)
        steps = per_pass * plan.train.groups_epochs if is_one_sequence else None
        say(f"training (log: {self._path('logs/train.log')})")
        await train(settings, folder, by.policy.http.api_key or "", steps, is_resumed=resumed)
        weights = max((folder / "weights").glob("step-??????"))
        await asyncio.to_thread(copy_folder, weights, self._path("candidate"))
        version = int(weights.name.removeprefix("step-"))
        return {"version": version, "steps": version, "tokens": self._trained_tokens(learned)}

    async def _after(self, by: PolicyDistiller, turns: Mapping[str, HeldOutTurn], version: int) -> dict[str, Any]:
        result = await self._answers("after", by, turns, version)
        groups = await asyncio.to_thread(read_groups, self._path("held_out.distilled.jsonl"))
        with closing(RowFile(self._path("logprobs.jsonl"))) as file:
            logprobs = await accepted_logprob(groups, by, file)
        return {**result, "logprobs": logprobs}

    async def _grades(self, by: PolicyDistiller, turns: Mapping[str, HeldOutTurn]) -> dict[str, Any]:
        """Grade the answers; the result has the figures of each turn, and the pairs that the report shows."""
        arms, seed = self._read_answers(), self.plan.config.seed
        with closing(RowFile(self._path("grades.jsonl"))) as file:
            at_once = min(_GRADES_AT_ONCE, self.plan.env.judge.max_concurrent)
            tasks = {name: turn.task for name, turn in turns.items()}
            await grade_answers(tasks, arms, grading_world(self.plan, by), file, seed, at_once)
        figures, pairs = dict[str, Any](), list[ShownPair]()
        for name, turn in turns.items():
            before, after = (arms[arm][name] for arm in ("before", "after"))
            grades = [file.rows[grade_key(name, row["message"])]["grade"] for row in (before, after)]
            figures[name] = {
                "session": turn.session,
                "grades": grades,
                "is_called_in_log": bool(turn.logged.answer.get("tool_calls")),
                "has_tools": bool(turn.tool_names),
                "figures": [figures_of(row, turn.tool_names).to_json() for row in (before, after)],
            }
            answers = (before["message"], after["message"])
            logged = turn.logged
            pairs.append(ShownPair(name, logged.history, logged.answer, logged.reply, answers, (grades[0], grades[1])))
        return {"turns": figures, "pairs": [pair.to_json() for pair in shown_pairs(pairs, seed)]}

    def _read_answers(self) -> dict[str, Mapping[str, Any]]:
        arms: dict[str, Mapping[str, Any]] = {}
        for arm in ("before", "after"):
            with closing(RowFile(self._path(f"answers.{arm}.jsonl"))) as file:
                arms[arm] = file.rows
        return arms

    # ------------------------------------------------------------------------------------------------------- the server

    @asynccontextmanager
    async def _server(self) -> AsyncGenerator[str]:
        """Yield the URL of the policy's server: the named one, or one that ends with this block."""
        if self.plan.is_served:
            yield str(self.plan.server.base_url)
            return
        say(f"vLLM is started (log: {self._path('logs/vllm.log')})")
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
            if self.plan.is_served:
                await check_model(by.policy.http, info, self.plan.model, "--model")
            if info.max_adapters == 0 or info.max_lora_rank < rank:
                raise ServerMismatchError(
                    f"{by.policy_url} takes no adapters of rank {rank}: start it with scripts/serve_vllm "
                    f"{self.plan.model} --max-lora-rank {rank} --weights-root {self.plan.folder.resolve()}"
                )
            if info.weight_version not in (None, 0) and not self.stages.is_done("before"):
                raise ServerMismatchError(
                    f"{by.policy_url} serves weights of version {info.weight_version}, but the first measurement needs "
                    "the model's own weights: restart it"
                )
            yield by


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


def _has_hint(group: ScoredGroup) -> bool:
    return any(turn.is_scored for rollout in group.rollouts for turn in rollout.turns or ())
