"""Tasks in Harbor's format: a folder with an instruction, a container, and tests that run in it after the agent."""
