"""bpf(2) without libbpf: maps, programs on raw tracepoints, ring buffers, the kernel's types.

Source: bpf(2), Documentation/bpf/ of the kernel (btf.rst, ringbuf.rst), the ELF format on relocations.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from windtunnel.linux import LinuxError
from windtunnel.linux.system import bpf

HASH, ARRAY, PERCPU_ARRAY, LRU_HASH, RINGBUF = 1, 2, 6, 9, 27
_CREATE, _LOOKUP, _UPDATE, _DELETE, _NEXT, _LOAD, _RAW_TRACEPOINT = 0, 1, 2, 3, 4, 5, 17
_RAW_TRACEPOINT_PROGRAM = 17
VMLINUX = Path("/sys/kernel/btf/vmlinux")
_STRUCT, _UNION = 4, 5
# words that follow the three of every type of BTF, by kind: fixed, and for each of its members
_FIXED = {1: 1, 3: 3, 14: 1, 17: 1}
_EACH = {4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}
_BUSY, _DISCARD = 1 << 31, 1 << 30


class Map:
    """One map; keys and values are bytes."""

    def __init__(self, kind: int, key: int, value: int, entries: int) -> None:
        self.key, self.value = key, value
        self.fd = bpf(_CREATE, struct.pack("IIIII", kind, key, value, entries, 0))

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._ask(_UPDATE, key, value)

    def get(self, key: bytes) -> bytes | None:
        return self._ask(_LOOKUP, key)

    def remove(self, key: bytes) -> None:
        self._ask(_DELETE, key)

    def _ask(self, command: int, key: bytes, value: bytes = b"") -> bytes | None:
        """What stands at the value after it; None: there is no such key."""
        keys = ctypes.create_string_buffer(key, self.key)
        values = ctypes.create_string_buffer(value, self.value)
        # who removes gives no value
        at = ctypes.addressof(values) if command != _DELETE else 0
        try:
            bpf(command, struct.pack("IIQQQ", self.fd, 0, ctypes.addressof(keys), at, 0))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return values.raw

    def __iter__(self) -> Iterator[bytes]:
        key: bytes | None = None
        while True:
            found = ctypes.create_string_buffer(self.key)
            old = ctypes.create_string_buffer(key, self.key) if key is not None else None
            at = ctypes.addressof(old) if old is not None else 0
            try:
                bpf(_NEXT, struct.pack("IIQQ", self.fd, 0, at, ctypes.addressof(found)))
            except OSError:
                return
            key = found.raw
            yield key

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class Program:
    """Code for one raw tracepoint, and at which of its instructions which map goes in."""

    tracepoint: str
    code: bytes
    maps: tuple[tuple[int, str], ...]


def programs(elf: bytes) -> list[Program]:
    """The programs of an object file made by ``clang -target bpf``, one a section."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    count, names_at = struct.unpack_from("<HH", elf, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * number) for number in range(count)]

    def text(base: int, offset: int) -> str:
        return elf[base + offset : elf.index(b"\0", base + offset)].decode()

    symbols: list[str] = []
    for header in headers:
        if header[1] == 2:
            strings = headers[header[6]][4]
            for offset in range(header[4], header[4] + header[5], 24):
                symbols.append(text(strings, struct.unpack_from("<I", elf, offset)[0]))
    found = []
    for number, header in enumerate(headers):
        name = text(headers[names_at][4], header[0])
        if header[1] != 1 or not name.startswith("raw_tracepoint/"):
            continue
        uses = []
        for other in headers:
            if other[1] == 9 and other[7] == number:
                for entry in range(other[4], other[4] + other[5], 16):
                    offset, info = struct.unpack_from("<QQ", elf, entry)
                    uses.append((offset, symbols[info >> 32]))
        code = elf[header[4] : header[4] + header[5]]
        found.append(Program(name.partition("/")[2], code, tuple(uses)))
    return found


def loaded(program: Program, maps: Mapping[str, Map]) -> int:
    """Give a program to the kernel: its descriptor. Raises LinuxError with the verifier's last words."""
    code = bytearray(program.code)
    for offset, name in program.maps:
        code[offset + 1] = code[offset + 1] & 0x0F | 0x10
        struct.pack_into("<i", code, offset + 4, maps[name].fd)
    instructions = ctypes.create_string_buffer(bytes(code), len(code))
    license_name = ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(1 << 20)
    what = (_RAW_TRACEPOINT_PROGRAM, len(code) // 8, ctypes.addressof(instructions))

    def load(level: int) -> int:
        told = (level, len(log), ctypes.addressof(log)) if level else (0, 0, 0)
        return bpf(_LOAD, struct.pack("<IIQQIIQII", *what, ctypes.addressof(license_name), *told, 0, 0))

    try:
        return load(0)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            raise LinuxError(
                f"the kernel does not let this process load BPF programs: {error.strerror}"
            ) from None
    try:
        return load(1)
    except OSError as error:
        words = " / ".join(log.value.decode(errors="replace").strip().splitlines()[-3:])
        raise LinuxError(
            f"the kernel refused the program for {program.tracepoint}: {error.strerror}; {words[-400:]}"
        ) from None


def attached(program: int, tracepoint: str) -> int:
    """Attach a loaded program; it stays attached until the returned descriptor is closed."""
    name = ctypes.create_string_buffer(tracepoint.encode())
    try:
        return bpf(_RAW_TRACEPOINT, struct.pack("<QI", ctypes.addressof(name), program))
    except OSError as error:
        raise LinuxError(f"tracepoint {tracepoint} cannot be used: {error.strerror}") from None


class Ring:
    """Reader of a ring buffer: the kernel writes records, this process reads them out of shared memory.

    The producer's position and a record's length are written by the kernel with release semantics. Python
    cannot load with acquire semantics by itself; a full fence is had by an atomic operation of the C
    library's (a lock taken and released), which is enough on machines that reorder loads. ``drain`` must be
    called by one thread at a time.
    """

    def __init__(self, fd: int, size: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        self.fd, self._size, self._page = fd, size, page
        self._consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
        self._producer = mmap.mmap(fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._fence = threading.Lock()

    def drain(self, timeout: float = 1.0) -> Iterator[bytes]:
        """All records whose call was finished before this one. A record that is being written is waited for;
        raises LinuxError when it is not finished in time."""
        at = struct.unpack_from("<Q", self._consumer)[0]
        end = struct.unpack_from("<Q", self._producer)[0]
        deadline = 0.0
        while at < end:
            with self._fence:
                offset = self._page + (at & (self._size - 1))
                length = struct.unpack_from("<I", self._producer, offset)[0]
            if length & _BUSY:
                now = time.monotonic()
                deadline = deadline or now + timeout
                if now > deadline:
                    raise LinuxError("the kernel did not finish writing an event")
                time.sleep(0)
                continue
            with self._fence:
                size = length & (_DISCARD - 1)
                record = b"" if length & _DISCARD else self._producer[offset + 8 : offset + 8 + size]
            at += (size + 15) & ~7
            struct.pack_into("<Q", self._consumer, 0, at)
            if record:
                yield record

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()


class Types:
    """Where the fields of kernel structures lie, from the kernel's own type data (BTF).

    Offsets differ between kernels; they are looked up by name in ``/sys/kernel/btf/vmlinux``, which
    distribution kernels have carried since 2020; fields inside unnamed structs and unions are found too.
    Raises LinuxError when ``data`` is none.
    """

    def __init__(self, data: bytes) -> None:
        try:
            magic, version, _, header = struct.unpack_from("<HBBI", data)
            type_at, type_size, string_at, string_size = struct.unpack_from("<IIII", data, 8)
        except struct.error:
            raise LinuxError("the kernel's type data (BTF) is cut short") from None
        if magic != 0xEB9F or version != 1:
            raise LinuxError(f"the kernel's type data (BTF) has version {version}, not 1")
        self._strings = data[header + string_at : header + string_at + string_size]
        self._words = memoryview(data[header + type_at : header + type_at + type_size]).cast("I")
        self._starts = self._indexed()

    def _indexed(self) -> list[int]:
        words, starts, at = self._words, [0], 0
        fixed, each, end = _FIXED, _EACH, len(words)
        while at < end:
            starts.append(at)
            info = words[at + 1]
            kind = (info >> 24) & 31
            if kind in each:
                at += 3 + each[kind] * (info & 0xFFFF)
            else:
                at += 3 + fixed.get(kind, 0)
        return starts

    def _name(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _named(self, name: str) -> int:
        """Where the structure of that name starts."""
        wanted = self._strings.find(b"\0" + name.encode() + b"\0") + 1
        words = self._words
        if wanted:
            for start in self._starts[1:]:
                if words[start] == wanted and (words[start + 1] >> 24) & 31 == _STRUCT:
                    return start
        raise LinuxError(f"the kernel's type data knows no struct {name}")

    def _members(self, start: int, base: int = 0) -> Iterable[tuple[str, int, int]]:
        """Name, byte offset and type of every field, those of unnamed structs and unions among them."""
        words = self._words
        info = words[start + 1]
        for number in range(info & 0xFFFF):
            name, kind, bits = words[start + 3 + 3 * number : start + 6 + 3 * number]
            offset = base + ((bits & 0xFFFFFF if info >> 31 else bits) >> 3)
            if name:
                yield self._name(name), offset, kind
            elif (words[self._starts[kind] + 1] >> 24) & 31 in (_STRUCT, _UNION):
                yield from self._members(self._starts[kind], offset)

    def offset(self, path: str) -> int:
        """Byte offset of ``struct.field[.field…]``; ``a|b`` names alternatives, the first one present
        counts."""
        name, *fields = path.split(".")
        start, total = self._named(name), 0
        for field in fields:
            members = {member: (offset, kind) for member, offset, kind in self._members(start)}
            for choice in field.split("|"):
                if choice in members:
                    offset, kind = members[choice]
                    break
            else:
                raise LinuxError(f"the kernel's type data knows no field {field} in {path}")
            total, start = total + offset, self._starts[self._plain(kind)]
        return total

    def _plain(self, kind: int) -> int:
        """The type behind typedefs and qualifiers."""
        while (self._words[self._starts[kind] + 1] >> 24) & 31 in (8, 9, 10, 11, 18):
            kind = self._words[self._starts[kind] + 2]
        return kind


def kernel_types(path: Path = VMLINUX) -> Types:
    """Raises LinuxError when the kernel carries no type data."""
    try:
        return Types(path.read_bytes())
    except OSError as error:
        raise LinuxError(f"no kernel type data at {path} ({error.strerror})") from None
