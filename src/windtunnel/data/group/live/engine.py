"""The engine of one replica: it does a group's operations on its region, and nothing else.

It stands for the replica's network card. The paper has the card do this, from operations that its host has
posted before; here it is a process of one thread, by real-time priority ahead of all else on the host, with
rings of slots for posted operations. No application of the replica is on the path. What a process cannot show
is the card's microseconds.

Operations come from the predecessor (of the head: the coordinator) in the order of their numbers:

    WRITE a, payload    MEMCPY a → b, c bytes    CAS word at a: b → c, where the mask has this member's bit
    FLUSH               all before it is on the disk of every member

Each is done here, then handed on; the tail tells the coordinator. So no member is behind those after it. A
FLUSH is handed on first, so that all disks write at once, and FLUSHED follows once this one's has.

On each failure:
- a write or sync fails (a full disk): the coordinator is told, and nothing more is done or handed on. The
  region is allocated at the start, and written by pwrite: a disk's failure is an error and not a signal.
- the successor is gone: the coordinator is told. The predecessor is gone: nothing comes any more.
- a newer epoch begins: its coordinator fences this engine, which says so to those of the older one. What
  bears another epoch's number is refused, and told.
- it is killed: the region is a file, and behind it lies what was done and which epoch is the newest. What was
  under way may be there in part; so regions are compared before the next epoch.

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
import struct
import sys
from pathlib import Path

import zstandard

from windtunnel.base import handshake
from windtunnel.base.keys import Keys
from windtunnel.base.wire import WireError
from windtunnel.data.group.live.link import (
    CHUNK,
    SERVICE,
    STANDING,
    WORD,
    EngineLink,
    Frame,
    FrameKind,
    connect,
)
from windtunnel.data.group.policy import SLOT

PAGE = mmap.PAGESIZE
TRAILER, MARK = struct.Struct("<8sQQQ?"), b"wtgroup1"
"""In the page behind the region: the mark, fenced, epoch, sequence, torn."""
PRIORITY, ROOM, STRANGERS, PATIENCE = 50, 64 << 20, 64, 2.0
"""Of real time; bytes of a ring at most; connections without proof; seconds for a successor to answer."""


class EngineFault(Exception):
    """What was asked cannot be done here; the words go to who asked."""


class RegionEngine:
    """Raises OSError: the region cannot be had. EngineFault: it is another engine's, or of another size."""

    def __init__(self, region: Path, size: int, secret: bytes) -> None:
        self.size, self._secret = size, secret
        self._file = os.open(region, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EngineFault("another engine has the region") from error
        if (file_size := os.fstat(self._file).st_size) not in (0, size + PAGE):
            raise EngineFault(f"the region has {file_size - PAGE} bytes, not {size}")
        os.posix_fallocate(self._file, 0, size + PAGE)
        os.fsync(self._file)
        self._memory = mmap.mmap(self._file, size + PAGE)
        trailer = TRAILER.unpack_from(self._memory, size)
        _, self.fenced, self.epoch, self.sequence, self.torn = (
            trailer if trailer[0] == MARK else (0, 0, 0, 0, False)
        )
        self.steady, self._index = False, 0
        self._links: dict[int, EngineLink] = {}
        self._strangers: dict[EngineLink, handshake.ServerHandshake] = {}
        self._coordinator: EngineLink | None = None
        self._before: EngineLink | None = None
        self._next: EngineLink | None = None
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
            self._strangers[self._hold(EngineLink(sock))] = handshake.ServerHandshake(
                Keys(self._secret), (SERVICE,)
            )
            if len(self._strangers) > STRANGERS:
                self._drop(next(iter(self._strangers)))

    def _hold(self, link: EngineLink) -> EngineLink:
        link.sock.setblocking(False)
        self._links[link.sock.fileno()] = link
        self._poll.register(link.sock, select.POLLIN)
        return link

    def _drop(self, link: EngineLink | None) -> None:
        if link is None or self._links.pop(link.sock.fileno(), None) is None:
            return
        self._poll.unregister(link.sock)
        self._strangers.pop(link, None)
        link.close()
        if link is self._coordinator:
            self._coordinator = None
        if link is self._before:
            self._before = None
        if link is self._next:
            self._next = None
            self._tell(FrameKind.LOST)

    def _turn(self, link: EngineLink, event: int) -> None:
        try:
            if event & select.POLLOUT:
                self._send(link, b"")
            if event & ~select.POLLOUT:
                part = link.sock.recv(1 << 18)
                if not part:
                    raise WireError("the peer closed the connection")
                link.inbox += part
                if link in self._strangers:
                    answer, link.session = self._strangers[link].take(link.inbox)
                    self._send(link, answer)
                    if link.session is not None:
                        del self._strangers[link]
                while link.session and link.sock.fileno() >= 0 and (frame := link.parse()) is not None:
                    self._take(link, frame)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(link)

    def _send(self, link: EngineLink, data: bytes) -> None:
        """As much as the socket takes; the rest when it takes more. Raises OSError: the peer is gone."""
        waited, link.outbox = bool(link.outbox), link.outbox + data
        with contextlib.suppress(BlockingIOError):
            link.outbox = link.outbox[link.sock.send(link.outbox) :]
        if waited or link.outbox:
            self._poll.modify(link.sock, select.POLLIN | bool(link.outbox) * select.POLLOUT)

    def _say(self, link: EngineLink | None, frame: Frame) -> None:
        try:
            if link is not None:
                self._send(link, link.pack(frame))
        except OSError:
            self._drop(link)

    def _tell(
        self, kind: FrameKind, sequence: int = 0, a: int = 0, results: bytes = b"", words: str = ""
    ) -> None:
        """Something to the coordinator."""
        frame = Frame(kind, self.fenced, sequence, a, results=results, payload=words.encode())
        self._say(self._coordinator, frame)

    def _refuse(self, link: EngineLink) -> None:
        self._say(link, Frame(FrameKind.STALE, self.fenced, 0, self.fenced))
        self._drop(link)

    # --- what is asked of this engine alone

    def _take(self, link: EngineLink, frame: Frame) -> None:
        if link is self._next:  # a newer epoch has begun there: a successor says nothing else
            self._next = None
            self._tell(FrameKind.STALE, a=frame.a)
            self._drop(link)
        elif frame.kind <= FrameKind.FLUSHED:
            if frame.epoch == self.fenced and link is self._before:
                self._operate(frame)
            else:
                self._refuse(link)
        elif frame.kind not in (FrameKind.STATUS, FrameKind.FENCE) and frame.epoch != self.fenced:
            self._refuse(link)
        else:
            answer = Frame(FrameKind.ANSWER, self.fenced, frame.sequence)
            try:
                if frame.kind == FrameKind.JOIN and link.local:
                    self._ring(link, frame.a, answer)
                elif frame.kind == FrameKind.FENCE and frame.epoch <= self.fenced:
                    self._say(link, answer._replace(kind=FrameKind.STALE, a=self.fenced))
                else:
                    self._say(link, answer._replace(payload=self._answer(link, frame)))
            except (EngineFault, OSError, ValueError) as error:
                self._say(link, answer._replace(kind=FrameKind.FAILED, payload=words_of(error).encode()))

    def _answer(self, link: EngineLink, frame: Frame) -> bytes:
        state = (self.fenced, self.epoch, self.sequence, self.steady, self.torn, self.size, link.local * ROOM)
        match frame.kind:
            case FrameKind.STATUS:
                return STANDING.pack(*state)
            case FrameKind.FENCE:
                self._fence(link, frame.epoch)
                return STANDING.pack(*state)
            case FrameKind.JOIN:
                self._drop(self._before)
                self._before = link
            case FrameKind.CHAIN:
                self._chain(frame)
            case FrameKind.READ:
                return self._get(frame.a, min(frame.b, SLOT))
            case FrameKind.HASH:
                each, end = range(frame.a, frame.a + frame.b, CHUNK), frame.a + frame.b
                parts = (self._get(at, min(CHUNK, end - at)) for at in each)
                return b"".join(hashlib.sha256(part).digest() for part in parts)
            case FrameKind.PATCH:
                if not self.torn:
                    self.steady, self.torn = False, True
                    self._note(durable=True)
                self._put(frame.a, frame.payload)
        return b""

    def _ring(self, link: EngineLink, window: int, answer: Frame) -> None:
        self._drop(self._before)
        self._before, link.window = link, window
        with open(os.memfd_create("group-ring"), "r+b") as file:
            file.truncate(window * SLOT)
            link.slots = mmap.mmap(file.fileno(), window * SLOT)
            socket.send_fds(link.sock, [link.pack(answer)], [file.fileno()])

    def _fence(self, link: EngineLink, epoch: int) -> None:
        self.fenced = epoch
        self._note(durable=True)
        after, self._next = self._next, None  # nobody is to hear that it is lost
        self._drop(after)
        for old in filter(None, (self._coordinator, self._before)):
            self._refuse(old)
        self._coordinator = link

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
                raise EngineFault(f"operation {frame.sequence} came after {self.sequence}")
            if frame.kind == FrameKind.FLUSH:
                self._hand_on(frame)
                self._sync()
                if self._index == 0:
                    self._done(frame._replace(kind=FrameKind.FLUSHED))
                return
            self._done(frame._replace(results=frame.results + self._apply(frame)))
        except (EngineFault, OSError) as error:
            self.steady = False
            self._tell(FrameKind.BROKEN, words=words_of(error))
            self._drop(self._before)

    def _apply(self, frame: Frame) -> bytes:
        match frame.kind:
            case FrameKind.WRITE:
                packed = frame.c and zstandard.ZstdDecompressor().decompress(frame.payload, frame.c)
                self._put(frame.a, packed or frame.payload)
            case FrameKind.MEMCPY:
                self._put(frame.b, self._get(frame.a, frame.c))
            case FrameKind.CAS:
                old = self._get(frame.a, WORD.size)
                if frame.mask >> self._index & 1 and WORD.unpack(old)[0] == frame.b:
                    self._put(frame.a, WORD.pack(frame.c))
                return old
        return b""

    def _done(self, frame: Frame) -> None:
        self.sequence = frame.sequence
        self._note()
        if self._next is None:  # the coordinator takes it from the tail alone
            self._tell(FrameKind.ACK, frame.sequence, results=frame.results)
        self._hand_on(frame)

    def _hand_on(self, frame: Frame) -> None:
        self._say(self._next, frame)

    # --- the region

    def _get(self, offset: int, length: int) -> bytes:
        self._within(offset, length)
        return self._memory[offset : offset + length]

    def _put(self, offset: int, data: bytes) -> None:
        self._within(offset, len(data))
        at = 0
        while at < len(data):
            at += os.pwrite(self._file, data[at:] if at else data, offset + at)

    def _within(self, offset: int, length: int) -> None:
        if offset + length > self.size:
            raise EngineFault(f"bytes {offset} to {offset + length} are not within the region's {self.size}")

    def _sync(self) -> None:
        os.fdatasync(self._file)

    def _note(self, *, durable: bool = False) -> None:
        trailer = (MARK, self.fenced, self.epoch, self.sequence, self.torn)
        TRAILER.pack_into(self._memory, self.size, *trailer)
        if durable:
            self._memory.flush(self.size, PAGE)


def words_of(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def listening(address: str) -> tuple[socket.socket, str]:
    """A socket that listens at ``unix:PATH`` or ``tcp:HOST:PORT``, and its address for `connect`."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        if Path(rest).is_socket():  # of one that was killed: the region is locked by now
            os.unlink(rest)
        return socket.create_server(rest, family=socket.AF_UNIX), address
    host, _, port = rest.rpartition(":")
    sock = socket.create_server((host, int(port)))
    return sock, f"{host}:{sock.getsockname()[1]}"


def main(words: list[str]) -> None:
    """REGION SIZE LISTEN CORES REALTIME: one line of JSON says how it began; the secret is the first line of
    standard input."""
    region, size, listen, cores, realtime = words
    response = {"refused": ""}
    try:
        engine = RegionEngine(Path(region), int(size), bytes.fromhex(sys.stdin.readline()))
        listener, response["address"] = listening(listen)
        if cores:
            os.sched_setaffinity(0, map(int, cores.split(",")))
    except (OSError, EngineFault) as error:
        print(json.dumps({"failed": words_of(error)}), flush=True)
        sys.exit(1)
    try:
        if realtime:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except OSError as error:
        response["refused"] = f"real-time priority is refused ({error.strerror}): it runs as any process"
    print(json.dumps(response), flush=True)
    gc.freeze()
    gc.disable()
    engine.run(listener)


if __name__ == "__main__":
    main(sys.argv[1:])
