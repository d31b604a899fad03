"""Ports of this machine for servers that are started later (I/O)."""

import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on.

    The kernel gives it to no outgoing connection either, so it is still free when a server has started, or starts
    again.
    """
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = SystemRandom().randrange(10_000, max(first_of_connections, 20_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
