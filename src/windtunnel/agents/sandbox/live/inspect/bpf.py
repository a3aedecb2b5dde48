"""bpf(2) through ctypes: maps, an object's programs, attaching them to raw tracepoints. No libbpf.

Source: bpf(2), Documentation/bpf/ of the kernel, the ELF format's chapter on relocations.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from windtunnel.agents.sandbox.live.inspect.fault import InspectError

HASH, ARRAY, PERCPU_ARRAY, LRU_HASH, RINGBUF = 1, 2, 6, 9, 27
_NUMBER = {"x86_64": 321, "aarch64": 280}
_CREATE, _LOOKUP, _UPDATE, _DELETE, _NEXT, _LOAD, _RAW_TRACEPOINT = 0, 1, 2, 3, 4, 5, 17
_RAW_TRACEPOINT_PROGRAM = 17
_libc = ctypes.CDLL(None, use_errno=True)


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, max(len(attributes), 128))
    result: int = _libc.syscall(_NUMBER[platform.machine()], command, buffer, ctypes.c_uint(128))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class Map:
    """One map; keys and values are bytes."""

    def __init__(self, kind: int, key: int, value: int, entries: int) -> None:
        self.key, self.value = key, value
        self.fd = _bpf(_CREATE, struct.pack("IIIII", kind, key, value, entries, 0))

    def __setitem__(self, key: bytes, value: bytes) -> None:
        keys, values = (
            ctypes.create_string_buffer(key, self.key),
            ctypes.create_string_buffer(value, self.value),
        )
        _bpf(_UPDATE, struct.pack("IIQQQ", self.fd, 0, ctypes.addressof(keys), ctypes.addressof(values), 0))

    def get(self, key: bytes) -> bytes | None:
        keys, values = ctypes.create_string_buffer(key, self.key), ctypes.create_string_buffer(self.value)
        try:
            _bpf(
                _LOOKUP, struct.pack("IIQQQ", self.fd, 0, ctypes.addressof(keys), ctypes.addressof(values), 0)
            )
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return values.raw

    def remove(self, key: bytes) -> None:
        keys = ctypes.create_string_buffer(key, self.key)
        try:
            _bpf(_DELETE, struct.pack("IIQQQ", self.fd, 0, ctypes.addressof(keys), 0, 0))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def __iter__(self) -> Iterator[bytes]:
        key: bytes | None = None
        while True:
            found = ctypes.create_string_buffer(self.key)
            old = ctypes.create_string_buffer(key, self.key) if key is not None else None
            at = ctypes.addressof(old) if old is not None else 0
            try:
                _bpf(_NEXT, struct.pack("IIQQ", self.fd, 0, at, ctypes.addressof(found)))
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
    """Give a program to the kernel: its descriptor. Raises InspectError with the verifier's last words."""
    code = bytearray(program.code)
    for offset, name in program.maps:
        code[offset + 1] = code[offset + 1] & 0x0F | 0x10
        struct.pack_into("<i", code, offset + 4, maps[name].fd)
    instructions = ctypes.create_string_buffer(bytes(code), len(code))
    license_name = ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(1 << 20)

    def load(level: int) -> int:
        return _bpf(
            _LOAD,
            struct.pack(
                "<IIQQIIQII",
                _RAW_TRACEPOINT_PROGRAM,
                len(code) // 8,
                ctypes.addressof(instructions),
                ctypes.addressof(license_name),
                level,
                len(log) if level else 0,
                ctypes.addressof(log) if level else 0,
                0,
                0,
            ),
        )

    try:
        return load(0)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            raise InspectError(
                f"the kernel does not let this process load BPF programs: {error.strerror}"
            ) from None
    try:
        return load(1)
    except OSError as error:
        words = " / ".join(log.value.decode(errors="replace").strip().splitlines()[-3:])
        raise InspectError(
            f"the kernel refused the program for {program.tracepoint}: {error.strerror}; {words[-400:]}"
        ) from None


def attached(program: int, tracepoint: str) -> int:
    """Attach a loaded program; it stays attached until the returned descriptor is closed."""
    name = ctypes.create_string_buffer(tracepoint.encode())
    try:
        return _bpf(_RAW_TRACEPOINT, struct.pack("<QI", ctypes.addressof(name), program))
    except OSError as error:
        raise InspectError(f"tracepoint {tracepoint} cannot be used: {error.strerror}") from None
