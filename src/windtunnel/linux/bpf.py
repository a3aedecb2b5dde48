"""bpf(2) without libbpf: maps, programs on raw tracepoints and on packets, ring buffers.

BPF code is the same for every machine of one byte order, so one compiled object is shipped beside its C
source, named by the digest of it (`Object`).

Source: bpf(2), Documentation/bpf/ of the kernel (btf.rst, ringbuf.rst), the ELF format on relocations.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from windtunnel.base import native
from windtunnel.base.errors import UserError
from windtunnel.linux import LinuxError
from windtunnel.linux.system import bpf

HASH, ARRAY, PERCPU_ARRAY, LRU_HASH, LPM_TRIE, STRUCT_OPS, RINGBUF = 1, 2, 6, 9, 11, 26, 27
_CREATE, _LOOKUP, _UPDATE, _DELETE, _NEXT, _LOAD, _TEST_RUN, _RAW_TRACEPOINT = 0, 1, 2, 3, 4, 5, 10, 17
_PROGRAM_BY_ID, _MAP_BY_ID, _INFO, _LOAD_BTF, _LOOKUP_BATCH, _UPDATE_BATCH, _BIND_MAP = (
    13,
    14,
    15,
    18,
    24,
    26,
    35,
)
_KINDS = {"raw_tracepoint": 17, "tc": 3}
"""Kinds of programs, by the beginning of the names of their sections."""
_NO_PREALLOC, _LOCKED = 1, 4
VMLINUX = Path("/sys/kernel/btf/vmlinux")
_BUSY, _DISCARD = 1 << 31, 1 << 30


class Map:
    """One map; keys and values are bytes. ``lock``: values begin with a struct bpf_spin_lock."""

    def __init__(
        self, kind: int, key: int, value: int, entries: int, name: str = "", *, lock: bool = False
    ) -> None:
        self.key, self.value, self.entries = key, value, entries
        flags = _NO_PREALLOC if kind == LPM_TRIE else 0
        types = _lock_types(value) if lock else -1
        try:
            head = struct.pack("IIIII8x16sI", kind, key, value, entries, flags, name.encode(), 0)
            self.fd = bpf(_CREATE, head + (struct.pack("III", types, 1, 3) if lock else b""))
        finally:
            if types >= 0:
                os.close(types)

    @classmethod
    def by_number(cls, number: int) -> tuple[str, Map]:
        """A map that stands already, by its number, and its name."""
        map_ = cls.of_descriptor(bpf(_MAP_BY_ID, struct.pack("I", number)))
        return _information(map_.fd, 96)[24:40].rstrip(b"\0").decode(), map_

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Map:
        """A map whose descriptor is there already."""
        map_ = cls.__new__(cls)
        map_.fd = descriptor
        _, _, map_.key, map_.value, map_.entries = struct.unpack_from("5I", _information(descriptor, 96))
        return map_

    @property
    def memory(self) -> int:
        """Bytes that the kernel holds for it."""
        text = Path(f"/proc/self/fdinfo/{self.fd}").read_text(encoding="ascii")
        return int(text.partition("memlock:")[2].split()[0])

    def put(self, keys: bytes, values: bytes) -> None:
        """Many values at their keys, each packed one after the other."""
        self._batch(_UPDATE_BATCH, keys, values, len(keys) // self.key, 0)

    def all(self, *, locked: bool = False) -> bytes:
        """The values of an array, one after the other. ``locked``: each as it was between two changes."""
        step, values = 4096, bytearray()
        for start in range(0, self.entries, step):
            count = min(step, self.entries - start)
            after = struct.pack("I", start - 1) if start else b""
            values += self._batch(_LOOKUP_BATCH, after, b"", count, _LOCKED if locked else 0)
        return bytes(values)

    def _batch(self, command: int, keys: bytes, values: bytes, count: int, flags: int) -> bytes:
        first_keys, out = ctypes.create_string_buffer(keys, max(len(keys), 8)), ctypes.create_string_buffer(8)
        # an update takes its keys where a lookup puts those that it found
        key_buffer = first_keys if command == _UPDATE_BATCH else ctypes.create_string_buffer(count * self.key)
        value_buffer = ctypes.create_string_buffer(values, count * self.value)
        begin = ctypes.addressof(first_keys) if keys and command == _LOOKUP_BATCH else 0
        at = (begin, ctypes.addressof(out), ctypes.addressof(key_buffer), ctypes.addressof(value_buffer))
        try:
            bpf(command, struct.pack("QQQQIIQQ", *at, count, self.fd, flags, 0))
        except OSError as error:
            if error.errno != errno.ENOENT:  # the end of the map
                raise
        return value_buffer.raw

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
            following = ctypes.create_string_buffer(self.key)
            old = ctypes.create_string_buffer(key, self.key) if key is not None else None
            at = ctypes.addressof(old) if old is not None else 0
            try:
                bpf(_NEXT, struct.pack("IIQQ", self.fd, 0, at, ctypes.addressof(following)))
            except OSError:
                return
            key = following.raw
            yield key

    def close(self) -> None:
        os.close(self.fd)


def prefix_key(prefix: str) -> bytes:
    """The key of a prefix in an `LPM_TRIE` of both families: IPv4 stands among IPv6, as ::ffff:a.b.c.d."""
    net = ipaddress.ip_network(prefix)
    bits, address = net.prefixlen, net.network_address.packed
    if net.version == 4:
        bits, address = bits + 96, bytes(10) + b"\xff\xff" + address
    return struct.pack("<I16s", bits, address)


def _lock_types(size: int) -> int:
    """Type data with a struct of ``size`` bytes that begins with a lock: the kernel must know where that is.
    Type 1 is an int (of the key), 3 the struct; a descriptor."""
    names = b"\0u32\0bpf_spin_lock\0val\0state\0lock\0"

    def at(name: bytes) -> int:
        return names.index(b"\0" + name + b"\0") + 1

    types = struct.pack("IIII", at(b"u32"), 1 << 24, 4, 32)
    for name, length, member, kind in ((b"bpf_spin_lock", 4, b"val", 1), (b"state", size, b"lock", 2)):
        types += struct.pack("IIIIII", at(name), 4 << 24 | 1, length, at(member), kind, 0)
    head = struct.pack("HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(names))
    blob = ctypes.create_string_buffer(head + types + names, len(head + types + names))
    return bpf(_LOAD_BTF, struct.pack("QQIII", ctypes.addressof(blob), 0, len(blob), 0, 0))


def _information(descriptor: int, size: int) -> bytes:
    information = ctypes.create_string_buffer(size)
    bpf(_INFO, struct.pack("IIQ", descriptor, size, ctypes.addressof(information)))
    return information.raw


def number_of(descriptor: int) -> int:
    """The number by which the kernel knows a program, as long as somebody holds it."""
    return int(struct.unpack_from("II", _information(descriptor, 64))[1])


def bind(program: int, table: Map) -> None:
    """Let a loaded program hold a map that it does not use: whoever finds the program finds the map."""
    bpf(_BIND_MAP, struct.pack("III", program, table.fd, 0))


def maps_of(program: int) -> dict[str, Map]:
    """The maps of the program with that number, by name. Raises OSError: there is none."""
    descriptor = bpf(_PROGRAM_BY_ID, struct.pack("I", program))
    try:
        numbers = (ctypes.c_uint32 * 64)()
        info = ctypes.create_string_buffer(64)
        struct.pack_into("<IQ", info, 52, len(numbers), ctypes.addressof(numbers))
        bpf(_INFO, struct.pack("IIQ", descriptor, 64, ctypes.addressof(info)))
        return dict(Map.by_number(number) for number in numbers[: struct.unpack_from("I", info, 52)[0]])
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class BpfProgram:
    """Code of one section of an object file, and at which of its instructions which map goes in. ``kind``:
    how the section's name begins, ``name`` the rest: that of a raw tracepoint is the tracepoint."""

    name: str
    code: bytes
    maps: tuple[tuple[int, str], ...]
    kind: str = "raw_tracepoint"


def programs(elf: bytes) -> list[BpfProgram]:
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
    sections = []
    for number, header in enumerate(headers):
        kind, _, name = text(headers[names_at][4], header[0]).partition("/")
        if header[1] != 1 or kind not in _KINDS:
            continue
        uses = []
        for other in headers:
            if other[1] == 9 and other[7] == number:
                for entry in range(other[4], other[4] + other[5], 16):
                    offset, info = struct.unpack_from("<QQ", elf, entry)
                    uses.append((offset, symbols[info >> 32]))
        code = elf[header[4] : header[4] + header[5]]
        sections.append(BpfProgram(name, code, tuple(uses), kind))
    return sections


def loaded(program: BpfProgram, maps: Mapping[str, Map]) -> int:
    """Give a program to the kernel: its descriptor. Raises LinuxError with the verifier's last words."""
    code = bytearray(program.code)
    for offset, name in program.maps:
        code[offset + 1] = code[offset + 1] & 0x0F | 0x10
        struct.pack_into("<i", code, offset + 4, maps[name].fd)
    instructions = ctypes.create_string_buffer(bytes(code), len(code))
    license_name = ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(1 << 20)
    called = f"wt_{program.name}".encode()[:15]
    what = (_KINDS[program.kind], len(code) // 8, ctypes.addressof(instructions))

    def load(level: int) -> int:
        logging = (level, len(log), ctypes.addressof(log)) if level else (0, 0, 0)
        return bpf(
            _LOAD, struct.pack("<IIQQIIQII16s", *what, ctypes.addressof(license_name), *logging, 0, 0, called)
        )

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
            f"the kernel refused the program for {program.name}: {error.strerror}; {words[-400:]}"
        ) from None


def attached(program: int, tracepoint: str) -> int:
    """Attach a loaded program; it stays attached until the returned descriptor is closed."""
    name = ctypes.create_string_buffer(tracepoint.encode())
    try:
        return bpf(_RAW_TRACEPOINT, struct.pack("<QI", ctypes.addressof(name), program))
    except OSError as error:
        raise LinuxError(f"tracepoint {tracepoint} cannot be used: {error.strerror}") from None


@dataclass(frozen=True)
class Packet:
    """What a program on packets is tried with. ``length``: bytes on the wire (struct __sk_buff, wire_len);
    ``time``: its tstamp, ns; ``data``: from the Ethernet header on, at least 14 bytes."""

    data: bytes
    length: int
    time: int = 0
    mark: int = 0


def tried(program: int, packet: Packet, repeat: int = 1) -> tuple[int, int]:
    """Run a loaded program of kind ``tc`` on a packet, by BPF_PROG_TEST_RUN: what it returned (as a signed
    number) and the mean of a run in ns. Raises OSError."""
    data = ctypes.create_string_buffer(packet.data, len(packet.data))
    context = ctypes.create_string_buffer(192)
    struct.pack_into("I", context, 8, packet.mark)
    struct.pack_into("QI", context, 152, packet.time, packet.length)
    attributes = bytearray(80)
    struct.pack_into(
        "IIIIQQIIII", attributes, 0, program, 0, len(data), 0, ctypes.addressof(data), 0, repeat, 0, 192, 0
    )
    struct.pack_into("Q", attributes, 48, ctypes.addressof(context))
    bpf(_TEST_RUN, attributes)
    return struct.unpack_from("i", attributes, 4)[0], struct.unpack_from("I", attributes, 36)[0]


@dataclass(frozen=True)
class Object:
    """BPF programs in C: what is shipped lies built beside the ``source``, named by the digest of all C files
    of its folder. ``module``: who builds it anew, by ``python -m``. ``typed``: with type data, for `libbpf`.
    """

    source: Path
    module: str
    typed: bool = False

    @property
    def file_name(self) -> str:
        return f"{self._stem}-{native.digest(sorted(self.source.parent.glob('*.[ch]')))}.o"

    @property
    def _stem(self) -> str:
        return self.source.name.partition(".")[0]

    def programs(self) -> list[BpfProgram]:
        """Raises LinuxError when the object that belongs to the source is not there."""
        return programs(self.locate().read_bytes())

    def locate(self) -> Path:
        """Where it lies. Raises LinuxError as `programs` does."""
        path = self.source.parent / self.file_name
        if not path.exists():
            raise LinuxError(
                f"the compiled program {path.name} is missing; build it with clang: python -m {self.module}"
            )
        return path

    def build(self, target: Path) -> None:
        """Compile it without debug data. Raises UserError with the compiler's words."""
        clang, strip = shutil.which("clang"), shutil.which("llvm-strip") or shutil.which("llvm-strip-14")
        if clang is None or strip is None:
            raise UserError(
                "building the program needs clang and llvm-strip: apt-get install clang llvm libbpf-dev"
            )
        includes = [f"-I{path}" for path in sorted(Path("/usr/include").glob("*-linux-gnu"))]
        options = ["-O2", *["-g"] * self.typed, "-target", "bpf", "-mcpu=v3", "-Wall", "-Werror", *includes]
        with tempfile.TemporaryDirectory() as scratch:
            compiled = f"{scratch}/{self._stem}.o"
            native.compiled([clang, *options, "-c", str(self.source), "-o", compiled], self.source.name)
            sections = [] if self.typed else ["--remove-section=.BTF", "--remove-section=.BTF.ext"]
            native.compiled([strip, "-g", *sections, compiled], self.source.name)
            shutil.copyfile(compiled, target)

    def rebuild(self) -> None:
        """Build what is shipped anew, and remove older builds."""
        native.rebuilt(self.source.parent, self.file_name, f"{self._stem}-*.o", self.build)


class RingReader:
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
