"""Seconds of a collective or message on the links that its group crosses.

As NCCL does before each call, the time of every algorithm and protocol is predicted as latency plus bytes
over bandwidth, and the least is taken. *Ring* passes every byte once over every link of a circle that
enters and leaves each host once; *tree* (two of them, each with half of the data) trades bandwidth for
fewer steps between hosts; *NVLS* lets the NVLink switch add up; *PAT* gathers and scatters in log steps
between single ranks; *direct* is what an all-to-all does. Protocols: *Simple* moves large chunks at the
full rate behind memory fences, *LL* stores a flag with each 4 bytes, *LL128* one with each 120. Latencies
and factors are those of NCCL's tuner (`NcclParameters`), bandwidths those of the placement.

``nbytes`` is what nccl-tests calls the size: the whole buffer of an all_reduce, broadcast or reduce, the
gathered output of an all_gather, the whole input of a reduce_scatter, one rank's buffer in an all_to_all, the
root's whole buffer in a gather or scatter. The *bus bandwidth* is nccl-tests' too: what the slowest link
carries, comparable with its rate whatever the number of ranks.

On CPU tensors it is gloo, which moves host memory over TCP, step by step: a ring for all_reduce and
all_gather, an all_reduce for reduce_scatter, a binomial tree for broadcast and the like. The model is alpha-
beta a step. Where the machine was calibrated the measured times of two ranks are interpolated between sizes,
and the model only scales them to other numbers of ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from windtunnel.cluster.model import Cluster, GroupPlacement
from windtunnel.training.emulate.graph import Alternative, Collective, Group
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile
from windtunnel.training.emulate.twin.costs.roofline import GLOO, NCCL

LL, LL128, SIMPLE = 0, 1, 2
PROTOCOLS = ("LL", "LL128", "Simple")


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """``bus_bandwidth`` in bytes/s, as nccl-tests tells it."""

    seconds: float
    algorithm: str
    protocol: str
    bus_bandwidth: float


@dataclass(frozen=True, slots=True)
class _Network:
    """The group as NCCL sees it: bandwidths in bytes/s of the whole ring, shares and efficiencies applied."""

    ranks: int
    hosts: int
    local: int
    ring: float  # what one circle through all ranks carries
    host: float  # of one rank to its peers inside the host (line rate, 0 when it has none there)
    cross: float  # of one rank over the network when all traffic leaves the leaf
    hop: float  # wire and switch latency of one message between hosts beyond NCCL's own
    nvlink: bool
    nvls: bool


def bus_factor(kind: str, ranks: int) -> float:
    """Bus over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0


def sharing_of(cluster: Cluster, placement: GroupPlacement) -> float:
    """How many groups of the same shape use each NIC at once, when all devices of a host do the same.

    In an SPMD job the groups of a mesh dimension communicate together. With a NIC for each device they do not
    meet; with fewer NICs than devices they do.
    """
    if placement.hosts < 2:
        return 1.0
    return max(1.0, cluster.host.devices * placement.nics_per_rank / cluster.host.nics)


def collective_cost(
    kind: str, nbytes: int, placement: GroupPlacement, cluster: Cluster, *, backend: str = "nccl",
    sharing: float = 1.0, profile: DeviceProfile | None = None,
) -> CollectiveCost:  # fmt: skip
    """The cost of one collective of ``kind`` over ``nbytes`` (see the module) by the ranks of ``placement``.

    ``sharing``: how many such groups cross the same NICs at once (`sharing_of`). ``profile``: measured gloo
    times of this machine, for ``backend="gloo"``. Raises `ValueError` for a kind that there is not.
    """
    if backend == "gloo":
        seconds = gloo_seconds(kind, nbytes, placement, profile)
        bus = nbytes / seconds * bus_factor(kind, placement.ranks) if seconds else 0.0
        return CollectiveCost(seconds, "ring", "tcp", bus)
    return _nccl_cost(kind, int(nbytes), placement, cluster, float(sharing))


@lru_cache(maxsize=65536)
def _nccl_cost(
    kind: str, nbytes: int, placement: GroupPlacement, cluster: Cluster, sharing: float
) -> CollectiveCost:
    if kind in ("send", "recv"):
        return _message(nbytes, placement, cluster, sharing)
    if kind not in _ALGORITHMS:
        raise ValueError(f"collective {kind!r} is not one of {', '.join(sorted(_ALGORITHMS))}, send, recv")
    if placement.ranks == 1:
        rate = cluster.host.device.memory_bandwidth / 2
        copy = 0.0 if kind == "barrier" else nbytes / rate
        return CollectiveCost(NCCL.single_rank + copy, "copy", "Simple", 0.0)
    if kind == "barrier":
        nbytes = 4
    network = _network(placement, cluster, sharing)
    best = (math.inf, "", "")
    for algorithm, predict in _ALGORITHMS[kind].items():
        for protocol in (LL, LL128, SIMPLE):
            predicted = predict(kind, protocol, network)
            if predicted is not None:
                latency, bandwidth = predicted
                option = (latency + nbytes / bandwidth, algorithm, PROTOCOLS[protocol])
                best = min(best, option, key=itemgetter(0))
    seconds, algorithm, name = best  # ring or direct with Simple is always possible
    return CollectiveCost(seconds, algorithm, name, nbytes / seconds * bus_factor(kind, placement.ranks))


def _network(placement: GroupPlacement, cluster: Cluster, sharing: float) -> _Network:
    host = cluster.host
    inside = placement.intra_bandwidth * placement.intra.efficiency if placement.intra else math.inf
    ring, cross = inside, math.inf
    if placement.hosts > 1 and placement.inter is not None:
        efficiency = placement.inter.efficiency / sharing
        ring = min(inside, placement.ring_bandwidth * placement.ranks_per_host * efficiency)
        cross = placement.inter_bandwidth * efficiency
    switched = host.intra_switched and placement.intra is not None
    return _Network(
        ranks=placement.ranks,
        hosts=placement.hosts,
        local=placement.ranks_per_host,
        ring=ring,
        host=placement.intra_bandwidth if placement.intra else 0.0,
        cross=cross,
        hop=placement.latency if placement.hosts > 1 else 0.0,
        nvlink=placement.intra is None or not placement.intra.name.startswith(("pcie", "shared")),
        # Two ranks gain nothing from a switch that adds up.
        nvls=host.nvls and switched and placement.ranks_per_host > 2,
    )


def _steps(kind: str, net: _Network) -> tuple[int, int]:
    """Steps of a ring, and how many of them pass between hosts."""
    steps = net.ranks - 1
    between = net.hosts - 1 if net.hosts > 1 else 0
    if kind in ("all_reduce", "barrier"):
        return 2 * steps, 2 * between
    return steps, between


def _ring(kind: str, protocol: int, net: _Network) -> tuple[float, float] | None:
    if protocol == LL128 and not net.nvlink:
        return None
    steps, between = _steps(kind, net)
    inside = (NCCL.ring_nvlink if net.nvlink else NCCL.ring_pcie)[protocol]
    if net.hosts > 1:
        inside = max(inside, NCCL.network_post * (3 if protocol == SIMPLE else 1))
    network = NCCL.ring_network[protocol] + net.hop
    # A broadcast or reduce is a chain of pipelined chunks, and the first chunk passes all ranks too.
    latency = NCCL.ring_base[protocol] + (steps - between) * inside + between * network
    bandwidth = net.ring
    if protocol == LL:
        limit = NCCL.ll_limit_host if net.hosts == 1 else NCCL.ll_limit_network
        bandwidth = min(bandwidth * NCCL.ring_ll, limit)
    elif protocol == LL128:
        bandwidth *= NCCL.ring_ll128_single_rank if net.hosts > 1 and net.local < 2 else NCCL.ring_ll128
    return latency, bandwidth / bus_factor(kind if kind != "barrier" else "all_reduce", net.ranks)


def _tree(kind: str, protocol: int, net: _Network) -> tuple[float, float] | None:
    if protocol == LL128 and not net.nvlink:
        return None
    inside = (NCCL.tree_nvlink if net.nvlink else NCCL.tree_pcie)[protocol]
    network = NCCL.tree_network[protocol] + net.hop
    latency = NCCL.tree_base[protocol] + 2 * (
        (net.local - 1) * inside + math.ceil(math.log2(net.hosts)) * network
    )
    bandwidth = net.ring * NCCL.tree_bandwidth
    if protocol == LL:
        limit = NCCL.ll_limit_host if net.hosts == 1 else NCCL.ll_limit_network
        bandwidth = min(bandwidth * NCCL.tree_ll, limit)
    elif protocol == LL128:
        bandwidth *= NCCL.tree_ll128_host if net.hosts == 1 else NCCL.tree_ll128
    return latency, bandwidth / 2


def _nvls(kind: str, protocol: int, net: _Network) -> tuple[float, float] | None:
    """Adding up in the switch, and over a tree between hosts where there is more than one (NVLSTree)."""
    if not net.nvls or protocol != SIMPLE:
        return None
    bandwidth = net.host * NCCL.nvls_bandwidth
    latency = NCCL.nvls_latency
    if net.hosts > 1:
        # Up and down the tree: with two hosts each link carries the data once, with more it carries them
        # twice.
        bandwidth = min(bandwidth, net.cross * net.local / (1 if net.hosts == 2 else 2))
        latency += 2 * math.ceil(math.log2(net.hosts)) * (NCCL.nvls_network + net.hop)
    return latency, bandwidth


def _pat(kind: str, protocol: int, net: _Network) -> tuple[float, float] | None:
    """Parallel aggregated trees: all_gather and reduce_scatter among hosts with one rank each, in log
    steps."""
    if protocol != SIMPLE or net.hosts < 2 or net.local > 1:
        return None
    depth = math.ceil(math.log2(net.hosts))
    latency = NCCL.pat_base + depth * NCCL.pat_network + net.ranks * NCCL.pat_rank
    return latency, net.ring * NCCL.pat_bandwidth / bus_factor(kind, net.ranks)


def _direct(kind: str, protocol: int, net: _Network) -> tuple[float, float] | None:
    """Every rank sends to every other at once: the slower of what goes over NVLink and over the NICs."""
    if protocol != SIMPLE:
        return None
    away = (net.ranks - net.local) / net.ranks
    near = (net.local - 1) / net.ranks
    seconds_per_byte = away / net.cross if away else 0.0
    if near:
        seconds_per_byte = max(seconds_per_byte, near / net.host)
    inside = (NCCL.ring_nvlink if net.nvlink else NCCL.ring_pcie)[SIMPLE]
    network = NCCL.ring_network[SIMPLE] + net.hop if net.hosts > 1 else 0.0
    latency = NCCL.ring_base[SIMPLE] + (net.ranks - 1) * NCCL.all_to_all_peer + inside + network
    return latency, NCCL.all_to_all_efficiency / seconds_per_byte


Predict = Callable[[str, int, _Network], tuple[float, float] | None]
_ALGORITHMS: dict[str, dict[str, Predict]] = {
    "all_reduce": {"ring": _ring, "tree": _tree, "nvls": _nvls}, "barrier": {"ring": _ring, "tree": _tree},
    "all_gather": {"ring": _ring, "pat": _pat}, "reduce_scatter": {"ring": _ring, "pat": _pat},
    "broadcast": {"ring": _ring}, "reduce": {"ring": _ring}, "all_to_all": {"direct": _direct},
    "gather": {"direct": _direct}, "scatter": {"direct": _direct},
}  # fmt: skip


def _message(nbytes: int, placement: GroupPlacement, cluster: Cluster, sharing: float) -> CollectiveCost:
    if placement.hosts > 1 and placement.inter is not None:
        latency = NCCL.message_base + NCCL.ring_network[SIMPLE] + placement.latency
        rate = placement.inter_bandwidth * placement.inter.efficiency / sharing
    else:
        link = placement.intra or cluster.host.intra
        nvlink = not link.name.startswith(("pcie", "shared"))
        latency = NCCL.message_base + (NCCL.ring_nvlink if nvlink else NCCL.ring_pcie)[SIMPLE]
        rate = (placement.intra_bandwidth or link.bandwidth) * link.efficiency
    seconds = latency + nbytes / rate
    return CollectiveCost(seconds, "direct", "Simple", nbytes / seconds)


def full_bytes(collective: Collective, ranks: int) -> int:
    """The size of a collective in the meaning of this module, from one rank's buffers."""
    kind = collective.kind
    if kind == "all_gather":
        return collective.out_bytes or collective.in_bytes * ranks
    if kind == "reduce_scatter":
        return collective.in_bytes or collective.out_bytes * ranks
    if kind == "gather":
        return collective.in_bytes * ranks
    if kind == "scatter":
        return collective.out_bytes * ranks
    return max(collective.in_bytes, collective.out_bytes)


def call_cost(
    call: Collective, group: Group, cluster: Cluster, profile: DeviceProfile | None = None,
    alternatives: Sequence[Alternative] = (),
) -> CollectiveCost:  # fmt: skip
    """What ``call`` by ``group`` costs on ``cluster`` from the moment that all members are ready.

    The group of a message is its sender and receiver. ``alternatives``: see `or_alternative`. Raises
    `UserError` when the cluster does not have the ranks.
    """
    placement = _placement(cluster, group.ranks)
    cost = collective_cost(
        call.kind, full_bytes(call, placement.ranks), placement, cluster,
        backend=call.backend, sharing=sharing_of(cluster, placement), profile=profile,
    )  # fmt: skip
    return or_alternative(cost, call, group, alternatives)


def or_alternative(
    cost: CollectiveCost, collective: Collective, group: Group, alternatives: Sequence[Alternative]
) -> CollectiveCost:
    """``cost``, which is NCCL's best, or that of the ``alternatives`` which is the least below it.

    An alternative spares switches, not NCCL's own: its kernel and proxy begin, and what sending to all peers
    at once reaches of a link's rate is the same.
    """
    kind, ranks = collective.kind, len(group.ranks)
    direct = "direct" in _ALGORITHMS.get(kind, ())
    begin = NCCL.ring_base[SIMPLE] + NCCL.ring_network[SIMPLE]
    begin += (ranks - 1) * NCCL.all_to_all_peer if direct else 0.0
    for alternative in alternatives if collective.backend == "nccl" else ():
        seconds = alternative.seconds(collective, group)
        if seconds is None:
            continue
        seconds /= NCCL.all_to_all_efficiency if direct else 1.0
        if begin + seconds < cost.seconds:
            bus = full_bytes(collective, ranks) / (begin + seconds) * bus_factor(kind, ranks)
            cost = CollectiveCost(begin + seconds, alternative.name, "", bus)
    return cost


@lru_cache(maxsize=65536)
def _placement(cluster: Cluster, ranks: tuple[int, ...]) -> GroupPlacement:
    return cluster.placement(ranks)


def gloo_seconds(kind: str, nbytes: float, placement: GroupPlacement, profile: DeviceProfile | None) -> float:
    """Seconds of one collective over ``nbytes`` (`collectives` says of what) by all ranks of ``placement``.

    Measured times count only for groups inside one host; a message is measured where it is sent. Raises
    `ValueError` for a kind that there is not.
    """
    kind = "send" if kind == "recv" else kind
    bandwidth, latency = GLOO.loopback_bandwidth, GLOO.step_seconds
    if placement.hosts > 1 and placement.inter is not None:
        bandwidth = placement.inter_bandwidth * placement.inter.efficiency
        latency += placement.latency
    model = _model(kind, nbytes, placement.ranks, latency, bandwidth)
    if profile is None or placement.hosts > 1 or placement.ranks < 2:
        return model
    worlds = sorted({world for k, world, _, _ in profile.collectives if k == kind})
    if not worlds:
        return model
    nearest = min(worlds, key=lambda world: abs(math.log(world / placement.ranks)))
    points = sorted((size, s) for k, world, size, s in profile.collectives if k == kind and world == nearest)
    # The bytes that pass one link decide, not the buffer: compare at equal bytes for each step.
    scaled = model / _model(kind, nbytes, nearest, latency, bandwidth)
    return _between(points, nbytes) * scaled


def _model(kind: str, nbytes: float, ranks: int, latency: float, bandwidth: float) -> float:
    if ranks < 2:
        return GLOO.call_seconds + (0.0 if kind == "barrier" else nbytes / GLOO.reduce_bandwidth)
    depth = math.ceil(math.log2(ranks))
    piece = nbytes / ranks
    add = piece / GLOO.reduce_bandwidth
    steps, each = {
        "all_reduce": (2 * (ranks - 1), piece / bandwidth + add / 2),
        "all_gather": (ranks - 1, piece / bandwidth),
        # PyTorch's backend sums everything everywhere and keeps its part: measured on the links
        "reduce_scatter": (2 * (ranks - 1), piece / bandwidth + add / 2),
        "all_to_all": (ranks - 1, piece / bandwidth),
        "broadcast": (depth, nbytes / bandwidth),
        "reduce": (depth, nbytes / bandwidth + nbytes / GLOO.reduce_bandwidth),
        "gather": (ranks - 1, piece / bandwidth),
        "scatter": (ranks - 1, piece / bandwidth),
        "barrier": (2 * depth, 0.0),
        "send": (1, nbytes / bandwidth),
    }.get(kind, (0, 0.0))
    if not steps:
        raise ValueError(f"collective {kind!r} is unknown")
    return GLOO.call_seconds + steps * (latency + each)


def _between(points: list[tuple[int, float]], nbytes: float) -> float:
    """Seconds at ``nbytes``, linear between measured sizes and beyond the last one; at least the smallest."""
    if len(points) == 1 or nbytes <= points[0][0]:
        return points[0][1]
    sizes = [size for size, _ in points]
    at = min(max(1, bisect_left(sizes, nbytes)), len(points) - 1)
    (low, fast), (high, slow) = points[at - 1], points[at]
    return max(points[0][1], fast + (slow - fast) * (nbytes - low) / (high - low))
