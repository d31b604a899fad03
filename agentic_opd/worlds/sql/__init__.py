"""The SQL world: questions over small SQLite databases, answered by a query that hidden databases judge."""
