"""The engine of one replica: it does a group's operations on its region, and nothing else.

It stands for the replica's network card. The paper has the card itself do this, from a window of operations
that its host has posted before; here it is a process with one thread, by real-time priority ahead of all that
the host else does, with rings of slots in the place of posted operations. No application of the replica is on
the path: it may be busy, frozen or gone. What a process cannot show is the card's microseconds.

Operations come from the predecessor (or the coordinator, at the head) in the order of their numbers:

    WRITE a, payload    MEMCPY a → b, c bytes    CAS word at a: b → c, where the mask has this member's bit
    FLUSH               all before it is on the disk of every member

Each is done here, then handed on; the tail tells the coordinator. A FLUSH is handed on first, so that all
disks write at once, and FLUSHED follows it once this one's has. What is handed on again was done here, so no
member is behind those after it.

On each failure:
- a write or sync fails (a full disk): the coordinator is told, nothing is handed on, and no later operation
  is done. The region is allocated at the start, so that a disk that is full already is told then.
- the successor is gone: the coordinator is told. The predecessor is gone: nothing comes any more.
- a newer epoch begins: its coordinator has fenced this engine, which forgets its links to the older one, and
  says so to them. What comes with another epoch's number is refused and told.
- it is killed: the region is a file, and behind it lies what was done and which epoch is the newest. An
  operation that was under way is there in part perhaps; so regions are compared before the next epoch.

The engine writes by pwrite, where a disk's failure is an error and not a signal, and reads what it mapped.
It ends with whoever started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import mmap
import os
import select
import socket
import stat
import struct
import sys
from pathlib import Path

from windtunnel.base import handshake, wire
from windtunnel.base.keys import Keys
from windtunnel.data.group.live.link import (
    CHUNK,
    SERVICE,
    STANDING,
    WORD,
    Frame,
    Kind,
    Link,
    connect,
    local_ring,
)
from windtunnel.data.group.policy import SLOT

PAGE = mmap.PAGESIZE
TRAILER = struct.Struct("<8sQQQ?")
"""In the page behind the region: magic, fenced, epoch, sequence, torn."""
TRAILER_MAGIC = b"wtgroup1"
PRIORITY = 50
ROOM = 64 << 20
"""Bytes of a ring at most."""
STRANGERS = 64
PATIENCE = 2.0
"""Seconds for a successor to be connected."""


class Failed(Exception):
    """What was asked cannot be done here; the words go to who asked."""


class Engine:
    """Raises OSError: the region cannot be had. Failed: the file is another's, or of another size."""

    def __init__(self, region: Path, size: int, secret: bytes) -> None:
        self.size, self._secret = size, secret
        self._file = os.open(region, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Failed("another engine has the region") from error
        held = os.fstat(self._file).st_size
        if held not in (0, size + PAGE):
            raise Failed(f"the region has {held - PAGE} bytes; accepted is that size, or no file")
        os.posix_fallocate(self._file, 0, size + PAGE)
        os.fsync(self._file)
        self._memory = mmap.mmap(self._file, size + PAGE)
        known = TRAILER.unpack_from(self._memory, size)
        if known[0] != TRAILER_MAGIC:
            known = (TRAILER_MAGIC, 0, 0, 0, False)
        _, self.fenced, self.epoch, self.sequence, self.torn = known
        self.steady = False
        self._synced = 0  # the FLUSH that was done here last
        self._index, self._links = 0, dict[int, Link]()
        self._strangers: dict[Link, handshake.Server] = {}
        self._coordinator: Link | None = None
        self._before: Link | None = None
        self._next: Link | None = None
        self._poll = select.poll()

    # --- connections

    def run(self, listener: socket.socket) -> None:
        """Serve until whoever started it closes standard input, or ends."""
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        self._poll.register(0, 0)  # its end is always reported
        while True:
            for number, event in self._poll.poll():
                if number == 0:
                    return
                if number == listener.fileno():
                    self._accept(listener)
                elif (link := self._links.get(number)) is not None:
                    self._turn(link, event)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = self._hold(Link(sock))
            self._strangers[link] = handshake.Server(Keys(self._secret), (SERVICE,))
            if len(self._strangers) > STRANGERS:
                self._drop(next(iter(self._strangers)))

    def _hold(self, link: Link) -> Link:
        link.sock.setblocking(False)
        self._links[link.sock.fileno()] = link
        self._poll.register(link.sock, select.POLLIN)
        return link

    def _drop(self, link: Link | None) -> None:
        if link is None or self._links.pop(link.sock.fileno(), None) is None:
            return
        self._strangers.pop(link, None)
        self._poll.unregister(link.sock)
        link.close()
        if link is self._next:
            self._next = None
            self._tell(Kind.LOST)
        if link is self._before:
            self._before = None
        if link is self._coordinator:
            self._coordinator = None

    def _turn(self, link: Link, event: int) -> None:
        try:
            if event & select.POLLOUT:
                self._send(link, b"")
            if event & ~select.POLLOUT:
                part = link.sock.recv(1 << 18)
                if not part:
                    raise wire.WireError("the peer closed the connection")
                link.inbox += part
                self._read(link)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(link)

    def _read(self, link: Link) -> None:
        if link.session is None:
            answer, link.session = self._strangers[link].take(link.inbox)
            self._send(link, answer)
            if link.session is None:
                return
            del self._strangers[link]
        while link.sock.fileno() >= 0 and (frame := link.parse()) is not None:
            self._take(link, frame)

    def _send(self, link: Link, data: bytes) -> None:
        """As much as the socket takes; the rest when it takes more. Raises OSError: the peer is gone."""
        waited = bool(link.outbox)
        if waited:
            link.outbox += data
            data = bytes(link.outbox)
        try:
            sent = link.sock.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        link.outbox[:] = data[sent:]
        if waited or link.outbox:
            self._poll.modify(link.sock, select.POLLIN | bool(link.outbox) * select.POLLOUT)

    def _say(self, link: Link | None, frame: Frame) -> None:
        if link is not None:
            try:
                self._send(link, link.pack(frame))
            except OSError:
                self._drop(link)

    def _tell(self, kind: Kind, sequence: int = 0, a: int = 0, results: bytes = b"", words: str = "") -> None:
        """Something to the coordinator."""
        self._say(
            self._coordinator,
            Frame(kind, self.fenced, sequence, a, results=results, payload=words.encode()),
        )

    # --- frames

    def _take(self, link: Link, frame: Frame) -> None:
        if frame.kind in (Kind.WRITE, Kind.MEMCPY, Kind.CAS, Kind.FLUSH, Kind.FLUSHED):
            if frame.epoch != self.fenced or link is not self._before:
                self._refuse(link)
            else:
                self._operate(frame)
        elif link is self._next:  # all that a successor ever says
            self._next = None
            self._tell(Kind.STALE, a=frame.a)
            self._drop(link)
        elif frame.kind not in (Kind.STATUS, Kind.FENCE) and frame.epoch != self.fenced:
            self._refuse(link)
        else:
            try:
                self._answer(link, frame)
            except (Failed, OSError, ValueError) as error:
                words = str(getattr(error, "strerror", None) or error)
                self._say(link, Frame(Kind.FAILED, self.fenced, frame.sequence, payload=words.encode()))

    def _refuse(self, link: Link) -> None:
        self._say(link, Frame(Kind.STALE, self.fenced, 0, self.fenced))
        self._drop(link)

    def _answer(self, link: Link, frame: Frame) -> None:
        """What is asked of this engine alone."""
        payload = b""
        match frame.kind:
            case Kind.FENCE if frame.epoch <= self.fenced:
                self._say(link, Frame(Kind.STALE, self.fenced, frame.sequence, self.fenced))
                return
            case Kind.FENCE:
                payload = self._standing(link)
                self._fence(link, frame.epoch)
            case Kind.STATUS:
                payload = self._standing(link)
            case Kind.JOIN:
                self._drop(self._before)
                self._before, link.window = link, frame.a
                if link.local:
                    link.slots, file = local_ring(frame.a)
                    answer = link.pack(Frame(Kind.ANSWER, self.fenced, frame.sequence))
                    with open(file, "rb"):  # it is closed here
                        socket.send_fds(link.sock, [answer], [file])
                    return
            case Kind.CHAIN:
                self._chain(frame)
            case Kind.READ:
                payload = self._get(frame.a, min(frame.b, SLOT))
            case Kind.HASH:
                each = range(frame.a, frame.a + frame.b, CHUNK)
                payload = b"".join(self._digest(at, min(CHUNK, frame.a + frame.b - at)) for at in each)
            case Kind.PATCH:
                if not self.torn:
                    self.steady, self.torn = False, True
                    self._note(durable=True)
                self._put(frame.a, frame.payload)
            case _:
                raise Failed(f"kind {frame.kind} is unknown here")
        self._say(link, Frame(Kind.ANSWER, self.fenced, frame.sequence, payload=payload))

    def _standing(self, link: Link) -> bytes:
        room = ROOM if link.local else 0
        return STANDING.pack(self.fenced, self.epoch, self.sequence, self.steady, self.torn, self.size, room)

    def _fence(self, link: Link, epoch: int) -> None:
        self.fenced = epoch
        self._note(durable=True)
        if self._coordinator is not link:
            self._tell(Kind.STALE, a=epoch)
            self._drop(self._coordinator)
        if self._before is not None:
            self._refuse(self._before)
        self._coordinator = link
        if (after := self._next) is not None:
            self._next = None  # nobody is to hear that it is lost
            self._drop(after)

    def _chain(self, frame: Frame) -> None:
        spec = json.loads(frame.payload)
        self._index = int(spec["index"])
        if spec["next"]:
            after = connect(spec["next"], self._secret, PATIENCE)
            after.join(self.fenced, int(spec["window"]))
            self._next = self._hold(after)
        if self.torn:
            os.fdatasync(self._file)
        self.epoch, self.sequence, self.steady, self.torn = self.fenced, frame.a, True, False
        self._note(durable=True)

    # --- operations

    def _operate(self, frame: Frame) -> None:
        try:
            if frame.sequence != self.sequence + 1 or not self.steady:
                raise Failed(f"operation {frame.sequence} came after {self.sequence}")
            if frame.kind == Kind.FLUSH:
                if self._next is not None:
                    self._hand_on(frame)
                self._sync(frame.sequence)
                if self._index == 0:
                    self._done(frame._replace(kind=Kind.FLUSHED))
                return
            results = frame.results
            if frame.kind == Kind.FLUSHED:
                if self._synced != frame.sequence:
                    raise Failed(f"operation {frame.sequence} is not on the disk here")
            else:
                results = self._apply(frame)
            self._done(frame._replace(results=results))
        except (Failed, OSError) as error:
            self.steady = False
            words = error.strerror if isinstance(error, OSError) else str(error)
            self._tell(Kind.BROKEN, frame.sequence, words=str(words))
            self._drop(self._before)

    def _apply(self, frame: Frame) -> bytes:
        match frame.kind:
            case Kind.WRITE:
                self._put(frame.a, frame.payload)
            case Kind.MEMCPY:
                self._put(frame.b, self._get(frame.a, frame.c))
            case Kind.CAS:
                old = self._get(frame.a, WORD.size)
                if frame.mask >> self._index & 1 and WORD.unpack(old)[0] == frame.b:
                    self._put(frame.a, WORD.pack(frame.c))
                return frame.results + old
        return frame.results

    def _done(self, frame: Frame) -> None:
        self.sequence = frame.sequence
        self._note()
        if self._next is not None:
            self._hand_on(frame)
        else:
            self._acknowledge(frame)

    def _hand_on(self, frame: Frame) -> None:
        self._say(self._next, frame)

    def _acknowledge(self, frame: Frame) -> None:
        self._tell(Kind.ACK, frame.sequence, results=frame.results)

    # --- the region

    def _get(self, offset: int, length: int) -> bytes:
        self._within(offset, length)
        return self._memory[offset : offset + length]

    def _digest(self, offset: int, length: int) -> bytes:
        self._within(offset, length)
        with memoryview(self._memory) as view:
            return hashlib.sha256(view[offset : offset + length]).digest()

    def _put(self, offset: int, data: bytes) -> None:
        self._within(offset, len(data))
        at = 0
        while at < len(data):
            at += os.pwrite(self._file, data[at:] if at else data, offset + at)

    def _within(self, offset: int, length: int) -> None:
        if offset + length > self.size:
            raise Failed(f"bytes {offset} to {offset + length} are not within the region's {self.size}")

    def _sync(self, sequence: int) -> None:
        os.fdatasync(self._file)
        self._synced = sequence

    def _note(self, *, durable: bool = False) -> None:
        known = (self.fenced, self.epoch, self.sequence, self.torn)
        TRAILER.pack_into(self._memory, self.size, TRAILER_MAGIC, *known)
        if durable:
            self._memory.flush(self.size, PAGE)


def listening(address: str) -> tuple[socket.socket, str]:
    """A socket that listens at ``unix:PATH`` or ``tcp:HOST:PORT``, and its address for `connect`."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.lstat(rest).st_mode):  # of one that was killed: the region is locked by now
                os.unlink(rest)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(rest)
        os.chmod(rest, 0o600)
        sock.listen()
        return sock, address
    host, _, port = rest.rpartition(":")
    sock = socket.create_server((host, int(port)))
    return sock, f"{host}:{sock.getsockname()[1]}"


def prioritised() -> str:
    """Real-time priority for this process; why it is refused, or ""."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except OSError as error:
        return f"real-time priority is refused ({error.strerror}): it runs as any process"
    return ""


def main(words: list[str]) -> None:
    """REGION SIZE LISTEN REALTIME CORES: one JSON line says how it began; the secret is the first line of
    standard input."""
    region, size, listen, realtime, cores = words
    try:
        secret = bytes.fromhex(sys.stdin.readline())
        if cores:
            os.sched_setaffinity(0, map(int, cores.split(",")))
        engine = Engine(Path(region), int(size), secret)
        listener, address = listening(listen)
        told = {"address": address, "refused": prioritised() if realtime == "realtime" else ""}
    except (OSError, Failed, ValueError) as error:
        print(json.dumps({"failed": str(getattr(error, "strerror", None) or error)}), flush=True)
        sys.exit(1)
    print(json.dumps(told), flush=True)
    gc.freeze()
    gc.disable()
    engine.run(listener)


if __name__ == "__main__":
    main(sys.argv[1:])
