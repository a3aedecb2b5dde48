"""How a host that is not ours learns what the job is: it asks the launcher, which listens for it.

Both show that they know the job's secret (`base.handshake`). Then one frame each way: ``{op: "job"}``, and
the `AgentConfig` that the host is to use. Its own address is the one that the connection came from, unless it
knows better.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from windtunnel.base import handshake, schema, wire
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener
from windtunnel.base.tls import Untrusted
from windtunnel.training.elastic.live.agent.config import AgentConfig
from windtunnel.training.elastic.live.messages import TO_OFFER
from windtunnel.training.elastic.model import OFFER

PATIENCE = 10.0


class Offer:
    """Listens at ``address`` ("host:port") and answers with what ``config()`` makes."""

    def __init__(self, address: str, keys: Keys, config: Callable[[], AgentConfig]) -> None:
        host, port = split(address, "--listen")
        self._config = config
        try:
            sock = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise UserError(f"--listen {address}: {error.strerror}") from error
        self.address = f"{host}:{sock.getsockname()[1]}"
        self._listener = Listener(sock, self._serve, keys=keys, services=lambda: (OFFER,), name="offer")

    def close(self) -> None:
        self._listener.close()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE)
        message, following = wire.receive(sock)
        wire.skip(sock, following)
        schema.require(message, TO_OFFER)
        wire.send(sock, {"op": "job", "config": self._config().plain()})


def ask(launcher: str, keys: Keys, address: str = "", domain: str = "") -> AgentConfig:
    """What the ``launcher`` wants a host to do; ``secret`` and ``tls`` are to be set to files of this host.

    Raises:
        UserError: nobody listens there, or somebody else, or the secret is not that of the job, or one side
            does not take the other's certificate.
    """
    split(launcher, "host")
    try:
        with handshake.connect(launcher, PATIENCE, keys, OFFER) as sock:
            wire.send(sock, {"op": "job"})
            plain = wire.receive(sock)[0]["config"]
            here = sock.getsockname()[0]
    except handshake.Refused as error:
        raise UserError(f"host {launcher}: {error}; give this host the secret of that job") from error
    except Untrusted as error:
        raise UserError(f"host {launcher}: {error}") from error
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
