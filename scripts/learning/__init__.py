"""The experiment of scripts/learn: does the demo policy learn from its hints?"""
