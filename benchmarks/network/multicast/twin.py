"""Broadcasts emulated: the formula, several sources, and losses packet by packet."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.harness.measure import spread
from benchmarks.harness.rows import Row, figure
from windtunnel.network.multicast.planning import fabric_of
from windtunnel.network.multicast.policy import Rounds, decide
from windtunnel.network.multicast.policy.shuffle import Shuffle
from windtunnel.network.multicast.twin import (
    BASELINES,
    MulticastWorld,
    electrical,
    packets,
    pipelined,
    splitters,
)

WORLD, SIZE, SEEDS = MulticastWorld(), 1e9, 5
SIZES = ((2, 2), (2, 3), (4, 2), (3, 3), (8, 2))


def twin_rows(quick: bool) -> Iterator[Row]:
    """One source by size of the fabric, 1 to 2p sources, losses."""
    for p, k in SIZES[: 2 if quick else None]:
        seen = fabric_of(Shuffle(p, k), [0], SIZE)
        found = splitters(seen, decide(seen), WORLD)
        racks, ideal = Shuffle(p, k).racks, SIZE / WORLD.rate + pipelined(2 * k - 1, WORLD)
        arms = {arm: electrical(seen.requests, racks, WORLD, arm) for arm in BASELINES}
        told = ", ".join(
            f"{arm} {one.seconds * 1e3:.2f} ms, {one.sent / SIZE:.0f}x" for arm, one in arms.items()
        )
        sent = found.sent / SIZE
        yield figure(
            f"{racks} racks, p={p}, k={k}: 1 GB to all at 100 Gb/s", "ms",
            goal=f"size/rate + {2 * k - 1} hops, {racks // p} transmissions", emulated=found.seconds * 1e3,
            met=abs(found.seconds / ideal - 1) < 1e-9 and round(sent, 6) == racks // p,
            note=f"{sent:.0f}x the bytes sent; {told}",
        )  # fmt: skip
    yield from _sources(Shuffle(2, 3), 1 if quick else SEEDS)
    for loss in (0.0, 0.01, 0.05, 0.2):
        world, size = MulticastWorld(loss=loss), 20e6
        seen = fabric_of(Shuffle(2, 2), [0], size)
        (tree,) = decide(seen).rounds[0]
        runs = [packets(seen, tree, world, seed) for seed in range(SEEDS)]
        taken = spread(one.seconds * 1e3 for one in runs)
        name = f"8 racks, 20 MB, {loss:.1%} lost at every receive port, packets"
        yield figure(name, "ms", emulated=taken.median, note=f"worst seed {taken.p95:.2f} ms")


def _sources(shuffle: Shuffle, seeds: int) -> Iterator[Row]:
    """The knee: more sources than go at once."""
    for count in range(1, 2 * shuffle.p + 1):
        ratios: dict[str, list[float]] = {}
        rounds = []
        for seed in range(seeds):
            sources = np.random.default_rng(seed).choice(shuffle.racks, count, replace=False).tolist()
            seen = fabric_of(shuffle, sources, SIZE)
            made = decide(seen)
            alone = Rounds(tuple((tree,) for trees in made.rounds for tree in trees))
            own = {
                "packed": splitters(seen, made, WORLD), "one at a time": splitters(seen, alone, WORLD),
                **{arm: electrical(seen.requests, shuffle.racks, WORLD, arm) for arm in BASELINES},
            }  # fmt: skip
            rounds.append(len(made.rounds))
            for name, one in own.items():
                ratios.setdefault(name, []).append(one.seconds * WORLD.rate / SIZE)
        told = ", ".join(f"{name} {spread(of).median:.2f}" for name, of in ratios.items())
        name = f"{shuffle.racks} racks, {count} sources at once: until all have all"
        note = f"{min(rounds)} to {max(rounds)} rounds of {seeds} seeds; {told}"
        yield figure(name, "x size/rate", emulated=spread(ratios["packed"]).median, note=note)
