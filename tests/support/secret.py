"""The secret of the jobs that tests play, and both ends of a connection that knows it."""

from __future__ import annotations

import socket
from pathlib import Path

from windtunnel.base import handshake
from windtunnel.base.keys import Keys
from windtunnel.base.wire import Secured
from windtunnel.training.checkpoint.live.memory import messages

KEYS = Keys(b"a secret of the tests")


def memory(address: str) -> socket.socket:
    """A peer's connection to a memory service."""
    return handshake.connect(address, 5.0, KEYS, messages.service(address))


def admitted(listener: socket.socket, service: str, keys: Keys = KEYS) -> Secured:
    """The next connection, accepted as ``service`` does."""
    sock = Secured(fileno=listener.accept()[0].detach())
    handshake.admit(sock, keys, (service,))
    return sock


def kept(folder: Path) -> str:
    """A file with the secret."""
    KEYS.write(folder / "secret")
    return str(folder / "secret")
