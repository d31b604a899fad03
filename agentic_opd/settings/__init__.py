"""Command lines and YAML files -> settings; one error lists every invalid setting.

In: settings models of other subpackages, a command line and a file. Out: validated settings, and help.
"""
