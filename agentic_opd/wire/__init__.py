"""Scored groups: typed records, conversion to and from wire JSON, counts and checks.

In: finished episodes, or JSON of any origin. Out: groups, or a list of problems. See docs/wire_format.md.
"""
