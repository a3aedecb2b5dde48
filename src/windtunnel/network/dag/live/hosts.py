"""Hosts as network namespaces that nothing but processes holds, joined by a bridge in one more.

No namespace, device or queue gets a name that others see: this process and the hosts' agents hold all, so the
kernel takes all away when they end, however that comes. What a host sends goes through HTB on its own end of
its link, what it receives through HTB on the bridge's end, with a class of each flow on both. Rates are of
payload: what frames add is added. Acknowledgements pass free.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from windtunnel.base.errors import HostError
from windtunnel.linux import namespaces, network, queues
from windtunnel.network.dag.live import agent

FRAMED = 1514 / 1448
"""Of a full TCP segment, what is on the wire over what is payload."""
LEAST = 2e-3
"""Of a line, what a flow has that is to get nothing: HTB has no class without a rate. It is on top."""
SEGMENTS = 2
"""Of a packet that the kernel cuts later: it is sent whole, and what a class did not have for it is owed."""
AHEAD = 0.008
"""Seconds of its line that a flow may have under way."""


@dataclass(frozen=True)
class TaskFlow:
    """From one host to another, and how many bytes for each of its task's."""

    source: str
    destination: str
    times: float


class NamespaceHosts:
    """``lines``: bytes/s by ``HOST.out`` and ``HOST.in`` of every host. ``flows``: all that there will be, by
    number; ``memory``: how many numbers hosts count under.

    Raises:
        OSError: the kernel refused, by this and `shape`.
        HostError: an agent did not start.
    """

    def __init__(
        self, lines: Mapping[str, float], names: Sequence[str], flows: Sequence[TaskFlow], memory: int
    ):
        self._lines, self._flows = lines, flows
        self._places = {name: place for place, name in enumerate(names)}
        self._classes: dict[str, queues.HtbClasses] = {}
        self._set: dict[tuple[str, int], tuple[float, float]] = {}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self.controls: dict[str, socket.socket] = {}
        self._stack = ExitStack()
        try:
            counted = os.memfd_create("windtunnel-dag")
            self._stack.callback(os.close, counted)
            os.ftruncate(counted, max(1, memory) * 8)
            self.counts = memoryview(mmap(counted, 0)).cast("Q")
            self._switch = self._namespace()
            namespaces.within(self._switch, self._bridge)
            for name in names:
                self._add(name, counted)
            for name in names:
                self.receive(name)  # that it listens
        except BaseException:
            self.close()
            raise

    def _namespace(self) -> int:
        namespace = namespaces.apart(
            ["net"], lambda: os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        )
        self._stack.callback(os.close, namespace)
        return namespace

    def _bridge(self) -> None:
        network.ask(lambda route: route.link("add", ifname="wtb", kind="bridge"))
        network.configure("wtb", "10.0.0.1", 16)

    def _add(self, name: str, counted: int) -> None:
        place, end = self._namespace(), f"wtp{self._places[name]}"
        namespace = Path(f"/proc/self/fd/{place}")

        def linked() -> None:
            network.make_pair(end, network.INTERFACE, namespace, "wtb")
            network.set_link(end, up=True)

        namespaces.within(self._switch, linked)
        network.configure("lo", "127.0.0.1", 8, namespace)
        network.configure(network.INTERFACE, self._address(name), 16, namespace)
        out, into = f"{name}.out", f"{name}.in"
        if out in self._lines:
            network.ask(_cut, namespace)
            self._shaped(out, network.INTERFACE, namespace)
        if into in self._lines:
            switch = Path(f"/proc/self/fd/{self._switch}")
            self._shaped(into, end, switch)
            numbers = [number for number, flow in enumerate(self._flows) if flow.destination == name]
            network.ask(lambda route: _classify(route, end, numbers), switch)
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stack.enter_context(own)
        window = max(1 << 16, int(AHEAD * self._lines.get(into, 0.0)))
        words = [sys.executable, "-I", "-S", agent.__file__, str(counted), str(window)]

        def started() -> subprocess.Popen[bytes]:
            namespaces.enter(place)
            inherited = {"stdin": theirs.fileno(), "stdout": 2, "pass_fds": [counted]}
            return subprocess.Popen(words, start_new_session=True, **inherited)  # type: ignore[call-overload, no-any-return]

        with theirs:
            # the next process that its thread starts is the first one of a namespace of processes
            self._agents[name] = namespaces.apart(["pid"], started)
        self.controls[name] = own

    def _shaped(self, line: str, device: str, where: Path) -> None:
        self._classes[line] = queues.HtbClasses(device, self._lines[line] * FRAMED, where)
        self._stack.callback(self._classes[line].close)

    def _address(self, name: str) -> str:
        number = self._places[name] + 2
        return f"10.0.{number // 250}.{number % 250 + 1}"

    def ask(self, host: str, *words: Any) -> None:
        """Let a host's agent do something. Raises HostError: it is gone."""
        try:
            self.controls[host].send(json.dumps(words).encode())
        except OSError:
            raise self.ended(host) from None

    def receive(self, host: str) -> list[Any]:
        """The number of what ended there, of a process also its status and seconds of CPU. Raises HostError:
        the agent is gone."""
        if not (message := self.controls[host].recv(4096)):
            raise self.ended(host)
        words: list[Any] = json.loads(message)
        return words

    def send(self, number: int, size: int) -> None:
        """Begin a flow, of ``size`` bytes."""
        flow = self._flows[number]
        self.ask(flow.source, "send", number, self._address(flow.destination), size)

    def shape(self, rates: Mapping[int, tuple[float, float]]) -> None:
        """Give flows the bytes/s that they have, and those that they get at most."""
        shapes_of: dict[str, dict[int, tuple[float, float, int]]] = {name: {} for name in self._classes}
        for number, flow_rates in rates.items():
            flow = self._flows[number]
            for name in (f"{flow.source}.out", f"{flow.destination}.in"):
                if self._set.get((name, number)) != flow_rates:
                    self._set[name, number] = flow_rates
                    rate, cap = (min(1.0, max(LEAST, share / self._lines[name])) for share in flow_rates)
                    line = self._lines[name] * FRAMED
                    # what others leave goes to those who have most, nearly all: at once also to one that has
                    # just been given more, and still owes for what it sent when it had less
                    turn = 2000 + int(200_000 * rate)
                    shapes_of[name][number + agent.CLASSES] = line * min(rate, cap), line * cap, turn
        for name, shapes in shapes_of.items():
            if shapes:
                self._classes[name].set(shapes)

    def ended(self, name: str) -> HostError:
        """What to raise of a host whose agent is gone."""
        with suppress(subprocess.TimeoutExpired):
            self._agents[name].wait(5.0)
        return HostError(
            f"network dag run: host {name} is gone: its agent ended with {self._agents[name].poll()}"
        )

    def close(self) -> None:
        """End all that runs there; all else goes with it."""
        for process in self._agents.values():
            process.kill()
            process.wait()
        self._stack.close()


def _cut(route: Any) -> None:
    route.link("set", index=socket.if_nametoindex(network.INTERFACE), gso_max_segs=SEGMENTS)


def _classify(route: Any, device: str, numbers: Sequence[int]) -> None:
    """Send flows to their classes by the port that they come from: priorities end with a namespace."""
    index = socket.if_nametoindex(device)
    for number in numbers:
        match = f"0x{agent.FIRST + number:04x}0000/0xffff0000+20"
        route.tc(
            "add-filter", "u32", index, 0, parent=0x10000, prio=10, protocol=0x0800,
            target=0x10000 | number + agent.CLASSES, keys=[match],
        )  # fmt: skip
