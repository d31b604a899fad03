"""On-policy distillation from hindsight for tool-using agents, as an Atropos environment.

Nothing is imported here: a vLLM server that loads `agentic_opd.serving` needs none of the environment's dependencies.
"""

__version__ = "0.1.0"
