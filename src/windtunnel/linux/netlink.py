"""The few requests of rtnetlink that a sandbox's network needs, so that no ``ip`` has to be installed or
spawned."""

from __future__ import annotations

import errno
import os
import socket
import struct

REQUEST, ACKNOWLEDGE, CREATE, EXCLUSIVE = 0x1, 0x4, 0x400, 0x200
NEWLINK, DELLINK, NEWADDR = 16, 17, 20
IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_FD = 3, 18, 28
INFO_KIND, INFO_DATA, VETH_PEER = 1, 2, 1
IFA_ADDRESS, IFA_LOCAL = 1, 2
UP = 1


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", len(data) + 4, kind) + data + b"\0" * (-len(data) % 4)


def _link(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


def _ask(kind: int, flags: int, body: bytes) -> None:
    """Send one request in the caller's network namespace and wait for its acknowledgement. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as plug:
        plug.send(struct.pack("=IHHII", 16 + len(body), kind, flags | REQUEST | ACKNOWLEDGE, 1, 0) + body)
        answer = plug.recv(65536)
        code = -struct.unpack_from("=i", answer, 16)[0]
        if code:
            raise OSError(code, os.strerror(code))


def make_pair(device: str, peer: str, namespace: int) -> None:
    """A veth pair: ``device`` here, ``peer`` in the network namespace behind the descriptor."""
    there = _link() + _attribute(IFLA_IFNAME, peer.encode() + b"\0")
    there += _attribute(IFLA_NET_NS_FD, struct.pack("=i", namespace))
    pair = _attribute(INFO_KIND, b"veth\0") + _attribute(INFO_DATA, _attribute(VETH_PEER, there))
    body = _link() + _attribute(IFLA_IFNAME, device.encode() + b"\0") + _attribute(IFLA_LINKINFO, pair)
    _ask(NEWLINK, CREATE | EXCLUSIVE, body)


def configure(device: str, address: bytes, prefix: int) -> None:
    """Give ``device`` its address and bring it up."""
    index = socket.if_nametoindex(device)
    body = struct.pack("=BBBBI", socket.AF_INET, prefix, 0, 0, index)
    body += _attribute(IFA_LOCAL, address) + _attribute(IFA_ADDRESS, address)
    _ask(NEWADDR, CREATE | EXCLUSIVE, body)
    _ask(NEWLINK, 0, _link(index, UP, UP))


def remove_link(device: str) -> None:
    """Remove a device, and with it its peer; one that is absent is fine."""
    try:
        index = socket.if_nametoindex(device)
    except OSError:
        return
    try:
        _ask(DELLINK, 0, _link(index))
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
