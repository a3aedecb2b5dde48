"""Ends restored TCP connections whose other end is gone, so that a program waiting on one learns it at once.

A restore brings back every connection as it was. If both ends lie inside the sandbox they go on; of one to
the outside (the host's model proxy, another machine) only the inner end comes back, and a program that waits
for an answer would wait for ever. Such an end is an established socket whose mirror image is not in the same
network namespace; the kernel destroys it on request, and the program's call returns with an error.

Source: Linux, sock_diag(7) and inet_diag.h (SOCK_DESTROY).
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from windtunnel.linux import namespaces

ESTABLISHED = 1
CLONE_NEWNET = 0x40000000
NETLINK_SOCK_DIAG = 4
SOCK_DESTROY = 21
REQUEST_WITH_ACK = 0x1 | 0x4
ERROR_MESSAGE = 2
MAPPED = bytes(10) + b"\xff\xff"
"""What precedes an IPv4 address inside an IPv6 one."""

End = tuple[bytes, int]
"""Address (4 or 16 bytes) and port."""


def close_orphans(pid: int, netns: Path) -> int:
    """End the connections of ``pid``'s network namespace that lost their other end; how many were ended.

    Nothing is ended where the kernel has no SOCK_DESTROY: such a program learns it when it next sends.
    """
    found = orphans(table(pid))
    if not found:
        return 0

    def end() -> int:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as channel:
            return sum(destroy(channel, family, local, remote) for family, local, remote in found)

    try:
        return namespaces.within(netns, end)
    except OSError:
        return 0


def table(pid: int) -> list[tuple[int, End, End]]:
    """The established TCP sockets of a process's network namespace: family, own end, other end."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, *_ = line.split()
            if int(state, 16) == ESTABLISHED:
                found.append((int(family), _end(local), _end(remote)))
    return found


def orphans(established: list[tuple[int, End, End]]) -> list[tuple[int, End, End]]:
    """Those of which the other end is not in the table too."""
    ends = {(_plain(local), _plain(remote)) for _, local, remote in established}
    return [
        (family, local, remote)
        for family, local, remote in established
        if (_plain(remote), _plain(local)) not in ends
    ]


def destroy(channel: socket.socket, family: int, local: End, remote: End) -> bool:
    """Ask the kernel to end one connection of the namespace in which ``channel`` was opened."""
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 1 << ESTABLISHED)
    body += struct.pack(">HH", local[1], remote[1])
    body += local[0].ljust(16, b"\0") + remote[0].ljust(16, b"\0")
    body += struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    channel.send(struct.pack("=IHHII", 16 + len(body), SOCK_DESTROY, REQUEST_WITH_ACK, 1, 0) + body)
    answer = channel.recv(4096)
    _, kind, _, _, _ = struct.unpack_from("=IHHII", answer)
    return kind == ERROR_MESSAGE and struct.unpack_from("=i", answer, 16)[0] == 0


def _end(word: str) -> End:
    """``0100007F:1F90`` is 127.0.0.1 port 8080: words of the host's byte order, in hexadecimal."""
    address, _, port = word.partition(":")
    words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
    return struct.pack(f"={len(words)}I", *words), int(port, 16)


def _plain(end: End) -> End:
    return (end[0][12:], end[1]) if end[0].startswith(MAPPED) and len(end[0]) == 16 else end
