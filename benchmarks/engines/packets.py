"""How fast packets go, beside the simulators that others use: ``python -m benchmarks engines.packets``.

One dumbbell, 10 Gb/s and 100 us, drop-tail queues of 1,000 packets of 1,500 bytes, long flows of Reno. CPU
seconds are of the run alone, without imports and compilation. Our TCP is a sketch (`senders`); htsim's is,
too; ns-3's is a whole stack. Peers are optional: ``WINDTUNNEL_HTSIM`` is the folder ``sim`` of csg-htsim
after ``make libhtsim.a`` (needs g++), ``WINDTUNNEL_NS3`` a Python that has ns3 from PyPI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness.measure import conditions, in_turn, scratch
from benchmarks.harness.rows import Row, left_out, runner
from windtunnel.engines.packets.network import Flow, Link, Queue
from windtunnel.engines.packets.simulation import Simulation

PEERS = Path(__file__).parent
FLOWS = (2, 64, 1024)
SECONDS = 1.0
PLAIN = Queue(packets=1000)


def dumbbell(flows: int, queue: Queue = PLAIN, sender: str = "reno", own: bool = False) -> Simulation:
    """``own``: every flow comes over a link of its own, so that the heap holds as many."""
    marks = sender == "dctcp"
    links = [Link(1.25e9, 50e-6, queue), Link(1.25e9, 50e-6)]
    links += [Link(1.25e9, 1e-6 + index * 1e-9) for index in range(flows if own else 0)]
    return Simulation(
        links,
        [
            Flow([2 + index, 0] if own else [0], [1], sender, start=index * 1e-6, ecn=marks)
            for index in range(flows)
        ],
    )


def ours(world: Simulation, seconds: float) -> tuple[float, float]:
    """Packets delivered and events, each per CPU second."""
    begin = time.process_time()
    world.run(seconds)
    spent = time.process_time() - begin
    return float(world.flows["delivered"].sum()) / spent, world.events / spent


def told(command: list[str]) -> float:
    """Packets per CPU second, as a peer's last line has them."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    try:
        packets, seconds, *_ = done.stdout.splitlines()[-1].split()
        return float(packets) / float(seconds)
    except (IndexError, ValueError):
        why = (done.stderr.splitlines() or ["it printed nothing"])[-1]
        raise RuntimeError(f"{Path(command[0]).name} ended with status {done.returncode}: {why}") from None


def htsim(folder: Path) -> Path | str:
    """The peer's program, built in ``folder``, or why there is none."""
    where = os.environ.get("WINDTUNNEL_HTSIM")
    if not where:
        return "WINDTUNNEL_HTSIM names no csg-htsim"
    if not (Path(where) / "libhtsim.a").exists() or not shutil.which("g++"):
        return f"no libhtsim.a in {where}, or no g++"
    program = folder / "dumbbell"
    command = [
        "g++",
        "-std=c++11",
        "-O3",
        "-w",
        f"-I{where}",
        str(PEERS / "dumbbell_htsim.cpp"),
        f"-L{where}",
    ]
    subprocess.run([*command, "-lhtsim", "-o", str(program)], check=True, timeout=300)
    return program


def speed_rows(quick: bool) -> Iterator[Row]:
    """Packets and events per CPU second at 2, 64 and 1,024 flows, arms in turn."""
    dumbbell(2).run(1e-3)  # compiled
    yield Row("speed", "conditions", "", note=conditions())
    ns3 = os.environ.get("WINDTUNNEL_NS3")
    with scratch() as folder:
        program = htsim(folder)
        for flows in FLOWS:
            arms = {"ours": lambda count=flows: ours(dumbbell(count), SECONDS)[0]}
            if isinstance(program, Path):
                arms["htsim"] = partial(told, [str(program), str(flows), str(SECONDS * 1e3)])
            found = {name: median(values) for name, values in in_turn(arms, 3 if quick else 7).items()}
            if ns3 and (flows == FLOWS[0] or not quick):
                found["ns-3"] = told([ns3, str(PEERS / "dumbbell_ns3.py"), str(flows), "0.01"])
            for name, value in found.items():
                yield Row("speed", f"{flows} flows, {name}", "packets/CPU-s", measured=value)
            events = ours(dumbbell(flows), SECONDS)[1]
            yield Row("speed", f"{flows} flows, ours", "events/CPU-s", measured=events)
            for name, least in (("htsim", 0.5), ("ns-3", 50.0)):
                if name in found:
                    ratio = found["ours"] / found[name]
                    yield Row(
                        "speed", f"{flows} flows, ours over {name}", "×", measured=ratio,
                        target=f"≥ {least:g}", met=ratio >= least,
                    )  # fmt: skip
        if isinstance(program, str):
            yield left_out("speed", "htsim", program)
        if not ns3:
            yield left_out("speed", "ns-3", "WINDTUNNEL_NS3 names no Python that has ns3")


def kinds_rows(quick: bool) -> Iterator[Row]:
    """The same with 64 flows for every sender and queue, and with a link for each of 1,024 flows."""
    worlds = {
        f"{sender}, fifo": partial(dumbbell, 64, Queue(mark_at=65 * (sender == "dctcp")), sender)
        for sender in ("reno", "cubic", "dctcp", "vegas", "bbr")
    }
    for kind in ("priority", "drr", "codel", "fq_codel"):
        worlds[f"reno, {kind}"] = partial(dumbbell, 64, Queue(kind, bands=1024 if kind == "fq_codel" else 8))
    worlds["reno, fifo, 1,024 flows with links of their own"] = partial(dumbbell, 1024, own=True)
    for name, make in worlds.items():
        ours(make(), 0.01)
        runs = [ours(make(), SECONDS / 4) for _ in range(1 if quick else 3)]
        packets, events = (median(values) for values in zip(*runs, strict=True))
        foretold, world = make().foretell(SECONDS / 4), make()
        world.run(SECONDS / 4)
        note = f"foretold {foretold.events / world.events:.2f} of the events that came"
        yield Row(
            "kinds",
            name,
            "packets/CPU-s",
            measured=packets,
            note=f"{events / 1e6:.1f} M events/CPU-s; {note}",
        )


run = runner("benchmarks.engines", {"speed": "packets.speed_rows", "kinds": "packets.kinds_rows"})
