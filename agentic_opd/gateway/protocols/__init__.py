"""The protocols that the gateway speaks: one file each, and one line here.

Each translates between its clients' JSON and the same conversation: `request.Request` in, `exchange.Begun`,
`choice.Piece` and `choice.Finished` out.
"""

from agentic_opd.gateway.protocols.base import WireProtocol
from agentic_opd.gateway.protocols.chat import ChatCompletions
from agentic_opd.gateway.protocols.messages import AnthropicMessages
from agentic_opd.gateway.protocols.responses import OpenAIResponses

PROTOCOLS: tuple[WireProtocol, ...] = (ChatCompletions(), OpenAIResponses(), AnthropicMessages())
