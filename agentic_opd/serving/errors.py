"""The error with which a route of the plugin refuses a request."""


class RouteError(Exception):
    """The request is refused with a 4xx `status`; `field` names the wrong field, `message` the reason.

    This class is not in the package's error tree, because the plugin runs without the rest of the package.
    """

    def __init__(self, field: str | None, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.message, self.status = field, message, status
