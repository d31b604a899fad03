"""Distillation: an episode becomes hindsight hints, teacher rows and distillation arrays."""
