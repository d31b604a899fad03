"""AgenticOPDEnv: rollouts of coding tasks distilled from hindsight, as an Atropos environment."""

import sys
from collections.abc import Callable
from functools import cached_property
from random import Random
from typing import NoReturn

from agentic_opd.core.types import Episode, TeacherRequest
from agentic_opd.distill.config import ReplayProof
from agentic_opd.distill.distiller import Distiller
from agentic_opd.distill.evidence import TurnContext
from agentic_opd.distill.proving import HintProof
from agentic_opd.env import command
from agentic_opd.env.agent import AgentEnv
from agentic_opd.env.config import AgenticOPDEnvConfig, default_settings
from agentic_opd.proof.prove import PlayedOn, prove
from agentic_opd.rollout.loop import HintInsertion
from agentic_opd.settings.atropos import PolicyServerConfig

_MANY_SEEDS = 2**31


class AgenticOPDEnv(AgentEnv):
    """Coding agents on vLLM, distilled token by token from hindsight hints.

    With `opd_enabled` off it is an `AgentEnv`: no judge is asked and no distillation field is written.
    """

    name = "agentic_opd"
    shown_metrics = (*AgentEnv.shown_metrics, "opd/mean_hints_per_rollout", "opd/mean_turns_scored", "opd/hint_rate")
    env_config_cls = AgenticOPDEnvConfig  # type: ignore[assignment]
    config: AgenticOPDEnvConfig  # type: ignore[assignment]

    @classmethod
    def config_init(cls) -> tuple[AgenticOPDEnvConfig, list[PolicyServerConfig]]:  # type: ignore[override]
        return default_settings()

    @classmethod
    def cli(cls) -> NoReturn:
        sys.exit(command.main(cls))

    def make_distiller(self) -> Distiller | None:
        """Return a distiller with the judge and the teacher of the settings; None if `opd_enabled` is off."""
        config = self.config
        if not config.opd_enabled:
            return None
        return Distiller(
            config,
            max_token_length=config.max_token_length,
            retry_s=config.server_retry_s,
            seed=config.seed,
            prove=self.prove_hint,
        )

    @cached_property
    def _seeds(self) -> Random:
        """Draws the first seed of each proof."""
        return Random(self.config.seed)

    async def setup(self) -> None:
        """Load the tasks and check what rollouts, and the proofs of hints, require; see `AgentEnv.setup`."""
        await super().setup()
        if self.distiller is not None and self.config.hint.proof.type == "replay":
            self.replay()

    async def prove_hint(
        self, context: TurnContext, request: TeacherRequest, spend: Callable[[int], bool]
    ) -> HintProof:
        """Play continuations of a turn with and without its hint; see `distill.proving.ProveHint`."""
        proof = self.config.hint.proof
        assert isinstance(proof, ReplayProof)
        hint = HintInsertion(request.insert_at, request.hint_token_ids)
        recording, turn_index = context.recording, context.pair.turn_index
        unhinted: dict[int, Episode] = {}

        async def play(*, is_hinted: bool, seed: int) -> PlayedOn:
            played = await self.continued(recording, turn_index, hint, is_hinted=is_hinted, seed=seed)
            if proof.join and not is_hinted and played.is_rollout_of(recording):
                assert played.episode is not None
                unhinted[seed] = played.episode
            return PlayedOn.of(played)

        # Rollouts of a group, and of a task in later groups, may have the same prompts: their continuations differ.
        first_seed = self._seeds.randrange(_MANY_SEEDS)
        result = await prove(play, proof.pairs, spend, first_seed)
        by_seed = tuple(episode for _, episode in sorted(unhinted.items()))
        return HintProof(result.record, result.rollouts, result.seconds, by_seed)

    def roles(self) -> dict[str, str]:
        """Return the policy, the judge and the teacher, for the first lines of a run."""
        off = {} if self.config.opd_enabled else {"hints": "none (env.opd_enabled is off)"}
        return {**super().roles(), **off}
