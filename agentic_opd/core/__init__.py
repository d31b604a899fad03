"""What every room stands on: the types that cross the flow, the errors, HTTP clients, text, and the console.

In: nothing of this package. Out: names that any room may import.
"""
