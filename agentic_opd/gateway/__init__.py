"""An OpenAI-compatible server before the policy's vLLM servers: conversations that happen become scored groups.

In: chat requests of any agent. Out: what the policy sampled, answered as OpenAI writes it; and, when a session is over,
a scored group of the very ids that vLLM read and sampled, judged and scored as the environment's episodes are.
"""
