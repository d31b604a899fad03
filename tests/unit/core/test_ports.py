"""Ports for servers that are started later."""

import socket
from pathlib import Path

from agentic_opd.core.ports import free_port


def test_a_port_is_free_and_the_kernel_gives_it_to_no_connection() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(50):
        port = free_port()
        assert port < max(first, 20_000)
        assert first < 20_000 or not first <= port <= last
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
