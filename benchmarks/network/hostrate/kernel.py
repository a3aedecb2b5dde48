"""Requests beside bulk flows in this kernel: hosts in namespaces on a bridge, real TCP, a line of 200 Mb/s.

The host's queue is a token bucket on the bridge's port to the receiver. One host sends bulk flows through it,
another answers requests (100 bytes; the answer is 1 kB, and waits in the queue). Packets are cut before the
queue (no segmentation offload), so that queues count the same packets in every arm. DCTCP, which kernels
often lack, is the bench's own: ``python -m benchmarks.network.hostrate.kernel`` builds it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import in_turn, scratch, spread
from benchmarks.harness.rows import Row, left_out
from windtunnel.linux import bpf, libbpf, network, queues
from windtunnel.network import traffic
from windtunnel.network.hostrate.live.controller import run
from windtunnel.network.hostrate.policy import POLICIES, Settings
from windtunnel.network.hostrate.spec import Spec, check
from windtunnel.network.traffic import BULK, begin, line, told

LINE = 25e6
PACKETS = 1000
WIRE = 1514
KINDS = ("reno", "bbr")
ARMS = ("weights", "published", "cubic", "reno", "bbr", "dctcp", "cut", "aq")
DCTCP = bpf.Object(
    Path(__file__).parent / "bpf" / "dctcp.bpf.c", "benchmarks.network.hostrate.kernel", typed=True
)
FLOWS = (1, 8, 24, 64)
FASTER, SHARE, IDLE_TIMES = 15.0, 0.95, 3.0


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
        kind = arm if arm in KINDS else _marked(stack, port) if arm == "dctcp" else "cubic"

        def start(place: str, *words: object) -> subprocess.Popen[str]:
            return stack.enter_context(traffic.started(place, *words))

        drain = start(there, "receive", BULK[0], *[kind] * (arm == "dctcp"))
        line(drain), line(start(answers[0], "answer"))
        asks = start(there, "ask", answers[1], warm, span)
        line(asks)
        if flows:
            line(start(bulk[0], "send", address, BULK[0], kind, flows))
        begin(asks)
        line(asks)
        began, (before,) = told(drain)
        with _watched(port) as waiting:
            line(asks)
            ended, (after,) = told(drain)
        return Round((after - before) / (ended - began), json.loads(line(asks)), waiting)


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


def _marked(stack: ExitStack, port: str) -> str:
    """Marks of what finds as many packets in the port's queue as windows leave there; the name of the
    congestion control that heeds them."""
    name = f"wt_dctcp{os.getpid()}"
    elf = DCTCP.locate().read_bytes().replace(b"wt_dctcp".ljust(16, b"\0"), name.encode().ljust(16, b"\0"))
    loaded = libbpf.Loaded(elf, {})
    stack.callback(loaded.close)
    loaded.register("control")
    loaded.maps["at"][bytes(4)] = Settings.upper.to_bytes(4, "little")
    queues.make_clsact(port)
    queues.attach(port, "egress", loaded.program("mark"), "mark")
    return name


def _shared(stack: ExitStack, port: str, sources: Sequence[str]) -> None:
    """Equal bandwidth shares before the queue, lent while others leave theirs: `network.sharing`."""
    folder = stack.enter_context(scratch())
    entities = {f"e{number}": {"match": source} for number, source in enumerate(sources)}
    file = folder / "shares.yaml"
    file.write_text(json.dumps({"line": LINE, "by": "source", "entities": entities}))
    code = "from windtunnel.cli.main import main; main()"
    words = ["-c", code, "network", "sharing", "attach", port, file, "--lend"]
    lender = stack.enter_context(traffic.started(None, *words, own=False))
    if not line(lender).startswith("Attached"):
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


if __name__ == "__main__":
    DCTCP.rebuild()
