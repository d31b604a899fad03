"""The eight built-in tasks: `python environments/builtin_tasks_env.py process --openai.base_url URL`."""

from agentic_opd.env import AgenticOPDEnv


class BuiltinTasksEnv(AgenticOPDEnv):
    """Eight small functions to write, each with public examples and hidden tests."""

    name = "builtin_tasks_opd"


if __name__ == "__main__":
    BuiltinTasksEnv.cli()
