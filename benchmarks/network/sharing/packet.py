"""What a packet costs with ten entities to a million, by the kernel's own clock: the gap beside HTB.

A program clones a packet to an interface that drops what it is to send (ifb), each time for a random entity,
and BPF_PROG_TEST_RUN tells the mean. What is on the interface is the arm; the time with the usual queue on it
is taken away. Memory is what the kernel says of the maps, and of HTB what its slabs grew by.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness.measure import quantile
from benchmarks.harness.rows import Row, figure, left_out, need
from windtunnel.linux import bpf, namespaces, network, queues
from windtunnel.network.sharing.live import native
from windtunnel.network.sharing.policy.units import NEVER

OBJECT = bpf.Object(Path(__file__).parent / "bpf" / "spread.bpf.c", "benchmarks.network.sharing.packet")
COUNTS = (10, 1_000, 10_000, 100_000, 1_000_000)
CLASSES = 10_000
"""HTB has at most 2^16 classes, and takes a request for each."""
FRAME = bytes(12) + b"\x08\x00\x45" + bytes(49)
DEVICE = "wtdrop"


def packet_rows(quick: bool) -> Iterator[Row]:
    """ns a packet and bytes an entity."""
    need(network.missing())
    repeats, times = (3, 50_000) if quick else (5, 300_000)
    arms: dict[str, Callable[[int], int]] = {"gap": _attach, "HTB": _classes}
    for count in COUNTS[: 2 if quick else None]:
        for arm, put in arms.items():
            name = f"{count:,} entities, {arm}"
            if arm == "HTB" and count > CLASSES:
                yield left_out(name, "HTB has at most 65,535 classes; it was let have 10,000")
                continue
            cost, memory = namespaces.apart(["net"], partial(_tried, put, count, repeats, times))
            yield figure(f"{name}: a packet", "ns", cost, note=f"p95 {quantile(cost, 0.95):.0f} ns")
            yield figure(f"{name}: memory an entity", "bytes", memory / count)


def _tried(put: Callable[[int], int], count: int, repeats: int, times: int) -> tuple[list[float], int]:
    """ns of each repeat above those of the usual queue, and the memory of what ``put`` made."""
    network.ask(lambda route: route.link("add", ifname=DEVICE, kind="ifb"))
    network.set_link(DEVICE, up=True)
    target = bpf.Map(bpf.ARRAY, 4, 12, 1)
    target[bytes(4)] = struct.pack("III", socket.if_nametoindex(DEVICE), count, 0x10002)
    (program,) = OBJECT.programs()
    code = bpf.loaded(program, {"target": target})
    try:

        def cost() -> float:
            return float(bpf.tried(code, bpf.Packet(FRAME, 64), times)[1])

        usual = [cost() for _ in range(repeats)]
        memory = put(count)
        return [cost() - median(usual) for _ in range(repeats)], memory
    finally:
        os.close(code)
        target.close()


def _attach(count: int) -> int:
    """The gap of so many marks."""
    maps = native.make_maps("mark", count + 1, count)
    try:
        allowed = np.zeros(count + 1, native.ALLOWED)
        allowed["rate"], allowed["limit"], allowed["mark"] = 2**26, 2**24, NEVER
        native.put(maps["allowed"], allowed)
        places = np.arange(1, count + 1, dtype="<u4").tobytes()
        maps["marks"].put(places, places)
        code = native.load("mark", maps)
        queues.make_clsact(DEVICE)
        queues.attach(DEVICE, "egress", code, "bench")
        os.close(code)
        return sum(table.memory for name, table in maps.items() if name != "names")
    finally:
        native.close(maps)


def _classes(count: int) -> int:
    """An HTB of so many classes."""
    before = _slab()
    queues.make_classes(DEVICE, 12.5e9, [1.25e6] * count, 12.5e9)
    return max(0, _slab() - before)


def _slab() -> int:
    """Bytes of the kernel's slabs that cannot be reclaimed."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("SUnreclaim:")) * 1024


if __name__ == "__main__":
    OBJECT.rebuild()
