"""Settings of worlds that other packages bring, until each world declares its own."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, Field, model_validator

from agentic_opd.settings.fields import FIRST, WORLD


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


class HarborConfig(BaseModel):
    """Where Harbor tasks are, and what their files leave open."""

    setting_group: ClassVar = WORLD

    tasks_dir: Annotated[Path | None, FIRST] = Field(
        default=None,
        description="harbor: a task in Harbor's format (a folder with task.toml), or a folder with tasks at any depth "
        "(docs/harbor.md).",
    )
    tasks_network: bool = Field(
        default=False,
        description="harbor: network of the tasks whose task.toml has neither network_mode nor allow_internet.",
    )
    tasks_variables: dict[str, str] = Field(
        default_factory=dict,
        description="harbor: values of ${NAME} in the env tables of task.toml. The variables of this process are never "
        "read.",
    )
    tasks_keep_processes: bool = Field(
        default=False,
        description="harbor: let the agent's processes run on while the tests run, for tasks about servers. Off: they "
        "are killed before, since such a process can forge the verdict.",
    )
