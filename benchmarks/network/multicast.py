"""Broadcasts emulated: the formula, and several sources.

A file from one rack to seven on this machine: splitters and relays, and what does without them over TCP.

All arms are in turn on the same racks, whose ports are token buckets of one rate: unicast after unicast, a
binomial tree, a chain that passes on what has come, and gloo's broadcast. All times are from the word to the
source until the last rack has the last byte. Ports have jumbo frames, TCP too.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.measure import in_turn, ratios
from benchmarks.harness.ranks import interface_bytes
from benchmarks.harness.rows import Row, figure, need
from windtunnel.linux import network
from windtunnel.network.multicast.live.rack import PAYLOAD, serve
from windtunnel.network.multicast.live.racks import Message, Racks, address
from windtunnel.network.multicast.live.send import send
from windtunnel.network.multicast.planning import fabric_of
from windtunnel.network.multicast.policy import Rounds, decide
from windtunnel.network.multicast.policy.shuffle import Shuffle
from windtunnel.network.multicast.twin import (
    BASELINES,
    MulticastWorld,
    electrical,
    pipelined,
    splitters,
)

WORLD, SIZE, SEEDS = MulticastWorld(), 1e9, 5
SIZES = ((2, 2), (2, 3), (4, 2), (3, 3), (8, 2))


def twin_rows(quick: bool) -> Iterator[Row]:
    """One source by size of the fabric, 1 to 2p sources."""
    for p, k in SIZES[: 2 if quick else None]:
        observation = fabric_of(Shuffle(p, k), [0], SIZE)
        outcome = splitters(observation, decide(observation), WORLD)
        racks, ideal = Shuffle(p, k).racks, SIZE / WORLD.rate + pipelined(2 * k - 1, WORLD)
        arms = {arm: electrical(observation.requests, racks, WORLD, arm) for arm in BASELINES}
        each_arm = ", ".join(
            f"{arm} {sent_by.seconds * 1e3:.2f} ms, {sent_by.sent / SIZE:.0f}x"
            for arm, sent_by in arms.items()
        )
        sent = outcome.sent / SIZE
        yield figure(
            f"{racks} racks, p={p}, k={k}: 1 GB to all at 100 Gb/s", "ms",
            goal=f"size/rate + {2 * k - 1} hops, {racks // p} transmissions", emulated=outcome.seconds * 1e3,
            passed=abs(outcome.seconds / ideal - 1) < 1e-9 and round(sent, 6) == racks // p,
            note=f"{sent:.0f}x the bytes sent; {each_arm}",
        )  # fmt: skip
    yield from _sources(Shuffle(2, 3), 1 if quick else SEEDS)


def _sources(shuffle: Shuffle, seeds: int) -> Iterator[Row]:
    """The knee: more sources than go at once."""
    for count in range(1, 2 * shuffle.p + 1):
        over: dict[str, list[float]] = {}
        rounds = []
        for seed in range(seeds):
            sources = np.random.default_rng(seed).choice(shuffle.racks, count, replace=False).tolist()
            observation = fabric_of(shuffle, sources, SIZE)
            plan = decide(observation)
            alone = Rounds(tuple((tree,) for trees in plan.rounds for tree in trees))
            own = {
                "packed": splitters(observation, plan, WORLD),
                "one at a time": splitters(observation, alone, WORLD),
                **{arm: electrical(observation.requests, shuffle.racks, WORLD, arm) for arm in BASELINES},
            }  # fmt: skip
            rounds.append(len(plan.rounds))
            for name, outcome in own.items():
                over.setdefault(name, []).append(outcome.seconds * WORLD.rate / SIZE)
        each_way = ", ".join(f"{name} {median(of):.2f}" for name, of in over.items())
        name = f"{shuffle.racks} racks, {count} sources at once: until all have all"
        note = f"{min(rounds)} to {max(rounds)} rounds of {seeds} seeds; {each_way}"
        yield figure(name, "x size/rate", emulated=over["packed"], note=note)


SHUFFLE, RATE, PORT, PART = Shuffle(2, 2), 12.5e6, 7200, 1 << 14
FILE_SIZES, LOSSES, SHORT = {"256 KiB": 1 << 18, "4 MiB": 4 << 20}, (0.01, 0.05, 0.2), 0.95
SENDERS = {
    "unicast": {0: [1, 2, 3, 4, 5, 6, 7]},
    "binomial": {0: [4, 2, 1], 4: [6, 5], 2: [3], 6: [7]},
    "chain": {rack: [rack + 1] for rack in range(7)},
}
TARGETS = {"unicast": ">= 5x", "binomial": ">= 2x", "chain": "about 1x"}


def live_rows(quick: bool) -> Iterator[Row]:
    """Every arm, small and large; then losses."""
    need(network.missing())
    import torch.distributed  # noqa: F401 - once, before the racks are forked

    racks = Racks(SHUFFLE, RATE, _part)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, size in FILE_SIZES.items():
                yield from _compared(racks, Path(folder), name, size, 2 if quick else 5)
            for loss in LOSSES[-1:] if quick else LOSSES:
                file = _file(Path(folder), 1 << 21)
                runs = [send(racks, file, loss=loss, seed=seed) for seed in range(2 if quick else 5)]
                same = all(state["same"] for run in runs for rack, state in run.racks.items() if rack)
                name, seconds = (
                    f"8 racks, 2 MiB, each loses {loss:.0%} of what comes",
                    [run.seconds for run in runs],
                )
                yield figure(name, "s", seconds, "every rack has it, digest equal", passed=same)
    finally:
        racks.close()


def _compared(racks: Racks, folder: Path, name: str, size: int, repeats: int) -> Iterator[Row]:
    file = _file(folder, size)
    arms = {"splitters": partial(_sent, racks, lambda: send(racks, file).seconds)}
    for arm in (*SENDERS, "gloo"):
        arms[arm] = partial(_sent, racks, partial(_all, racks, {"op": "pass", "arm": arm, "size": size}))
    for arm_ in arms.values():
        arm_()
    psutil.cpu_percent()
    results = in_turn(arms, repeats)
    busy = psutil.cpu_percent() / 100
    short = f"; SHORT OF CPU ({busy:.0%} busy): not counted" if busy > SHORT else f"; CPUs {busy:.0%} busy"
    observation = fabric_of(SHUFFLE, [0], size)
    seconds = {arm: [duration for duration, _ in runs] for arm, runs in results.items()}
    emulated = splitters(observation, decide(observation), MulticastWorld(RATE, 0.0, PAYLOAD)).seconds
    sent = {
        arm: f"{median(nbytes for _, nbytes in runs) / 1e6:.2f} MB sent by all racks"
        for arm, runs in results.items()
    }
    words, note = f"8 racks, {name} at 100 Mb/s: splitters", sent["splitters"] + short
    yield figure(words, "s", seconds["splitters"], emulated=emulated, note=note)
    for arm in (*SENDERS, "gloo"):
        goal = TARGETS.get(arm, "") if name == "4 MiB" else ""
        yield figure(
            f"8 racks, {name}: splitters over {arm}", "x", ratios(seconds[arm], seconds["splitters"]), goal,
            judged=goal.startswith(">") and busy <= SHORT,
            note=f"{arm} {median(seconds[arm]) * 1e3:.0f} ms; {sent[arm]}{short}",
        )  # fmt: skip


def _file(folder: Path, size: int) -> Path:
    file = folder / str(size)
    file.write_bytes(os.urandom(size))
    return file


def _sent(racks: Racks, work: Callable[[], float]) -> tuple[float, float]:
    """Seconds, and bytes that all racks sent meanwhile."""

    def counted() -> int:
        return sum(interface_bytes(racks.pid(rack), "tx") for rack in range(SHUFFLE.racks))

    before = counted()
    return work(), counted() - before


def _all(racks: Racks, message: Message) -> float:
    """Tell every rack, the source last; seconds from then until the last has done it.

    Raises:
        RuntimeError: a rack is gone.
    """
    for rack in range(1, SHUFFLE.racks):
        racks.tell(rack, message)
    began = time.monotonic()
    racks.tell(0, message)
    ends = [racks.hear(rack) for rack in range(SHUFFLE.racks)]
    if None in ends:
        raise RuntimeError(f"{message['op']}: rack {ends.index(None)} has ended")
    return max(float(end["at"]) for end in ends if end) - began


def _part(rack: int, control: socket.socket) -> None:
    """A rack of the bench: besides multicasts it passes on what it has, by gloo over TCP."""
    tensors: dict[int, Any] = {}  # by size

    def passed(message: Message) -> Message:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        if not tensors:
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = network.INTERFACE
            store = TCPStore(address(0), PORT, SHUFFLE.racks, rack == 0, timeout=timedelta(seconds=60))
            dist.init_process_group("gloo", store=store, rank=rack, world_size=SHUFFLE.racks)
        size, senders = message["size"], SENDERS.get(message["arm"], {})
        room = tensors.setdefault(size, torch.zeros(size, dtype=torch.uint8))
        if not senders:
            dist.broadcast(room, 0)
        up = next((sender for sender, to in senders.items() if rack in to), None)
        parts = room.split(PART if message["arm"] == "chain" else size) if senders else ()
        coming: list[Any] = [dist.irecv(part, up) for part in parts] if up is not None else []
        sent, end = list[Any](), 0.0
        for place, part in enumerate(parts):
            if coming:
                coming[place].wait()
            end = time.monotonic()
            for to in senders.get(rack, []):
                sent.append(dist.isend(part, to))
                if message["arm"] != "chain":
                    sent.pop().wait()  # one after the other
        for transfer in sent:
            transfer.wait()
        return {"at": end or time.monotonic()}

    serve(rack, control, {"pass": passed})
