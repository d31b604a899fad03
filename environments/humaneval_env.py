"""HumanEval: `python environments/humaneval_env.py process --openai.base_url URL --env.world.dataset_name FILE`."""

from agentic_opd.env import AgenticOPDEnv, AgenticOPDEnvConfig, PolicyServerConfig
from agentic_opd.worlds.coding.config import CodingSettings


class HumanEvalEnv(AgenticOPDEnv):
    """The tasks of openai/human-eval, from the hub or a local file."""

    name = "humaneval_opd"

    @classmethod
    def config_init(cls) -> tuple[AgenticOPDEnvConfig, list[PolicyServerConfig]]:
        """The hub's copy, unless `env.world.dataset_name` names a file."""
        config, servers = super().config_init()
        world = CodingSettings(dataset_name="openai/openai_humaneval", dataset_split="test", dataset_format="humaneval")
        return config.model_copy(update={"world": world}), servers


if __name__ == "__main__":
    HumanEvalEnv.cli()
