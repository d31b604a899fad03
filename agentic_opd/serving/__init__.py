"""The vLLM endpoint plugin: exact generation, scoring of given tokens, and loading weights, in an unmodified vLLM.

In: HTTP requests to a vLLM server. Out: sampled ids and logprobs. Imports vLLM and no other subpackage of this package.
"""
