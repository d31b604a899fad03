"""Flags and YAML files -> settings, with every wrong one named at once.

In: the models of settings that other rooms declare, a command line and a file. Out: validated settings, and help.
"""
