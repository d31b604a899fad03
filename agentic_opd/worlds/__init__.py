"""What agents act in: one package a world, with its tools, tasks and verifier; and one's own, as a class.

In: a task and the policy's tool calls. Out: tool results, and a verdict on what was left behind.
"""
