"""Traffic of real sockets for the benches of networks: senders, receivers, and requests beside them.

Each is a program of its own in the namespace of a host, ``python -m benchmarks.network.traffic NAME ...``,
that prints a line when it is ready and ends with who started it: `started` starts one, and kills it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from windtunnel.base.errors import HostError
from windtunnel.linux import namespaces
from windtunnel.network.sharing.live import attachment
from windtunnel.network.sharing.live.lending import lend
from windtunnel.network.sharing.spec import check

BULK = (7001, 7002)
"""Ports of bulk data, to which any program here may send."""
_ANSWERS = 7003
REQUEST, ANSWER = 100, 1000
"""Bytes of a request, and of what comes back."""
DATAGRAM = 1400
_FRAME = DATAGRAM + 42
"""Bytes of a datagram on the wire."""
_PLUGS, _EVERY = 4, 0.0025
_CONGESTION = 13  # TCP_CONGESTION


class started:
    """A program here in a namespace, killed at the end. As a context manager: its process."""

    def __init__(self, place: str | Path | None, *words: object) -> None:
        call = [sys.executable, "-m", __spec__.name, *map(str, words)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = namespaces.within(place, lambda: subprocess.Popen(call, text=True, **pipes))

    def __enter__(self) -> subprocess.Popen[str]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def shared(port: str, line: float, entities: Mapping[str, Any], *, work_conserving: bool) -> Iterator[None]:
    """Bandwidth shares (`network.sharing`) before a port's queue; ``work_conserving``: what others leave
    is used."""
    shares = attachment.attach(port, check({"line": line, "by": "source", "entities": entities}, "bench"))
    stop = threading.Event()
    lender = threading.Thread(target=lend, args=(shares,), kwargs={"stop": stop})
    if work_conserving:
        lender.start()
    try:
        yield
    finally:
        stop.set()
        if work_conserving:
            lender.join()
        shares.close()


def line(process: subprocess.Popen[str]) -> str:
    """The next that it prints. Raises HostError: it has ended instead."""
    assert process.stdout is not None
    shares = process.stdout.readline()
    if not shares.endswith("\n"):
        words = " ".join(map(str, process.args[1:]))  # type: ignore[index]
        raise HostError(f"{words}: ended with status {process.wait()} and has not said what was waited for")
    return shares


def say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def byte_counts(receiver: subprocess.Popen[str]) -> tuple[float, list[int]]:
    """When `receive` was asked, in seconds of its clock, and the bytes that it has read at each port."""
    say(receiver, "tell")
    at, counts = json.loads(line(receiver))
    return at, counts


def receive(ports: str) -> None:
    """Read what comes to ``ports`` (with commas between) by TCP and by UDP."""
    poll, sources = select.epoll(), dict[int, tuple[socket.socket, int, bool]]()
    counts = dict.fromkeys(map(int, ports.split(",")), 0)

    def watch(plug: socket.socket, port: int, listens: bool) -> None:
        sources[plug.fileno()] = (plug, port, listens)
        poll.register(plug, select.EPOLLIN)

    for port in counts:
        server = socket.create_server(("", port), backlog=256)
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(("", port))
        watch(server, port, True)
        watch(datagrams, port, False)
    poll.register(sys.stdin, select.EPOLLIN)
    room = bytearray(1 << 18)
    print("ready", flush=True)
    while True:
        for number, _ in poll.poll():
            if number not in sources:
                if not sys.stdin.readline():
                    return
                print(json.dumps([time.monotonic(), list(counts.values())]), flush=True)
                continue
            plug, port, listens = sources[number]
            if listens:
                watch(plug.accept()[0], port, False)
                continue
            got = plug.recv_into(room)
            counts[port] += got
            if not got and plug.type == socket.SOCK_STREAM:
                poll.unregister(number)


def send(host: str, port: str, kind: str, count: str, rate: str = "0") -> None:
    """So many flows of a congestion control, each as much as it may; of ``udp``, each of ``rate`` bytes/s."""
    place = (host, int(port))

    def stream() -> None:
        plug = socket.socket()
        plug.setsockopt(socket.IPPROTO_TCP, _CONGESTION, kind.encode())
        plug.connect(place)
        data = bytes(1 << 17)
        with contextlib.suppress(OSError):  # the round is over
            while True:
                plug.sendall(data)

    def datagrams() -> None:
        plug = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        due = time.monotonic()
        with contextlib.suppress(OSError):
            while True:
                for _ in range(8):
                    plug.sendto(bytes(DATAGRAM), place)
                due += 8 * _FRAME / float(rate)
                time.sleep(max(0.0, due - time.monotonic()))

    for _ in range(int(count)):
        threading.Thread(target=datagrams if kind == "udp" else stream, daemon=True).start()
    _stay()


def answer() -> None:
    """Answer requests on any number of connections."""

    def serve(plug: socket.socket) -> None:
        half = 0
        while got := len(plug.recv(65536)):
            half += got
            plug.sendall(bytes(ANSWER * (half // REQUEST)))
            half %= REQUEST

    def accept(server: socket.socket) -> None:
        while True:
            plug = server.accept()[0]
            plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve, args=(plug,), daemon=True).start()

    server = socket.create_server(("", _ANSWERS))
    threading.Thread(target=accept, args=(server,), daemon=True).start()
    _stay()


def ask(host: str) -> None:
    """Requests to `answer`, one every 2.5 ms in turn over four connections, until it is told to end; then
    when each was sent, and the seconds that it took.

    A line says that it is connected, and it waits for one before its first request: beside bulk flows that
    fill a queue nobody surely connects, since the answer to whose address that is (ARP) waits in it too."""
    plugs = [socket.create_connection((host, _ANSWERS)) for _ in range(_PLUGS)]
    for plug in plugs:
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent: list[list[float]] = [[] for _ in plugs]
    half, shares, turn, ends = [0] * _PLUGS, list[tuple[float, float]](), 0, False
    print("connected", flush=True)
    os.read(0, len("go\n"))  # and no more: what comes then ends it
    due = time.monotonic()
    while not ends or any(sent):
        now = time.monotonic()
        if now >= due and not ends:
            sent[turn % _PLUGS].append(now)
            plugs[turn % _PLUGS].send(bytes(REQUEST))
            turn, due = turn + 1, due + _EVERY
            continue
        sources: list[Any] = plugs if ends else [*plugs, 0]
        for ready in select.select(sources, [], [], max(0.0, due - now))[0]:
            if ready == 0:
                ends = True
                continue
            k = plugs.index(ready)
            half[k] += len(ready.recv(65536))
            while half[k] >= ANSWER:
                half[k] -= ANSWER
                began = sent[k].pop(0)
                shares.append((began, time.monotonic() - began))
    print(json.dumps(shares), flush=True)


def _stay() -> None:
    """Until who started this program is gone; its threads end with it."""
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {each.__name__: each for each in (receive, send, answer, ask)}
    partial(programs[sys.argv[1]], *sys.argv[2:])()
