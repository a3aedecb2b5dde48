"""Requests beside bulk flows in this kernel: hosts in namespaces on a bridge, real TCP, a line of 200 Mb/s.

The host's queue is a token bucket on the bridge's port to the receiver. One host sends bulk flows through it,
another answers requests (100 bytes; the answer is 1 kB, and waits in the queue). Packets are cut before the
queue (no segmentation offload), so that queues count the same packets in every arm.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from windtunnel.bench.measure import in_turn, scratch, spread
from windtunnel.bench.rows import Row, left_out
from windtunnel.linux import namespaces, network, queues
from windtunnel.network.hostrate.live.controller import run
from windtunnel.network.hostrate.policy import POLICIES, Settings
from windtunnel.network.hostrate.spec import Spec, check

LINE = 25e6
PACKETS = 1000
WIRE = 1514
KINDS = ("reno", "bbr")
ARMS = ("weights", "published", "cubic", "reno", "bbr", "cut", "aq")
FLOWS = (1, 8, 24, 64)
FASTER, SHARE, IDLE_TIMES = 15.0, 0.95, 3.0
DRAIN = """
import json, select, socket, sys, time
server, poll, plugs, count = socket.create_server(("", 7001), backlog=256), select.epoll(), {}, 0
poll.register(server, select.EPOLLIN)
poll.register(sys.stdin, select.EPOLLIN)
room = bytearray(1 << 18)
print("ready", flush=True)
while True:
    for number, _ in poll.poll():
        if number == server.fileno():
            plug = server.accept()[0]
            plugs[plug.fileno()] = plug
            poll.register(plug, select.EPOLLIN)
        elif number in plugs:
            got = plugs[number].recv_into(room)
            count += got
            if not got:
                poll.unregister(number)
        else:
            sys.stdin.readline()
            print(json.dumps([count, time.monotonic()]), flush=True)
"""
ASK = """
import json, select, socket, sys, time
plugs = [socket.create_connection((sys.argv[1], 7002)) for _ in range(4)]
for plug in plugs:
    plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
sent, half, found, turn = [[] for _ in plugs], [0] * 4, [], 0
def take(k):
    half[k] += len(plugs[k].recv(65536))
    while half[k] >= 1000:
        half[k] -= 1000
        began = sent[k].pop(0)
        found.append((began, time.monotonic() - began))
def ask(span):
    global turn
    due = time.monotonic()
    end = due + span
    while (now := time.monotonic()) < end:
        if now >= due:
            sent[turn % 4].append(now)
            plugs[turn % 4].send(bytes(100))
            turn, due = turn + 1, due + 0.0025
        else:
            for plug in select.select(plugs, [], [], due - now)[0]:
                take(plugs.index(plug))
ask(float(sys.argv[2]))
print("warm", flush=True)
began = time.monotonic()
ask(float(sys.argv[3]))
print("done", flush=True)
while any(sent):
    take(next(k for k in range(4) if sent[k]))
print(json.dumps([took for at, took in found if at >= began]), flush=True)
"""
SENDER = """
import socket, sys, threading
def answer(plug):
    half = 0
    while got := len(plug.recv(65536)):
        half += got
        plug.sendall(bytes(1000 * (half // 100)))
        half %= 100
def serve(server):
    while True:
        plug = server.accept()[0]
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer, args=(plug,), daemon=True).start()
def stream(host, kind):
    plug = socket.socket()
    plug.setsockopt(socket.IPPROTO_TCP, 13, kind.encode())
    plug.connect((host, 7001))
    data = bytes(1 << 17)
    try:
        while True:
            plug.sendall(data)
    except OSError:  # the round is over
        pass
if sys.argv[1] == "answers":
    threading.Thread(target=serve, args=(socket.create_server(("", 7002)),), daemon=True).start()
else:
    for _ in range(int(sys.argv[3])):
        threading.Thread(target=stream, args=sys.argv[1:3], daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Round:
    """``goodput``: bytes/s that the receivers of bulk flows read; ``latency``: seconds of every request;
    ``waiting``: packets in the host's queue, every few ms."""

    goodput: float
    latency: list[float]
    waiting: list[float]


def measured(
    arm: str, flows: int, span: float = 3.0, warm: float = 1.0, log: Path | None = None, **fields: Any
) -> Round:
    """One round, in a network that is made for it and goes with it. ``log`` and ``fields`` (of the file): for
    the arms that are policies."""
    net = network.Network(f"bench-{os.getpid() % 10**6}")
    with ExitStack() as stack:
        stack.callback(net.close)
        bulk, answers, (there, address) = (net.add(name) for name in ("bulk", "answers", "receiver"))
        for place, _ in (bulk, answers):
            network.ask(_uncut, Path(place))
        port = net.port("receiver")
        packets = Settings.upper if arm == "cut" else PACKETS
        burst, limit = 10 * WIRE, packets * WIRE
        queues.try_queue(port, "tbf", rate=f"{int(LINE * 8)}bit", burst=burst, limit=limit)
        if arm in POLICIES:
            entities = {"bulk": {"match": bulk[1]}, "answers": {"match": answers[1]}}
            spec = check({"line": LINE, "by": "source", "entities": entities, **fields}, "bench")
            _controlled(stack, port, spec, arm, log)
        if arm == "aq":
            _shared(stack, port, (bulk[1], answers[1]))
        drain = stack.enter_context(_started(there, [DRAIN]))
        answering = stack.enter_context(_started(answers[0], [SENDER, "answers"]))
        _line(drain), _line(answering)
        if flows:
            kind = arm if arm in KINDS else "cubic"
            _line(stack.enter_context(_started(bulk[0], [SENDER, address, kind, str(flows)])))
        asks = stack.enter_context(_started(there, [ASK, answers[1], str(warm), str(span)]))
        _line(asks)
        counts = [_told(drain)]
        with _watched(port) as waiting:
            _line(asks)
            counts.append(_told(drain))
        (before, began), (after, ended) = counts
        return Round((after - before) / (ended - began), json.loads(_line(asks)), waiting)


def _uncut(route: Any) -> None:
    route.link("set", index=socket.if_nametoindex(network.INTERFACE), gso_max_segs=1)


def _controlled(stack: ExitStack, port: str, spec: Spec, policy: str, log: Path | None) -> None:
    """A controller until the stack's end."""
    stop, began = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def control() -> None:
        try:
            run(port, spec, policy=policy, log=log, stop=stop, ready=lambda _: began.set())
        except BaseException as error:
            failed.append(error)
            began.set()

    loop = threading.Thread(target=control)
    loop.start()
    stack.callback(loop.join)
    stack.callback(stop.set)
    began.wait()
    if failed:
        raise failed[0]


def _shared(stack: ExitStack, port: str, sources: Sequence[str]) -> None:
    """Equal bandwidth shares before the queue, lent while others leave theirs: `network.sharing`."""
    folder = stack.enter_context(scratch())
    entities = {f"e{number}": {"match": source} for number, source in enumerate(sources)}
    file = folder / "shares.yaml"
    file.write_text(json.dumps({"line": LINE, "by": "source", "entities": entities}))
    code = "from windtunnel.cli.main import main; main()"
    words = [code, "network", "sharing", "attach", port, str(file), "--lend"]
    if not _line(stack.enter_context(_started(None, words))).startswith("Attached"):
        raise RuntimeError(f"shares could not be attached to {port}")


@contextmanager
def _watched(port: str) -> Iterator[list[float]]:
    """Packets in the queue, looked at until the end."""
    found: list[float] = []
    queue, done = queues.Backlog(port), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            found.append(queue.look()[1] / WIRE)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()
        queue.close()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _told(process: subprocess.Popen[str]) -> Any:
    assert process.stdin is not None
    process.stdin.write("tell\n")
    process.stdin.flush()
    return json.loads(_line(process))


def kernel_rows(quick: bool) -> Iterator[Row]:
    """Every arm at every count of flows, in turn."""
    if (why := network.missing()) is not None:
        yield left_out("kernel", "kernel", why)
        return
    repeats, span = (1, 1.0) if quick else (5, 3.0)
    idle = statistics.mean(took for _ in range(repeats) for took in measured("cubic", 0, span).latency)
    yield Row("kernel", "idle: a request", "ms", measured=idle * 1e3)
    for flows in FLOWS[1:2] if quick else FLOWS:
        found = in_turn({arm: partial(measured, arm, flows, span) for arm in ARMS}, repeats)
        mean = {arm: [statistics.mean(one.latency) for one in rounds] for arm, rounds in found.items()}
        goodput = {arm: spread(one.goodput for one in rounds).median for arm, rounds in found.items()}
        cubic = spread(mean["cubic"]).median
        for arm, rounds in found.items():
            took, part = spread(mean[arm]).median, goodput[arm] / goodput["cubic"]
            met = arm == "weights" and cubic / took >= FASTER and part >= SHARE
            goal = f">= {FASTER:g}x under CUBIC's at >= {SHARE:.0%} of its throughput"
            if arm == "weights" and flows == 8:
                goal, met = f"{goal}; <= {IDLE_TIMES:g}x idle", met and took <= IDLE_TIMES * idle
            each = sorted(took for one in rounds for took in one.latency)
            waits = spread(statistics.mean(one.waiting) for one in rounds)
            yield Row(
                "kernel", f"{flows} flows, {arm}: a request", "ms", measured=took * 1e3,
                target=goal if arm == "weights" else "", met=met if arm == "weights" else None,
                note=f"{cubic / took:.1f}x under CUBIC, {took / idle:.1f}x idle;"
                f" p50 {spread(each).median * 1e3:.2f} p95 {spread(each).p95 * 1e3:.2f} ms; bulk"
                f" {goodput[arm] * 8e-6:.1f} Mb/s ({part:.1%}); {waits.median:.1f} packets wait;"
                f" worst round {max(mean[arm]) * 1e3:.2f} ms",
            )  # fmt: skip


class _started:
    """A program of ours in a namespace, killed at the end."""

    def __init__(self, place: str | None, words: Sequence[str]) -> None:
        line = [sys.executable, "-c", *words]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = namespaces.within(place, lambda: subprocess.Popen(line, text=True, **pipes))

    def __enter__(self) -> subprocess.Popen[str]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
