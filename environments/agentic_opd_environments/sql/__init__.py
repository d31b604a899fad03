"""The SQL world: questions over small SQLite databases, answered by a query and judged on hidden databases."""
