"""The demo policy of the SQL world: what it is taught, and how it is measured."""
