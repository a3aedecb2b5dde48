"""The kernel side: programs, maps and ring, shared by all sandboxes that one process watches.

A program at every system call taxes all processes of the host, so the programs are attached with the first
sandbox that is watched and detached with the last. Each sandbox has a slot; loss of events, doubts and counts
are kept by slot, so that a storm in one sandbox puts no other in doubt.
"""

from __future__ import annotations

import os
import platform
import select
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.inspect.syscalls import DOUBTS, NUMBERS, rules_of
from windtunnel.linux import LinuxError, bpf, libbpf

OBJECT = bpf.Object(
    Path(__file__).parent / "bpf" / "turn.bpf.c", "windtunnel.agents.sandbox.inspect.kernel", typed=True
)
TRACEPOINTS = ("sys_exit", "sched_process_exec", "sched_process_exit", "signal_generate")
"""Of the kernel; each has the program of its name."""
SLOTS = 1024
DOUBTS_EACH = 16
CUT = 1
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
_HEADER = struct.Struct("<IIHHBBxxIIIHHHH")


class Event(NamedTuple):
    """One change of a file, as the kernel saw it. Names are those from the root of the file system that
    ``device`` tells (as in mountinfo: major, minor); ``path`` is what the process passed, relative to them.
    """

    pid: int
    number: int
    op: int
    cut: bool
    mode: int
    links: int
    device: int
    names: bytes
    path: bytes
    device2: int
    names2: bytes
    path2: bytes


@dataclass(frozen=True)
class Count:
    inputs: int = 0
    writes: int = 0
    execs: int = 0


def _names(pieces: bytes) -> bytes:
    """``b"a\\0tmp\\0"`` (leaf first) as ``b"/tmp/a"``."""
    return b"/" + b"/".join(reversed(pieces[:-1].split(b"\0"))) if pieces else b"/"


def decoded(record: bytes) -> tuple[int, Event]:
    """Slot and event of one record of the ring."""
    slot, pid, number, mode, op, flags, links, device, device2, *ends = _HEADER.unpack_from(record)
    base1, path1, base2, path2 = (_HEADER.size + end for end in ends)
    return slot, Event(
        pid,
        number,
        op,
        bool(flags & CUT),
        mode,
        links,
        device,
        _names(record[_HEADER.size : base1]),
        record[base1:path1].rstrip(b"\0"),
        device2,
        _names(record[path1:base2]) if base2 > path1 else b"/",
        record[base2:path2].rstrip(b"\0") if base2 > _HEADER.size else b"",
    )


def missing() -> str:
    """Why the programs cannot be used here, in words; empty when they can."""
    if os.geteuid() != 0:
        return "needs root"
    if platform.machine() not in NUMBERS:
        return f"no program for machines of the kind {platform.machine()}"
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        return "this process is not in the machine's first pid namespace"
    try:
        kernel = Kernel(lambda slot, event: None)
        try:
            kernel.open()
        finally:
            kernel.close()
    except (InspectError, LinuxError) as error:
        return str(error)
    except OSError as error:
        return f"BPF maps or programs cannot be made: {error.strerror}"
    return ""


class Kernel:
    """Programs, maps, ring and its reader. ``sink`` gets every event, in the ring's order, under a lock."""

    def __init__(self, sink: Callable[[int, Event], None]) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._open = False
        self._loaded: libbpf.Loaded | None = None
        self._maps: dict[str, bpf.Map] = {}
        self._links: list[int] = []
        self._ring: bpf.Ring | None = None
        self._stop = -1
        self._reader: threading.Thread | None = None
        self.broken = ""
        """Why events may not have been handed on yet, in words; empty after a whole ``drain``."""

    def open(self) -> None:
        """Load and attach (idempotent). Raises InspectError or OSError; then nothing is attached."""
        if self._open:
            return
        try:
            self._loaded = libbpf.Loaded(OBJECT.locate().read_bytes(), {})
            self._maps = self._loaded.maps
            for number, rule in rules_of(platform.machine()).items():
                self._maps["rules"][struct.pack("<I", number)] = rule.packed()
            self._ring = bpf.Ring(self._maps["ring"].fd, self._maps["ring"].entries)
            for name in TRACEPOINTS:
                self._links.append(bpf.attached(self._loaded.program(name), name))
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        except BaseException:
            self._release()
            raise
        self._open = True
        self._reader = threading.Thread(target=self._read, name="windtunnel-inspect", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Detach and forget (idempotent)."""
        if not self._open:
            return
        self._open = False
        os.eventfd_write(self._stop, 1)
        if self._reader is not None:
            self._reader.join()
        with self._lock:
            self._release()

    def _release(self) -> None:
        for link in self._links:
            os.close(link)
        if self._ring is not None:
            self._ring.close()
        if self._loaded is not None:
            self._loaded.close()
        if self._stop >= 0:
            os.close(self._stop)
        self._links, self._ring, self._loaded, self._maps, self._stop = [], None, None, {}, -1

    def _read(self) -> None:
        assert self._ring is not None
        poll = select.poll()
        poll.register(self._ring.fd, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while self._open:
            # events do not wake the reader before the ring is an eighth full
            ready = poll.poll()
            if any(fd == self._stop for fd, _ in ready):
                return
            self.drain()

    def drain(self) -> None:
        """Hand on everything that happened before this call."""
        with self._lock:
            if self._ring is None:
                return
            try:
                for record in self._ring.drain():
                    self._sink(*decoded(record))
                self.broken = ""
            except LinuxError as error:
                self.broken = f"files: {error}"

    def add(self, slot: int, cgroup: Path, epoch: int) -> int:
        """Watch the processes of a cgroup (v2): its id, for ``set_epoch`` and ``remove``."""
        identity = os.stat(cgroup).st_ino
        self.set_epoch(identity, slot, epoch)
        return identity

    def set_epoch(self, identity: int, slot: int, epoch: int) -> None:
        self._maps["slots"][struct.pack("<Q", identity)] = struct.pack("<II", slot, epoch & 0xFFFFFFFF)

    def remove(self, identity: int, slot: int) -> None:
        self._maps["slots"].remove(struct.pack("<Q", identity))
        for key in list(self._maps["counts"]):
            if struct.unpack_from("<I", key)[0] == slot:
                self._maps["counts"].remove(key)

    def count(self, slot: int, pid: int) -> Count:
        value = self._maps["counts"].get(struct.pack("<II", slot, pid))
        return Count(*struct.unpack("<QQQ", value)) if value else Count()

    def lost(self, slot: int) -> int:
        value = self._maps["lost"].get(struct.pack("<I", slot))
        return int(struct.unpack("<Q", value)[0]) if value else 0

    def doubts(self, slot: int) -> tuple[int, ...]:
        """How often each of ``syscalls.DOUBTS`` was raised, ever."""
        counts = []
        for number in range(len(DOUBTS)):
            value = self._maps["doubts"].get(struct.pack("<I", slot * DOUBTS_EACH + number))
            counts.append(int(struct.unpack("<Q", value)[0]) if value else 0)
        return tuple(counts)


if __name__ == "__main__":
    OBJECT.rebuild()
