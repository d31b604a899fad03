"""Distillation: episodes -> hindsight hints, teacher rows and distillation arrays.

In: a finished episode. Out: its arrays, one record per turn, and statistics for the metrics.
"""
