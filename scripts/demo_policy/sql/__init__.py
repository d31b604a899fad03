"""The demo policy of the SQL world: its training data and its measurement."""
