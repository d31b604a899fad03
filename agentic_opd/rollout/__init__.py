"""Rollouts, whatever the world and the policy: a task becomes an episode of sampled turns, tool results and a verdict.

In: a task, a policy and a world. Out: an `Episode`, every token of it as it was sampled.
"""
