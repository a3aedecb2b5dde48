"""How a host that is not ours learns what the job is: it asks the launcher, which listens for it.

One frame each way: ``{op: "job"}``, and the `AgentConfig` that the host is to use. Its own address is the
one that the connection came from, unless it knows better.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from windtunnel.base import wire
from windtunnel.base.errors import UserError
from windtunnel.training.elastic.live.agent.config import AgentConfig

PATIENCE = 10.0


class Offer:
    """Listens at ``address`` ("host:port") and answers with what ``config()`` makes."""

    def __init__(self, address: str, config: Callable[[], AgentConfig]) -> None:
        host, port = split(address, "--listen")
        self._config = config
        try:
            self._listener = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise UserError(f"--listen {address}: {error.strerror}") from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="offer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.settimeout(PATIENCE)
                wire.receive(sock)
                wire.send(sock, {"op": "job", "config": asdict(self._config())})


def ask(launcher: str, address: str = "", domain: str = "") -> AgentConfig:
    """What the ``launcher`` wants a host to do.

    Raises:
        UserError: nobody listens there, or somebody else.
    """
    split(launcher, "host")
    try:
        with wire.connect(launcher, PATIENCE) as sock:
            wire.send(sock, {"op": "job"})
            plain = wire.receive(sock)[0]["config"]
            here = sock.getsockname()[0]
    except (OSError, KeyError) as error:
        raise UserError(
            f"host {launcher}: no launcher with --external-hosts answers there ({error})"
        ) from error
    config = AgentConfig.of(plain)
    root = f"{config.memory_root}-host"
    return replace(
        config, address=address or here, domain=domain, forkserver=None, memory_root=str(Path(root))
    )


def split(address: str, option: str) -> tuple[str, int]:
    """ "host:port" in its parts.

    Raises:
        UserError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UserError(f"{option} {address}: accepted is HOST:PORT")
    return host, int(port)
