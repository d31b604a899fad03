"""Distillation: an episode becomes hindsight hints, teacher rows and distillation arrays.

In: a verified episode. Out: its arrays, one record a turn, and what the metrics are made of.
"""
