"""Isolation of model-written code: one protocol, three backends, their limits, and the clean-up after killed runs.

In: a shell command and its input. Out: its result, within the limits of the settings.
"""
