"""A rank's side of the memory service of its host.

Slots are files that the rank maps and fills by itself; the service is told when one is full. Every thread
that uses a `LocalMemory` has a connection of its own, so one may wait for a commit while another saves;
windows go on one that all share, in order.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from windtunnel.base import handshake, wire
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.plain import from_plain
from windtunnel.base.tls import Certificates
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import transfer
from windtunnel.training.checkpoint.live.memory.replicate import Pace
from windtunnel.training.checkpoint.live.memory.state import Board
from windtunnel.training.checkpoint.live.slot import CopyError, Slot
from windtunnel.training.checkpoint.model import Copy, Health

RESERVATION = 5e7
"""Bytes/s at which slots are made at the very least; `LocalMemory.reserve` waits that long."""

COPYING = 600.0
"""Seconds in which a copy for storage is made; `LocalMemory.persist` waits that long."""

CONNECT = 5.0
"""Seconds until a peer's listener answers."""


class StaleGeneration(Exception):
    """The service knows a newer membership than this rank, which will hear of it, too."""


class LocalMemory:
    """``path``: "unix:/..." of the service. ``timeout``: seconds that it may take to answer.

    Every method raises OSError where the service is gone or does not answer, and `StaleGeneration` where it
    is in another generation than this rank.
    """

    def __init__(self, path: str, rank: int, generation: int, timeout: float = 30.0) -> None:
        self._path, self._timeout = path, timeout
        self._about = {"rank": rank, "generation": generation}
        self._local = threading.local()
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._windows: socket.socket | None = None
        try:
            hello = self._ask("hello")
            certificates = Certificates.load(hello["tls"]) if hello["tls"] else None
            # Peers want to see that we know it.
            self._keys = Keys(bytes.fromhex(hello["secret"]), certificates)
            self._board = Board(Path(hello["board"]))
        except BaseException:
            self._hang_up()
            raise

    def reserve(
        self,
        layout: bytes,
        nbytes: Mapping[str, int],
        *,
        slots: int = 2,
        copies: int = 2,
        placement: Mapping[str, Any] | None = None,
        mode: str = "concurrent",
        chunk: int = 4 << 20,
        bandwidth: float | None = None,
        startup: float = 0.0,
    ) -> dict[str, list[Slot]]:
        """Slots for shards of ``nbytes`` bytes, here and with those who hold their copies.

        May be called again, for more shards or larger ones. ``copies``: with the one here; 1 for shards that
        are not sent anywhere. ``placement``: the arguments ``kind`` and ``domains`` of
        `policy.placement.place`. ``mode``: "blocking", "concurrent", or "idle": sent only while windows are
        open, in chunks of at most
        ``chunk`` bytes that take ``startup`` seconds and their bytes over ``bandwidth`` (bytes/s; None:
        measured). What was complete in the slots still is.

        Raises:
            UserError: it does not fit into this host's memory or a holder's; with the sum.
        """
        if mode not in ("blocking", "concurrent", "idle"):
            raise UserError(f"mode is {mode!r}; blocking, concurrent or idle is accepted")
        pace = Pace(mode, chunk, bandwidth if mode == "idle" or bandwidth else None, startup)
        answer = self._ask(
            "reserve",
            layout,
            self._timeout + slots * copies * sum(nbytes.values()) / RESERVATION,
            layout=xxhash.xxh3_128_hexdigest(layout),
            nbytes=dict(nbytes),
            slots=slots,
            copies=copies,
            placement=dict(placement or {"kind": "mixed"}),
            pace=asdict(pace),
        )
        self.needs = str(answer["needs"])
        return {
            shard: [Slot.open(Path(path)) for path in paths[:slots]]
            for shard, paths in answer["paths"].items()
        }

    def saved(self, shard: str, slot: int, step: int, replicate: bool = True) -> int:
        """Slot number ``slot`` of ``shard`` holds ``step``: it is sent to its holders (``replicate``).

        If the slot was not completed the service makes the checksum. Returns the newest committed step.

        Raises:
            CopyError: it does not hold that step.
        """
        about: dict[str, Any] = {
            "shard": shard,
            "slot": slot,
            "step": step,
            "replicate": replicate,
        }
        return int(self._ask("saved", **about)["committed"])

    def restored(self, step: int, course: int) -> None:
        """All ranks go on from ``step`` (-1: from the beginning), for the time ``course`` in this generation.
        It counts as committed when it has been `saved` again by all: whoever holds a copy already is sent
        nothing."""
        self._ask("restored", step=step, course=course)

    def committed(self) -> int:
        """The newest step that is committed in this generation, -1 for none. Does not ask the service."""
        return self._board.read()

    def wait_committed(self, step: int, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until ``step`` or a later one is committed; whether it is. False
        also when the generation ends."""
        answer = self._ask("wait", None, self._timeout + timeout, seconds=timeout, step=step)
        return bool(answer["committed"])

    def open_window(self, seconds: float) -> None:
        """The network is idle, and will be for so long. Does not wait."""
        self._say_window(time.monotonic() + seconds)

    def close_window(self) -> None:
        """The network is in use. Does not wait."""
        self._say_window(0.0)

    def flush(self) -> None:
        """What is still to be sent goes now, until a window is opened or closed again. Does not wait."""
        self._say_window(float("inf"))

    def copies(self) -> list[Copy]:
        """The complete copies in this host's memory, its own and those it holds."""
        return [from_plain(Copy, copy) for copy in self._ask("list")["copies"]]

    def fetch(
        self, place: int | str | None, shard: str, step: int, into: memoryview, *, world: int | None = None
    ) -> str:
        """A copy into ``into``, which is as long as the copy; its checksum, verified.

        ``place``: who holds it, a place, an address ("host:port"), or None for this host. ``world``: of the
        job that saved it, where that matters.

        Raises:
            CopyError: it is missing, torn, of another length, or not what its checksum says.
        """
        if isinstance(place, str):
            where: dict[str, Any] = {"address": place}
        else:
            where = self._ask("locate", place=place, shard=shard, step=step, world=world)
        if "path" in where:
            return slots.load(Path(where["path"]), into, step=step).checksum
        with self._peer(where["address"]) as sock:
            sock.settimeout(self._timeout)
            return transfer.receive_copy(sock, transfer.ask_copy(sock, shard, step, world), into)

    def layout(self, digest: str) -> bytes:
        """The layout with this digest, from this host or whoever has it.

        Raises:
            CopyError: nobody has it.
        """
        for address in (self._path, *self._ask("places")["addresses"]):
            with (
                contextlib.suppress(OSError, CopyError),
                self._peer(address) as sock,
            ):
                sock.settimeout(self._timeout)
                return transfer.layout(sock, digest)
        raise CopyError(f"no host has the layout {digest}")

    def health(self) -> Health:
        """How well the present state is kept, as far as this host knows."""
        return Health(**self._ask("health"))

    def traffic(self) -> dict[int, tuple[int, int]]:
        """By step: bytes of this host's shards that were sent, and how many of them within windows."""
        return {step: (sent, inside) for step, sent, inside in self._ask("traffic")["steps"]}

    def persist(self, step: int, url: str, keep: int = 0) -> None:
        """Have this rank's shards of ``step``, which it has saved, written to storage once it is committed;
        when it is whole there, all but the newest ``keep`` steps go (0: none). Waits for a copy to be made in
        memory, not for storage."""
        self._ask("persist", None, COPYING, step=step, url=url, keep=keep)

    def close(self) -> None:
        """End the connections. Slots stay mapped until they are closed."""
        self._hang_up()
        self._board.close()

    def _say_window(self, until: float) -> None:
        with self._lock:
            if self._windows is None:
                self._windows = self._connect()
            wire.send(self._windows, {"op": "window", "until": until, **self._about})

    def _peer(self, address: str) -> socket.socket:
        return handshake.connect(address, min(CONNECT, self._timeout), self._keys, transfer.service(address))

    def _connect(self) -> socket.socket:
        sock = wire.connect(self._path, self._timeout)
        self._open.append(sock)
        return sock

    def _ask(
        self, op: str, data: bytes | None = None, patience: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        sock: socket.socket | None = getattr(self._local, "sock", None)
        if sock is None:
            with self._lock:
                sock = self._local.sock = self._connect()
        sock.settimeout(patience or self._timeout)
        try:
            answer = transfer.ask(sock, {"op": op, **self._about, **fields}, data)
        except BaseException:
            # Whatever comes later on it would be taken for the answer to the next request.
            sock.close()
            self._local.sock = None
            raise
        if "error" in answer:
            raise _ERRORS.get(answer["error"], CopyError)(answer["text"])
        return answer

    def _hang_up(self) -> None:
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it
                sock.close()
            self._open.clear()


_ERRORS: dict[str, type[Exception]] = {
    "stale": StaleGeneration,
    "late": StaleGeneration,
    "copy": CopyError,
    "timeout": TimeoutError,
    "user": UserError,
}
