"""A rank's side of the memory service of its host.

Slots are files that the rank maps and fills by itself; the service is told when one is full. Any thread may
use a `LocalMemory`, so one may wait for a commit while another saves.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from windtunnel.base import handshake, remote
from windtunnel.base.keys import Keys
from windtunnel.base.tls import Certificates
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import messages
from windtunnel.training.checkpoint.live.memory.messages import ERRORS, Caller, Ranks, Reservation
from windtunnel.training.checkpoint.live.memory.state import Board
from windtunnel.training.checkpoint.live.slot import CopyError, SlotFile
from windtunnel.training.checkpoint.model import Copy

LONGEST = 600.0
"""Seconds in which slots are made, a copy for storage is, or a commit is waited for."""

CONNECT = 5.0
"""Seconds until a peer's listener answers."""


class LocalMemory:
    """``path``: "unix:/..." of the service. ``timeout``: seconds that it may take to answer.

    Every method raises OSError where the service is gone or does not answer, and `StaleGeneration` where it
    is in another generation than this rank.
    """

    def __init__(self, path: str, rank: int, generation: int, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._caller = Caller(rank, generation)
        self._service = remote.Blocking(Ranks, path, errors=ERRORS, timeout=timeout)
        self._patient = remote.Blocking(Ranks, path, errors=ERRORS, timeout=LONGEST)
        welcome = self._service.hello(self._caller)
        certificates = Certificates.load(welcome.tls) if welcome.tls else None
        # Peers want to see that we know it.
        self._keys = Keys(bytes.fromhex(welcome.secret), certificates)
        self._board = Board(Path(welcome.board))
        self.needs = ""

    def reserve(self, reservation: Reservation, layout: bytes) -> list[SlotFile]:
        """Slots for a shard, here and with those who hold its copies; again for a larger one. What was
        complete in them still is.

        Raises:
            UserError: it does not fit into this host's memory or a holder's; with the sum.
        """
        reserved = self._patient.reserve(self._caller, reservation, layout)
        self.needs = reserved.needs
        return [SlotFile.open(Path(path)) for path in reserved.paths]

    def saved(self, shard: str, slot: int, step: int) -> int:
        """Slot number ``slot`` of ``shard`` holds ``step``: it is sent to its holders.

        If the slot was not completed the service makes the checksum. Returns the newest committed step.

        Raises:
            CopyError: it does not hold that step.
        """
        return int(self._service.saved(self._caller, shard, slot, step))

    def restored(self, step: int, course: int) -> None:
        """All ranks go on from ``step`` (-1: from the beginning), for the time ``course`` in this generation.
        It counts as committed when it has been `saved` again by all: whoever holds a copy already is sent
        nothing."""
        self._service.restored(self._caller, step, course)

    def committed(self) -> int:
        """The newest step that is committed in this generation, -1 for none. Does not ask the service."""
        return self._board.read()

    def wait_committed(self, step: int, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until ``step`` or a later one is committed; whether it is. False
        also when the generation ends."""
        service = self._service if timeout < self._timeout / 2 else self._patient
        return bool(service.wait(self._caller, step, timeout))

    def open_window(self, seconds: float) -> None:
        """The network is idle, and will be for so long."""
        self._service.window(self._caller, time.monotonic() + seconds)

    def close_window(self) -> None:
        """The network is in use."""
        self._service.window(self._caller, 0.0)

    def flush(self) -> None:
        """What is still to be sent goes now, until a window is opened or closed again. Does not wait."""
        self._service.window(self._caller, float("inf"))

    def copies(self) -> list[Copy]:
        """The complete copies in this host's memory, its own and those it holds."""
        return list(self._service.copies())

    def fetch(
        self, place: int | str | None, shard: str, step: int, into: memoryview, *, world: int | None = None
    ) -> str:
        """A copy into ``into``, which is as long as the copy; its checksum, verified.

        ``place``: who holds it, a place, an address ("host:port"), or None for this host. ``world``: of the
        job that saved it, where that matters.

        Raises:
            CopyError: it is missing, torn, of another length, or not what its checksum says.
        """
        where = place if isinstance(place, str) else self._service.locate(shard, step, world, place)
        if where.startswith("/"):
            return slots.load(Path(where), into, step=step).checksum
        with self._peer(where) as sock:
            return messages.read_copy(sock, shard, step, world, into)

    def layout(self, digest: str) -> bytes:
        """The layout with this digest, from this host or whoever has it.

        Raises:
            CopyError: nobody has it.
        """
        with contextlib.suppress(CopyError):
            return bytes(self._service.layout(digest))
        for address in self._service.addresses():
            with contextlib.suppress(OSError, CopyError), self._peer(address) as sock:
                return messages.layout(sock, digest)
        raise CopyError(f"no host has the layout {digest}")

    def traffic(self) -> dict[int, tuple[int, int]]:
        """By step: bytes of this host's shards that were sent, and how many of them within windows."""
        return {step: (sent, inside) for step, sent, inside in self._service.traffic()}

    def persist(self, step: int, url: str, keep: int = 0) -> None:
        """Have this rank's shards of ``step``, which it has saved, written to storage once it is committed;
        when it is whole there, all but the newest ``keep`` steps go (0: none). Waits for a copy to be made in
        memory, not for storage."""
        self._patient.persist(self._caller, step, url, keep)

    def close(self) -> None:
        """End the connections. Slots stay mapped until they are closed."""
        self._service.close()
        self._patient.close()
        self._board.close()

    def _peer(self, address: str) -> socket.socket:
        wait = min(CONNECT, self._timeout)
        sock = handshake.connect(address, wait, self._keys, messages.service(address))
        sock.settimeout(self._timeout)
        return sock
