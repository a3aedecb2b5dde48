"""Racks on this machine: processes in networks of their own, with splitters and an electrical network.

Rack r sends by its device ``tx``; the other end lies among the wires, a further network, where all that comes
is mirrored (tc) to p devices, whose other ends are ``rx0``, ``rx1``, … of the racks that the splitter feeds.
``wt0`` leads to a bridge among the wires. Token buckets (tc-tbf) limit ``tx``, and ``wt0`` in either
direction. No network has a name and none is held by anything but its process, and racks end with their
controller: a kill -9 of it leaves nothing, and nothing that others named is in the way.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.linux import network, queues
from windtunnel.linux.namespaces import start_in_own_network
from windtunnel.network.multicast.policy.shuffle import Shuffle

Message = dict[str, Any]
MTU, LARGEST = 9000, 1 << 20
NET, SILENCE = "10.77.0", 60.0
"""Of the electrical network; seconds after which a rack that is to answer and does not is lost."""


def address(rack: int) -> str:
    """Of its electrical port."""
    return f"{NET}.{rack + 1}"


class Racks:
    """All of them, each of which does ``part(rack, control)`` with a socket to this process. ``rate``:
    bytes/s of every port. ``lost``: racks whose process is gone.

    Raises:
        UserError: this machine cannot emulate networks.
        LinuxError: the kernel refused a part of it.
    """

    def __init__(self, shuffle: Shuffle, rate: float, part: Callable[[int, socket.socket], None]) -> None:
        if (reason := network.missing()) is not None:
            raise UserError(f"network multicast send: {reason}; accepted here is plan")
        if shuffle.racks > 64:
            raise UserError(
                f"`racks`: {shuffle.racks} on one machine, accepted are up to 64; plan takes more"
            )
        self.shuffle, self.rate, self.lost = shuffle, rate, set[int]()
        self._processes: list[int] = []
        self.controls: list[socket.socket] = []
        try:
            self._processes.append(start_in_own_network(signal.pause))
            for rack in range(shuffle.racks):
                here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                here.settimeout(SILENCE)
                self.controls.append(here)

                def work(rack: int = rack, there: socket.socket = there) -> None:
                    for other in self.controls:
                        other.close()  # or a rack would not hear that its controller is gone
                    if there.recv(1):  # its network is wired
                        part(rack, there)

                self._processes.append(start_in_own_network(work))
                there.close()
            self._wire(rate)
        except BaseException:
            self.close()
            raise
        for control in self.controls:
            control.send(b"1")

    def _wire(self, rate: float) -> None:
        networks = [Path(f"/proc/{pid}/ns/net") for pid in self._processes]
        wires, racks = networks[0], networks[1:]
        files = [os.open(rack, os.O_RDONLY) for rack in racks]
        ends: list[tuple[str, str, int]] = []  # among the wires, in the rack, which
        for rack in range(len(racks)):
            ends += [(f"e{rack}", network.INTERFACE, rack), (f"t{rack}", "tx", rack)]
            feeders = self.shuffle.members(self.shuffle.feeding_group(rack))
            ends += [(f"f{feeder}-{rack}", f"rx{place}", rack) for place, feeder in enumerate(feeders)]

        def wire(route: Any) -> None:
            route.link("add", ifname="bridge", kind="bridge")
            for end, inside, rack in ends:
                peer = {"ifname": inside, "net_ns_fd": files[rack], "mtu": MTU}
                on = {"master": socket.if_nametoindex("bridge")} if end[0] == "e" else {}
                route.link("add", ifname=end, kind="veth", mtu=MTU, peer=peer, **on)
            for name in ("bridge", *(end for end, _, _ in ends)):
                route.link("set", index=socket.if_nametoindex(name), state="up")

        def up(route: Any) -> None:
            for name in ("lo", "tx", *(f"rx{place}" for place in range(self.shuffle.p))):
                route.link("set", index=socket.if_nametoindex(name), state="up")

        try:
            network.ask(wire, wires)
        finally:
            for file in files:
                os.close(file)
        for rack, own in enumerate(racks):
            network.configure(network.INTERFACE, address(rack), 24, own)
            network.ask(up, own)
            network.set_rate("tx", rate, own)
            network.set_rate(network.INTERFACE, rate, own)
            network.set_rate(f"e{rack}", rate, wires)
            queues.split(f"t{rack}", [f"f{rack}-{to}" for to in self.shuffle.fed_by(rack)], wires)

    def pid(self, rack: int) -> int:
        return self._processes[rack + 1]

    def tell(self, rack: int, message: Message) -> None:
        """To a rack that stands; one that has gone is `lost`."""
        if rack not in self.lost:
            try:
                self.controls[rack].send(json.dumps(message).encode())
            except OSError:
                self.lost.add(rack)

    def hear(self, rack: int) -> Message | None:
        """What it says next; None: it is lost, or silent for too long."""
        try:
            data = self.controls[rack].recv(LARGEST)
        except OSError:
            data = b""
        if not data:
            self.lost.add(rack)
            return None
        message: Message = json.loads(data)
        return message

    def close(self) -> None:
        """End all of them, and with them all that was wired."""
        for pid in self._processes:
            os.kill(pid, signal.SIGKILL)
        for pid in self._processes:
            os.waitpid(pid, 0)
        for control in self.controls:
            control.close()
        self._processes, self.controls = [], []
