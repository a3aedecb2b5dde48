"""One device's part in a round of its group: the model is passed on, then the group comes to its mean.

Each device listens at its own address. A member asks the device before it in the group for the model, and
sends it on while it still comes; where that device does not answer, the leader is asked. When a device has
trained, it tells the leader, whose *coordinator* names an *epoch*: the members that are there, in order. In
an epoch each device runs the policy's schedule with the others of it. All have done so: the leader says that
it holds. What happens on a failure:

- A member's connection to the leader breaks (killed, or partitioned), before or in an epoch: the next epoch
  is named without it, and every other device begins again from the vector that it trained.
- A device does not come through to another (no bytes for ``stall`` seconds): it says with whom. After the
  second time the other is left out; where the other is the leader, who said so.
- A vector is not finite: its device takes part with the weight 0, and is named.
- The leader is lost: each member ends with `GroupFailed`, and the round goes on without the group.
- A stranger, a wrong secret, a frame that is longer than what is expected: that connection ends.

So a sum never has a part of a device twice, nor of a device that is not named in its epoch. Connections have
`base.handshake`'s proof of the secret, and `base.wire`'s tag on each frame; they are encrypted where there
are certificates. Frames have a header in JSON and raw bytes; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base import handshake, wire
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener
from windtunnel.edge.federated.policy import schedule

PIECE = 256 << 10
"""Bytes of one frame at most, so that who waits sees that there is progress."""
RETRY = 0.05
Vector = NDArray[Any]
Message = dict[str, Any] | None


class GroupFailed(RuntimeError):
    """This device's group has no mean in this round."""


class _Superseded(Exception):
    """The epoch has ended: another was named, or it holds."""


@dataclass(frozen=True)
class ExchangeGroup:
    """``members``: name and "host:port" of each device, the leader first. ``label``: of this round, the same
    for all of the group. ``model``: bytes at most. ``patience``: seconds until all must have trained;
    ``stall``: without a byte."""

    label: str
    members: tuple[tuple[str, str], ...]
    exchange: str
    model: int
    patience: float = 600.0
    stall: float = 10.0

    def service(self, place: int) -> str:
        return f"federated {self.label} {self.members[place][0]}"


@dataclass(frozen=True)
class Mean:
    """``total``: the weight of all in it. Names: ``lost`` are not in it, ``refused`` were not finite."""

    vector: Vector
    total: float
    lost: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass
class _Arriving:
    """Bytes that come piece by piece. ``last``: when one came last (monotonic)."""

    data: bytearray
    have: int = 0
    last: float = field(default_factory=time.monotonic)

    @property
    def whole(self) -> bool:
        return self.have == len(self.data)


class ExchangePeer:
    """A device in one round; a context manager. ``place``: its own in the group, 0 leads."""

    def __init__(self, group: ExchangeGroup, place: int, keys: Keys) -> None:
        self.group, self.place, self._keys = group, place, keys
        self._changed = threading.Condition()
        self._model: _Arriving | None = None
        self._parts: dict[tuple[int, int, int], _Arriving] = {}  # by epoch, step and sender
        self._epoch = 0
        self._orders: queue.Queue[Message] = queue.Queue()
        self._reports: queue.Queue[tuple[int, Message]] = queue.Queue()  # to the coordinator
        self._controls: dict[int, socket.socket] = {}
        self._links: dict[int, socket.socket] = {}
        self._size = 0
        host, _, port = group.members[place][1].rpartition(":")
        sock = socket.create_server((host, int(port)))
        self._listener = Listener(
            sock, self._serve, keys=keys, services=lambda: (group.service(place),), name="federated"
        )

    def __enter__(self) -> ExchangePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for sock in (*self._links.values(), *self._controls.values()):
            with contextlib.suppress(OSError):  # a thread that reads it would keep it open
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def model(self, data: bytes | None = None) -> bytes:
        """The round's model, which the leader gives, and members get.

        Raises:
            GroupFailed: nobody gave it.
        """
        if data is not None:
            with self._changed:
                self._model = _Arriving(bytearray(data), len(data))
                self._changed.notify_all()
            return data
        for before in dict.fromkeys((self.place - 1, 0)):
            with contextlib.suppress(OSError):
                return self._ask_model(before)
        raise GroupFailed(f"no model came from {self.group.members[0][0]}, the leader of the group")

    def mean(self, vector: Vector, weight: float) -> Mean:
        """The weighted mean of the group's vectors, (n,) of one float type; what each device calls once.

        Raises:
            GroupFailed: the leader was lost.
        """
        finite = bool(np.isfinite(vector).all()) and bool(np.isfinite(weight))
        counted = np.append(vector * weight, weight) if finite else np.zeros(len(vector) + 1)
        counted = counted.astype(vector.dtype)
        with self._changed:
            self._size = counted.nbytes
        report, coordinator = self._control()
        try:
            report({"ready": finite})
            return self._follow(counted, report)
        finally:
            if coordinator is not None:
                coordinator.join()

    def _follow(self, counted: Vector, report: Callable[[dict[str, Any]], None]) -> Mean:
        """Run each epoch that the coordinator names, until one holds."""
        result = counted
        while True:
            order: Message = None
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=2 * self.group.patience)
            if order is None:
                raise GroupFailed(f"{self.group.members[0][0]}, the leader of the group, was lost")
            if "holds" in order:
                total = float(result[-1])
                vector = result[:-1] / total if total else result[:-1] * np.nan
                return Mean(
                    vector.astype(counted.dtype), total, tuple(order["lost"]), tuple(order["refused"])
                )
            epoch, members = order["epoch"], order["members"]
            with contextlib.suppress(_Superseded):
                try:
                    result = self._run(epoch, members, counted.copy())
                    report({"done": epoch})
                except _Unreached as unreached:
                    report({"failed": epoch, "with": unreached.place})

    def _run(self, epoch: int, members: list[int], vector: Vector) -> Vector:
        """The schedule among ``members``; ``vector`` becomes the sum."""
        chunks, steps = schedule(self.group.exchange, len(members))
        parts, own = np.array_split(vector, chunks), members.index(self.place)
        with ThreadPoolExecutor(1) as pool:
            for number, step in enumerate(steps):
                sent = [
                    pool.submit(
                        self._send,
                        members[transfer.receiver],
                        (epoch, number),
                        parts[transfer.chunk].tobytes(),
                    )
                    for transfer in step
                    if transfer.sender == own
                ]
                for transfer in step:
                    if transfer.receiver == own:
                        part = parts[transfer.chunk]
                        data = self._take((epoch, number, members[transfer.sender]), part.nbytes)
                        arrived = np.frombuffer(data, part.dtype)
                        part[:] = part + arrived if transfer.adds else arrived
                for future in sent:
                    future.result()
        return vector

    def _send(self, place: int, step: tuple[int, int], data: bytes) -> None:
        try:
            if place not in self._links:
                self._links[place] = self._connect(place, self.group.stall)
            for header, piece in _pieces(data):
                header |= {"epoch": step[0], "step": step[1], "from": self.place}
                wire.send(self._links[place], header, piece)
        except OSError as error:
            if (sock := self._links.pop(place, None)) is not None:
                sock.close()
            raise _Unreached(place) from error

    def _take(self, key: tuple[int, int, int], size: int) -> bytearray:
        began = time.monotonic()
        with self._changed:
            while True:
                if self._epoch != key[0]:
                    raise _Superseded
                part = self._parts.get(key)
                if part is not None and part.whole and len(part.data) == size:
                    return self._parts.pop(key).data
                left = (part.last if part else began) + self.group.stall - time.monotonic()
                if left <= 0:
                    raise _Unreached(key[2])
                self._changed.wait(left)

    def _ask_model(self, place: int) -> bytes:
        with self._connect(place, self.group.patience if place == 0 else self.group.stall) as sock:
            wire.send(sock, {"want": "model"})
            arriving: _Arriving | None = None
            while arriving is None or not arriving.whole:
                header, count = wire.receive(sock)
                if arriving is None:
                    arriving = self._model = _Arriving(bytearray(self._bounded(header, self.group.model)))
                self._put(arriving, header, wire.rest(sock, self._piece(count)))
        return bytes(arriving.data)

    def _connect(self, place: int, within: float) -> socket.socket:
        """A connection to another device, which may start later than this one."""
        end = time.monotonic() + within
        while True:
            try:
                return handshake.connect(
                    self.group.members[place][1], self.group.stall, self._keys, self.group.service(place)
                )
            except handshake.HandshakeRefused:
                raise
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(RETRY)

    def _serve(self, sock: socket.socket) -> None:
        """One connection of another device."""
        sock.settimeout(self.group.patience)
        header, count = wire.receive(sock)
        try:
            if header.get("want") == "model":
                self._give_model(sock)
            elif "member" in header and self.place == 0:
                self._attend(sock, int(header["member"]))
            else:
                while True:
                    self._receive_part(header, wire.rest(sock, self._piece(count)))
                    header, count = wire.receive(sock)
        except (KeyError, TypeError, ValueError) as error:
            raise wire.WireError("a header lacks a field, or has another in its place") from error

    def _receive_part(self, header: dict[str, Any], piece: bytearray) -> None:
        key = (int(header["epoch"]), int(header["step"]), int(header["from"]))
        with self._changed:
            if key[0] < self._epoch:  # nobody waits for it any more
                return
            part = self._parts.get(key)
            if part is None:
                part = self._parts[key] = _Arriving(bytearray(self._bounded(header, self._size)))
        self._put(part, header, piece)

    def _put(self, part: _Arriving, header: dict[str, Any], piece: bytearray) -> None:
        with self._changed:
            if header["at"] != part.have or part.have + len(piece) > len(part.data):
                raise wire.WireError("a frame is not the next of its message")
            part.data[part.have : part.have + len(piece)] = piece
            part.have, part.last = part.have + len(piece), time.monotonic()
            self._changed.notify_all()

    def _piece(self, count: int) -> int:
        if count > PIECE:
            raise wire.WireError(f"a frame of {count} bytes is longer than {PIECE}")
        return count

    def _bounded(self, header: dict[str, Any], most: int) -> int:
        size = int(header["of"])
        if not 0 <= size <= most:
            raise wire.WireError(f"a message of {size} bytes is longer than {most}")
        return size

    def _give_model(self, sock: socket.socket) -> None:
        """Send the model on as far as it is here."""
        sent = 0
        while True:
            with self._changed:
                while self._model is None or self._model.have <= sent < len(self._model.data):
                    if not self._changed.wait(self.group.patience):
                        return
                piece = bytes(self._model.data[sent : min(self._model.have, sent + PIECE)])
                size = len(self._model.data)
            wire.send(sock, {"at": sent, "of": size}, piece)
            sent += len(piece)
            if sent == size:
                return

    def _control(self) -> tuple[Callable[[dict[str, Any]], None], threading.Thread | None]:
        """How this device tells the coordinator something; the leader's coordinator begins."""
        if self.place == 0:
            coordinator = threading.Thread(target=self._coordinate, name="federated-coordinator", daemon=True)
            coordinator.start()
            return lambda message: self._reports.put((0, message)), coordinator
        try:
            sock = self._connect(0, self.group.stall)
            wire.send(sock, {"member": self.place})
        except OSError as error:
            raise GroupFailed(f"{self.group.members[0][0]}, the leader of the group, is not there") from error
        sock.settimeout(None)
        self._controls[0] = sock
        threading.Thread(target=self._hear, args=(sock,), name="federated-orders", daemon=True).start()

        def report(message: dict[str, Any]) -> None:
            with contextlib.suppress(OSError):  # `_hear` sees it, too
                wire.send(sock, message)

        return report, None

    def _hear(self, sock: socket.socket) -> None:
        try:
            while True:
                self._ordered(wire.receive(sock)[0])
        except (OSError, KeyError):
            self._ordered(None)

    def _ordered(self, order: Message) -> None:
        with self._changed:
            self._epoch = order.get("epoch", -1) if order else -1
            self._parts = {key: part for key, part in self._parts.items() if key[0] >= self._epoch >= 0}
            self._orders.put(order)
            self._changed.notify_all()

    def _attend(self, sock: socket.socket, place: int) -> None:
        """Bring a member's reports to the coordinator; None when its connection is gone."""
        self._controls[place] = sock
        sock.settimeout(None)
        try:
            while True:
                self._reports.put((place, wire.receive(sock)[0]))
        finally:
            self._reports.put((place, None))

    def _coordinate(self) -> None:
        """Name epochs until all that are left have run one."""
        end = time.monotonic() + self.group.patience
        left, names = set(range(len(self.group.members))), [name for name, _ in self.group.members]
        ready: dict[int, bool] = {}
        failures: Counter[int] = Counter()
        epoch = 0
        while left - ready.keys():
            place, message = self._next(end)
            if message is None:
                left -= {place} if place >= 0 else left - ready.keys()
            elif "ready" in message:
                ready[place] = message["ready"]
        done: set[int] = set()
        named = True
        while named or done != left:
            if named:
                epoch, named, done = epoch + 1, False, set()
                self._order(left, {"epoch": epoch, "members": sorted(left)})
            place, message = self._next(time.monotonic() + self.group.patience)
            if message is None and (place in left or place < 0):
                left -= {place} if place >= 0 else left - done
                named = True
            elif message and message.get("done") == epoch:
                done.add(place)
            elif message and message.get("failed") == epoch:
                blamed = message["with"] or place
                failures[blamed] += 1
                left -= {blamed} if failures[blamed] > 1 else set()
                named = True
        lost = [names[place] for place in range(len(names)) if place not in left]
        refused = [names[place] for place in sorted(left) if not ready[place]]
        self._order(left, {"holds": epoch, "lost": lost, "refused": refused})

    def _next(self, end: float) -> tuple[int, Message]:
        """The next report; place -1 where none came."""
        try:
            return self._reports.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return -1, None

    def _order(self, places: set[int], order: dict[str, Any]) -> None:
        for place in places - {0}:
            with contextlib.suppress(OSError):  # `_attend` sees it, too
                wire.send(self._controls[place], order)
        self._ordered(order)


class _Unreached(Exception):
    """No bytes to or from a device."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


def _pieces(data: bytes) -> Iterator[tuple[dict[str, Any], memoryview]]:
    view = memoryview(data)
    for at in range(0, max(1, len(view)), PIECE):
        yield {"at": at, "of": len(view)}, view[at : at + PIECE]
