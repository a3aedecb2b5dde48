"""How fast packets go: ``python -m benchmarks engines.packets``.

One dumbbell, 10 Gb/s and 100 us, drop-tail queues of 1,000 packets of 1,500 bytes, long flows of Reno. CPU
seconds are of the run alone, without compilation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.harness.rows import Row, figure
from windtunnel.engines.packets.network import Flow, PacketLink, Queue
from windtunnel.engines.packets.simulation import Simulation

SECONDS = 1.0


def dumbbell(flows: int) -> Simulation:
    links = [PacketLink(1.25e9, 50e-6, Queue(packets=1000)), PacketLink(1.25e9, 50e-6)]
    return Simulation(links, [Flow([0], [1], "reno", start=index * 1e-6) for index in range(flows)])


def ran(flows: int) -> float:
    """Packets delivered per CPU second."""
    world, begin = dumbbell(flows), time.process_time()
    world.run(SECONDS)
    return float(world.flows["delivered"].sum()) / (time.process_time() - begin)


def speed_rows(quick: bool) -> Iterator[Row]:
    """Packets per CPU second at 2, 64 and 1,024 flows."""
    dumbbell(2).run(1e-3)  # compiled
    for flows in (2, 64, 1024):
        yield figure(f"{flows} flows", "packets/CPU-s", (ran(flows) for _ in range(3 if quick else 7)))
