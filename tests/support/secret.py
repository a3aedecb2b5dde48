"""The secret of the jobs that tests play, and both ends of a connection that knows it."""

from __future__ import annotations

import socket
from pathlib import Path

from windtunnel.base import handshake
from windtunnel.base.keys import Keys
from windtunnel.base.wire import Secured
from windtunnel.training.checkpoint.live.memory import transfer
from windtunnel.training.elastic.model import SUPERVISOR

KEYS = Keys(b"a secret of the tests")


def memory(address: str) -> socket.socket:
    """A peer's connection to a memory service."""
    return handshake.connect(address, 5.0, KEYS, transfer.service(address))


def supervisor(address: str, timeout: float = 10.0) -> socket.socket:
    """An agent's connection to a supervisor."""
    return handshake.connect(address, timeout, KEYS, SUPERVISOR)


def admitted(listener: socket.socket, service: str, keys: Keys = KEYS) -> Secured:
    """The next connection, accepted as ``service`` does."""
    sock = Secured(fileno=listener.accept()[0].detach())
    handshake.admit(sock, keys, (service,))
    return sock


def kept(folder: Path) -> str:
    """A file with the secret."""
    KEYS.write(folder / "secret")
    return str(folder / "secret")
