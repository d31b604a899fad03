"""Settings of the SQL world: the source of its questions."""

from typing import ClassVar

from pydantic import BaseModel, Field, model_validator

from agentic_opd.settings.fields import TASKS


class SqlConfig(BaseModel):
    """Generated questions, or files in the format of Spider and BIRD."""

    setting_group: ClassVar = TASKS

    sql_tasks: int = Field(default=2000, ge=1, description="sql: questions to generate for training.")
    sql_eval_tasks: int = Field(
        default=200,
        ge=0,
        description="sql: questions to generate for evaluation, over databases and combinations that training never "
        "has.",
    )
    sql_seed: int = Field(default=0, ge=0, description="sql: seed of the generated questions.")
    sql_file: str | None = Field(
        default=None,
        description="sql: a JSON file of questions as Spider or BIRD writes it, in place of generated ones.",
    )
    sql_databases: str | None = Field(
        default=None,
        description="sql: the folder with DB_ID/DB_ID.sqlite for sql_file. Further .sqlite files beside one are hidden "
        "databases; where there are none, hidden ones are made of parts of its rows.",
    )

    @model_validator(mode="after")
    def _check_files(self) -> "SqlConfig":
        if (self.sql_file is None) != (self.sql_databases is None):
            raise ValueError("sql_file and sql_databases belong together: set both or neither")
        return self
