"""Requests beside bulk flows in the packet engine, five seeds each. Emulated.

Requests beside bulk flows in this kernel: hosts in namespaces on a bridge, real TCP, a line of 200 Mb/s.

The host's queue is a token bucket on the bridge's port to the receiver. One host sends bulk flows through it,
another answers requests (100 bytes; the answer is 1 kB, and waits in the queue). Packets are cut before the
queue (no segmentation offload), so that queues count the same packets in every arm.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.harness.measure import in_turn
from benchmarks.harness.rows import Row, figure, need
from benchmarks.network import traffic
from benchmarks.network.traffic import BULK, byte_counts, line, say
from windtunnel.linux import network, queues
from windtunnel.network.hostrate.live.controller import run
from windtunnel.network.hostrate.policy import POLICIES, WindowSettings
from windtunnel.network.hostrate.spec import HostrateSpec, check
from windtunnel.network.hostrate.twin import ARMS as TWIN_ARMS
from windtunnel.network.hostrate.twin import BulkTenant, emulate

FLOWS = (1, 8, 24, 64)
GOAL = ">= 15x under CUBIC's at >= 95% of its throughput"


def twin_rows(quick: bool) -> Iterator[Row]:
    """Every arm at every count of flows."""
    seeds, seconds = (range(2), 0.5) if quick else (range(5), 2.0)
    for flows in FLOWS[:2] if quick else FLOWS:
        results = {
            arm: [emulate([BulkTenant("bulk", flows)], arm, seconds, seed) for seed in seeds]
            for arm in TWIN_ARMS
            if arm != "free"
        }
        latency = {arm: median(result.latency for result in some) for arm, some in results.items()}
        goodput = {arm: median(sum(result.goodput) for result in some) for arm, some in results.items()}
        for arm, some in results.items():
            under, part = latency["cubic"] / latency[arm], goodput[arm] / goodput["cubic"]
            yield figure(
                f"{flows} flows, {arm}: a request", "s", goal=GOAL if arm == "weights" else "",
                emulated=[result.latency for result in some], passed=under >= 15 and part >= 0.95,
                note=f"{under:.1f}x under CUBIC; bulk {goodput[arm] * 8e-6:.1f} Mb/s ({part:.1%});"
                f" {median(result.wait for result in some):.1f} packets wait",
            )  # fmt: skip


LINE = 25e6
PACKETS = 1000
WIRE = 1514
ARMS = ("weights", "published", "cubic", "reno", "bbr", "cut", "aq")


@dataclass(frozen=True)
class Round:
    """``goodput``: bytes/s that the receivers of bulk flows read; ``latency``: seconds of every request;
    ``waiting``: packets in the host's queue, every few ms."""

    goodput: float
    latency: list[float]
    waiting: list[float]


def measured(arm: str, flows: int, span: float = 3.0, warm: float = 1.0) -> Round:
    """One round, in a network that is made for it and goes with it."""
    net = network.Network(f"bench-{os.getpid() % 10**6}")
    with ExitStack() as stack:
        stack.callback(net.close)
        bulk, answers, (there, address) = (net.add(name) for name in ("bulk", "answers", "receiver"))
        for place, _ in (bulk, answers):
            network.ask(_uncut, Path(place))
        port = net.port("receiver")
        burst, limit = 10 * WIRE, WIRE * (WindowSettings.upper if arm == "cut" else PACKETS)
        queues.try_queue(port, "tbf", rate=f"{int(LINE * 8)}bit", burst=burst, limit=limit)
        entities = {"bulk": {"match": bulk[1]}, "answers": {"match": answers[1]}}
        if arm in POLICIES:
            spec = check({"line": LINE, "by": "source", "entities": entities}, "bench")
            stack.enter_context(_controlled(port, spec, arm))
        if arm == "aq":
            stack.enter_context(traffic.shared(port, LINE, entities, work_conserving=True))

        def start(place: str, *words: object) -> subprocess.Popen[str]:
            process = stack.enter_context(traffic.started(place, *words))
            line(process)
            return process

        drain = start(there, "receive", BULK[0])
        start(answers[0], "answer")
        asks = start(there, "ask", answers[1])
        if flows:
            start(bulk[0], "send", address, BULK[0], arm if arm in ("reno", "bbr") else "cubic", flows)
        say(asks, "go")
        time.sleep(warm)
        began, (before,) = byte_counts(drain)
        with _watched(port) as waiting:
            time.sleep(span)
            ended, (after,) = byte_counts(drain)
        say(asks, "end")
        latency = [took for at, took in json.loads(line(asks)) if began <= at <= ended]
        return Round((after - before) / (ended - began), latency, waiting)


def _uncut(route: Any) -> None:
    route.link("set", index=socket.if_nametoindex(network.INTERFACE), gso_max_segs=1)


@contextmanager
def _controlled(port: str, spec: HostrateSpec, policy: str) -> Iterator[None]:
    """A controller until the end."""
    stop, began = threading.Event(), threading.Event()

    def ready(_: object) -> None:
        began.set()

    with ThreadPoolExecutor(1) as pool:
        control = pool.submit(run, port, spec, policy=policy, stop=stop, ready=ready)
        control.add_done_callback(ready)
        began.wait()
        try:
            if not control.done():
                yield
        finally:
            stop.set()
            control.result()


@contextmanager
def _watched(port: str) -> Iterator[list[float]]:
    """Packets in the queue, looked at until the end."""
    packets: list[float] = []
    queue, done = queues.Backlog(port), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            packets.append(queue.read()[1] / WIRE)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield packets
    finally:
        done.set()
        watcher.join()
        queue.close()


def kernel_rows(quick: bool) -> Iterator[Row]:
    """Every arm at every count of flows, in turn."""
    need(network.missing())
    repeats, span = (1, 1.0) if quick else (5, 3.0)
    idle = mean(took for _ in range(repeats) for took in measured("cubic", 0, span).latency)
    yield figure("idle: a request", "s", idle)
    for flows in FLOWS[1:2] if quick else FLOWS:
        results = in_turn({arm: partial(measured, arm, flows, span) for arm in ARMS}, repeats)
        latency = {arm: [mean(run.latency) for run in rounds] for arm, rounds in results.items()}
        goodput = {arm: median(run.goodput for run in rounds) for arm, rounds in results.items()}
        cubic = median(latency["cubic"])
        for arm, rounds in results.items():
            took, part = median(latency[arm]), goodput[arm] / goodput["cubic"]
            goal, reached = (GOAL, cubic / took >= 15 and part >= 0.95) if arm == "weights" else ("", None)
            if goal and flows == 8:
                goal, reached = f"{goal}; <= 3x idle", reached and took <= 3 * idle
            yield figure(
                f"{flows} flows, {arm}: a request", "s", latency[arm], goal, passed=reached,
                note=f"{cubic / took:.1f}x under CUBIC, {took / idle:.1f}x idle; bulk"
                f" {goodput[arm] * 8e-6:.1f} Mb/s ({part:.1%});"
                f" {median(mean(run.waiting) for run in rounds):.1f} packets wait",
            )  # fmt: skip
