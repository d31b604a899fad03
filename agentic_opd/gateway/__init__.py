"""An OpenAI-compatible server before the policy's vLLM servers that records live conversations as scored groups.

In: chat requests of any agent. Out: the policy's completions in OpenAI's format and, after a session ends, a scored
group. The group holds exactly the token ids that vLLM read and sampled, judged and scored like the environment's
episodes.
"""
