"""The sockets of a sandbox in words: what kind, in which state, where.

Source: Linux, sock_diag(7) and unix_diag.h.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Mapping

from windtunnel.agents.sandbox.criu import connections
from windtunnel.agents.sandbox.policy.standing import OUTSIDE, PEERLESS, UNACCEPTED, UNREAD, UNSENT
from windtunnel.linux import namespaces

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
_BY_FAMILY, _REQUEST_DUMP, _SHOW_PEER, _PEER = 20, 0x301, 4, 2
_SIOCOUTQNSD = 0x894B
_WAITING = struct.Struct("<24xI")
"""Where TCP_INFO has, for a socket that listens, the number of connections that nobody has accepted."""


def sockets(have: Mapping[int, Mapping[int, str]]) -> dict[str, str]:
    """Words for each socket of processes, by its link in /proc; ``have``: the links of each process's
    descriptors, by number."""
    words: dict[str, str] = {}
    ends: dict[str, connections.Connection] = {}
    connected: list[str] = []
    """Unix datagram sockets, which say so even after their peer is closed."""
    for link, plug in connections.sockets(have.items()):
        family = FAMILIES.get(plug.family, f"family {int(plug.family)}")
        kind = f"{family} {KINDS.get(plug.type, f'type {int(plug.type)}')} socket"
        words[link] = kind
        # kinds that do not know every question have fewer words
        with contextlib.suppress(OSError):
            words[link] = " ".join([kind, *_state(plug)])
        if (found := connections.connection(plug)) is not None:
            ends[link] = found
        if words[link] == f"{kind} connected" and plug.type == socket.SOCK_DGRAM:
            connected.append(link)
    for link in ends.keys() - _inside(ends):
        words[link] = f"{words[link].partition(' socket ')[0]} socket connected {OUTSIDE}"
    if connected:
        peers = _peers(next(iter(have)))
        for link in connected:
            if peers.get(int(link[len("socket:[") : -1])) == 0:
                words[link] = words[link].replace("connected", PEERLESS)
    return words


def _peers(pid: int) -> dict[int, int]:
    """Of each connected Unix socket in the network of a process, by the numbers of their inodes: its peer; 0
    where that is closed. Empty where the kernel does not tell."""
    asked = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_PEER, 0, 0)
    head = struct.pack("=IHHII", 16 + len(asked), _BY_FAMILY, _REQUEST_DUMP, 1, 0)

    def ask() -> dict[int, int]:
        found: dict[int, int] = {}
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, connections.NETLINK_SOCK_DIAG) as channel:
            channel.send(head + asked)
            while True:
                answer = channel.recv(1 << 16)
                while answer:
                    length, kind = struct.unpack_from("=IH", answer)
                    if kind != _BY_FAMILY:
                        return found  # the end, or an error
                    (inode,) = struct.unpack_from("=I", answer, 20)
                    at = 32
                    while at < length:
                        size, what = struct.unpack_from("=HH", answer, at)
                        if what == _PEER:
                            (found[inode],) = struct.unpack_from("=I", answer, at + 4)
                        at += (size + 3) & ~3
                    answer = answer[(length + 3) & ~3 :]

    with contextlib.suppress(OSError):
        return namespaces.within(f"/proc/{pid}/ns/net", ask)
    return {}


def _inside(ends: dict[str, connections.Connection]) -> set[str]:
    alone = set(connections.orphans(list(ends.values())))
    return {link for link, one in ends.items() if one not in alone}


def _state(plug: socket.socket) -> list[str]:
    if plug.family not in FAMILIES:
        return []
    words = []
    if plug.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        words.append("listening")
        if plug.family in (socket.AF_INET, socket.AF_INET6):
            (waiting,) = _WAITING.unpack(plug.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WAITING.size))
            words += [f"({waiting} {UNACCEPTED})"] if waiting else []
    if plug.type == socket.SOCK_DGRAM and plug.family in (socket.AF_INET, socket.AF_INET6):
        (unread,) = struct.unpack("i", fcntl.ioctl(plug, termios.FIONREAD, bytes(4)))
        words += [f"({unread} {UNREAD})"] if unread else []
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
