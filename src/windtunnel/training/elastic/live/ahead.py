"""Connections to the store, made before they are needed.

torch looks up the *name* of both ends of each connection of a TCPStore, on both sides, for its messages: a
question to the DNS, which takes 5 s where the answer gets lost. A regrouping must not wait for that. So once
a group is formed, a thread connects the client for the next one.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from windtunnel.training.elastic.live.sockets import Recorder, appeared, ports, sockets_now

# A lost answer costs 1 s and not 5 s where we have to wait for it after all. Read by the C library when it
# first looks something up.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

_lock = threading.Lock()
_ready: dict[str, tuple[TCPStore, Recorder]] = {}  # by "host:port"
_at_work: set[str] = set()


def connect(address: str, timeout: float) -> tuple[TCPStore, Recorder]:
    """A client of the store at "host:port", and its socket.

    Its constructor must be left alone: torch tries again and again, up to ``timeout`` s, if the socket is
    shut meanwhile. So the socket is looked for when it is over.

    Raises:
        RuntimeError: there is none, or it does not answer within ``timeout`` s.
    """
    host, _, port = address.rpartition(":")
    before = sockets_now()
    store = TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    new = appeared(sockets_now(), before)
    recorder = Recorder()
    recorder.adopt({fd: inode for fd, inode in new.items() if ports(fd)[2] == int(port)})
    return store, recorder


def prepare(address: str, timeout: float) -> None:
    """Connect in the background. Returns at once; clients of other stores are dropped."""
    with _lock:
        for other in [known for known in _ready if known != address]:
            del _ready[other]
        if address in _ready or address in _at_work:
            return
        _at_work.add(address)
    threading.Thread(target=_work, args=(address, timeout), name="windtunnel-ahead", daemon=True).start()


def take(address: str) -> tuple[TCPStore, Recorder] | None:
    """The client that was prepared, and its socket; None if there is none (yet)."""
    with _lock:
        return _ready.pop(address, None)


def _work(address: str, timeout: float) -> None:
    made = None
    try:
        made = connect(address, timeout)
    except RuntimeError:
        pass  # the store is gone; who needs one will be told
    finally:
        with _lock:
            _at_work.discard(address)
            if made is not None:
                _ready[address] = made
