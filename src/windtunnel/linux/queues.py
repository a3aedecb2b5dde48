"""Queueing disciplines and programs on packets, by rtnetlink.

A program of kind ``tc`` hangs on an interface's clsact, where what it sends (egress) or receives (ingress)
passes: as a filter of the first priority, beside those that others put there. Nothing here removes what it
did not make.

Source: tc(8), tc-bpf(8), tc-htb(8), tc-u32(8).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from windtunnel.linux import LinuxError
from windtunnel.linux.namespaces import within
from windtunnel.linux.network import ask

Hook = Literal["egress", "ingress"]
_PARENTS = {"ingress": 0xFFFFFFF2, "egress": 0xFFFFFFF3}
_CLSACT, _ALL = 0xFFFF0000, 0x0300
"""The handle of clsact; every protocol (ETH_P_ALL) as it goes over the wire."""
_FIRST, _ROOT = 1, 0xFFFFFFFF
_PACKET, _AT_ONCE = 1600, 64


@dataclass(frozen=True)
class Filter:
    """One filter on an interface's clsact."""

    hook: Hook
    kind: str
    name: str
    priority: int
    handle: int


def queues(device: str, namespace: Path | None = None) -> dict[str, str]:
    """The kinds of an interface's queueing disciplines by their handles, such as ``{"1:": "htb"}``."""

    def listed(route: Any) -> dict[str, str]:
        kinds = {}
        for qdisc in route.get_qdiscs(index=socket.if_nametoindex(device)):
            kinds[f"{qdisc['handle'] >> 16:x}:"] = dict(qdisc["attrs"])["TCA_KIND"]
        return kinds

    return ask(listed, namespace)


class Backlog:
    """What waits in an interface's root queue, asked often: one socket, and messages without a library. All
    queues of the network are asked for: asking for one tells everybody who listens for changes.

    Raises:
        LinuxError: there is no such interface, by this and `look`.
    """

    def __init__(self, device: str) -> None:
        self._device, self._index = device, _index(device)
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(1.0)

    def read(self) -> tuple[str, int]:
        """The queue's kind ("noqueue" where there is none), and bytes."""
        self._socket.send(struct.pack("IHHIIBxxxiIII", 36, 38, 0x301, 0, 0, 0, 0, 0, 0, 0))  # RTM_GETQDISC
        kind_name, waits = "noqueue", 0
        while True:
            response, at = self._socket.recv(1 << 16), 0
            while at < len(response):
                size, kind = struct.unpack_from("IH", response, at)
                if kind == 3:  # NLMSG_DONE
                    if kind_name == "noqueue" and _index(self._device) != self._index:
                        raise LinuxError(f"there is no interface {self._device}", errno.ENODEV)
                    return kind_name, waits
                index, _, parent = struct.unpack_from("iII", response, at + 20)
                if index == self._index and parent == _ROOT:
                    options = _attributes(response[at + 36 : at + size])
                    kind_name = options[1].rstrip(b"\0").decode()
                    waits = struct.unpack_from("II", _attributes(options[7])[3])[1]
                at += size + 3 & ~3

    def close(self) -> None:
        self._socket.close()


def _index(device: str) -> int:
    try:
        return socket.if_nametoindex(device)
    except OSError:
        raise LinuxError(f"there is no interface {device}", errno.ENODEV) from None


def _attributes(data: bytes) -> dict[int, bytes]:
    values, at = {}, 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("HH", data, at)
        values[kind & 0x3FFF] = data[at + 4 : at + size]
        at += max(4, size + 3 & ~3)
    return values


def filters(device: str, namespace: Path | None = None) -> list[Filter]:
    """All filters on an interface's clsact."""

    def listed(route: Any) -> list[Filter]:
        index, rows = socket.if_nametoindex(device), []
        for hook, parent in _PARENTS.items():
            for message in route.get_filters(index=index, parent=parent):
                attributes = dict(message["attrs"])
                options = attributes.get("TCA_OPTIONS")
                if options is None or not message["handle"]:  # the head of a priority, not a filter
                    continue
                name = dict(options["attrs"]).get("TCA_BPF_NAME", "")
                kind, priority = attributes["TCA_KIND"], message["info"] >> 16
                rows.append(Filter(hook, kind, name, priority, message["handle"]))  # type: ignore[arg-type]
        return rows

    return [] if queues(device, namespace).get("ffff:") != "clsact" else ask(listed, namespace)


def make_clsact(device: str, namespace: Path | None = None) -> bool:
    """Whether it had to be made. Raises LinuxError where an ingress queue stands in its place, or the kernel
    has none."""
    there = queues(device, namespace).get("ffff:")
    if there == "clsact":
        return False
    if there is not None:
        raise LinuxError(f"{device} has a queue of kind {there} that is not ours, where clsact would be")
    try:
        ask(lambda route: route.tc("add", "clsact", socket.if_nametoindex(device)), namespace)
    except LinuxError as error:
        if error.errno == errno.ENOENT:
            raise LinuxError(f"the kernel has no clsact ({error})", errno.ENOENT) from None
        raise
    return True


def remove_clsact(device: str, namespace: Path | None = None) -> None:
    """With all filters on it."""
    _remove(device, {"handle": _CLSACT, "parent": 0xFFFFFFF1}, namespace)


def attach(device: str, hook: Hook, program: int, name: str, namespace: Path | None = None) -> None:
    """Hang a loaded program on clsact; it decides by what it returns."""
    parent = _PARENTS[hook]

    def add(route: Any) -> None:
        index = socket.if_nametoindex(device)
        route.tc(
            "add-filter", "bpf", index, 0, fd=program, name=name, parent=parent, prio=_FIRST,
            direct_action=True,
        )  # fmt: skip

    ask(add, namespace)


def split(device: str, outputs: Sequence[str], namespace: Path | None = None) -> None:
    """Let everything that ``device`` receives leave by each of ``outputs``, and go nowhere else: a passive
    splitter. Raises LinuxError where the kernel has no clsact, u32 or mirred."""
    make_clsact(device, namespace)

    def add(route: Any) -> None:
        ways = [
            {"kind": "mirred", "direction": "egress", "action": "mirror", "ifindex": _index(output)}
            for output in outputs
        ]
        ways[-1]["action"] = "redirect"
        route.tc(
            "add-filter", "u32", _index(device), 0, parent=_PARENTS["ingress"], prio=_FIRST, protocol=0x0003,
            target=0x10001, keys=["0x0/0x0+0"], action=ways,
        )  # fmt: skip

    ask(add, namespace)


def detach(device: str, attached: Filter, namespace: Path | None = None) -> None:
    """Remove one filter."""

    def remove(route: Any) -> None:
        index, info = socket.if_nametoindex(device), attached.priority << 16 | _ALL
        route.tc(
            "del-filter", attached.kind, index, attached.handle, parent=_PARENTS[attached.hook], info=info
        )

    ask(remove, namespace)


def try_queue(device: str, kind: str, namespace: Path | None = None, **settings: Any) -> None:
    """Make a queue of that kind an interface's root, or raise LinuxError."""
    ask(lambda route: route.tc("replace", kind, socket.if_nametoindex(device), **settings), namespace)


def remove_queue(device: str, namespace: Path | None = None) -> None:
    """Remove an interface's root queue: it has the kernel's usual one then."""
    _remove(device, {"parent": _ROOT}, namespace)


def _remove(device: str, which: dict[str, int], namespace: Path | None) -> None:
    ask(lambda route: route.tc("del", index=socket.if_nametoindex(device), **which), namespace)


def make_classes(
    device: str, line: float, rates: Sequence[float], ceiling: float, namespace: Path | None = None
) -> None:
    """An HTB of ``line`` bytes/s as the root, with a class of each of ``rates`` and ``ceiling`` bytes/s below
    it: 1:2, 1:3, … To the first goes what belongs to none. A packet whose priority (SO_PRIORITY) is a class's
    number goes there without a filter."""

    def make(route: Any) -> None:
        index = socket.if_nametoindex(device)
        route.tc("replace", "htb", index, 0x10000, default=2)
        route.tc("add-class", "htb", index, 0x10001, parent=0x10000, **_shape(line, line))
        for number, rate in enumerate(rates, 2):
            route.tc("add-class", "htb", index, 0x10000 | number, parent=0x10001, **_shape(rate, ceiling))

    ask(make, namespace)


def _shape(rate: float, ceiling: float) -> dict[str, Any]:
    return {
        "rate": f"{int(rate * 8)}bit",
        "ceil": f"{int(ceiling * 8)}bit",
        "burst": 16_000,
        "cburst": 16_000,
        "quantum": 60_000,
    }


class HtbClasses:
    """Classes below the line of an interface's HTB, made and changed often: one socket, and messages without
    a library. What is in no class passes free of the line.

    A class's priority is left alone: the kernel goes by a new one only once nothing waits in the class. Rates
    hold at once.

    Raises:
        LinuxError: the kernel refused, by this and `set`.
    """

    def __init__(self, device: str, line: float, namespace: Path | None = None) -> None:
        def opened() -> tuple[int, socket.socket]:
            return _index(device), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

        make_classes(device, line, (), line, namespace)
        self._index, self._socket = within(namespace, opened)
        self._socket.settimeout(5.0)
        self.set({1: (line, line, 60_000)})

    def set(self, shapes: Mapping[int, tuple[float, float, int]]) -> None:
        """Of class 1:number the bytes/s that it has, those that it gets at most, and the bytes that it sends
        in a turn of what others leave. Numbers are from 3 on; 1 is the line."""
        waiting = list(shapes.items())
        while waiting:
            part, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            self._socket.send(b"".join(self._message(number, *shape) for number, shape in part))
            answers = 0
            while answers < len(part):
                response, at = self._socket.recv(1 << 16), 0
                while at < len(response):
                    size, _, _, _, _, code = struct.unpack_from("IHHIIi", response, at)
                    if code:
                        raise LinuxError(os.strerror(-code), -code)
                    answers, at = answers + 1, at + (size + 3 & ~3)

    def _message(self, number: int, rate: float, ceiling: float, quantum: int) -> bytes:
        rates = [max(1, min(int(limit), 2**32 - 1)) for limit in (rate, ceiling)]
        # what is saved up: 4 ms, and whole packets; in units of 64 ns
        saved = [int(max(_PACKET, 0.004 * rate) / rate * 1e9 / 64) for rate in rates]
        body = b"".join(struct.pack("BBHhHI", 0, 1, 0, 0, 0, rate) for rate in rates)  # linklayer Ethernet
        body += struct.pack("5I", *(min(limit, 2**32 - 1) for limit in saved), quantum, 0, 0)
        body = struct.pack("HH4sHHHH", 8, 1, b"htb", 8 + len(body), 2, 4 + len(body), 1) + body
        parent = 0x10000 if number == 1 else 0x10001
        body = struct.pack("BxxxiIII", 0, self._index, 0x10000 | number, parent, 0) + body
        return struct.pack("IHHII", 16 + len(body), 40, 0x405, 0, 0) + body  # RTM_NEWTCLASS, made if need be

    def close(self) -> None:
        self._socket.close()


def classify(device: str, source: str, number: int, namespace: Path | None = None) -> None:
    """Send what comes from an IPv4 address to class 1:``number`` of an interface's HTB."""
    key = f"0x{socket.inet_aton(source).hex()}/0xffffffff+12"

    def add(route: Any) -> None:
        index = socket.if_nametoindex(device)
        route.tc(
            "add-filter", "u32", index, 0, parent=0x10000, prio=10, protocol=0x0800,
            target=0x10000 | number, keys=[key],
        )  # fmt: skip

    ask(add, namespace)
