"""Links, addresses and queues by rtnetlink, and networks of emulated hosts that are made of them.

No ``ip`` is installed or spawned: pyroute2 speaks to the kernel. Every request has a socket of its own in a
thread of its own, which enters the network namespace that is named and ends with the socket; so nothing is
shared by threads, inherited by forks, or in the way of a caller's event loop.

`Network` joins hosts, each in a network namespace of its own, by a bridge. The bridge lies in this host's
namespace under a name and a 10.x net of its own, so that a server is reached on its address; every host has
one end of a veth pair, called `INTERFACE` inside, with a token bucket (tc-tbf) on both ends where a rate is
set. Nothing leaves the machine.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.base.errors import UserError
from windtunnel.base.processes import Identity, add_owner, owned
from windtunnel.linux import LinuxError, namespaces

T = TypeVar("T")
INTERFACE = "wt0"
_NAMES = Path("/run/netns")
_OWNERS = Path("/run/windtunnel-networks")
_FASTEST = 2**32 - 1
"""Bytes/s, the most that a token bucket's own field holds."""
_LARGEST = 70_000
"""Bytes of the largest packet that is cut up by the device only, with the headers of all its parts."""


def make_pair(device: str, peer: str, namespace: Path, master: str | None = None) -> None:
    """A veth pair: ``device`` here (on the bridge ``master``), ``peer`` in the namespace that the file holds.

    Raises OSError, as all functions here do."""
    with open(namespace, "rb") as file:
        there = {"ifname": peer, "net_ns_fd": file.fileno()}
        on_bridge = {} if master is None else {"master": socket.if_nametoindex(master)}
        ask(lambda route: route.link("add", ifname=device, kind="veth", peer=there, **on_bridge))


def configure(device: str, address: str, prefix: int, namespace: Path | None = None) -> None:
    """Give ``device`` an IPv4 address and bring it up."""

    def give(route: Any) -> None:
        index = socket.if_nametoindex(device)
        route.addr("add", index=index, address=address, prefixlen=prefix)
        route.link("set", index=index, state="up")

    ask(give, namespace)


def remove_link(device: str) -> None:
    """Remove a device, and with it its peer; one that is absent is fine."""
    try:
        index = socket.if_nametoindex(device)
        ask(lambda route: route.link("del", index=index))
    except OSError as error:
        if error.errno != errno.ENODEV and error.errno is not None:
            raise


def set_link(device: str, *, up: bool) -> None:
    """Take a device down, or up again: no connection over it closes."""
    index = socket.if_nametoindex(device)
    ask(lambda route: route.link("set", index=index, state="up" if up else "down"))


def set_rate(device: str, rate: float, namespace: Path | None = None) -> None:
    """Limit what a device sends to ``rate`` bytes/s, by a token bucket of 2 ms and a queue of 200 ms.

    A network card saves up nothing: with a large bucket, what is sent in a pause would be paid for by what
    follows it. But with one that is smaller than what TCP sends at once (`_LARGEST`) up to a third of the
    rate is lost, as the queue cuts that up: so it is that large where that is no more than 8 ms.
    """
    bits = max(8000, min(int(rate), _FASTEST) * 8)
    burst = max(16_000, int(rate * 0.002), min(_LARGEST, int(rate * 0.008)))

    def limit(route: Any) -> None:
        index = socket.if_nametoindex(device)
        route.tc("replace", "tbf", index=index, rate=f"{bits}bit", burst=burst, latency="200ms")

    ask(limit, namespace)


def missing() -> str | None:
    """Why this host cannot emulate networks, in words; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if importlib.util.find_spec("pyroute2") is None:
        return "pyroute2 is not installed (pip install pyroute2)"
    return None


class Network:
    """One bridge and the hosts on it, called after the run's ``token``; ``rate``: bytes/s of each host in
    either direction, None for no limit. ``address``: the bridge's own, on which this machine is reached. It
    stands as long as one of its owners lives (`sweep`), of which this process is the first.

    ``before``: the address of one that stands already, made by a process that is gone, with the ``hosts``
    that were added to it, in their order: it is taken up.

    Raises:
        UserError: this machine cannot emulate networks.
        LinuxError: the kernel refused a link, by this and every method.
    """

    def __init__(
        self, token: str, rate: float | None = None, before: str | None = None, hosts: Sequence[str] = ()
    ) -> None:
        reason = missing()
        if reason is not None:
            raise UserError(f"network netns: {reason}; accepted here is loopback")
        self.rate = rate
        self._bridge = f"wt{token.rpartition('-')[2]}"
        self._numbers = {name: number for number, name in enumerate(hosts)}
        self._net = before.rpartition(".")[0] if before is not None else ask(_free_net)
        self.address = f"{self._net}.1"
        if before is not None:
            self.own(Identity.own())
            return
        ask(lambda route: route.link("add", ifname=self._bridge, kind="bridge"))
        try:
            _OWNERS.mkdir(exist_ok=True)
            self.own(Identity.own())
            configure(self._bridge, self.address, 24)
        except BaseException:
            self.close()
            raise

    def own(self, owner: Identity) -> None:
        """It stands as long as this process lives, too."""
        add_owner(_OWNERS / self._bridge, owner)

    def add(self, name: str) -> tuple[str, str]:
        """A host: the path of its namespace, and its address."""
        number = self._numbers[name] = len(self._numbers)
        address = f"{self._net}.{number + 2}"
        namespace, end = self._namespace(name), self._end(name)
        _NAMES.mkdir(exist_ok=True)
        namespaces.make_network(namespace)
        make_pair(end, INTERFACE, namespace, self._bridge)
        set_link(end, up=True)
        configure(INTERFACE, address, 24, namespace)
        if self.rate is not None:
            self.set_rate(name, self.rate)
        return str(namespace), address

    def set_rate(self, name: str, rate: float) -> None:
        """Limit a host's link to ``rate`` bytes/s in either direction."""
        set_rate(self._end(name), rate)
        set_rate(INTERFACE, rate, self._namespace(name))

    def link_down(self, name: str) -> None:
        """A host's link carries nothing more; no connection closes."""
        set_link(self._end(name), up=False)

    def link_up(self, name: str) -> None:
        """And carries again."""
        set_link(self._end(name), up=True)

    def part(self, first: str, other: str, *, apart: bool) -> None:
        """Let two hosts not reach each other, or reach each other again; all others do throughout."""
        for name, to in ((first, other), (other, first)):
            self._refuse(name, f"{self._net}.{self._numbers[to] + 2}/32", "add" if apart else "del")

    def _refuse(self, name: str, address: str, work: str) -> None:
        ask(lambda route: route.route(work, dst=address, type="blackhole"), self._namespace(name))

    def close(self) -> None:
        """Remove all of it."""
        _remove(self._bridge)

    def port(self, name: str) -> str:
        """The bridge's end of a host's link: what it sends is what the host receives."""
        return self._end(name)

    def _end(self, name: str) -> str:
        return f"{self._bridge}p{self._numbers[name]}"

    def _namespace(self, name: str) -> Path:
        return _NAMES / f"{self._bridge}-{self._numbers[name]}"


def sweep() -> None:
    """Remove the networks whose owners are all gone."""
    if missing() is not None or not _OWNERS.is_dir():
        return
    for mark in _OWNERS.iterdir():
        try:
            lives = owned(mark)
        except FileNotFoundError:  # another process sweeps, too
            continue
        except ValueError:  # written by a process that died over it
            lives = False
        if not lives:
            _remove(mark.name)


def _remove(bridge: str) -> None:
    for file in _NAMES.glob(f"{bridge}-*"):
        with suppress(OSError):
            namespaces.release(file)
    # pairs go with their namespace, but some time later
    ends = [name for _, name in socket.if_nameindex() if name.startswith(f"{bridge}p")]
    for device in (*ends, bridge):
        with suppress(OSError):
            remove_link(device)
    (_OWNERS / bridge).unlink(missing_ok=True)


def _free_net(route: Any) -> str:
    """The first 10.x.y that nothing on this machine uses, counted from one that depends on the process."""
    used = [message.get("address") for message in route.get_addr(family=socket.AF_INET)]
    used += [message.get("dst") for message in route.get_routes(family=socket.AF_INET)]
    prefixes = {address.rpartition(".")[0] for address in used if address}
    for number in range(os.getpid(), os.getpid() + 40_000):
        net = f"10.{64 + number // 250 % 150}.{number % 250}"
        if net not in prefixes:
            return net
    raise UserError("network netns: no net of 10.0.0.0/8 is free")


def ask(work: Callable[[Any], T], namespace: Path | None = None) -> T:
    """What ``work(route)`` returns, with a pyroute2.IPRoute of a network namespace. Raises LinuxError."""
    # a fifth of a second to load: only who makes links pays
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    def asked() -> T:
        try:
            with IPRoute(groups=0) as route:
                return work(route)
        except NetlinkError as error:
            raise LinuxError(os.strerror(error.code), error.code) from error

    return namespaces.within(namespace, asked)
