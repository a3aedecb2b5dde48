"""What the fork server's children of a training run do in torch's name: get a trainer ready, serve a store.

The fork server names these functions and knows nothing of torch; a job without torch passes untouched.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from windtunnel.base.keys import Keys
from windtunnel.linux.forkserver_client import ForkServerClient
from windtunnel.linux.gate import ListeningGate
from windtunnel.training.elastic.live.store import BEHIND, LOOPBACK, serve, serve_own

MODULE = __name__
PREPARE, SERVE = f"{__name__}:prepare", f"{__name__}:serve_store"


def prepare() -> None:
    """A trainer's own number of threads (its server has one, since a pool must not exist when it forks),
    its generation's part of the store, and a DDP that sums alike whenever it is made."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if "torch.nn.parallel" in sys.modules:
        from windtunnel.training.elastic.live import exactness

        exactness.settle()
    if "torch.distributed.rendezvous" in sys.modules and "WINDTUNNEL_PREFIX" in os.environ:
        _prefix_store(os.environ["WINDTUNNEL_PREFIX"])


def _prefix_store(prefix: str) -> None:
    """Let ``env://`` of a script that does not use `elastic.run` meet under ``prefix``.

    torch takes an agent's store as it is, since torchrun makes a new one for every restart; ours serves all
    generations, and what an earlier one left in it would be taken for the peers' addresses.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    plain = rendezvous._create_c10d_store

    def create(*arguments: Any, **options: Any) -> Any:
        return PrefixStore(prefix, plain(*arguments, **options))

    rendezvous._create_c10d_store = create


def start_store(client: ForkServerClient, host: str, secret: str, tls: Sequence[str] = ()) -> tuple[str, int]:
    """A TCPStore in a process of its own, which outlives this one: the "host:port" where those are admitted
    to it who know the job's secret (see `Keys.of_job`), and its process id.

    Raises:
        OSError: the address cannot be listened on, or there is no fork server.
    """
    with socket.create_server((host, 0), backlog=512) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        arguments = {"address": address, "secret": secret, "tls": list(tls)}
        request = {"call": SERVE, "arguments": arguments}
        pid = client.started(request, (listener.fileno(),), stays=True)
    return address, pid


def serve_store(arguments: dict[str, Any], fds: list[int]) -> None:
    """Serve a TCPStore behind a socket that listens already, until killed."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    own, gate = _store_listeners()  # by itself it listens everywhere, for everybody
    port = own.getsockname()[1]
    own_client = serve_own(own, gate)
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=gate.listener.dup().detach(),
    )
    keys = Keys.of_job(arguments["secret"], arguments["tls"])
    listener = serve(socket.socket(fileno=fds[0]), arguments["address"], gate, keys)
    while all((store, own_client, listener)):  # they are held
        signal.pause()


def _store_listeners() -> tuple[socket.socket, ListeningGate]:
    """A listener on the loopback, and a gate behind it at the same port: one that nothing else has there, and
    connections that have ended there keep theirs for a minute."""
    while True:
        own = socket.create_server((LOOPBACK, 0))
        try:
            return own, ListeningGate((BEHIND, own.getsockname()[1]))
        except OSError as error:
            own.close()
            if error.errno != errno.EADDRINUSE:
                raise
