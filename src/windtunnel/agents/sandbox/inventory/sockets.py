"""The sockets of a sandbox: what kind, in which state, where; and the end of connections that lost their
other end.

A program that waits for an answer of a host that knows nothing of a restored connection would wait for ever.
Such an end is an established TCP socket whose mirror image no process of the sandbox holds. It is
disconnected through a copy of its descriptor: the program's call returns with an error, as after a reset.

Source: Linux, connect(2) (AF_UNSPEC), sock_diag(7), unix_diag.h, tcp.h (TCP_REPAIR).
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from windtunnel.agents.sandbox.policy.standing import OUTSIDE, PEERLESS, UNACCEPTED, UNREAD, UNSENT
from windtunnel.linux import namespaces, processes
from windtunnel.linux.system import checked, copied_descriptor, libc, process_handle, unread

ESTABLISHED = 1
TCP_REPAIR = 19
"""Option of a TCP socket whose state is being read; no data can be read or written meanwhile."""
NETLINK_SOCK_DIAG = 4
NO_ADDRESS = bytes(16)
"""A ``struct sockaddr`` of the family AF_UNSPEC: to connect to it is to disconnect."""
MAPPED = bytes(10) + b"\xff\xff"
"""What precedes an IPv4 address inside an IPv6 one."""
INTERNET = (socket.AF_INET, socket.AF_INET6)
FAMILIES = {
    socket.AF_UNIX: "Unix",
    socket.AF_INET: "IPv4",
    socket.AF_INET6: "IPv6",
    socket.AF_NETLINK: "netlink",
    socket.AF_PACKET: "packet",
}
KINDS = {
    socket.SOCK_STREAM: "stream",
    socket.SOCK_DGRAM: "datagram",
    socket.SOCK_SEQPACKET: "sequenced",
    socket.SOCK_RAW: "raw",
}
_BY_FAMILY, _REQUEST, _SHOW_PEER, _PEER = 20, 1, 4, 2
ANY = 0xFFFFFFFF
"""Any state, any cookie."""
_SIOCOUTQNSD = 0x894B
_WAITING = struct.Struct("<24xI")
"""Where TCP_INFO has, for a socket that listens, the number of connections that nobody has accepted."""

End = tuple[bytes, int]
"""Address (4 or 16 bytes) and port."""


class Connection(NamedTuple):
    """A TCP socket that has another end, or had one."""

    local: End
    remote: End
    established: bool = True
    """Neither end has said that it sends no more."""


def close_orphans(pids: Iterable[int]) -> None:
    """End the connections of the processes ``pids`` that lost their other end."""
    # asked one by one: the kernel's table of a network is read by going through that of all networks, which
    # takes ten milliseconds where there is much memory
    have = list(_links(pids))
    ends = {link: end for link, plug in copies(have) if (end := connection(plug)) is not None}
    # one whose other end has ended already waits for nothing
    lost = {link for link in orphans(ends) if ends[link].established}
    for link, plug in copies(have) if lost else ():
        if link in lost:
            with contextlib.suppress(OSError):
                checked(libc.connect(plug.fileno(), NO_ADDRESS, len(NO_ADDRESS)), "connect")


def leave_repair(pids: Iterable[int]) -> int:
    """Take the TCP sockets of these processes out of the state into which a CRIU that was killed has put
    them; how many were. Else every later read fails, and a later dump keeps them so."""
    left = 0
    for _, plug in copies(_links(pids)):
        with contextlib.suppress(OSError):  # no TCP socket
            if plug.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR):
                plug.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)
                left += 1
    return left


def _links(pids: Iterable[int]) -> Iterator[tuple[int, Mapping[int, str]]]:
    return ((pid, processes.descriptors(pid)) for pid in pids)


def copies(have: Iterable[tuple[int, Mapping[int, str]]]) -> Iterator[tuple[str, socket.socket]]:
    """Copies of the sockets that processes have open, with their links in /proc; each socket once, closed
    before the next. ``have``: processes, with the links of their descriptors by number."""
    visited: set[str] = set()
    for pid, links in have:
        numbers = {link: number for number, link in links.items() if link.startswith("socket:[")}
        fresh = {link: numbers[link] for link in numbers.keys() - visited}
        if not fresh:
            continue
        with contextlib.suppress(OSError), process_handle(pid) as handle:
            for link, number in fresh.items():
                with (
                    contextlib.suppress(OSError),
                    socket.socket(fileno=copied_descriptor(handle, number)) as plug,
                ):
                    visited.add(link)
                    yield link, plug


def connection(plug: socket.socket) -> Connection | None:
    """None for what is not connected by TCP."""
    if plug.type != socket.SOCK_STREAM or plug.family not in INTERNET:
        return None
    try:
        remote = end(plug.family, plug.getpeername())
        state = plug.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return None
    return Connection(end(plug.family, plug.getsockname()), remote, state == ESTABLISHED)


def orphans(connections: Mapping[str, Connection]) -> list[str]:
    """The links of those of which the other end is not among them."""
    ends = {(each.local, each.remote) for each in connections.values()}
    return [link for link, each in connections.items() if (each.remote, each.local) not in ends]


def end(family: int, address: tuple[str, int]) -> End:
    """From Python's form of an address; an IPv4 address in IPv6's form is that IPv4 address."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    return packed.removeprefix(MAPPED) if len(packed) == 16 else packed, address[1]


def describe_sockets(have: Mapping[int, Mapping[int, str]]) -> dict[str, str]:
    """Words for each socket of processes, by its link in /proc; ``have``: the links of each process's
    descriptors, by number."""
    words: dict[str, str] = {}
    ends: dict[str, Connection] = {}
    connected: list[str] = []
    """Unix datagram sockets, which say so even after their peer is closed."""
    for link, plug in copies(have.items()):
        family = FAMILIES.get(plug.family, f"family {int(plug.family)}")
        kind = f"{family} {KINDS.get(plug.type, f'type {int(plug.type)}')} socket"
        words[link] = kind
        # kinds that do not know every question have fewer words
        with contextlib.suppress(OSError):
            words[link] = " ".join([kind, *_state(plug)])
        if (end := connection(plug)) is not None:
            ends[link] = end
        if words[link] == f"{kind} connected" and plug.type == socket.SOCK_DGRAM:
            connected.append(link)
    for link in orphans(ends):
        words[link] = f"{words[link].partition(' socket ')[0]} socket connected {OUTSIDE}"
    for link in _peerless(next(iter(have)), connected) if connected else ():
        words[link] = words[link].replace("connected", PEERLESS)
    return words


def _peerless(pid: int, links: Iterable[str]) -> set[str]:
    """Those of the connected Unix sockets ``links``, in the network of a process, whose peer is closed; none
    where the kernel does not tell."""

    def ask() -> set[str]:
        gone = set()
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as channel:
            for link in links:
                inode = int(link[len("socket:[") : -1])
                request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, ANY, inode, _SHOW_PEER, ANY, ANY)
                channel.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _REQUEST, 1, 0) + request)
                answer = channel.recv(1 << 16)
                length, kind = struct.unpack_from("=IH", answer)
                at = 32
                while kind == _BY_FAMILY and at < length:
                    size, what, peer = struct.unpack_from("=HHI", answer, at)
                    if (what, peer) == (_PEER, 0):
                        gone.add(link)
                    at += (size + 3) & ~3
        return gone

    with contextlib.suppress(OSError):
        return namespaces.within(f"/proc/{pid}/ns/net", ask)
    return set()


def _state(plug: socket.socket) -> list[str]:
    if plug.family not in FAMILIES:
        return []
    words = []
    if plug.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        words.append("listening")
        if plug.family in INTERNET:
            (waiting,) = _WAITING.unpack(plug.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WAITING.size))
            words += [f"({waiting} {UNACCEPTED})"] if waiting else []
    if plug.type == socket.SOCK_DGRAM and plug.family in INTERNET:
        words += [f"({count} {UNREAD})"] if (count := unread(plug.fileno())) else []
    try:
        other = plug.getpeername()
    except OSError:
        return [*words, "at", _address(plug.getsockname())]
    if plug.family == socket.AF_UNIX:
        # CRIU brings connected ends back as a pair without names
        return ["connected"]
    if plug.type == socket.SOCK_STREAM:
        (unsent,) = struct.unpack("i", fcntl.ioctl(plug, _SIOCOUTQNSD, bytes(4)))
        words += [f"({unsent} {UNSENT})"] if unsent else []
    return [*words, "from", _address(plug.getsockname()), "to", _address(other)]


def _address(address: object) -> str:
    match address:
        case (str() as host, int() as port, *_):
            return f"{host}:{port}"
        case bytes():
            return "@" + address[1:].decode(errors="replace")
        case _:
            return str(address) or "no name"
