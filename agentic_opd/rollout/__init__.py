"""Rollouts for any world and policy: a task becomes an episode of sampled turns, tool results and a verdict.

In: a task, a policy and a world. Out: an `Episode` with the tokens exactly as sampled.
"""
