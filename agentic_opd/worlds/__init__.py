"""The environments that agents act in: the coding world, custom worlds, and those of other packages.

In: a task and the policy's tool calls. Out: tool results, and the verification of the final state.
"""
