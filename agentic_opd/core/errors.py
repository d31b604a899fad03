"""All errors that this package raises deliberately.

Each message names the object, the value received, the value expected, and the remedy.
"""


class OPDError(Exception):
    """Root of the package's errors. Commands print its message without a traceback."""


class ConfigError(OPDError):
    """A setting, or a combination of settings, is wrong."""


class DatasetError(OPDError):
    """Tasks cannot be loaded, or a row lacks a field."""


class SandboxError(OPDError):
    """The requested isolation does not work on this machine."""


class WorldError(OPDError):
    """A hook of a custom world raised, or returned an invalid value; the message names the hook."""


class HintSourceError(OPDError):
    """A hint source of a user's file raised, or returned an invalid value; the message names the source."""


class AgentError(OPDError):
    """The program of `agent.command` produced nothing to learn from."""


class RendererError(OPDError):
    """The chat template cannot be rendered, parsed, or extended token by token."""


class RewrittenError(RendererError):
    """The chat template changes the tokens of earlier messages when new ones follow, so a new sequence starts."""


class ServerError(OPDError):
    """A server (policy, judge or teacher) failed a request."""


class ServerUnreachableError(ServerError):
    """No usable answer came within the retry window: refused, reset, timed out, or 5xx."""


class NotSentError(ServerUnreachableError):
    """The request needs a connection that is open already, and there is none: the server has not received it."""


class ServerTooSlowError(ServerError):
    """The server runs, but did not answer within the time limit of a request; the message names the settings."""


class ServerRequestError(ServerError):
    """The server refused the request (4xx); a retry would be refused too.

    `status` is the HTTP status code, `answer` the text of the response.
    """

    def __init__(self, message: str, status: int, answer: str = "") -> None:
        super().__init__(message)
        self.status, self.answer = status, answer


class ServerMemoryError(ServerError):
    """A server has no memory for new weights. It would have none for the same request again."""


class BrokenWeightsError(ServerError):
    """A server's weights are partly those of a push that failed: it computes nothing until whole ones are loaded."""


class EndpointRefusedError(ServerRequestError):
    """The server would refuse every request: its key, its account or its model is at fault."""


class RateLimitError(ServerError):
    """The server answers no request at present, because of its rate limit.

    `pause_s` is the number of seconds that it wants to pass before the next request; None if it names none.
    """

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class ServerMismatchError(ServerError):
    """The server runs, but its model, caps or plugin do not fit the settings."""


class NoGroupsError(OPDError):
    """An environment gives no groups to learn from; the message says why, as far as it is known."""


class AlignmentError(OPDError):
    """Lengths or ids that must agree differ."""


class WireError(OPDError):
    """JSON is not a scored group; the message names the field, the value received and the value expected."""


class TrainingError(OPDError):
    """Losses or gradients are not finite in consecutive steps; the weights are those before the first such step."""


class RolledBackError(OPDError):
    """The brake found pushed weights worse than earlier ones, which are served again; training has ended."""


class OutputError(OPDError):
    """A file cannot be written, read back, or continued."""


class PlaceError(OutputError):
    """The file or folder of a setting or an argument cannot be used; raised before any work is done."""
