"""Windows without BPF or root: on sockets of this process, which receive.

A receiver tells its sender how much it may send. Clamping that (TCP_WINDOW_CLAMP) caps the sender from afar,
so this serves a process that receives what a queue of the same host carries: from containers, over a shaped
link. A clamp holds whole packets, two at least, and cannot pace: with more flows than the window has pairs of
packets the queue is longer than asked for. It dies with its sockets.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from windtunnel.network.hostrate.live.controller import control
from windtunnel.network.hostrate.live.native import Array
from windtunnel.network.hostrate.policy import LEAST, WindowShare
from windtunnel.network.hostrate.spec import HostrateSpec

_UNCLAMPED = 2**30
_RECEIVED = 128
"""Where struct tcp_info has tcpi_bytes_received."""


class OwnSockets:
    """Sockets told by whence they receive; ``sockets()`` gives those there are now. ``spec`` goes by source.

    Raises:
        ValueError: it goes by cgroup.
    """

    def __init__(self, spec: HostrateSpec, sockets: Callable[[], Sequence[socket.socket]]) -> None:
        if spec.by != "source":
            raise ValueError(f"own sockets are told apart by source; by is {spec.by!r}")
        places = {name: place for place, name in enumerate(spec.entities)}
        self._prefixes = [(ipaddress.ip_network(match), places[name]) for name, match in spec.matches()]
        self._prefixes.sort(key=lambda prefix: -prefix[0].prefixlen)
        self._payload, self._sockets = spec.packet - 52, sockets
        self._had: dict[socket.socket, tuple[int, int]] = {}
        self._clamps: dict[socket.socket, int] = {}
        self._acked = np.zeros(len(places), np.int64)
        self._active_flows = np.zeros(len(places), np.int64)
        self._round = 0

    def counts(self) -> tuple[Array, Array]:
        """Of every entity the packets that were received, and the flows that were seen in rounds."""
        for plug, place in self._placed_sockets():
            received = struct.unpack_from("Q", plug.getsockopt(6, socket.TCP_INFO, 256), _RECEIVED)[0]
            before, round_ = self._had.get(plug, (received, -1))
            if received > before:
                self._acked[place] += -(-(received - before) // self._payload)
                self._active_flows[place] += round_ != self._round
                round_ = self._round
            self._had[plug] = (received, round_)
        return self._acked.copy(), self._active_flows.copy()

    def give(self, shares: tuple[WindowShare, ...], round_: int, holds: float) -> list[list[int]]:
        """Clamp what every socket tells its sender; of each entity the clamps of its sockets, bytes."""
        clamps: list[list[int]] = [[] for _ in shares]
        self._round, numbers = round_, [0] * len(shares)
        for plug, place in self._placed_sockets():
            share = shares[place]
            packets = share.of_flow(numbers[place]) if share.pace is None else LEAST
            numbers[place] += 1
            clamp = _UNCLAMPED if share.free else max(LEAST, packets) * self._payload
            clamps[place].append(clamp)
            if self._clamps.get(plug) != clamp:
                self._clamps[plug] = clamp
                with suppress(OSError):  # it was closed meanwhile
                    plug.setsockopt(6, socket.TCP_WINDOW_CLAMP, clamp)
        return clamps

    def release(self) -> None:
        """Let all tell what they like."""
        self.give((WindowShare(),) * len(self._acked), self._round, 0.0)

    def _placed_sockets(self) -> list[tuple[socket.socket, int]]:
        plugs = []
        for plug in self._sockets():
            with suppress(OSError):
                whence = ipaddress.ip_address(plug.getpeername()[0])
                if isinstance(whence, ipaddress.IPv6Address) and whence.ipv4_mapped:
                    whence = whence.ipv4_mapped
                place = next((place for net, place in self._prefixes if whence in net), None)
                if place is not None:
                    plugs.append((plug, place))
        for by_socket in (self._had, self._clamps):
            for plug in [sock for sock in by_socket if sock.fileno() < 0]:
                del by_socket[plug]
        return plugs


def keep_short(
    device: str, spec: HostrateSpec, sockets: Callable[[], Sequence[socket.socket]], stop: threading.Event
) -> None:
    """Hold back who sends to ``sockets()`` until ``stop``, by the queue of ``device``. It needs no root.

    Raises:
        LinuxError: there is no such interface, or it went.
        UserError: it has no queue.
        ValueError: entities go by cgroup.
    """
    enforcer = OwnSockets(spec, sockets)
    try:
        control(device, spec, enforcer, stop=stop)
    finally:
        enforcer.release()
