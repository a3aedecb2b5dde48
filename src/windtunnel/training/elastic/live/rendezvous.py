"""How a host that is not emulated learns what the job is: it calls the launcher, which serves that (`rpc`).

Both show that they know the job's secret. The answer is the `AgentConfig` that the host is to use; its own
address is the one from which it reaches the launcher, unless it knows better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from windtunnel.base.errors import HostError, UserError
from windtunnel.base.keys import Keys
from windtunnel.base.remote import RemoteLink
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.linux.hosts import own_address
from windtunnel.training.elastic.live.agent.config import AgentConfig

PATIENCE = 10.0


class Jobs(Protocol):
    """What a launcher serves."""

    def config(self) -> dict[str, Any]:
        """`AgentConfig.plain`; the names of files of secret and certificates are to be set by the host."""


class Offer:
    """Serves at ``address`` ("host:port") what ``config()`` makes."""

    def __init__(self, address: str, keys: Keys, config: Callable[[], AgentConfig]) -> None:
        split(address, "--listen")
        self._config = config
        try:
            self._server = RpcServer(RpcService.of(Jobs, self), f"tcp:{address}", keys)
        except UserError as error:
            raise UserError(f"--listen {address}: {error}") from error
        self.address = self._server.address.removeprefix("tcp:")
        self.close = self._server.close

    def config(self) -> dict[str, Any]:
        """As `Jobs`."""
        return self._config().plain()


def ask(launcher: str, keys: Keys, address: str = "", domain: str = "") -> AgentConfig:
    """What the ``launcher`` wants a host to do; ``secret`` and ``tls`` are to be set to files of this host.

    Raises:
        UserError: nobody listens there, or somebody else, or the secret is not that of the job, or one side
            does not take the other's certificate.
    """
    host, _ = split(launcher, "host")
    link = RemoteLink(f"tcp:{launcher}", keys=keys, timeout=PATIENCE)
    try:
        plain = link.call(Jobs, "config", "")
    except PermissionError as error:
        raise UserError(f"host {launcher}: {error}; give this host the secret of that job") from error
    except (OSError, HostError) as error:
        raise UserError(
            f"host {launcher}: no launcher with --external-hosts answers there ({error})"
        ) from error
    finally:
        link.close()
    config = AgentConfig.of(plain)
    return replace(
        config,
        address=address or own_address(host),
        domain=domain,
        forkserver=None,
        memory_root=f"{config.memory_root}-host",
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
