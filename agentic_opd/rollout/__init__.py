"""Rollouts: a task becomes an episode of sampled turns, tool results and a verdict."""
