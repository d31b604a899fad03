"""Scored groups: types that are the form of the JSON, files, checks and counts.

In: finished episodes, or JSON of any origin. Out: groups, or a list of problems. See docs/wire_format.md.
"""
