"""What commands that serve HTTP need around uvicorn: a port, and an end that signals call for."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from windtunnel.base.errors import UserError


class WebServer(uvicorn.Server):
    """uvicorn that leaves signals to others: after its own handlers it would end the process by them, two
    servers of one process would take them from each other, and the process may be somebody else's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end_on_signals(self) -> None:
        """SIGTERM and SIGINT let what is under way end, and then the server. Called within its loop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, setattr, self, "should_exit", True)


def listen(verb: str, host: str, port: int) -> socket.socket:
    """Where ``verb`` is asked; from now on uvicorn tells errors only.

    Raises:
        UserError: nobody may listen there.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(f"{verb}: {host}:{port} cannot be listened on ({error.strerror})") from error
