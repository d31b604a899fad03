"""The scored group as it is written and sent: typed records, to the wire and back, counts, and checks.

In: finished episodes, or JSON of any origin. Out: groups, or what is wrong with them. docs/wire_format.md.
"""
