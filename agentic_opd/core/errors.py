"""Every error that this package raises on purpose.

    OPDError
    ├── ConfigError            a setting, or a combination of settings, is wrong
    ├── DatasetError           tasks cannot be loaded, or a row lacks a field
    ├── SandboxError           the isolation asked for does not work on this machine
    ├── WorldError             a hook of a world of one's own raised, or gave what it may not give
    ├── AgentError             the program of agent_command did nothing that can be learned from
    ├── RendererError          the chat template cannot be rendered or extended token by token
    │   └── RewrittenError           it writes earlier messages otherwise when new ones follow
    ├── ServerError            a server was asked and did not do its part
    │   ├── ServerUnreachableError   no usable answer within the retry window
    │   ├── ServerTooSlowError       it runs, and answered nothing for as long as a request may take
    │   ├── ServerRequestError       it refused the request (4xx)
    │   └── ServerMismatchError      it runs, but its model, caps or plugin do not fit the settings
    ├── AlignmentError         lengths or ids that must agree do not; the message holds both
    ├── WireError              JSON is not a scored group
    ├── TrainingError          losses or gradients are not finite, step after step
    └── OutputError            a file cannot be written, read back, or continued
        └── PlaceError           found at the start: the file or folder that a setting or an argument names

A message names the thing, the value got, the value expected, and what to do.
"""


class OPDError(Exception):
    """Root of the package's errors; a command line shows its message without a traceback."""


class ConfigError(OPDError):
    """A setting, or a combination of settings, is wrong."""


class DatasetError(OPDError):
    """Tasks cannot be loaded, or a row lacks a field."""


class SandboxError(OPDError):
    """The isolation asked for does not work on this machine."""


class WorldError(OPDError):
    """A hook of a world of one's own raised, or gave what it may not give; the message names the hook."""


class AgentError(OPDError):
    """The program of `agent_command` did nothing that can be learned from."""


class RendererError(OPDError):
    """The chat template cannot be rendered, parsed, or extended token by token."""


class RewrittenError(RendererError):
    """The chat template writes earlier messages otherwise when new ones follow: the next prompt is another sequence."""


class ServerError(OPDError):
    """A server (policy, judge or teacher) was asked and did not do its part."""


class ServerUnreachableError(ServerError):
    """No usable answer came within the retry window: refused, reset, timed out, or 5xx."""


class ServerTooSlowError(ServerError):
    """The server runs, and answered nothing for as long as a request may take; the message names the settings."""


class ServerRequestError(ServerError):
    """The server refused the request (4xx); asking again would change nothing.

    `status` is the HTTP status code, `answer` the text that the server refused it with.
    """

    def __init__(self, message: str, status: int, answer: str = "") -> None:
        super().__init__(message)
        self.status, self.answer = status, answer


class ServerMismatchError(ServerError):
    """The server runs, but its model, caps or plugin do not fit the settings."""


class AlignmentError(OPDError):
    """Lengths or ids that must agree do not."""


class WireError(OPDError):
    """JSON of any origin is not a scored group; the message says which field, what came and what was expected."""


class TrainingError(OPDError):
    """Losses or gradients are not finite, step after step; the weights are those before the first of these steps."""


class OutputError(OPDError):
    """A file cannot be written, read back, or continued."""


class PlaceError(OutputError):
    """The file or folder that a setting or an argument names cannot be used; found before anything is done."""
