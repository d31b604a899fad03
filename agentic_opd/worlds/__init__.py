"""The environments that agents act in: one package per world with its tools, tasks and verifier, and custom worlds.

In: a task and the policy's tool calls. Out: tool results, and the verification of the final state.
"""
