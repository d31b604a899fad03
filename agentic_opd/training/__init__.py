"""Losses on the distillation arrays, and a small reference trainer (torch; extra `[train]`).

In: batches of scored groups. Out: gradient steps, checkpoints, and new weights in the running vLLM servers.
"""
