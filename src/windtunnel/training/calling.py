"""A supervisor that listens at another address than the one before: the hosts that the log names are called.

The call goes to the memory service of each, whose address is in the log; so it reaches hosts that share no
storage with the launcher. It carries the supervisor's epoch: an agent that has heard a later one stays there.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from windtunnel.base import handshake
from windtunnel.base.keys import Keys
from windtunnel.base.schema import Check, count, fields, text
from windtunnel.training.checkpoint.live.memory import transfer
from windtunnel.training.elastic.model import MemberHost

CALL = "supervisor"
PATIENCE = 2.0
PAUSE = 0.2


def answer(follow: Callable[[str, int], None]) -> tuple[Check, transfer.Handler]:
    """What a call's fields are, and what a host's memory service does with it: ``follow(address, epoch)``."""

    def called(_: socket.socket, message: dict[str, Any], data: bytes) -> dict[str, Any]:
        follow(message["address"], message["epoch"])
        return {}

    return fields(address=text, epoch=count), called


def call(hosts: Iterable[MemberHost], address: str, epoch: int, keys: Keys, over: threading.Event) -> None:
    """Tell ``hosts`` that the supervisor of ``epoch`` listens at ``address``, each in a thread that tries
    until it was heard or it is ``over``."""

    def reach(host: MemberHost) -> None:
        while not over.is_set():
            try:
                with handshake.connect(host.memory, PATIENCE, keys, transfer.service(host.memory)) as sock:
                    transfer.ask(sock, {"op": CALL, "address": address, "epoch": epoch})
                return
            except OSError:
                over.wait(PAUSE)

    for host in hosts:
        threading.Thread(target=reach, args=(host,), name="call", daemon=True).start()
