"""What the kernel knows of a TCP connection within this host (and this network namespace).

One question to it costs some microseconds; /proc/net/tcp, which lists all connections, costs milliseconds
for each thousand of them, and is read only where the kernel cannot be asked.

Source: Linux, sock_diag(7) and inet_diag.h.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

Address = tuple[str, int]

ESTABLISHED = 1
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST = 4, 20, 1
_HEAD = struct.Struct("=IHHII")
_WANTED = struct.Struct("=BBBxI")
_PORTS, _ANY = struct.Struct("!HH"), struct.pack("=I8s", 0, b"\xff" * 8)  # any interface, any cookie
_ANSWER = struct.Struct("=BBBB48xIIIII")


@dataclass(frozen=True)
class ConnectionEnd:
    """One end of a connection. ``user``: whose it is."""

    state: int
    user: int


def end(own: Address, other: Address) -> ConnectionEnd | None:
    """The end at ``own`` of the IPv4 connection between both (also where its socket is of IPv6); None where
    there is none."""
    with contextlib.suppress(OSError):
        address = _query(own, other)
        if address is not None:
            return address
    return _listed(own, other)


def _query(own: Address, other: Address) -> ConnectionEnd | None:
    hosts = b"".join(socket.inet_aton(host).ljust(16, b"\0") for host in (own[0], other[0]))
    request = _WANTED.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    body = request + _PORTS.pack(own[1], other[1]) + hosts + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as channel:
        channel.send(_HEAD.pack(_HEAD.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0) + body)
        answer = channel.recv(4096)
    if _HEAD.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:  # an error: there is none, or it cannot be asked
        return None
    fields = _ANSWER.unpack_from(answer, _HEAD.size)
    return ConnectionEnd(fields[1], fields[7])


def _listed(own: Address, other: Address) -> ConnectionEnd | None:
    here, there = _hexadecimal(own), _hexadecimal(other)
    for name in ("tcp6", "tcp"):  # PyTorch's sockets are of IPv6, with IPv4 addresses at the end of theirs
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(here) and fields[2].endswith(there):
                    return ConnectionEnd(int(fields[3], 16), int(fields[7]))
    return None


def _hexadecimal(address: Address) -> str:
    host, port = address
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
