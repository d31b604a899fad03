"""Foundations of every subpackage: shared data types, errors, HTTP clients, text handling, and the console.

In: nothing else of this package. Out: names that any subpackage may import.
"""
