"""Ports for programs that are told theirs: below those that the system gives to connections, so that none of
these takes one before the program does."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

LOWEST = 10_000


def free_port(in_a_row: int = 1) -> int:
    """A port that nobody listens on here; the first of so many."""
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - in_a_row
    while True:
        port = LOWEST + secrets.randbelow(highest - LOWEST)
        if all(_free(port + more) for more in range(in_a_row)):
            return port


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
