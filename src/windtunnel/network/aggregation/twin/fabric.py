"""What a switch that adds gives the all_reduces of a job between hosts: a curve, measured in the twin.

The ranks of a host first add up among themselves; then each NIC sends its part of the sum, as int32, through
the switch, and gets everybody's. That last part is what `curve` has: seconds of so many fragments on one NIC,
from runs of the twin beside 0, 1, 3, 7 and 15 other jobs, at the sizes of `SIZES`. Between them it is linear,
beyond the largest in proportion. Where a run with more neighbours or more bytes came out faster than one with
fewer, by chance, the slower of both counts, so the curve never falls.

A *neighbour* is a job that has as many hosts, computes for as long as its sums alone take, is late by up to a
tenth of that, and is as urgent as any other. It has links and a server of its own: only slots are shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import TORI, Cluster, GroupPlacement
from windtunnel.network.aggregation.policy import MOST_WORKERS, RULES
from windtunnel.network.aggregation.policy.fixed import VALUES
from windtunnel.network.aggregation.twin import AggregationJob, AggregationWorld, emulate, nodes
from windtunnel.training.emulate.graph import DTYPE_BYTES, Alternative, Collective, Group

Floats = NDArray[np.float64]
PACKET = 4 * VALUES + 48 + 66
"""Bytes on the wire: values, our head, and those of UDP, IP and Ethernet with what is between frames."""
SLOTS = 512
"""Of a switch, as `windtunnel network aggregation serve` has."""
SIZES = (1, 16, 128, 1024, 4096)
NEIGHBOURS = (0, 1, 3, 7, 15)
BURST, SEEDS = 1024, 2
"""Fragments of a neighbour's iteration; runs of each point, of which the mean counts (one of many hosts)."""
URGENCY = 128
"""Of all: nothing is known of who is in more of a hurry."""
DTYPES = ("float32", "float16", "bfloat16")
MOST_NEIGHBOURS = nodes.MOST_JOBS - 1


@dataclass(frozen=True)
class Rack:
    """``workers`` (hosts) of a job, in ``racks``, whose NICs send at ``rate`` (bytes/s). ``delay``: seconds
    of a link, between switches ``core``; ``uplink``: as in `AggregationWorld`; ``slots``: for this NIC and
    its neighbours'."""

    workers: int
    racks: int
    rate: float
    delay: float
    core: float
    uplink: float
    slots: int

    def world(self) -> AggregationWorld:
        """Windows of twice what is under way, and patience for a whole queue of them."""
        trip = 4 * (self.delay + (self.core if self.racks > 1 else 0.0))
        packet = PACKET / self.rate
        window = min(nodes.RING // 2, self.slots, 32 + math.ceil(2 * trip / packet))
        return AggregationWorld(
            slots=self.slots, rate=self.rate, delay=self.delay, core=self.core, packet=PACKET, window=window,
            timeout=2 * trip + 4 * window * self.workers * packet, reminder=2 * trip + window * packet,
            jitter=0.1 * BURST * packet, racks=self.racks, uplink=self.uplink,
        )  # fmt: skip


@lru_cache(maxsize=64)
def table(rack: Rack, policy: str, neighbours: int) -> Floats:
    """Seconds of sums of `SIZES` beside the first so many of `NEIGHBOURS`, shape (neighbours, sizes)."""
    beside = NEIGHBOURS[: 1 + np.searchsorted(NEIGHBOURS, neighbours)]
    rows = [[measured(rack, policy, others, size) for size in SIZES] for others in beside]
    return np.maximum.accumulate(np.maximum.accumulate(np.array(rows), axis=0), axis=1)


def measured(rack: Rack, policy: str, neighbours: int, fragments: int) -> float:
    """Seconds of one sum of ``fragments``: the mean of a few in a row, of `SEEDS` runs of the twin."""
    world, rules = rack.world(), RULES[policy]
    burst = BURST * PACKET / rack.rate
    iterations = max(1, min(nodes.MOST_ITERATIONS, 2 * BURST // fragments))
    own = AggregationJob(rack.workers, fragments, 0.0, 1, iterations, 2 * burst, late=0.0, urgency=URGENCY)
    times = []
    for seed in range(SEEDS if neighbours and rack.workers <= 16 else 1):
        starts = np.random.default_rng(seed).uniform(0.0, 2 * burst, neighbours)
        others = [
            AggregationJob(
                rack.workers, BURST, burst, 1, nodes.MOST_ITERATIONS, float(start), urgency=URGENCY
            )
            for start in starts
        ]
        times.append(emulate([own, *others], world, rules, seed, first=1).jct[0] / iterations)
    return float(np.mean(times))


def curve(rack: Rack, policy: str, neighbours: int, fragments: float) -> float:
    """Seconds of one sum of so many fragments on each NIC."""
    times = table(rack, policy, neighbours)
    row = np.array([np.interp(neighbours, NEIGHBOURS[: len(times)], column) for column in times.T])
    least, last = float(times[0, 0]), float(row[-1])
    if fragments > SIZES[-1]:
        return least + (last - least) * fragments / SIZES[-1]
    return float(np.interp(fragments, SIZES, row))


def alternatives(cluster: Cluster, policy: str, neighbours: int) -> list[Alternative]:
    """All_reduces of floats between hosts, added by the switches that the hosts are at; none for ``none``.

    Float16 and bfloat16 take as many bytes on the wire as float32: a switch adds int32. Up to 32 hosts (or
    NVLink domains) are under one leaf, or under several of one pod: then leaves add first, one spine the
    rest. NICs of a host that are at the same switch share its slots. Nothing is sent before all agree on
    exponents, which takes a round trip. Inside a host NVLink carries its part meanwhile.

    Raises:
        UserError: there is no such policy, or there are more neighbours than a switch has jobs.
    """
    if policy not in ("none", *RULES):
        raise UserError(f"`aggregation`: {policy!r} is unknown, accepted are none, {', '.join(RULES)}")
    if not 0 <= neighbours <= MOST_NEIGHBOURS:
        raise UserError(f"`neighbours`: {neighbours} jobs, accepted are 0 to {MOST_NEIGHBOURS}")
    if policy == "none":
        return []
    host, topology = cluster.host, cluster.topology
    nics = host.nics * host.intra_hosts
    at_switch = host.intra_hosts if topology.kind == "rail-optimised" else nics
    slots = max(SLOTS // at_switch, neighbours + 1)

    @lru_cache(maxsize=1024)
    def at(ranks: tuple[int, ...]) -> tuple[Rack, GroupPlacement] | None:
        placed = cluster.placement(ranks)
        leaves = len({cluster.host_of(rank) // topology.hosts_per_leaf for rank in ranks})
        if not 1 < placed.hosts <= MOST_WORKERS or placed.tier > 2 or topology.kind in TORI:
            return None
        rate = host.nic_bandwidth * host.nic.efficiency
        hop = topology.hop_latency
        racks = leaves if placed.tier == 2 else 1
        return Rack(
            placed.hosts, min(racks, placed.hosts), rate, (host.nic.latency + hop) / 2, hop,
            1 / topology.oversubscription, slots,
        ), placed  # fmt: skip

    def seconds(call: Collective, group: Group) -> float | None:
        placement = at(group.ranks) if call.kind == "all_reduce" and call.dtype in DTYPES else None
        if placement is None:
            return None
        rack, placed = placement
        local, size = placed.ranks_per_host, max(call.in_bytes, call.out_bytes)
        groups = host.devices * host.intra_hosts / local  # of this shape at once, as in any SPMD job
        fragments = math.ceil(size / DTYPE_BYTES[call.dtype] * groups / nics / VALUES)
        exponents = math.ceil(fragments / VALUES)
        between, first, inside = curve(rack, policy, neighbours, fragments + exponents), 0.0, 0.0
        if local > 1 and placed.intra is not None:  # a ring that scatters sums, and one that gathers them
            steps, rate = 2 * (local - 1), placed.intra_bandwidth * placed.intra.efficiency
            first, inside = steps * placed.intra.latency, steps * size / local / rate
        return curve(rack, policy, neighbours, 1) + first + max(between, inside)

    shared = f"neighbours that share the {slots} slots a NIC: {neighbours}"
    same = "" if neighbours or policy == "switchml" else ", and alone esa equals atp"
    takes = f"all_reduces of floats between up to {MOST_WORKERS} hosts of one pod; {shared}{same}"
    return [Alternative(policy, takes, seconds)]
