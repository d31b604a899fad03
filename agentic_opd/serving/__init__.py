"""The vLLM endpoint plugin: exact generation, scoring of given tokens, and new weights, in an unmodified vLLM.

In: HTTP requests to a vLLM server. Out: sampled ids, and logprobs. Imports vLLM, and of this package only its version.
"""
