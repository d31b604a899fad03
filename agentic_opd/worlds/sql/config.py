"""Settings of the SQL world: the source of its questions."""

from typing import ClassVar

from pydantic import BaseModel, Field, model_validator

from agentic_opd.settings.fields import TASKS


class SqlConfig(BaseModel):
    """Generated questions, or files in the format of Spider and BIRD."""

    setting_group: ClassVar = TASKS

    sql_tasks: int = Field(default=2000, ge=1, description="sql: number of questions generated for training.")
    sql_eval_tasks: int = Field(
        default=200,
        ge=0,
        description="sql: number of questions generated for evaluation, over databases and combinations absent from "
        "training.",
    )
    sql_seed: int = Field(default=0, ge=0, description="sql: seed of the generated questions.")
    sql_file: str | None = Field(
        default=None,
        description="sql: JSON file of questions in the format of Spider or BIRD, in place of generated questions.",
    )
    sql_databases: str | None = Field(
        default=None,
        description="sql: folder with DB_ID/DB_ID.sqlite for sql_file. Further .sqlite files beside a database are "
        "its hidden databases; without such files, hidden databases are made from parts of its rows.",
    )

    @model_validator(mode="after")
    def _check_files(self) -> "SqlConfig":
        if (self.sql_file is None) != (self.sql_databases is None):
            raise ValueError("sql_file and sql_databases belong together: set both or neither")
        return self
