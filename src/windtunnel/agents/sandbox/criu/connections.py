"""TCP connections of a sandbox's network, and the end of those that lost their other end.

A program that waits for an answer of a host that knows nothing of a restored connection would wait for ever.
Such an end is an established socket whose mirror image no process of the sandbox holds; the kernel destroys
it on request, and the program's call returns with an error.

Source: Linux, sock_diag(7) and inet_diag.h (SOCK_DESTROY), tcp.h (TCP_REPAIR).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from windtunnel.linux import namespaces, processes
from windtunnel.linux.system import copied_descriptor, process_handle

ESTABLISHED = 1
TCP_REPAIR = 19
"""Option of a TCP socket whose state is being read; no data can be read or written meanwhile."""
NETLINK_SOCK_DIAG = 4
SOCK_DESTROY = 21
REQUEST_WITH_ACK = 0x1 | 0x4
ERROR_MESSAGE = 2
MAPPED = bytes(10) + b"\xff\xff"
"""What precedes an IPv4 address inside an IPv6 one."""

End = tuple[bytes, int]
"""Address (4 or 16 bytes) and port."""


class Connection(NamedTuple):
    """A TCP socket that has another end, or had one."""

    family: int
    local: End
    remote: End
    established: bool = True
    """Neither end has said that it sends no more."""


def close_orphans(pids: Iterable[int], netns: Path) -> int:
    """End the connections of the processes ``pids``, in the network namespace of that file, that lost their
    other end; how many were ended.

    Nothing is ended where the kernel has no SOCK_DESTROY: such a program learns it when it next sends.
    """
    # one whose other end has ended already waits for nothing
    found = [one for one in orphans(held(pids)) if one.established]
    if not found:
        return 0

    def end_all() -> int:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as channel:
            return sum(destroy(channel, one.family, one.local, one.remote) for one in found)

    try:
        return namespaces.within(netns, end_all)
    except OSError:
        return 0


def held(pids: Iterable[int]) -> list[Connection]:
    """The connections of processes, each once.

    They are asked one by one: the kernel's table of a network is read by going through that of all networks,
    which takes ten milliseconds where there is much memory.
    """
    found = [connection(plug) for _, plug in sockets(_links(pids))]
    return [one for one in found if one is not None]


def leave_repair(pids: Iterable[int]) -> int:
    """Take the TCP sockets of these processes out of the state into which a CRIU that was killed has put
    them; how many were. Else every later read fails, and a later dump keeps them so."""
    left = 0
    for _, plug in sockets(_links(pids)):
        with contextlib.suppress(OSError):  # no TCP socket
            if plug.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR):
                plug.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)
                left += 1
    return left


def _links(pids: Iterable[int]) -> Iterator[tuple[int, Mapping[int, str]]]:
    return ((pid, processes.descriptors(pid)) for pid in pids)


def sockets(have: Iterable[tuple[int, Mapping[int, str]]]) -> Iterator[tuple[str, socket.socket]]:
    """Copies of the sockets that processes have open, with their links in /proc; each socket once, closed
    before the next. ``have``: processes, with the links of their descriptors by number."""
    seen: set[str] = set()
    for pid, links in have:
        numbers = {link: number for number, link in links.items() if link.startswith("socket:[")}
        fresh = {link: numbers[link] for link in numbers.keys() - seen}
        if not fresh:
            continue
        with contextlib.suppress(OSError), process_handle(pid) as handle:
            for link, number in fresh.items():
                with (
                    contextlib.suppress(OSError),
                    socket.socket(fileno=copied_descriptor(handle, number)) as plug,
                ):
                    seen.add(link)
                    yield link, plug


def connection(plug: socket.socket) -> Connection | None:
    """None for what is not connected by TCP."""
    if plug.type != socket.SOCK_STREAM or plug.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        remote = end(plug.family, plug.getpeername())
        state = plug.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return None
    return Connection(plug.family, end(plug.family, plug.getsockname()), remote, state == ESTABLISHED)


def orphans(connections: list[Connection]) -> list[Connection]:
    """Those of which the other end is not among them."""
    ends = {(_plain(one.local), _plain(one.remote)) for one in connections}
    return [one for one in connections if (_plain(one.remote), _plain(one.local)) not in ends]


def destroy(channel: socket.socket, family: int, local: End, remote: End) -> bool:
    """Ask the kernel to end one connection of the namespace in which ``channel`` was opened."""
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 1 << ESTABLISHED)
    body += struct.pack(">HH", local[1], remote[1])
    body += local[0].ljust(16, b"\0") + remote[0].ljust(16, b"\0")
    body += struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    channel.send(struct.pack("=IHHII", 16 + len(body), SOCK_DESTROY, REQUEST_WITH_ACK, 1, 0) + body)
    answer = channel.recv(4096)
    _, kind, _, _, _ = struct.unpack_from("=IHHII", answer)
    return bool(kind == ERROR_MESSAGE and struct.unpack_from("=i", answer, 16)[0] == 0)


def end(family: int, address: tuple[str, int]) -> End:
    """From Python's form of an address."""
    return socket.inet_pton(family, address[0].partition("%")[0]), address[1]


def _plain(end: End) -> End:
    return (end[0][12:], end[1]) if end[0].startswith(MAPPED) and len(end[0]) == 16 else end
