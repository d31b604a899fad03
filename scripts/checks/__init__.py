"""Comparisons: with other programs, with committed files, and of both ends of a push."""
