"""A server that streams the same words to every request of the three protocols, one every few milliseconds.

A word is sent at a time that counts from the answer's beginning, so that a late one makes no later one late.

python -m bench.scripted_upstream PORT
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from agentic_opd.core.processes import end_of
from bench.local_server import ServerFailedError, child_process, free_port

WORDS = [f"word{number} " for number in range(48)]
PAUSE_S = 0.01
Event = dict[str, Any]


def chat(words: Sequence[str]) -> list[Event]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    deltas: list[tuple[Event, str | None]] = [({"content": word}, None) for word in words]
    return [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in [*deltas, ({}, "stop")]
    ]


def messages(words: Sequence[str]) -> list[Event]:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "scripted", "content": []}
    usage = {"input_tokens": 1, "output_tokens": len(words)}
    return [
        {"type": "message_start", "message": {**head, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in words),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    ]


def responses(words: Sequence[str]) -> list[Event]:
    part = {"type": "output_text", "text": "".join(words), "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "content": [part]}
    response = {"id": "resp_1", "object": "response", "model": "scripted", "status": "completed", "output": [item]}
    position = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    return [
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        *({"type": "response.output_text.delta", **position, "delta": word} for word in words),
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": response},
    ]


def streamed(events: Callable[[Sequence[str]], list[Event]]) -> Callable[[web.Request], Any]:
    """Return a handler that streams the events of `WORDS`."""
    written = [f"event: {event.get('type', 'message')}\ndata: {json.dumps(event)}\n\n" for event in events(WORDS)]

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        begin = time.monotonic()
        for number, text in enumerate(written, 1):
            await asyncio.sleep(begin + number * PAUSE_S - time.monotonic())
            await stream.write(text.encode())
        return stream

    return answer


@contextmanager
def scripted_upstream(folder: Path) -> Generator[tuple[str, int]]:
    """Serve in a process of its own while the body runs; its address and its id. The log is in `folder`.

    Raises:
        ServerFailedError: it did not start.
    """
    port, log = free_port(), folder / "upstream.log"
    command = (sys.executable, "-m", "bench.scripted_upstream", str(port))
    with child_process(command, log, {}, Path(__file__).parents[1]) as process:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None:
                raise ServerFailedError(f"the upstream did not start:\n{end_of(log)}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid


def main(argv: Sequence[str]) -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", streamed(chat))
    app.router.add_post("/v1/messages", streamed(messages))
    app.router.add_post("/v1/responses", streamed(responses))
    web.run_app(app, host="127.0.0.1", port=int(argv[0]), print=None, access_log=None)


if __name__ == "__main__":
    main(sys.argv[1:])
