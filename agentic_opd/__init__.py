"""On-policy distillation from hindsight for tool-using agents, as an Atropos environment.

This module imports nothing: a vLLM server can load `agentic_opd.serving` without the environment's dependencies.
"""

__version__ = "0.1.0"
