"""A server before the policy's vLLM servers that records live conversations as scored groups.

In: requests of any agent, in a protocol of OpenAI or Anthropic. Out: the policy's completions in that protocol and,
after a session ends, a scored group. The group holds exactly the token ids that vLLM read and sampled, judged and
scored like the environment's episodes.
"""

from agentic_opd.gateway.gateway_session import GatewaySession

__all__ = ["GatewaySession"]
