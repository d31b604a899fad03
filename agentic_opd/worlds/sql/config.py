"""Settings of the SQL world: the source of its questions."""

from typing import ClassVar

from pydantic import BaseModel, Field, model_validator

from agentic_opd.settings.fields import WORLD


class SqlConfig(BaseModel):
    """Files in the format of Spider and BIRD."""

    setting_group: ClassVar = WORLD

    sql_file: str | None = Field(
        default=None,
        description="sql: JSON file of questions in the format of Spider or BIRD.",
    )
    sql_databases: str | None = Field(
        default=None,
        description="sql: folder with DB_ID/DB_ID.sqlite for sql_file. Further .sqlite files beside a database are "
        "its hidden databases; without such files, they are copies of it with other values and rows (docs/sql.md).",
    )

    @model_validator(mode="after")
    def _check_files(self) -> "SqlConfig":
        if (self.sql_file is None) != (self.sql_databases is None):
            raise ValueError("sql_file and sql_databases belong together: set both or neither")
        return self
