"""Losses that use the distillation arrays as they are meant, and a small reference trainer (torch; extra `[train]`).

In: batches of scored groups. Out: gradient steps, checkpoints, and new weights in the running vLLM servers.
"""
