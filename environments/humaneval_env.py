"""HumanEval: `python environments/humaneval_env.py process --openai.base_url URL --env.dataset_name FILE`."""

from atroposlib.envs.base import APIServerConfig

from agentic_opd.env.opd import AgenticOPDEnv, AgenticOPDEnvConfig


class HumanEvalEnv(AgenticOPDEnv):
    """The tasks of openai/human-eval, from the hub or a local file."""

    name = "humaneval_opd"

    @classmethod
    def config_init(cls) -> tuple[AgenticOPDEnvConfig, list[APIServerConfig]]:
        """The hub's copy, unless `dataset_name` names a file."""
        config, servers = super().config_init()
        update = {"dataset_name": "openai/openai_humaneval", "dataset_split": "test", "dataset_format": "humaneval"}
        return config.model_copy(update=update), servers


if __name__ == "__main__":
    HumanEvalEnv.cli()
