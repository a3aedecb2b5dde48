"""A sender and a receiver on a thin link of their own, whose queue a controller keeps short."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from support.waiting import until
from windtunnel.linux import namespaces, network, queues
from windtunnel.linux.cgroup import mounts
from windtunnel.network.hostrate.live import controller, native
from windtunnel.network.hostrate.spec import check
from windtunnel.store import eventlog

T = TypeVar("T")
MAIN = "from windtunnel.cli.main import main; main()"
RECEIVER = """
import socket, sys, threading
def drain(plug):
    room = bytearray(1 << 16)
    while plug.recv_into(room):
        pass
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
while True:
    threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()
"""
CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def senders(**more: Any) -> dict[str, Any]:
    """Marks of a queue that is seen from outside."""
    marks = {"upper": 25, "lower": 12}
    return {"line": "20 Mb/s", "by": "source", "entities": {"bulk": {"match": "10.9.1.1"}}, **marks, **more}


@dataclass
class Place:
    """Two networks: here ``wt0`` (10.9.1.1, 20 Mb/s), there its peer (10.9.1.2) with a receiver."""

    here: Path
    there: Path
    port: int
    plugs: list[Any] = field(default_factory=list)

    def do(self, work: Callable[[], T]) -> T:
        return namespaces.within(self.here, work)

    def command(self, *words: str | Path) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", MAIN, "network", "hostrate", "run", *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.do(lambda: subprocess.Popen(line, **pipes))  # type: ignore[call-overload, no-any-return]

    def backlog(self) -> float:
        def look() -> int:
            queue = queues.Backlog("wt0")
            try:
                return queue.read()[1]
            finally:
                queue.close()

        return self.do(look) / 1514


@contextmanager
def veth(folder: Path) -> Iterator[Place]:
    """Skips, by name, where there can be none."""
    if (reason := network.missing()) is not None:
        pytest.skip(reason)
    here, there = folder / "here", folder / "there"
    namespaces.make_network(here)
    namespaces.make_network(there)
    receiver = None
    try:
        try:

            def pair(route: Any) -> None:
                with open(there, "rb") as held:
                    peer = {"ifname": "wt1", "net_ns_fd": held.fileno()}
                    route.link("add", ifname="wt0", kind="veth", peer=peer)

            network.ask(pair, here)
            network.configure("wt0", "10.9.1.1", 24, here)
            network.configure("wt1", "10.9.1.2", 24, there)
            queues.try_queue("wt0", "tbf", here, rate="20mbit", burst=15_000, limit=400 * 1514)
            spec = check(senders(), "trial")
            native.Senders(spec).close()
        except OSError as error:
            pytest.skip(f"links or congestion controls in BPF cannot be had here: {error}")
        line = [sys.executable, "-c", RECEIVER]
        receiver = namespaces.within(there, lambda: subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
        assert receiver.stdout is not None
        yield Place(here, there, int(receiver.stdout.readline()))
    finally:
        if receiver is not None:
            receiver.kill()
            receiver.communicate()
        for file in (here, there):
            namespaces.release(file)


@contextmanager
def sending(place: Place, flows: int) -> Iterator[list[Any]]:
    """So many bulk flows, whose sockets these are."""
    import socket

    data, stop = bytes(1 << 14), threading.Event()

    def stream(plug: socket.socket) -> None:
        with suppress(OSError):
            while not stop.is_set():
                plug.sendall(data)

    def connect() -> socket.socket:
        plug = socket.socket()
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")  # it fills any queue
        plug.connect(("10.9.1.2", place.port))
        return plug

    plugs = [place.do(connect) for _ in range(flows)]
    threads = [threading.Thread(target=stream, args=(plug,), daemon=True) for plug in plugs]
    for thread in threads:
        thread.start()
    try:
        yield plugs
    finally:
        stop.set()
        for plug in plugs:
            with suppress(OSError):
                plug.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for plug in plugs:
            plug.close()


def control_of(plug: Any) -> str:
    """The congestion control of a socket."""
    return str(plug.getsockopt(6, 13, 16).rstrip(b"\0").decode())


def available() -> list[str]:
    return CONTROLS.read_text(encoding="ascii").split()


def held_back(folder: Path) -> Path:
    """The log of a controller that held back some flows."""
    log, stop = folder / eventlog.NAME, threading.Event()
    ready = threading.Event()
    with veth(folder) as place:
        spec = check(senders(), "trial")
        failed: list[BaseException] = []

        def loop() -> None:
            try:
                place.do(lambda: controller.run("wt0", spec, log=log, stop=stop, ready=lambda _: ready.set()))
            except BaseException as error:
                failed.append(error)
                ready.set()

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            ready.wait()
            assert not failed, failed
            with sending(place, 3):
                until(lambda: any(event["decision"]["total"] for event in eventlog.decisions(log)))
        finally:
            stop.set()
            thread.join()
    return log


def unified() -> Path:
    """A cgroup of one's own, or a skip by name."""
    try:
        group = mounts().unified / f"windtunnel-hostrate-{os.getpid()}"
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    return group
