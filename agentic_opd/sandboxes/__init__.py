"""Where model-written code runs: one protocol, four backends, their limits and what a killed run leaves behind.

In: a shell command and its input. Out: how it ended, within the limits of the settings.
"""
