"""Types of settings that several rooms share."""

from typing import Annotated

from pydantic import Field

Url = Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
