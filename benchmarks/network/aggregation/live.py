"""The switch as a process, 4 and 8 workers, each in a network namespace on a link of its own.

Links are token buckets (tc tbf) in either direction; the switch's own has room for all. The arms are in turn
on the same links: the switch, gloo's ring of float32, and of float16 with half of the bytes and a few bits.
A ring sends 2 (n - 1) / n of the bytes a worker, a switch takes them once: 1.5 and 1.75 times sooner at best.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks.harness.measure import spread
from benchmarks.harness.rows import Row, figure, need
from windtunnel.linux import network

CASES = {4: (6.25e6, 4 << 20, ">= 1.2x (ideal 1.5)"), 8: (2.5e6, 2 << 20, ">= 1.4x (ideal 1.75)")}
"""Of so many workers: each link's bytes/s, the tensor's bytes, and the target over gloo's ring."""
LOSSES = (0.01, 0.05, 0.1, 0.2)
SLOTS, SHORT, LIMIT = 512, 0.95, 200.0
"""Of the CPUs' time, what may be used before a run counts as short of them; seconds of one run."""


def live_rows(quick: bool) -> Iterator[Row]:
    """Times without loss, and sums with it."""
    need(network.missing())
    for workers, (rate, size, target) in list(CASES.items())[: 1 if quick else None]:
        found = measured(workers, rate, size, 0.0, 2 if quick else 5)
        busy = found["busy"]
        short = f"CPUs {busy:.0%} busy" + ("; SHORT OF CPU: not counted" if busy > SHORT else "")
        where = f"{workers} workers, {rate * 8e-6:.0f} Mb/s, {size >> 20} MiB"
        times = {name: [one[name] for one in found["rounds"]] for name in found["rounds"][0]}
        told = ", ".join(f"{name} {spread(own).median * 1e3:.0f} ms" for name, own in times.items())
        for name, goal in (("gloo fp32", target), ("gloo fp16", "")):
            gains = spread(other / own for own, other in zip(times["switch"], times[name], strict=True))
            note = f"{told}; best round {gains.p95:.2f}x; {short}"
            words = f"{where}: switch over {name}"
            yield figure(words, "x", gains.median, goal, judged=busy <= SHORT, note=note)
        yield _sums(where, 0.0, found)
        for loss in LOSSES[-1:] if quick else LOSSES:
            found = measured(workers, rate, size >> 3, loss, 2)
            yield _sums(f"{workers} workers, {size >> 13} KiB", loss, found)


def _sums(where: str, loss: float, found: dict[str, Any]) -> Row:
    middle = spread(one["switch"] for one in found["rounds"]).median
    name = f"{where}, {loss:.0%} lost at the switch, in and out: sums that are exact"
    note = f"median {middle * 1e3:.0f} ms, {found['resent']:.0f} fragments sent again by all workers"
    return figure(name, "", float(found["exact"]), "100%", note=note)


def measured(workers: int, rate: float, size: int, loss: float, repeats: int) -> dict[str, Any]:
    """What `ranks` tells; ``busy``: the part of all CPUs that was used in the rounds.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    names = [f"worker{rank}" for rank in range(workers)]
    with ExitStack() as stack:
        net = network.Network(f"bench-{os.getpid() % 10**6}", rate)
        stack.callback(net.close)
        hosts = {name: net.add(name) for name in (*names, "server", "switch")}
        net.set_rate("switch", rate * (workers + 2))
        spec = {
            "workers": workers, "bytes": size, "loss": loss, "slots": SLOTS, "policy": "esa",
            "repeats": repeats, "deadline": 60.0,
            "places": {name: host[0] for name, host in hosts.items()},
            "addresses": {name: host[1] for name, host in hosts.items()},
        }  # fmt: skip
        line = [sys.executable, "-m", "benchmarks.network.aggregation.ranks", json.dumps(spec)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(line, start_new_session=True, **pipes)
        try:
            out, err = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    if process.returncode:
        raise RuntimeError(" / ".join(err.strip().splitlines()[-3:]))
    found: dict[str, Any] = json.loads(out)
    return found
