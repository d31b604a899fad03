"""HumanEval: `python environments/humaneval_env.py process --openai.base_url URL --env.dataset_name FILE`."""

from agentic_opd.env import AgenticOPDEnv, AgenticOPDEnvConfig, PolicyServerConfig


class HumanEvalEnv(AgenticOPDEnv):
    """The tasks of openai/human-eval, from the hub or a local file."""

    name = "humaneval_opd"

    @classmethod
    def config_init(cls) -> tuple[AgenticOPDEnvConfig, list[PolicyServerConfig]]:
        """The hub's copy, unless `dataset_name` names a file."""
        config, servers = super().config_init()
        update = {"dataset_name": "openai/openai_humaneval", "dataset_split": "test", "dataset_format": "humaneval"}
        return config.model_copy(update=update), servers


if __name__ == "__main__":
    HumanEvalEnv.cli()
